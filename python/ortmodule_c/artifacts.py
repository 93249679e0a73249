"""Files that the C library trains, where there is no Python (csrc/train/trainer.h).

A file is a safetensors file: tensors of the model, of its graphs and of the optimizer, and the graphs as text. Needs
the package safetensors, which nothing else of this package imports.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .arguments import Arguments
from .capture.export import Captured, capture, quiet
from .capture.shapes import Axes, Fit
from .errors import NotExportable
from .flatten import flatten_call, leaf_paths
from .guards.held import scan
from .lowering.lower import Lowered, lower
from .lowering.to_text import to_text
from .optim.fused import FusedOptimizer
from .ortmodule import ORTModule
from .process import tracing
from .signals import waiting
from .terms import Precision, Terms

VERSION = "1"  # of what csrc/train/load.c reads
_MODEL, _OPTIMIZER = "model/", "optimizer/"


def save(
    path: str | Path,
    model: nn.Module,
    example: tuple[Any, ...] | Mapping[str, Any],
    *,
    optimizer: FusedOptimizer | None = None,
    evaluation_example: tuple[Any, ...] | Mapping[str, Any] | None = None,
    dynamic_axes: Mapping[str, Sequence[int]] | None = None,
    precision: Precision | None = None,
) -> None:
    """Write a file with which a program in C trains and evaluates a model.

    The graph of training is that of the module in training mode, and its first output is the loss; that of evaluation
    is that of the module in evaluation. What the optimizer has kept so far goes along.

    Parameters
    ----------
    path
        The file.
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
        By name of an argument the axes whose size may be another one at each call.
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
    if optimizer is not None and not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, expected one of ortmodule_c.optim, which load the states of "
            "torch.optim's"
        )
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
        taken |= {*_add_graph(mode, module, terms, given, dynamic_axes or {}, tensors, texts)}
    unknown = [name for name in dynamic_axes or () if name not in taken]
    if unknown:
        raise ValueError(f"dynamic_axes has {unknown[0]!r}, expected one of {', '.join(map(repr, sorted(taken)))}")
    apart = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_file(apart, path, texts)


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
        texts = file.metadata() or {}
        if texts.get("ortmodule_c") != VERSION:
            raise ValueError(f"{path} was not written by ortmodule_c.artifacts, version {VERSION}")
        names = [line.split("\t", 1) for line in texts["state_dict"].split("\n")[:-1]]
        return {key: file.get_tensor(name) for name, key in names}


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


@contextlib.contextmanager
def _in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(m, m.training) for m in module.modules()]
    module.train(training)
    try:
        with torch.set_grad_enabled(training):
            yield
    finally:
        for m, was in before:
            m.training = was


def _add_graph(
    mode: str,
    module: nn.Module,
    terms: Terms,
    example: tuple[Any, ...] | Mapping[str, Any],
    dynamic_axes: Mapping[str, Sequence[int]],
    tensors: dict[str, Tensor],
    texts: dict[str, str],
) -> Sequence[str]:
    """Add the graph of a mode; the names of its arguments."""
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    arguments = Arguments(module)
    leaves, spec = flatten_call(*arguments.normal(args, kwargs))
    leaves = [t.detach().contiguous() for t in leaves]  # as they will lie
    paths = arguments.paths(spec)
    axes = _axes(paths, leaves, dynamic_axes)
    with waiting(), tracing, quiet(), _in_mode(module, mode == "training"), terms.region(module):
        now = scan(module)
        if now.refusal:
            raise NotExportable(now.refusal)
        captured = capture(module, terms, spec, leaves, paths, now, axes)
        lowered = lower(captured)
    _refuse_what_needs_python(mode, captured, lowered)
    dims, ranges = _sizes(mode, captured, paths, axes)
    text, constants = to_text(lowered.model)
    tensors.update({f"{mode}/{name}": t for name, t in constants.items()})
    inputs = [f">{path}" for path in paths] + [_MODEL + name for name in captured.names[len(paths) :]]
    texts[mode] = text
    texts[f"{mode}.inputs"] = _lines(inputs)
    texts[f"{mode}.sizes"] = _lines([" ".join(map(str, of)) for of in dims])
    texts[f"{mode}.ranges"] = _lines([f"{least} {'?' if most is None else most}" for least, most in ranges])
    texts[f"{mode}.outputs"] = _lines(_output_names(mode, captured, lowered))
    return paths


def _axes(paths: Sequence[str], leaves: Sequence[Tensor], dynamic: Mapping[str, Sequence[int]]) -> Axes:
    """By leaf the axes that are left open."""
    found = []
    for path, leaf in zip(paths, leaves, strict=True):
        for axis in dynamic.get(path, ()):
            if not -leaf.dim() <= axis < leaf.dim():
                raise ValueError(f"dynamic_axes has axis {axis} of {path!r}, which has {leaf.dim()} dims")
        found.append(tuple(sorted({axis % leaf.dim() for axis in dynamic.get(path, ())})))
    return tuple(found)


def _sizes(
    mode: str, captured: Captured, paths: Sequence[str], axes: Axes
) -> tuple[list[list[int | str]], list[tuple[int, int | None]]]:
    """Those of the arguments, and the ranges of open ones."""
    fit = Fit([n.meta["val"] for n in captured.placeholders()[0][: len(paths)]])
    for i, axis in sorted(fit.pinned(axes)):
        raise NotExportable(f"in {mode} the size of {paths[i]!r} along axis {axis} cannot be left open")
    try:
        return fit.plain()
    except NotExportable as error:
        raise NotExportable(f"in {mode} {error}") from None


def _refuse_what_needs_python(mode: str, captured: Captured, lowered: Lowered) -> None:
    if lowered.fallbacks:
        ops = ", ".join(sorted({name for name, _ in lowered.fallbacks}))
        raise NotExportable(f"in {mode} the C core has no kernel for {ops}")
    if captured.writes or captured.rebound:
        what = [str(w) for w in captured.writes] or [name for _, name in captured.rebound]
        raise NotExportable(f"in {mode} the forward sets {what[0]}")
    if captured.outside:
        raise NotExportable(f"in {mode} the forward uses a tensor that is neither an argument nor the module's")


def _output_names(mode: str, captured: Captured, lowered: Lowered) -> list[str]:
    """By graph output the name of the first result that it is."""
    names = [""] * (len(lowered.differentiable) - len(lowered.updates))
    for (source, position, steps), path in zip(lowered.results, leaf_paths(captured.out_spec), strict=True):
        if source != "output" or steps:
            raise NotExportable(f"in {mode} an output is an input, or a view of another tensor")
        names[position] = names[position] or _plain(path)
    if mode == "training":
        first = captured.results()[0][0].meta["val"] if lowered.results and lowered.results[0][1] == 0 else None
        if not isinstance(first, Tensor) or not first.is_floating_point() or first.numel() != 1:
            raise NotExportable("in training the first output is no loss of one float")
    return names


def _plain(path: str) -> str:
    """``[0]['logits']``, a leaf of the outputs, as ``logits``; elements of a tuple are numbered."""
    steps = re.findall(r"\w+", path)[1:]
    return ".".join(steps) if steps else "output"
