"""Training-exact translations of ATen ops, by family."""

from . import (
    carried,
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
from .carried import CARRIED, touches_carried
from .registry import TABLE, translation_of

__all__ = [
    "CARRIED",
    "TABLE",
    "carried",
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
    "touches_carried",
    "translation_of",
    "windows",
]
