"""The graphs of TorchDynamo that ran, for whoever compares them with PyTorch."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..capture.export import Captured


@dataclass(frozen=True)
class Run:
    """One run of one graph.

    Attributes
    ----------
    inputs
        Copies of the graph's tensors.
    state
        PyTorch's random state before it.
    seed
        Of the masks that the core drew; 0 if none.
    n_masks
        How many these are.
    capture
        Makes the graph again, for these sizes and numbers.
    """

    inputs: list[Tensor]
    state: Tensor
    seed: int
    n_masks: int
    capture: Callable[[], "Captured"]


class _Here(threading.local):
    """What this thread notes."""

    runs: list[Run] | None = None


_here = _Here()


@contextlib.contextmanager
def noting() -> Iterator[list[Run]]:
    """Gives the runs that this thread makes within it, in order."""
    before, _here.runs = _here.runs, []
    try:
        yield _here.runs
    finally:
        _here.runs = before


def wanted() -> bool:
    """Whether a run of this thread is to be noted: not one that a checkpoint repeats in a backward."""
    return _here.runs is not None and torch._C._current_graph_task_id() < 0


def note(run: Run) -> None:
    """Add a run."""
    assert _here.runs is not None
    _here.runs.append(run)
