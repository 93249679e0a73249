"""What the threads of a process share, and what a fork leaves of it."""

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Iterator

import torch

tracing_lock = threading.RLock()  # tracing changes process-wide state; planning locks a session
noting_lock = threading.Lock()  # of what is noted about calls, in microseconds; may be taken within the other
_first_process = os.getpid()

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
