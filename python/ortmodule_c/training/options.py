"""What a user may set of the trainer, as a nest of dicts that is checked by a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .amp.loss_scaler import LossScaler
from .optim.lr_scheduler import _LRScheduler


@dataclass(frozen=True)
class _Option:
    """A default, and what may stand in its place: a value of `kind` for which `accepts` holds, as `expected` says."""

    default: Any
    kind: type | tuple[type, ...]
    expected: str
    accepts: Callable[[Any], bool] = lambda value: True

    def checked(self, name: str, value: Any) -> Any:
        """The value; ValueError if it is none that the option takes."""
        mistaken = isinstance(value, bool) and self.kind in (int, (int, float))
        if value is self.default or (isinstance(value, self.kind) and not mistaken and self.accepts(value)):
            return list(value) if isinstance(value, list) else value
        raise ValueError(f"options: {name} is {value!r}, expected {self.expected}")


def _flag(default: bool) -> _Option:
    return _Option(default, bool, "True or False")


def _count(default: int, least: int = 0) -> _Option:
    return _Option(default, int, f"a whole number of at least {least}", lambda n: n >= least)


def _path() -> _Option:
    return _Option("", str, "a path")


def _only(default: Any, why: str) -> _Option:
    """One that ONNX Runtime had, and that is here at its default alone."""
    return _Option(default, type(default), f"{default!r}: {why}", lambda value: value == default)


def _is_device(value: Any) -> bool:
    try:
        torch.device(value)
    except RuntimeError:
        return False
    return True


def _is_names(value: list[Any]) -> bool:
    return all(isinstance(name, str) for name in value)


_ONE = "models are not split over processes"

_SCHEMA: dict[str, Any] = {
    "batch": {"gradient_accumulation_steps": _count(1, 1)},
    "device": {
        "id": _Option(None, str, "a device, such as 'cuda:0', or None for that of the model", _is_device),
        "mem_limit": _count(0),
    },
    "distributed": {
        "world_rank": _count(0),
        "world_size": _count(1, 1),
        "local_rank": _count(0),
        "data_parallel_size": _count(1, 1),
        "horizontal_parallel_size": _only(1, _ONE),
        "pipeline_parallel": {
            "pipeline_parallel_size": _only(1, _ONE),
            "num_pipeline_micro_batches": _only(1, _ONE),
            "pipeline_cut_info_string": _only("", _ONE),
            "sliced_schema": _only({}, _ONE),
            "sliced_axes": _only({}, _ONE),
            "sliced_tensor_names": _only([], _ONE),
        },
        "allreduce_post_accumulation": _flag(False),
        "deepspeed_zero_optimization": {"stage": _Option(0, int, "0 or 1", lambda n: n in (0, 1))},
        "enable_adasum": _only(False, "gradients of processes are averaged"),
    },
    "lr_scheduler": _Option(None, _LRScheduler, "one of optim.lr_scheduler, or None"),
    "mixed_precision": {
        "enabled": _flag(False),
        "dtype": _Option("fp16", str, "'fp16' or 'bf16'", lambda name: name in ("fp16", "bf16")),
        "loss_scaler": _Option(None, LossScaler, "one of amp, or None"),
    },
    "graph_transformer": {
        "attn_dropout_recompute": _flag(False),
        "gelu_recompute": _flag(False),
        "transformer_layer_recompute": _flag(False),
        "number_recompute_layers": _count(0),
        "propagate_cast_ops_config": {
            "strategy": _Option("FLOOD_FILL", object, "any"),
            "level": _Option(1, int, "a whole number"),
            "allow": _Option([], list, "a list of names", _is_names),
        },
        "memory_budget": _Option(None, (int, float), "as of ORTModule"),
    },
    "utils": {
        "frozen_weights": _Option([], list, "a list of names", _is_names),
        "grad_norm_clip": _flag(True),
        "memory_efficient_gradient": _flag(False),
        "run_symbolic_shape_infer": _flag(False),
    },
    "debug": {
        "deterministic_compute": _flag(False),
        "check_model_export": _flag(False),
        "graph_save_paths": {
            "model_after_graph_transforms_path": _path(),
            "model_with_gradient_graph_path": _path(),
            "model_with_training_graph_path": _path(),
            "model_with_training_graph_after_optimization_path": _path(),
        },
    },
    "_internal_use": {
        "enable_internal_postprocess": _flag(True),
        "extra_postprocess": _Option(None, object, "a function of an ONNX model, or None", callable),
        "onnx_opset_version": _Option(14, int, "a whole number"),
        "enable_onnx_contrib_ops": _flag(True),
    },
    "provider_options": _only({}, "they are ONNX Runtime's"),
    "session_options": _Option(None, type(None), "None: they are ONNX Runtime's"),
}


class _Section:
    """Options that belong together, as attributes; they stay as they are."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no option {name}, but {', '.join(vars(self))}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set: options are said when they are made")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Section) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return json.dumps(_plain(self), indent=1, default=repr)


class ORTTrainerOptions(_Section):
    """What :class:`ORTTrainer` may be told: ``ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 4}})``.

    Options are read as ``options.batch.gradient_accumulation_steps``, and keep their values. docs/orttrainer.md says
    what each does.

    Parameters
    ----------
    options
        A nest of dicts by name; what it does not say has its default.

    Raises
    ------
    ValueError
        If there is no option of a name, or it takes no such value: the message has the whole name.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(_filled({} if options is None else options, _SCHEMA, ""))


def _filled(given: Any, schema: Mapping[str, Any], within: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"options: {within.rstrip('.') or 'they'} is {given!r}, expected a dict")
    unknown = [name for name in given if name not in schema]
    if unknown:
        raise ValueError(f"options: there is no {within}{unknown[0]}, expected one of {', '.join(schema)}")
    values: dict[str, Any] = {}
    for name, row in schema.items():
        if isinstance(row, _Option):
            values[name] = row.checked(within + name, given.get(name, row.default))
        else:
            values[name] = _Section(_filled(given.get(name, {}), row, f"{within}{name}."))
    return values


def _plain(section: _Section) -> dict[str, Any]:
    return {name: _plain(v) if isinstance(v, _Section) else v for name, v in vars(section).items()}
