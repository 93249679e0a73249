"""The graph of a module as a whole, for files that are read where the module is not."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import Arguments
from .capture.export import Captured, capture, quiet
from .capture.shapes import Axes, Fit
from .errors import NotExportable
from .flatten import flatten_call, leaf_paths
from .guards.held import scan
from .lowering.lower import Lowered, lower
from .process import tracing
from .signals import waiting
from .terms import Terms

Example = tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class WholeGraph:
    """The graph of a module in one mode.

    Attributes
    ----------
    mode
        ``"training"`` or ``"evaluation"``.
    arguments
        Names of the tensors that the module is called with, the graph's first inputs.
    weights
        Names of the module's tensors that are its other inputs.
    captured, lowered
        The graph.
    sizes, ranges
        Of the arguments, as :meth:`Fit.plain` gives them.
    """

    mode: str
    arguments: Sequence[str]
    weights: Sequence[str]
    captured: Captured
    lowered: Lowered
    sizes: list[list[int | str]]
    ranges: list[tuple[int, int | None]]

    def output_names(self) -> list[str]:
        """By output of the graph, but for what is written into buffers, the name of the first result that it is."""
        names = [""] * (len(self.lowered.differentiable) - len(self.lowered.updates))
        paths = leaf_paths(self.captured.out_spec)
        for (source, position, steps), path in zip(self.lowered.results, paths, strict=True):
            if source != "output" or steps:
                raise NotExportable(f"in {self.mode} an output is an input, or a view of another tensor")
            names[position] = names[position] or _plain(path)
        return names


def whole_graph(
    mode: str, module: nn.Module, terms: Terms, example: Example, dynamic_axes: Mapping[str, Sequence[int]]
) -> WholeGraph:
    """The graph of a module in a mode, for arguments like those of an example.

    Parameters
    ----------
    mode
        ``"training"``, which has the module put in training mode, or ``"evaluation"``.
    module, terms
        What is called, and how.
    example
        Arguments, or keyword arguments.
    dynamic_axes
        By name of an argument the axes whose size is left open. Others' names are left to the caller.

    Raises
    ------
    NotExportable
        If there is no such graph, or it needs Python at each call.
    ValueError
        If an argument has no such axis.
    """
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
    sizes, ranges = _sizes(mode, captured, paths, axes)
    return WholeGraph(mode, paths, captured.names[len(paths) :], captured, lowered, sizes, ranges)


def unknown_argument(dynamic_axes: Mapping[str, Sequence[int]], arguments: Sequence[str]) -> str:
    """What is wrong with names of `dynamic_axes`, or nothing."""
    unknown = [name for name in dynamic_axes if name not in arguments]
    if not unknown:
        return ""
    return f"dynamic_axes has {unknown[0]!r}, expected one of {', '.join(map(repr, sorted(arguments)))}"


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


def _plain(path: str) -> str:
    """``[0]['logits']``, a leaf of the outputs, as ``logits``; elements of a tuple are numbered."""
    steps = re.findall(r"\w+", path)[1:]
    return ".".join(steps) if steps else "output"
