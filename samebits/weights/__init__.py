"""Logical tensors of a model: where they come from, their checksums, how they travel."""
