"""Python's `max`, `min` and `math.pow` while a module is exported.

torch.export puts others in their places: they choose elements where Python chooses one of two tensors, which may have
another type, and has another gradient where the two are equal or NaN; and they give whole powers of whole numbers.
"""

import builtins
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.export import _trace

from ..errors import NotRunnable
from ..guards.frames import is_run_for_user


@contextlib.contextmanager
def as_python_has_them() -> Iterator[None]:
    """Keeps torch.export from exchanging them but for sizes, which stay open, and refuses to choose among tensors."""
    exchange = _trace._override_builtin_ops
    _trace._override_builtin_ops = _for_sizes
    try:
        yield
    finally:
        _trace._override_builtin_ops = exchange


@contextlib.contextmanager
def _for_sizes() -> Iterator[None]:
    own, thread = (builtins.max, builtins.min), threading.get_ident()
    builtins.max = functools.partial(_choose, thread, own[0], torch.sym_max)
    builtins.min = functools.partial(_choose, thread, own[1], torch.sym_min)
    try:
        yield
    finally:
        builtins.max, builtins.min = own


def _choose(thread: int, own: Callable[..., Any], of_sizes: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if threading.get_ident() != thread or "key" in kwargs:
        return own(*args, **kwargs)
    if len(args) == 1:
        args = ([*args[0]],)
    among = args[0] if len(args) == 1 else args
    if any(isinstance(v, Tensor) for v in among) and is_run_for_user(sys._getframe(1)):
        name = own.__name__
        # TorchDynamo would choose elements, too.
        raise NotRunnable(
            f"{name} of Python chooses one of several tensors by their values; torch.{name}imum chooses elements"
        )
    if len(args) == 2 and not kwargs and {torch.SymInt} <= {*map(type, args)} <= {torch.SymInt, int}:
        return of_sizes(*args)
    return own(*args, **kwargs)
