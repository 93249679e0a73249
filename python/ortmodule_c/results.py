"""The results of a call."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .capture.aliases import Step

Place = tuple[str, int, tuple[Step, ...]]  # an "input" or an "output" of the graph, which, and views of it


class Results:
    """What a module gives, made of the inputs and outputs of its graph when it is asked for.

    A view that several results are made by way of is one tensor, as in PyTorch.

    Parameters
    ----------
    places
        Where each result comes from.
    inputs, outputs
        Those of the graph.
    """

    def __init__(self, places: Sequence[Place], inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        self._places = places
        self.inputs = inputs
        self.outputs = list(outputs)
        self._views: dict[Place, Any] = {}

    def __getitem__(self, k: int) -> Any:
        source, i, steps = self._places[k]
        t: Any = self.inputs[i] if source == "input" else self.outputs[i]
        for n, step in enumerate(steps, 1):
            place = (source, i, steps[:n])
            if place not in self._views:
                self._views[place] = step(t, self.inputs)
            t = self._views[place]
        return t
