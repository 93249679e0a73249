"""What the threads of a process share, and what a fork leaves of it."""

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Iterator

import torch

tracing_lock = threading.RLock()  # graphs are found in an instant, or made: see `tracing`; planning locks a session
noting_lock = threading.Lock()  # of what is noted about calls, in microseconds; may be taken within the other
_first_process = os.getpid()
_PATIENCE = 30.0  # seconds that who wants to trace waits for other threads to end what they run


class _Tracing:
    """A lock for who traces; no thread runs a module in Python meanwhile, whose parameters and classes are exchanged.

    Others may hold it shared, to run modules (:meth:`running`). A thread that runs one and wants to trace counts as not
    running until it has traced: two such do not wait for each other. Nobody holds `tracing_lock` who waits for this.
    Who runs a module may itself wait for the thread that wants to trace, which nobody can see; that one waits for no
    longer than `_PATIENCE`, and is told.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # held for microseconds; what handlers of signals run may come within
        self._running: dict[int, int] = {}  # thread: how many modules, one inside of the other
        self._paused: dict[int, list[int]] = {}  # thread that traces or wants to: what it ran, each time
        self._tracer: int | None = None

    def __enter__(self) -> bool:
        """Whether nobody else runs a module."""
        me = threading.get_ident()
        with self._changed:
            self._paused.setdefault(me, []).append(self._running.pop(me, 0))
        try:
            with self._changed:
                self._changed.notify_all()
                while not self._changed.wait_for(lambda: self._is_free(me), _PATIENCE) and self._tracer is not None:
                    pass  # a trace takes the time that it takes
                alone = self._is_free(me)
                self._tracer = me
            tracing_lock.acquire()
        except BaseException:
            self._end(me)
            raise
        return alone

    def __exit__(self, *_error: object) -> None:
        tracing_lock.release()
        self._end(threading.get_ident())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within it no other thread traces, unless this one wants to."""
        me = threading.get_ident()
        with self._changed:
            if me not in self._running:  # else others may wait for it
                self._changed.wait_for(lambda: self._tracer == me or self._nobody_wants(me))
            self._running[me] = self._running.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                if not self._running[me]:
                    del self._running[me]
                    self._changed.notify_all()

    def _is_free(self, me: int) -> bool:
        return self._tracer == me or (self._tracer is None and not self._running)

    def _nobody_wants(self, me: int) -> bool:
        return self._tracer is None and self._paused.keys() <= {me}

    def _end(self, me: int) -> None:
        with self._changed:
            ran = self._paused[me].pop()
            if not self._paused[me]:
                del self._paused[me]
                self._tracer = None if self._tracer == me else self._tracer
            self._changed.notify_all()
            if ran:
                try:
                    self._changed.wait_for(lambda: self._tracer in (None, me))
                finally:
                    self._running[me] = ran

    def before_fork(self) -> None:
        self._changed.acquire()

    def after_in_parent(self) -> None:
        self._changed.release()

    def after_in_child(self) -> None:
        """Only this thread is there."""
        me = threading.get_ident()
        self._running = {t: n for t, n in self._running.items() if t == me}
        self._paused = {t: n for t, n in self._paused.items() if t == me}
        self._tracer = me if self._tracer == me else None
        self._changed.release()


tracing = _Tracing()

# A thread that holds a lock would be missing in the child. Before a fork, the one that is registered last comes first.
os.register_at_fork(
    before=tracing.before_fork, after_in_parent=tracing.after_in_parent, after_in_child=tracing.after_in_child
)
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
