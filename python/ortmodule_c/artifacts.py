"""Files that the C library trains, where there is no Python (csrc/train/trainer.h).

A file is a safetensors file: tensors of the model, of its graphs and of the optimizer, and the graphs as text. Needs
the package safetensors, which nothing else of this package imports.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .errors import NotExportable
from .lowering.to_text import to_text
from .optim.fused import FusedOptimizer
from .ortmodule import ORTModule
from .replacing import replacing
from .terms import Precision, Terms
from .whole import DynamicAxes, Example, WholeGraph, unknown_argument, whole_graph

VERSION = "1"  # of what csrc/train/load.c reads
_MODEL, _OPTIMIZER = "model/", "optimizer/"


def save(
    path: str | Path,
    model: nn.Module,
    example: Example,
    *,
    optimizer: FusedOptimizer | None = None,
    evaluation_example: Example | None = None,
    dynamic_axes: DynamicAxes | None = None,
    precision: Precision | None = None,
) -> None:
    """Write a file with which a program in C trains and evaluates a model.

    The graph of training is that of the module in training mode, and its first output is the loss; that of evaluation
    is that of the module in evaluation. What the optimizer has kept so far goes along.

    Parameters
    ----------
    path
        The file; one that is there is replaced once all is written.
    model
        The module, on the CPU; left as it was. An :class:`ortmodule_c.ORTModule` has said `precision` and `outputs`.
    example
        Arguments that it is called with, or keyword arguments. The graph is made for their dtypes and sizes; what is
        no tensor is part of it.
    optimizer
        One of :mod:`ortmodule_c.optim` for the model's parameters, by which the program updates them. None: the
        program may evaluate, and find losses.
    evaluation_example
        The arguments in evaluation, if they are others.
    dynamic_axes
        By name of an argument the axes whose size may be another one at each call, or names for these sizes by axis,
        which are the same where their names are.
    precision
        As of :class:`ortmodule_c.ORTModule`.

    Raises
    ------
    NotExportable
        If there is no graph of the module that runs in C as a whole.
    TypeError
        If the optimizer is none of ours.
    ValueError
        If `dynamic_axes` names what is no tensor of the example, or the optimizer has what is no parameter, or one in
        16 bits.
    """
    if optimizer is not None:
        _check_optimizer(optimizer)
    module = model.module if isinstance(model, ORTModule) else model
    terms = Terms.of(precision, None)
    if isinstance(model, ORTModule):
        terms = terms.over(model._ort_terms)
    examples = {"training": example, "evaluation": example if evaluation_example is None else evaluation_example}
    known = {t: n for n, t in [*module.named_parameters(), *module.named_buffers()]}
    _refuse_what_a_file_cannot_say(module, known)
    tensors = {_MODEL + name: t for t, name in known.items()}
    texts = {"ortmodule_c": VERSION, "state_dict": _lines(_state_dict_names(module, known))}
    if optimizer is not None:
        _add_optimizer(optimizer, known, tensors, texts)
    taken: set[str] = set()
    for mode, given in examples.items():
        graph = whole_graph(mode, module, terms, given, dynamic_axes or {})
        taken |= {*graph.arguments}
        _add_graph(graph, tensors, texts)
    mistake = unknown_argument(dynamic_axes or {}, [*taken])
    if mistake:
        raise ValueError(mistake)
    apart = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    with replacing(Path(path).resolve()) as made:
        save_file(apart, made, texts)


def load_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the module's ``state_dict`` from a file, such as one that a program in C has trained.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    dict
        What ``load_state_dict`` of the module takes.

    Raises
    ------
    ValueError
        If the file was not written by :func:`save`.
    """
    with safe_open(path, "pt") as file:
        names = [line.split("\t", 1) for line in _texts(path, file)["state_dict"].split("\n")[:-1]]
        return {key: file.get_tensor(name) for name, key in names}


