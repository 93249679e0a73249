"""The state of a trainer as nested dicts of arrays, by the names that ONNX Runtime had for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .checkpoint import MODEL, OPTIMIZER, PRECISION, SHARED, State

_MOMENTS = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq"}
_COUNT = "Update_Count"
_STEP = "Step"


def array_of(t: Tensor) -> Any:
    """A copy of its elements; those of bfloat16, which NumPy lacks, in float32."""
    t = t.detach().cpu()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy().copy()


def of_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], counts_together: bool) -> State:
    """What it has kept of each parameter; steps are counted from 1, as ONNX Runtime does.

    Parameters
    ----------
    optimizer
        One of ours.
    names
        Of parameters.
    counts_together
        Whether there is a number of steps that stands for all parameters, too.
    """
    state: State = {}
    most = 0
    for p, kept in optimizer.state.items():
        moments = {theirs: array_of(kept[ours]) for theirs, ours in _MOMENTS.items() if ours in kept}
        if moments:
            steps = int(kept["step"]) + 1
            most = max(most, steps)
            state[names[p]] = {**moments, _COUNT: np.array([steps], dtype=np.int64)}
    if counts_together and state:
        state[SHARED] = {_STEP: np.array([most], dtype=np.int64)}
    return state


def tensors_of(weights: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Of each tensor that a state has, it and its elements.

    Raises
    ------
    ValueError
        If those are of another shape, or are no numbers.
    """
    return [(t, _elements(name, weights[name], t)) for name, t in tensors.items() if name in weights]


def states_of(
    given: State, optimizer: Optimizer, parameters: Mapping[str, Tensor]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Of each parameter that an optimizer has and a state knows, what the optimizer is to keep of it.

    Raises
    ------
    ValueError
        If a parameter lacks moments or steps, or they are of another shape, or are no numbers.
    """
    shared = next((v for k, v in given.get(SHARED, {}).items() if k.lower() == _STEP.lower()), None)
    here = {p for group in optimizer.param_groups for p in group["params"]}
    found = []
    for name, p in parameters.items():
        row = given.get(name)
        if row is None or p not in here:
            continue
        steps = row.get(_COUNT, shared)
        if not {*_MOMENTS} <= {*row} or steps is None or np.size(steps) != 1:
            raise ValueError(f"{name} has {', '.join(row)} in the state, expected its moments and steps")
        kept = {ours: _elements(name, row[theirs], p) for theirs, ours in _MOMENTS.items()}
        count = float(_elements(name, np.reshape(steps, ()), torch.zeros(()))) - 1
        found.append((p, {"step": torch.tensor(count, dtype=torch.float32, device=p.device), **kept}))
    return found


def _elements(name: str, array: Any, like: Tensor) -> Tensor:
    """An array on a tensor's device; in its dtype, unless that is of 16 bits and the array of more."""
    if tuple(np.shape(array)) != tuple(like.shape):
        raise ValueError(f"{name} has shape {list(np.shape(array))} in the state, {list(like.shape)} in the model")
    try:
        elements = torch.as_tensor(np.array(array))
    except TypeError:
        raise ValueError(f"{name} has {type(array).__name__} of {np.asarray(array).dtype} in the state") from None
    keeps = like.is_floating_point() and elements.is_floating_point() and like.dtype.itemsize < 4
    return elements.to(like.device, elements.dtype if keeps else like.dtype)


def differences(
    given: State, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Names that a state lacks, and those that it has beyond a model's.

    A tensor of several names needs one of them. Whole numbers, such as a count of batches or positions, may be there
    or not: files of ONNX Runtime have what its export used.
    """
    weights, rows = given[MODEL][PRECISION], given.get(OPTIMIZER, {})
    there = {id(t) for name, t in tensors.items() if name in weights}
    missing = [n for n, t in tensors.items() if n not in weights and id(t) not in there and t.is_floating_point()]
    unknown = [n for n, a in weights.items() if n not in tensors and np.asarray(a).dtype.kind not in "iub"]
    return missing, unknown + [f"{OPTIMIZER}/{n}" for n in rows if n not in parameters and n != SHARED]
