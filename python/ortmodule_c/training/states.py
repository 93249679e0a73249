"""The state of a trainer as nested dicts of arrays, by the names that ONNX Runtime had for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .checkpoint import MODEL, OPTIMIZER, OPTIONS, PRECISION, SHARED, State

_MOMENTS = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq"}
_COUNT = "Update_Count"
_STEP = "step"


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
        Whether the steps of all parameters are one number.
    """
    state: State = {}
    for p, kept in optimizer.state.items():
        moments = {theirs: array_of(kept[ours]) for theirs, ours in _MOMENTS.items() if ours in kept}
        if not moments:
            continue
        steps = np.array([int(kept[_STEP]) + 1], dtype=np.int64)
        if counts_together:
            state[SHARED] = {_STEP: steps}
            state[names[p]] = moments
        else:
            state[names[p]] = {**moments, _COUNT: steps}
    return state


def differences(given: Any, tensors: Mapping[str, Tensor], optimizer_name: str) -> tuple[list[str], list[str]]:
    """Names that a state lacks, and those that it has beyond a model's.

    Raises
    ------
    ValueError
        If it is no state, is of another optimizer, or has a tensor of another shape.
    """
    if not isinstance(given, Mapping) or PRECISION not in given.get(MODEL, {}):
        raise ValueError(f"the state has no {MODEL}/{PRECISION}: it is none of a trainer")
    name = given.get(OPTIONS, {}).get("optimizer_name", optimizer_name)
    if given.get(OPTIMIZER) and name != optimizer_name:
        raise ValueError(f"the state is of {name}, the trainer has {optimizer_name}")
    weights = given[MODEL][PRECISION]
    shapes = [(key, tensors[key], array) for key, array in weights.items() if key in tensors]
    kept = given.get(OPTIMIZER, {})
    for key, row in kept.items():
        if key in tensors and not ({*_MOMENTS} <= {*row} and (_COUNT in row or _STEP in kept.get(SHARED, {}))):
            raise ValueError(f"{key} has {', '.join(row)} in the state, expected its moments and steps")
        shapes += [(key, tensors[key], row[kind]) for kind in _MOMENTS if key in tensors]
    for key, t, array in shapes:
        if tuple(np.shape(array)) != tuple(t.shape):
            raise ValueError(f"{key} has shape {list(np.shape(array))} in the state, {list(t.shape)} in the model")
    return [key for key in tensors if key not in weights], [key for key in weights if key not in tensors]


def load_tensors(weights: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write elements into the tensors of these names."""
    with torch.no_grad():
        for key, array in weights.items():
            if key in tensors:
                tensors[key].copy_(torch.as_tensor(np.asarray(array)))


def load_optimizer(given: State, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Let it go on from a state; it forgets what it has of parameters of which that says nothing."""
    shared = given.get(SHARED, {}).get(_STEP)
    here = {p for group in optimizer.param_groups for p in group["params"]}
    for p in here:
        optimizer.state.pop(p, None)
    for name, p in parameters.items():
        row = given.get(name) if p in here else None
        if row is None:
            continue
        steps = shared if shared is not None else row[_COUNT]
        kept = {ours: torch.as_tensor(np.array(row[theirs])).to(p) for theirs, ours in _MOMENTS.items()}
        count = float(np.ravel(steps)[0]) - 1
        optimizer.state[p] = {_STEP: torch.tensor(count, dtype=torch.float32, device=p.device), **kept}
