"""Scales of the loss, for gradients of 16 bits."""

from . import loss_scaler
from .loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "loss_scaler"]