def load_optimizer(path: str | Path, model: nn.Module, optimizer: FusedOptimizer) -> None:
    """Have an optimizer go on from what a file keeps, such as one that a program in C has trained.

    Parameters
    ----------
    path
        The file.
    model
        The module that it was written of, or one with the same names.
    optimizer
        Of the kind that it was written with; its groups, with their numbers, stay its own. It forgets what it has of
        parameters of which the file has nothing.

    Raises
    ------
    TypeError
        If the optimizer is none of ours.
    ValueError
        If the file was not written by :func:`save`, or is of another optimizer or model; nothing has changed then.
    """
    _check_optimizer(optimizer)
    module = model.module if isinstance(model, ORTModule) else model
    names = {t: n for n, t in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states: dict[Tensor, dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        texts = _texts(path, file)
        if texts.get("optimizer") != optimizer.rule:
            raise ValueError(f"{path} is of the optimizer {texts.get('optimizer')}, this one is {optimizer.rule}")
        kinds: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118
            if key.startswith(_OPTIMIZER):
                _, kind, name = key.split("/", 2)
                kinds.setdefault(name, []).append(kind)
        known = {line.split(" ", 1)[1] for line in texts["optimizer.parameters"].split("\n")[:-1]}
        for p in parameters:
            if names.get(p) not in known:
                raise ValueError(f"{path} has no parameter {names.get(p, f'of shape {list(p.shape)}')} that is trained")
            found = {kind: file.get_tensor(f"{_OPTIMIZER}{kind}/{names[p]}") for kind in kinds.get(names[p], ())}
            for kind, t in found.items():
                if kind != "step" and t.shape != p.shape:
                    raise ValueError(f"{kind} of {names[p]} has shape {list(t.shape)}, the parameter {list(p.shape)}")
            states[p] = {kind: t.to(p.device) if kind == "step" else t.to(p) for kind, t in found.items()}
    for p, state in states.items():
        if not optimizer.counts:
            state.pop("step", None)
        optimizer.state.pop(p, None)
        if state:
            optimizer.state[p] = state


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, expected one of ortmodule_c.optim, which load the states of "
            "torch.optim's"
        )


def _texts(path: str | Path, file: Any) -> dict[str, str]:
    texts: dict[str, str] = file.metadata() or {}
    if texts.get("ortmodule_c") != VERSION:
        raise ValueError(f"{path} was not written by ortmodule_c.artifacts, version {VERSION}")
    return texts


def _lines(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _refuse_what_a_file_cannot_say(module: nn.Module, known: Mapping[Tensor, str]) -> None:
    memory: dict[int, str] = {}
    for t, name in known.items():
        if {"\n", "\t", "\0"}.intersection(name):
            raise ValueError(f"{name!r} has a line's end or a tab in it, which the file cannot say")
        if t.layout is not torch.strided or t.is_complex():
            raise NotExportable(f"{name} is of layout {t.layout} and dtype {t.dtype}")
        if t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None):
            raise NotExportable(f"{name} has hooks of its gradient")
        other = memory.setdefault(t.untyped_storage().data_ptr(), name) if t.numel() else name
        if other != name:
            raise NotExportable(f"{name} shares memory with {other}")
    strange = [key for key, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor) and t not in known]
    if strange:
        raise NotExportable(f"{strange[0]} of its state_dict is neither a parameter nor a buffer")


def _state_dict_names(module: nn.Module, known: Mapping[Tensor, str]) -> list[str]:
    """For each key of the module's state_dict the file's tensor: keys of tied parameters have one together."""
    state = module.state_dict(keep_vars=True)
    return [f"{_MODEL}{known[t]}\t{key}" for key, t in state.items() if isinstance(t, Tensor)]


def _add_optimizer(
    optimizer: FusedOptimizer, known: Mapping[Tensor, str], tensors: dict[str, Tensor], texts: dict[str, str]
) -> None:
    groups, parameters = [], []
    for number, group in enumerate(optimizer.param_groups):
        numbers = {**optimizer._numbers(group), "lr": float(group["lr"])}
        groups.append(" ".join(f"{name}={float(value)!r}" for name, value in numbers.items()))
        for parameter in group["params"]:
            name = known.get(parameter)
            if name is None:
                raise ValueError(f"the optimizer has a parameter of shape {list(parameter.shape)} that the model lacks")
            if not parameter.requires_grad:
                continue
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{name} is of {parameter.dtype}, which a program does not update; precision= computes in 16 bits "
                    "with parameters in float32"
                )
            parameters.append(f"{number} {name}")
            state = {k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, Tensor)}
            steps = state.pop("step", torch.ones(()) if state else None)
            if steps is not None:
                tensors[f"{_OPTIMIZER}step/{name}"] = steps.float().reshape(())
            for kind, value in state.items():
                tensors[f"{_OPTIMIZER}{kind}/{name}"] = value.to(parameter.dtype)
    texts["optimizer"] = optimizer.rule
    if optimizer.max_grad_norm is not None:
        texts["optimizer.max_grad_norm"] = repr(float(optimizer.max_grad_norm))
    texts["optimizer.groups"], texts["optimizer.parameters"] = _lines(groups), _lines(parameters)


def _add_graph(graph: WholeGraph, tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
    mode = graph.mode
    names = [""] * (len(graph.lowered.differentiable) - len(graph.lowered.updates))
    for name, position in graph.results():
        names[position] = names[position] or name
    if mode == "training":
        _refuse_what_is_no_loss(graph)
    text, constants = to_text(graph.lowered.model)
    tensors.update({f"{mode}/{name}": t for name, t in constants.items()})
    texts[mode] = text
    texts[f"{mode}.inputs"] = _lines([*[f">{path}" for path in graph.arguments], *[_MODEL + n for n in graph.weights]])
    numbers: dict[int | str, str] = {name: f"s{i}" for i, (name, *_) in enumerate(graph.ranges)}
    texts[f"{mode}.sizes"] = _lines([" ".join(str(numbers.get(d, d)) for d in of) for of in graph.sizes])
    texts[f"{mode}.ranges"] = _lines([f"{least} {'?' if most is None else most}" for _, least, most in graph.ranges])
    texts[f"{mode}.outputs"] = _lines(names)


def _refuse_what_is_no_loss(graph: WholeGraph) -> None:
    results = graph.lowered.results
    first = graph.captured.results()[0][0].meta["val"] if results and results[0][1] == 0 else None
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.numel() != 1:
        raise NotExportable("in training the first output is no loss of one float")
