"""What the threads of a process share, and what a fork leaves of it."""

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Iterator

import torch

tracing_lock = threading.RLock()  # tracing changes process-wide state; planning locks a session
_first_process = os.getpid()

# A thread that holds the lock would be missing in the child.
os.register_at_fork(
    before=tracing_lock.acquire, after_in_parent=tracing_lock.release, after_in_child=tracing_lock.release
)


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
