"""Which code of the user's runs while a module is traced."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .effects import acts
from .stack import LIBRARIES

_PACKAGES = os.sep + "site-packages" + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_TRUSTED_NAMES = {"ortmodule_c", "torch", "numpy", "sympy", *sys.stdlib_module_names} - {"__main__"}
_TRUSTED_PACKAGES = tuple(_PACKAGES + name for name in ("numpy" + os.sep, "sympy" + os.sep, "typing_extensions.py"))
_USERS, _LIBRARYS, _OTHERS = 2, 1, 0
_OF_NAMEDTUPLE = 4  # globals of what makes a named tuple
_READING = ("npyio.py", "_npyio_impl.py", "format.py", "torch" + os.sep + "serialization.py")  # as that does
_TOLD_ONCE = os.sep + "warnings.py"


def is_trusted(filename: str, scope: dict[str, Any]) -> bool:
    """Whether code of a file is Python's own, PyTorch's, NumPy's or ours: it keeps nothing that a forward reads.

    Code without a file, such as that of a dataclass, is told by its globals.
    """
    if filename.startswith("<") and not filename.startswith("<frozen"):
        name = str(scope.get("__name__"))
        of_tuple = name.startswith("namedtuple_") and len(scope) <= _OF_NAMEDTUPLE
        return of_tuple or is_trusted_module(name)
    return _is_trusted_file(filename)


@functools.cache
def _is_trusted_file(filename: str) -> bool:
    if filename.startswith((*LIBRARIES, "<frozen")):
        return True
    if _PACKAGES in filename:
        return any(name in filename for name in _TRUSTED_PACKAGES)
    return filename.startswith(_STANDARD)


@functools.cache
def _is_standard(filename: str) -> bool:
    own = filename.startswith((_STANDARD, "<frozen"))
    return filename.endswith(_READING) or (own and not filename.startswith(LIBRARIES) and _PACKAGES not in filename)


def is_trusted_module(name: str | None) -> bool:
    """Whether a module of Python is one of those."""
    return (name or "").split(".")[0] in _TRUSTED_NAMES


class Frames:
    """Reports the user's code that this thread runs.

    Parameters
    ----------
    entered
        Called with each code object, and its frame, before it runs for the first time.
    called
        Called before each call of a function of C by such code, with the function; a method is bound.
    acts
        Called if Python's own library calls such a function for that code and it acts.
    """

    def __init__(
        self,
        entered: Callable[[CodeType, FrameType], None],
        called: Callable[[Any], None],
        acts: Callable[[Any], None],
    ) -> None:
        self._entered = entered
        self._called = called
        self._acts = acts
        self._kinds: dict[CodeType, int] = {}

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

    def pause(self) -> bool:
        """Report nothing until :meth:`resume`: no code of the user's is called. Whether it was reported until now."""
        watching = sys.getprofile() == self._event
        if watching:
            sys.setprofile(None)
        return watching

    def resume(self) -> None:
        """Report again."""
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            kind = self._kinds.get(frame.f_code)
            if kind == _USERS:
                self._called(argument)
            elif kind == _LIBRARYS and acts(argument) and self._is_for_users(frame):
                self._acts(argument)
        elif event == "call":
            code = frame.f_code
            if code not in self._kinds:
                users = not is_trusted(code.co_filename, frame.f_globals)
                self._kinds[code] = _USERS if users else _LIBRARYS if _is_standard(code.co_filename) else _OTHERS
                if users:
                    self._entered(code, frame)

    def _is_for_users(self, frame: FrameType) -> bool:
        """Whether only Python's own library is between a frame and the user's code."""
        at: FrameType | None = frame
        while at is not None and self._kinds.get(at.f_code) == _LIBRARYS:
            if at.f_code.co_filename.endswith(_TOLD_ONCE):
                return False
            at = at.f_back
        return at is not None and self._kinds.get(at.f_code) == _USERS and not _is_remembered(at)


def _is_remembered(frame: FrameType) -> bool:
    """Whether it runs a method that is run once for equal arguments."""
    first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    return hasattr(getattr(type(first), frame.f_code.co_name, None), "cache_info")
