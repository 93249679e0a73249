"""Trains PyTorch modules through a graph executor in C: ``model = ORTModule(model)``."""

import importlib
from typing import Any

import torch  # loads the libraries that the extension shares  # noqa: F401

from ._C import __version__
from .errors import NotExportable, ORTModuleError
from .options import DebugOptions, LogLevel
from .ortmodule import ORTModule
from .verify import Verification, verify


def __getattr__(name: str) -> Any:
    """Parts that not every program needs are imported when they are asked for."""
    if name in ("artifacts", "backend", "onnx", "optim", "trainer", "training"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
