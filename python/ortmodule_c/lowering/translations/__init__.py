"""Training-exact translations of ATen ops, by family."""

from . import conv, division, elementwise, indexing, interpolation, losses, nn, recurrent, reduce, shape
from .registry import TABLE

__all__ = [
    "TABLE",
    "conv",
    "division",
    "elementwise",
    "indexing",
    "interpolation",
    "losses",
    "nn",
    "recurrent",
    "reduce",
    "shape",
]
