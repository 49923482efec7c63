"""One arithmetic for rollout and training, equal to the bit, and the proof of it."""

__version__ = "0.1.0"
