"""What the threads of a process share, and what a fork leaves of it."""

import contextlib
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from .errors import NotRunnable
from .signals import Interrupted, waiting

NOT_ALONE = "another thread runs a module, which may not see a trace, and does not end"
tracing_lock = threading.RLock()  # graphs are found in an instant, or made: see `tracing`; planning locks a session
noting_lock = threading.Lock()  # of what is noted about calls, in microseconds; may be taken within the other
_first_process = os.getpid()
# Seconds that who wants to trace waits for other threads to end what they run; and once it has waited in vain.
_PATIENCE, _IMPATIENCE = 2.0, 0.02
_PAUSE = 0.001  # seconds between two looks at what they do


class _Tracing:
    """Who traces is alone: no other thread runs a module in Python, whose parameters and classes are then exchanged.

    It has `tracing_lock`, which whoever begins to run a module (:meth:`run`) waits for. What runs already is read off
    the stacks of the other threads: nothing is counted, which an exception of a signal could leave behind. A thread
    that runs a module and wants to trace does not count as one that runs: two such do not wait for each other. Who runs
    may itself wait for the thread that wants to trace, which nobody can see: so that one waits for `_PATIENCE` at most.

    What autograd calls in a backward, such as a checkpoint that runs forward again, is not waited for: it sees tensors
    of its own (``capture/private.py``).
    """

    def __init__(self) -> None:
        self._patience = _PATIENCE
        self._wanted = False  # somebody may wait: a hint, looked into by who begins to run
        self._alone = True  # whoever traces, or did last

    def __enter__(self) -> bool:
        """Whether nobody else runs a module, as far as their stacks tell."""
        if tracing_lock._is_owned():  # type: ignore[attr-defined]
            # Nobody has begun to run since; who would do so waits for the lock, and looks like one that runs.
            alone = self._alone or not _is_any_other(_RUNS)
            tracing_lock.acquire()
            return alone
        waited = 0.0  # for runs; a trace takes the time that it takes
        while not self._locked_alone():
            if waited > self._patience:
                self._patience = _IMPATIENCE
                tracing_lock.acquire()
                self._alone = False
                return False
            self._wanted = True
            time.sleep(_PAUSE)
            waited += _PAUSE
        self._patience = _PATIENCE
        return True

    __exit__ = tracing_lock.__exit__  # of C: no signal comes between the end and the release

    def _locked_alone(self) -> bool:
        """Take the lock, unless others run; while this thread has it none begins to."""
        tracing_lock.acquire()
        try:
            self._alone = False  # to a handler of a signal, until it is known
            self._alone = not _is_any_other(_RUNS)
            if self._alone:
                return True
        except BaseException:
            tracing_lock.release()
            raise
        tracing_lock.release()
        return False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call what runs a module: while it does, no other thread traces, unless this one wants to."""
        if self._wanted and _doing(sys._getframe(1)) is not _RUNS:
            self._make_way()
        with tracing_lock:
            pass
        return function(*args, **kwargs)

    def _make_way(self) -> None:
        """Wait until nobody wants to trace: runs of several threads may leave no moment without any."""
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            if not _is_any_other(_WANTS):
                self._wanted = False
                return
            time.sleep(_PAUSE)


_WANTS, _RUNS, _WAITS = _Tracing.__enter__.__code__, _Tracing.run.__code__, _Tracing._make_way.__code__


def _doing(frame: FrameType | None) -> CodeType | None:
    """Whether a thread with this stack wants to trace, or runs a module, or waits to do so."""
    while frame is not None and frame.f_code not in (_WANTS, _RUNS, _WAITS):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _is_any_other(what: CodeType) -> bool:
    """Whether another thread does this."""
    me = threading.get_ident()
    return any(_doing(frame) is what for thread, frame in sys._current_frames().items() if thread != me)


tracing = _Tracing()


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """Within it this thread traces, and nobody else runs a module; signals wait, and their handlers raise as ever.

    Raises
    ------
    NotRunnable
        If others do not end what they run.
    """
    try:
        with waiting(), tracing as alone:
            if not alone:
                raise NotRunnable(NOT_ALONE)
            yield
    except Interrupted as interrupt:
        raise interrupt.error from None


# A thread that holds a lock would be missing in the child. Before a fork, the one that is registered last comes first.
for _lock in (noting_lock, tracing_lock):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Lets Python's garbage wait: a trace allocates so much that all of PyTorch's objects would be walked meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def one_thread_after_fork() -> None:
    """Let PyTorch compute on this thread alone if the process was forked, as the C core does.

    OpenMP starts its threads once. A child of the process that did would wait for them forever.
    """
    _enter(os.getpid())


@functools.cache
def _enter(process: int) -> None:
    if process != _first_process:
        torch.set_num_threads(1)
