"""What a user may set: logging, saved graphs, and what happens when something cannot run here."""

import enum
import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO, get_args

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


class _Unheard(logging.StreamHandler[TextIO]):
    """Writes to stderr what no handler of the program's own is told."""

    def emit(self, record: logging.LogRecord) -> None:
        heard = len(logger.handlers) > 1 or (logger.propagate and logging.root.handlers)
        if not heard:
            super().emit(record)


Fallback = Literal["warn", "error"]
Capture = Literal["auto", "export", "dynamo"]
_PREFIX = "ORTMODULE_"
_VARIABLES = {_PREFIX + name for name in ("LOG_LEVEL", "SAVE_ONNX_PATH", "FALLBACK", "CAPTURE")}


def _from_environment(variable: str, allowed: Iterable[str]) -> str | None:
    """What an environment variable says, or None if it is empty or not set."""
    value = os.environ.get(variable) or None
    if value is not None and value not in allowed:
        raise ValueError(f"environment variable {variable} is {value!r}, expected one of {', '.join(allowed)}")
    return value


@dataclass
class DebugOptions:
    """Debugging aids of one :class:`ORTModule`.

    Parameters
    ----------
    log_level
        Threshold of the logger ``ortmodule_c``, which all modules share, or its name; by default left as it is, at
        first that of :mod:`logging`. What passes it is written to stderr if the program has no handler for it. The
        environment variable ``ORTMODULE_LOG_LEVEL`` wins.
    save_onnx
        Write the exported, the joint and the optimized graph as ONNX files at the first run of each mode.
    onnx_prefix
        First part of the names of these files; required with ``save_onnx``.
    save_path
        Directory for these files, made if it is not there, by default the current one; ``ORTMODULE_SAVE_ONNX_PATH``
        wins.
    fallback
        ``"warn"`` runs in PyTorch what cannot run here and warns once; ``"error"`` raises instead.
        ``ORTMODULE_FALLBACK`` wins.
    capture
        How graphs are made: ``"export"`` traces the whole module or refuses it, ``"dynamo"`` has TorchDynamo make them,
        ``"auto"`` does so where the first refuses. ``ORTMODULE_CAPTURE`` wins.
    max_graphs
        How many exported graphs are kept, the least recently used goes first; and how many TorchDynamo makes of one
        function.
    verify
        How many of the first training steps are compared with PyTorch's by :func:`verify`. A step that agrees is
        logged at INFO; one that does not is warned about, or an error where `fallback` is ``"error"``.
    """

    log_level: LogLevel | str | None = None
    save_onnx: bool = False
    onnx_prefix: str = ""
    save_path: str = ""
    fallback: Fallback = "warn"
    capture: Capture = "auto"
    max_graphs: int = 16
    verify: int = 0

    def __post_init__(self) -> None:
        for name in sorted(os.environ):
            if name.startswith(_PREFIX) and name not in _VARIABLES:  # ONNX Runtime has others
                warnings.warn(
                    f"environment variable {name} is unknown, there are {', '.join(sorted(_VARIABLES))}", stacklevel=3
                )
        level = _from_environment("ORTMODULE_LOG_LEVEL", LogLevel.__members__)
        if level is not None:
            self.log_level = level
        if isinstance(self.log_level, str):
            if self.log_level not in LogLevel.__members__:
                expected = ", ".join(LogLevel.__members__)
                raise ValueError(f"log_level is {self.log_level!r}, expected one of {expected}")
            self.log_level = LogLevel[self.log_level]
        if not isinstance(self.log_level, LogLevel | None):
            raise TypeError(f"log_level is a {type(self.log_level).__name__}, expected LogLevel or its name")
        self._choose("fallback", "ORTMODULE_FALLBACK", get_args(Fallback))
        self._choose("capture", "ORTMODULE_CAPTURE", get_args(Capture))
        for name, least in (("max_graphs", 1), ("verify", 0)):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name} is a {type(value).__name__}, expected int")
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        self._check_onnx()

    def _choose(self, name: str, variable: str, allowed: tuple[str, ...]) -> None:
        """Let an environment variable win, and check what is chosen."""
        setattr(self, name, _from_environment(variable, allowed) or getattr(self, name))
        if getattr(self, name) not in allowed:
            expected = " or ".join([", ".join([f'"{a}"' for a in allowed[:-1]]), f'"{allowed[-1]}"'])
            raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    def _check_onnx(self) -> None:
        for name, kind in (("save_onnx", bool), ("onnx_prefix", str), ("save_path", str)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} is a {type(getattr(self, name)).__name__}, expected {kind.__name__}")
        if not self.save_onnx:
            return
        if not self.onnx_prefix:
            raise ValueError("onnx_prefix is empty, save_onnx=True needs a name for the files")
        origin = "ORTMODULE_SAVE_ONNX_PATH" if os.environ.get("ORTMODULE_SAVE_ONNX_PATH") else "save_path"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{origin} is {str(self.directory)!r}, which cannot be made: {error.strerror}") from error
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise OSError(f"{origin} is {str(self.directory)!r}, not a directory that can be written")

    @property
    def directory(self) -> Path:
        """Where ONNX files go."""
        return Path(os.environ.get("ORTMODULE_SAVE_ONNX_PATH") or self.save_path or os.curdir)

    def set_logging(self) -> None:
        """Let the logger tell what is asked for, if anything is."""
        if not isinstance(self.log_level, LogLevel):
            return
        logger.setLevel(_PYTHON_LEVELS[self.log_level])
        if not any(isinstance(h, _Unheard) for h in logger.handlers):
            handler = _Unheard()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
