"""Signals that come while a graph is made."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from . import _C


class Interrupted(BaseException):
    """A handler of a signal raised `error`, which is not to be taken for somebody's own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Lets Python's handlers of signals wait until its end, but for the one that ends what takes too long.

    What they raised within it would be taken for a failure to trace, or leave modules imported by half.

    Raises
    ------
    Interrupted
        With what a handler raises then.
    """
    came: dict[int, None] = {}
    taken: list[tuple[int, Any, bool]] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came[number] = None

    # They run in the main thread only, and can be exchanged there only.
    if threading.current_thread() is threading.main_thread():
        for which in signal.valid_signals():
            handler = signal.getsignal(which)
            if callable(handler) and handler is not signal.default_int_handler:
                taken.append((which, handler, _C.restarts(which)))
                _set(which, note, taken[-1][2])
    try:
        yield
    finally:
        for number, handler, restarts in taken:
            _set(number, handler, restarts)
        try:
            with contextlib.ExitStack() as stack:  # each runs, whatever another raises
                for number, handler, _ in reversed(taken):
                    if number in came:
                        stack.callback(handler, number, sys._getframe())
        except BaseException as error:
            raise Interrupted(error) from error


def _set(number: int, handler: Callable[..., Any], restarts: bool) -> None:
    """Have a signal handled; calls of the system that it interrupts go on as before."""
    signal.signal(number, handler)
    if restarts:
        signal.siginterrupt(number, False)
