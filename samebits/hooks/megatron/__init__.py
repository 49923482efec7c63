"""Modules and functions that patched Megatron-core calls in place of its own arithmetic."""
