"""Training-exact translations of ATen ops, by family."""

from . import (
    conv,
    copies,
    division,
    elementwise,
    indexing,
    interpolation,
    losses,
    margins,
    nn,
    recurrent,
    reduce,
    shape,
    special,
    windows,
)
from .registry import TABLE

__all__ = [
    "TABLE",
    "conv",
    "copies",
    "division",
    "elementwise",
    "indexing",
    "interpolation",
    "losses",
    "margins",
    "nn",
    "recurrent",
    "reduce",
    "shape",
    "special",
    "windows",
]
