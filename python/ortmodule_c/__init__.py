"""Trains PyTorch modules through a graph executor in C: ``model = ORTModule(model)``."""

import torch  # loads the libraries that the extension shares  # noqa: F401

from ._C import __version__
from .errors import NotExportable, ORTModuleError
from .options import DebugOptions, LogLevel
from .ortmodule import ORTModule
from .verify import Verification, verify

__all__ = [
    "DebugOptions",
    "LogLevel",
    "NotExportable",
    "ORTModule",
    "ORTModuleError",
    "Verification",
    "__version__",
    "verify",
]
