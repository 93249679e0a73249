"""Configurations of the trainer's optimizer, schedules of its learning rate, and the fused optimizers themselves."""

from ...optim import AdamWMode, FP16_Optimizer, FusedAdam
from . import lr_scheduler
from .config import AdamConfig, LambConfig, SGDConfig

__all__ = ["AdamConfig", "AdamWMode", "FP16_Optimizer", "FusedAdam", "LambConfig", "SGDConfig", "lr_scheduler"]
