"""Optimizers that update all parameters in one pass in C. They take any model, wrapped or not."""

from .adam import AdamWMode, FusedAdam
from .clip import clip_grad_norm_
from .fp16 import FP16_Optimizer
from .lamb import FusedLamb
from .sgd import FusedSGD

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam", "FusedLamb", "FusedSGD", "clip_grad_norm_"]
