"""Which code of the user's runs while a module is traced."""

import contextlib
import dis
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from ..stack import AS_PYTORCH, LIBRARIES, code_of, is_standard

_TRUSTED_NAMES = {"ortmodule_c", "torch", *AS_PYTORCH, "numpy", "sympy", "mpmath", *sys.stdlib_module_names} - {
    "__main__"
}
_TRUSTED_FILES = (*LIBRARIES, *code_of("numpy", "sympy", "mpmath", "typing_extensions"), "<frozen")
_OF_NAMEDTUPLE = 4  # globals of what makes a named tuple
# That an attribute is missing is so without a trace, too.
_READS = ("__getattr__", "module_getattr_wrapper", "read")
_CALLS_ONLY = ("contextlib", "copy", "dataclasses", "functools")  # and keep nothing of others meanwhile
_ENDS = ("RETURN", "YIELD", "SEND")  # what runs last of a frame that is not left by an exception


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
    return filename.startswith(_TRUSTED_FILES) or is_standard(filename)


def is_trusted_module(name: str | None) -> bool:
    """Whether a module of Python is one of those."""
    return (name or "").split(".")[0] in _TRUSTED_NAMES


def is_run_for_user(frame: FrameType | None) -> bool:
    """Whether code is the user's, or Python's own or NumPy's that the user's calls."""
    while frame is not None and not frame.f_code.co_filename.startswith(LIBRARIES):
        if not is_trusted(frame.f_code.co_filename, frame.f_globals):
            return True
        frame = frame.f_back
    return False


class _Whose(enum.Enum):
    """Whose code it is."""

    USERS = enum.auto()
    PYTORCHS = enum.auto()
    LIBRARYS = enum.auto()  # Python's own, NumPy's


class Frames:
    """Reports the user's code that this thread runs.

    Parameters
    ----------
    entered
        Called with each code object, and its frame, before it runs for the first time.
    called
        Called before each call of a function of C by such code, with the function (a method is bound) and the frame.
    left
        Called before such code calls other code of Python for the first time, with the frame of that.
    raised
        Called when PyTorch raises into such code, with the line that called it.
    ended
        Called with the function after each such call.
    libraries_raise
        Whether to report so, too, what is raised by Python's library and by functions of C.
    """

    def __init__(
        self,
        entered: Callable[[CodeType, FrameType], None],
        called: Callable[[Any, FrameType], None],
        ended: Callable[[Any], None],
        left: Callable[[FrameType], None],
        raised: Callable[[str], None],
        libraries_raise: bool = False,
    ) -> None:
        self._entered, self._called, self._ended = entered, called, ended
        self._left, self._raised = left, raised
        self._raising = {_Whose.PYTORCHS, _Whose.LIBRARYS} if libraries_raise else {_Whose.PYTORCHS}
        self._c_raises = libraries_raise
        self._followed: dict[CodeType, list[Callable[[FrameType], None]]] = {}
        self._whose: dict[CodeType, _Whose] = {}
        self._ways: set[tuple[CodeType, CodeType]] = set()

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

    def follow(self, code: CodeType, called: Callable[[FrameType], None]) -> None:
        """Call something each time before such code runs."""
        self._followed.setdefault(code, []).append(called)

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
        code = frame.f_code
        if event == "call":
            whose = self._whose.get(code) or self._meet(code, frame)
            caller = frame.f_back
            for follow in self._followed.get(code, ()) if whose is _Whose.USERS else ():
                follow(frame)
            if whose is not _Whose.USERS and caller is not None and self._is_users(caller):
                way = caller.f_code, code
                if way not in self._ways:
                    self._left(frame)
                    self._ways.add(way)
        elif event == "return":
            if argument is None and self._whose.get(code) in self._raising:
                self._check_return(frame)
        elif self._whose.get(code) is _Whose.USERS:
            if event == "c_call":
                self._called(argument, frame)
                return
            self._ended(argument)
            if event == "c_exception" and self._c_raises:
                self._raised(f"{code.co_filename}:{frame.f_lineno}")

    def _meet(self, code: CodeType, frame: FrameType) -> _Whose:
        if not is_trusted(code.co_filename, frame.f_globals):
            whose = _Whose.USERS
        else:
            whose = _Whose.PYTORCHS if code.co_filename.startswith(LIBRARIES) else _Whose.LIBRARYS
        self._whose[code] = whose
        if whose is _Whose.USERS:
            self._entered(code, frame)
        return whose

    def is_within_library(self, frame: FrameType | None) -> bool:
        """Whether a library of Python or NumPy's, that may be changing something, calls the code of a frame."""
        while frame is not None and not frame.f_code.co_filename.startswith(LIBRARIES[0]):
            mine = self._whose.get(frame.f_code) is _Whose.LIBRARYS
            if mine and frame.f_globals.get("__name__") not in _CALLS_ONLY:
                return True
            frame = frame.f_back
        return False

    def _is_users(self, frame: FrameType) -> bool:
        return self._whose.get(frame.f_code) is _Whose.USERS

    def _check_return(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        # Where libraries are reported, what leaves theirs is seen there; they may catch it, as a mapping's get() does.
        while not self._c_raises and caller is not None and self._whose.get(caller.f_code) is _Whose.LIBRARYS:
            caller = caller.f_back
        if caller is None or not self._is_users(caller) or code.co_name in _READS:
            return
        if code.co_flags & inspect.CO_GENERATOR and self._whose[code] is _Whose.LIBRARYS:  # closed before its end
            return
        if not dis.opname[code.co_code[frame.f_lasti]].startswith(_ENDS):
            self._raised(f"{caller.f_code.co_filename}:{caller.f_lineno}")
