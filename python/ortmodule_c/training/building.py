"""What a trainer is made of, as its options say."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from ..onnx import load
from ..options import DebugOptions
from ..ortmodule import ORTModule
from .checkpoint import OF_LOSS
from .description import ModelDescription
from .network import Network
from .optim.config import OptimizerConfig
from .options import ORTTrainerOptions

# Of the graphs that ORTModule writes, by the option that asks for the file.
STAGES = {
    "model_after_graph_transforms_path": "exported",
    "model_with_gradient_graph_path": "joint",
    "model_with_training_graph_path": "joint",
    "model_with_training_graph_after_optimization_path": "optimized",
}
_RECOMPUTE = {"transformer_layer_recompute": 0.0, "attn_dropout_recompute": 0.5, "gelu_recompute": 0.5}  # budgets
_OF_MODULES = (
    ("graph_transformer", (*_RECOMPUTE, "memory_budget")),
    ("device", ("mem_limit",)),
    ("mixed_precision", ("enabled",)),
    ("debug", ("check_model_export",)),
    ("debug.graph_save_paths", tuple(STAGES)),
)


def check(options: ORTTrainerOptions) -> None:
    """Raises ValueError for options that do not fit each other, or the processes that there are."""
    parallel = options.distributed
    if options.mixed_precision.loss_scaler is not None:
        if not options.mixed_precision.enabled:
            raise ValueError("options: mixed_precision.loss_scaler is given, and mixed_precision.enabled is False")
        if options.mixed_precision.dtype != "fp16":
            raise ValueError("options: mixed_precision.loss_scaler is given, and bf16 needs none")
    there = dist.is_available() and dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if there else (1, 0)
    if parallel.world_size not in (1, world):
        raise ValueError(
            f"options: distributed.world_size is {parallel.world_size}, and torch.distributed has {world} process(es): "
            "torch.distributed.init_process_group comes first"
        )
    if parallel.world_size > 1 and parallel.world_rank != rank:
        raise ValueError(f"options: distributed.world_rank is {parallel.world_rank}, and this process is rank {rank}")
    if parallel.data_parallel_size not in (1, parallel.world_size):
        raise ValueError(
            f"options: distributed.data_parallel_size is {parallel.data_parallel_size}, with "
            f"world_size={parallel.world_size}"
        )


def in_core(network: Network, options: ORTTrainerOptions, files: str | None) -> ORTModule:
    """A module in the C core, whose graphs are written to the folder `files`, or where the environment wants all."""
    if options._internal_use.extra_postprocess is not None:
        raise ValueError("options: _internal_use.extra_postprocess changes models of ONNX, and this one is a module")
    precision, change = options.mixed_precision, options.graph_transformer
    budget = change.memory_budget
    if budget is None:
        asked = [share for name, share in _RECOMPUTE.items() if getattr(change, name)]
        budget = min(asked) if asked else options.device.mem_limit or None
    debug = DebugOptions(
        save_onnx=files is not None,
        onnx_prefix=f"graph_{Path(files).name}" if files is not None else "",  # as nobody else's in the other folder
        save_path=files or "",
        verify=int(options.debug.check_model_export),
    )
    return ORTModule(network, debug, precision=precision.dtype if precision.enabled else None, memory_budget=budget)


def graph_file(module: ORTModule, name: str) -> Path:
    """Where such a module writes the graph that an option of :data:`STAGES` asks for."""
    debug = module._ort_options
    return Path(f"{debug.directory / debug.onnx_prefix}_{STAGES[name]}_training.onnx")


def of_onnx(model: onnx.ModelProto, description: ModelDescription, options: ORTTrainerOptions) -> OnnxNetwork:
    """A model of ONNX as a module that takes the inputs, and gives the outputs, of a description."""
    for section, names in _OF_MODULES:
        values: Any = options
        for part in section.split("."):
            values = getattr(values, part)
        asked = [name for name in names if getattr(values, name) not in (None, False, 0, "")]
        if asked:
            raise ValueError(f"options: {section}.{asked[0]} is for modules, and this is a model of ONNX")
    change = options._internal_use.extra_postprocess
    if change is not None:
        model = change(model)
        if not isinstance(model, onnx.ModelProto):
            raise TypeError(f"extra_postprocess gave a {type(model).__name__}, expected onnx.ModelProto")
    module = load(model)
    inputs, outputs = ([d.name for d in rows] for rows in (description.inputs, description.outputs))
    unlike = {*inputs} ^ {*module.input_names}
    if unlike or not {*outputs} <= {*module.output_names}:
        raise ValueError(
            f"model_desc has the inputs {', '.join(inputs)} and outputs {', '.join(outputs)}, the model "
            f"{', '.join(module.input_names)} and {', '.join(module.output_names)}"
        )
    return OnnxNetwork(module, inputs, outputs)


class OnnxNetwork(nn.Module):
    """A model of ONNX, its inputs and outputs in another order."""

    def __init__(self, model: Any, inputs: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs
        self._outputs = [model.output_names.index(name) for name in outputs]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        returned = self.model(**dict(zip(self._inputs, given, strict=True)))
        every = returned if isinstance(returned, tuple) else (returned,)
        return tuple([every[i] for i in self._outputs])


def move(module: nn.Module, options: ORTTrainerOptions) -> torch.device:
    """Put a module where it is to be; that device."""
    if options.device.id is None:
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        return torch.device("cpu") if first is None else first.device
    device = torch.device(options.device.id)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", options.distributed.local_rank)
    module.to(device)
    return device


def plain(name: str) -> str:
    """The name that the user's model has for a tensor of the module around it; those of the loss begin as no other."""
    return OF_LOSS + name.removeprefix("loss_fn.") if name.startswith("loss_fn.") else name.removeprefix("model.")


def trained(module: nn.Module, options: ORTTrainerOptions) -> tuple[dict[str, nn.Parameter], set[str]]:
    """The parameters by all of their names, but for those that are not to change; and the names of those."""
    parameters = {plain(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    others = {plain(name) for name, _ in module.named_buffers(remove_duplicate=False)}
    for name in options.utils.frozen_weights:
        if name in parameters:
            parameters[name].requires_grad_(False)
        elif name not in others:
            raise ValueError(f"options: utils.frozen_weights has {name!r}, which is no parameter of the model")
    found = {name: p for name, p in parameters.items() if p.requires_grad}
    if not found:
        raise ValueError("the model has no parameter to be trained")
    return found, parameters.keys() - found.keys() | others


def optimizer(
    config: OptimizerConfig, parameters: Mapping[str, nn.Parameter], frozen: Collection[str], options: ORTTrainerOptions
) -> Any:
    """The optimizer, and the norm that gradients are clipped to before it where it has some of them alone."""
    kind, groups, numbers = config.recipe(parameters, frozen, options.utils.grad_norm_clip)
    if options.distributed.world_size == 1 or not options.distributed.deepspeed_zero_optimization.stage:
        return kind(groups, **numbers), None
    most = numbers.get("max_grad_norm")
    alone: Any = {name: None if name == "max_grad_norm" else value for name, value in numbers.items()}
    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **alone), most
