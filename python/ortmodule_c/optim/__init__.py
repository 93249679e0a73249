"""Optimizers that update all parameters in one pass in C. They take any model, wrapped or not."""

from .adam import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FusedAdam"]
