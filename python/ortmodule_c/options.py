"""What a user may set: logging, saved graphs, and what happens when something cannot run here."""

import enum
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

logger = logging.getLogger("ortmodule_c")


class LogLevel(enum.IntEnum):
    """How much is logged, from most to least."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


_PYTHON_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}

Fallback = Literal["warn", "error"]


@dataclass
class DebugOptions:
    """Debugging aids of one :class:`ORTModule`.

    Parameters
    ----------
    log_level
        Threshold of the logger ``ortmodule_c``; the environment variable ``ORTMODULE_LOG_LEVEL`` wins.
    save_onnx
        Write the exported, the joint and the optimized graph as ONNX files at the first run of each mode.
    onnx_prefix
        First part of the names of these files; required with ``save_onnx``.
    save_path
        Directory for these files, by default the current one; ``ORTMODULE_SAVE_ONNX_PATH`` wins.
    fallback
        ``"warn"`` runs in PyTorch what cannot run here and warns once; ``"error"`` raises instead.
        ``ORTMODULE_FALLBACK`` wins.
    max_graphs
        How many exported graphs are kept; the least recently used goes first.
    """

    log_level: LogLevel = LogLevel.WARNING
    save_onnx: bool = False
    onnx_prefix: str = ""
    save_path: str = ""
    fallback: Fallback = "warn"
    max_graphs: int = 16

    def __post_init__(self) -> None:
        name = os.environ.get("ORTMODULE_LOG_LEVEL")
        if name is not None:
            if name not in LogLevel.__members__:
                raise ValueError(f"ORTMODULE_LOG_LEVEL is {name!r}, expected one of {', '.join(LogLevel.__members__)}")
            self.log_level = LogLevel[name]
        if not isinstance(self.log_level, LogLevel):
            raise TypeError(f"log_level is a {type(self.log_level).__name__}, expected LogLevel")
        self.fallback = os.environ.get("ORTMODULE_FALLBACK", self.fallback)  # type: ignore[assignment]
        if self.fallback not in ("warn", "error"):
            raise ValueError(f'fallback is {self.fallback!r}, expected "warn" or "error"')
        if self.max_graphs < 1:
            raise ValueError(f"max_graphs is {self.max_graphs}, expected at least 1")
        self._check_onnx()

    def _check_onnx(self) -> None:
        if not isinstance(self.onnx_prefix, str):
            raise TypeError(f"onnx_prefix is a {type(self.onnx_prefix).__name__}, expected str")
        if not self.save_onnx:
            return
        if not self.onnx_prefix:
            raise ValueError("onnx_prefix is empty, save_onnx=True needs a name for the files")
        if not os.access(self.directory, os.W_OK):
            raise OSError(f"save_path {str(self.directory)!r} is not a directory that can be written")

    @property
    def directory(self) -> Path:
        """Where ONNX files go."""
        return Path(os.environ.get("ORTMODULE_SAVE_ONNX_PATH") or self.save_path or os.curdir)

    @property
    def python_level(self) -> int:
        """`log_level` as a level of :mod:`logging`."""
        return _PYTHON_LEVELS[self.log_level]
