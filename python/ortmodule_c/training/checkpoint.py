"""Checkpoints of the trainer: HDF5 files, laid out as those of ONNX Runtime's were.

Needs the package h5py.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import first_lines
from ..replacing import replacing

State = dict[str, Any]
OF_LOSS = "loss_fn:"  # begins names of tensors of the loss

MODEL, PRECISION, OPTIMIZER, SHARED = "model", "full_precision", "optimizer", "shared_optimizer_state"
OPTIONS, PROGRESS, PARTITION, USER = "trainer_options", "train_step_info", "partition_info", "user_dict"
SCALER = "loss_scaler"


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write nested dicts of arrays, numbers and strings; a file that is there is replaced once all is written."""
    import h5py

    with replacing(Path(path).resolve()) as made, h5py.File(made, "w", track_order=True) as file:
        _write(file, state)


def load(path: str | os.PathLike[str]) -> State:
    """Read what :func:`save` wrote.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no file, or it is no HDF5 file.
    """
    import h5py

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint {os.fspath(path)!r}")
    if not h5py.is_hdf5(path):
        raise ValueError(f"{os.fspath(path)!r} is not a checkpoint: it is no HDF5 file")
    with h5py.File(path, "r") as file:
        return _read(file)


def aggregate_checkpoints(paths: Sequence[str | os.PathLike[str]], pytorch_format: bool = True) -> State:
    """Put together the checkpoints that the processes of one training have written.

    Parameters
    ----------
    paths
        One for each process, in any order.
    pytorch_format
        Whether to give the model's tensors by name; else all that :meth:`ORTTrainer.state_dict` does.

    Returns
    -------
    dict
        What ``load_state_dict`` of the model, or of a trainer, takes.

    Raises
    ------
    ValueError
        If they are not those of all processes of one training, or one of them is no checkpoint.
    """
    state = joined([load(path) for path in paths])
    if not pytorch_format:
        return state
    weights = state[MODEL][PRECISION].items()
    return {name: torch.from_numpy(np.array(array)) for name, array in weights if not name.startswith(OF_LOSS)}


def joined(states: Sequence[State]) -> State:
    """One state of those of all processes; each has the optimizer's state of the parameters that it updates."""
    if not states:
        raise ValueError("there are no checkpoints")
    for state in states:
        if MODEL not in state or PRECISION not in state[MODEL] or OPTIONS not in state:
            raise ValueError(f"a checkpoint has {', '.join(state)}, expected {MODEL}/{PRECISION} and {OPTIONS}")
    states = sorted(states, key=lambda state: int(state[OPTIONS]["world_rank"]))
    partitioned = int(states[0][OPTIONS]["zero_stage"]) > 0
    world = int(states[0][OPTIONS]["world_size"]) if partitioned else len(states)
    ranks = [int(state[OPTIONS]["world_rank"]) for state in states]
    if partitioned and ranks != list(range(world)):
        raise ValueError(f"there are checkpoints of the ranks {ranks}, expected those of all {world} processes")
    whole = {**states[0], MODEL: {PRECISION: {}}, OPTIMIZER: {}}
    if partitioned:
        whole[OPTIONS] = {**states[0][OPTIONS], "zero_stage": 0, "world_rank": 0, "world_size": 1}
    whole.pop(PARTITION, None)
    dims = {name: row["original_dim"] for state in states for name, row in state.get(PARTITION, {}).items()}
    for name in dict.fromkeys(name for state in states for name in state[MODEL][PRECISION]):
        parts = [state[MODEL][PRECISION][name] for state in states if name in state[MODEL][PRECISION]]
        whole[MODEL][PRECISION][name] = _whole(parts, dims.get(name))
    for name in dict.fromkeys(name for state in states for name in state.get(OPTIMIZER, {})):
        rows = [state[OPTIMIZER][name] for state in states if name in state.get(OPTIMIZER, {})]
        of_weight = name != SHARED
        whole[OPTIMIZER][name] = {
            kind: _whole(
                [row[kind] for row in rows], dims.get(name) if of_weight and kind.startswith("Moment") else None
            )
            for kind in rows[0]
        }
    return whole


def _whole(parts: Sequence[Any], dims: Any) -> Any:
    """The first, or where a weight was cut into parts, all of them one after another."""
    if dims is None or np.array_equal(np.shape(parts[0]), dims):
        return parts[0]
    return np.concatenate([np.ravel(part) for part in parts]).reshape([int(d) for d in dims])


def to_text(user_dict: Mapping[str, Any]) -> str:
    """What a user keeps in a checkpoint, as text.

    Raises
    ------
    TypeError
        If it is made of more than dicts, lists, tuples, numbers, strings and tensors.
    """
    stream = io.BytesIO()
    try:
        torch.save(dict(user_dict), stream)
        of_text(stream.getvalue().hex())
    except Exception as error:
        raise TypeError(f"user_dict holds what a checkpoint does not keep: {first_lines(error)}") from error
    return stream.getvalue().hex()


def of_text(text: str | bytes) -> dict[str, Any]:
    """What :func:`to_text` was given, or ONNX Runtime's trainer; no code of a file is run.

    Raises
    ------
    pickle.UnpicklingError
        If it holds anything else.
    """
    data = bytes.fromhex(text.decode() if isinstance(text, bytes) else text)
    if zipfile.is_zipfile(io.BytesIO(data)):  # as torch.save writes
        found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    else:
        found = _Plain(io.BytesIO(data)).load()
    return found


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"user_dict holds {module}.{name}, which may run code: aggregate_checkpoints reads a file without it"
        )


def _write(group: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        key = name.replace("%", "%25").replace("/", "%2F")  # a slash would name a part of a group
        if isinstance(value, Mapping):
            _write(group.create_group(key, track_order=True), value)
        else:
            group[key] = value


def _read(group: Any) -> State:
    found: State = {}
    for key, value in group.items():
        name = key.replace("%2F", "/").replace("%25", "%")
        if isinstance(value, Mapping):
            found[name] = _read(value)
        else:
            read = value[()]
            found[name] = read.decode() if isinstance(read, bytes) else read
    return found
