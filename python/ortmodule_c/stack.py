"""Where on the stack the user's own code is, that is, neither PyTorch, this package nor Python's library.

What einops and einx do is PyTorch's: they compute with its operators, and keep nothing that a forward reads.
"""

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch

_LAYERS = str(Path(torch.__file__).parent / "nn") + os.sep
AS_PYTORCH = ("einops", "einx")


def code_of(*modules: str) -> Iterator[str]:
    """What the names of the files of these modules begin with, of those that are installed."""
    for spec in filter(None, map(importlib.util.find_spec, modules)):
        if spec.origin:
            yield spec.origin if spec.submodule_search_locations is None else str(Path(spec.origin).parent) + os.sep


LIBRARIES = (*(str(Path(f).parent) + os.sep for f in (__file__, torch.__file__)), *code_of(*AS_PYTORCH))
_STANDARD = str(Path(os.__file__).parent) + os.sep


def is_standard(filename: str) -> bool:
    """Whether it is of Python's own library, in whose folder others may be installed."""
    first = filename.removeprefix(_STANDARD).split(os.sep, 1)[0]
    return filename.startswith(_STANDARD) and first.removesuffix(".py") in sys.stdlib_module_names


def is_users(frame: FrameType) -> bool:
    """Whether it runs the user's code."""
    return not frame.f_code.co_filename.startswith(LIBRARIES)


def users_level() -> int:
    """How far up the user's own line is, as `warnings.warn` counts for the caller of this."""
    level, frame, users = 1, sys._getframe(1), users_frame()
    while frame is not users and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def users_frame() -> FrameType:
    """The innermost frame that runs the user's code, or the outermost one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame):
        frame = frame.f_back
    return frame


def users_line(error: BaseException) -> str:
    """File and line of the innermost frame of the user's code that an error, or what it was raised from, passed."""
    line = ""
    cause: BaseException | None = error
    while cause is not None and not line:
        line = _innermost((f.filename, f.lineno) for f in traceback.extract_tb(cause.__traceback__))
        cause = cause.__cause__
    return line


def forwards_line(error: BaseException) -> str:
    """The same, or of PyTorch's layers where those of the user call nothing else."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    return users_line(error) or innermost([f for f in frames if f[0].startswith(_LAYERS)])


def users_line_in(trace: str) -> str:
    """The same of a stack trace in Python's words."""
    return innermost(re.findall(r'File "([^"]+)", line (\d+)', trace))


def innermost(frames: Iterable[tuple[str, object]]) -> str:
    """File and line of the innermost of these frames that is the user's, or PyTorch's where none is."""
    known = [(str(name), line) for name, line in frames]
    pytorchs = [f"{name}:{line}" for name, line in known if name.startswith(LIBRARIES[1:])]
    return _innermost(known) or (pytorchs or ["an unknown line"])[-1]


def _innermost(frames: Iterable[tuple[str, object]]) -> str:
    users = [f"{name}:{line}" for name, line in frames if not _is_librarys(name)]
    return users[-1] if users else ""


def _is_librarys(filename: str) -> bool:
    return is_standard(filename) or filename.startswith((*LIBRARIES, "<"))
