"""Operators: each formula once, with a written rounding schedule and a slow reference."""
