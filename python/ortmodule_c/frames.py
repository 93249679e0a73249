"""Which code of the user's runs while a module is traced."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .stack import LIBRARIES

_PACKAGES = os.sep + "site-packages" + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_TRUSTED_NAMES = {"ortmodule_c", "torch", "numpy", "sympy", *sys.stdlib_module_names} - {"__main__"}
_TRUSTED_PACKAGES = tuple(_PACKAGES + name for name in ("numpy" + os.sep, "sympy" + os.sep, "typing_extensions.py"))


def is_trusted(filename: str, scope: dict[str, Any]) -> bool:
    """Whether code of a file is Python's own, PyTorch's, NumPy's or ours: it keeps nothing that a forward reads.

    Code without a file, such as that of a dataclass, is told by its globals.
    """
    if filename.startswith("<") and not filename.startswith("<frozen"):
        return is_trusted_module(scope.get("__name__"))
    return _is_trusted_file(filename)


@functools.cache
def _is_trusted_file(filename: str) -> bool:
    if filename.startswith((*LIBRARIES, "<frozen")):
        return True
    if _PACKAGES in filename:
        return any(name in filename for name in _TRUSTED_PACKAGES)
    return filename.startswith(_STANDARD)


def is_trusted_module(name: str | None) -> bool:
    """Whether a module of Python is one of those."""
    top = (name or "").split(".")[0]
    return top in _TRUSTED_NAMES or top.startswith("namedtuple_")


class Frames:
    """Reports the user's code that this thread runs.

    Parameters
    ----------
    entered
        Called with each code object, and its frame, before it runs for the first time.
    called
        Called before each call of a function of C by such code, with the function; a method is bound.
    """

    def __init__(self, entered: Callable[[CodeType, FrameType], None], called: Callable[[Any], None]) -> None:
        self._entered = entered
        self._called = called
        self._users: dict[CodeType, bool] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it code is reported; another's profiler waits meanwhile."""
        other: Any = sys.getprofile()
        in_c = hasattr(other, "disable")  # such as cProfile's
        if in_c:
            other.disable()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None if in_c else other)
            if in_c:
                other.enable()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it no code of the user's is called."""
        watching = sys.getprofile() == self._event
        if watching:
            sys.setprofile(None)
        try:
            yield
        finally:
            if watching:
                sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in self._users:
                users = self._users[code] = not is_trusted(code.co_filename, frame.f_globals)
                if users:
                    self._entered(code, frame)
        elif event == "c_call" and self._users.get(frame.f_code):
            self._called(argument)
