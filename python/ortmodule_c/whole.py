"""The graph of a module as a whole, for files that are read where the module is not."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .arguments import Arguments
from .capture.export import Captured, capture, quiet
from .capture.shapes import Axes, Fit
from .dtypes import DTYPES
from .errors import NeedsStatic, NotExportable
from .flatten import Spec, flatten_call, leaf_paths
from .guards.held import scan
from .lowering.lower import Lowered, lower
from .process import tracing_alone
from .terms import Terms

Example = tuple[Any, ...] | Mapping[str, Any]
DynamicAxes = Mapping[str, Sequence[int] | Mapping[int, str]]


@dataclass(frozen=True)
class WholeGraph:
    """The graph of a module in one mode.

    Attributes
    ----------
    mode
        ``"training"`` or ``"evaluation"``.
    arguments, leaves, spec
        The tensors that the module is called with, the graph's first inputs: their names, those of the example, and
        the call around them.
    weights
        Names of the module's tensors that are its other inputs.
    captured, lowered
        The graph.
    sizes, ranges
        Of the arguments, as :meth:`Fit.plain` gives them.
    """

    mode: str
    arguments: Sequence[str]
    leaves: Sequence[Tensor]
    spec: Spec
    weights: Sequence[str]
    captured: Captured
    lowered: Lowered
    sizes: list[list[int | str]]
    ranges: list[tuple[str, int, int | None]]

    def results(self) -> list[tuple[str, int]]:
        """Of each result of the module its name, and which output of the graph it is."""
        found = []
        paths = leaf_paths(self.captured.out_spec)
        for (source, position, steps), path in zip(self.lowered.results, paths, strict=True):
            if source != "output" or steps:
                raise NotExportable(f"in {self.mode} an output is an input, or a view of another tensor")
            found.append((_plain(path), position))
        return found


def whole_graph(
    mode: str,
    module: nn.Module,
    terms: Terms,
    example: Example,
    dynamic_axes: DynamicAxes,
    called: Sequence[str] | None = None,
) -> WholeGraph:
    """The graph of a module in a mode, for arguments like those of an example.

    The module is put in that mode meanwhile: nobody else may run it. Those that a wrapper runs are waited for, for a
    moment; nobody can tell who calls the module past its wrapper.

    Parameters
    ----------
    mode
        ``"training"``, which has the module put in training mode, or ``"evaluation"``.
    module, terms
        What is called, and how.
    example
        Arguments, or keyword arguments.
    dynamic_axes
        By name of an argument the axes whose size is left open, or names for these sizes by axis, which are the same
        where their names are. What is no argument is left to the caller.
    called
        The arguments' names in messages; by default their own.

    Raises
    ------
    NotExportable
        If there is no such graph, or it needs Python at each call; or if another thread runs a module and does not end.
    ValueError
        If an argument has no such axis.
    """
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    arguments = Arguments(module)
    leaves, spec = flatten_call(*arguments.normal(args, kwargs))
    leaves = [t.detach().contiguous() for t in leaves]  # as they will lie
    paths = arguments.paths(spec)
    axes = _axes(paths, leaves, dynamic_axes)
    with tracing_alone(), quiet(), in_mode(module, mode == "training"), terms.region(module):
        now = scan(module)
        if now.refusal:
            raise NotExportable(now.refusal)
        try:
            captured = capture(module, terms, spec, leaves, paths, now, axes)
            lowered = lower(captured)
        except NeedsStatic as error:
            raise NotExportable(f"in {mode} {error}") from None
    _refuse_what_needs_python(mode, captured, lowered)
    _refuse_other_dtypes(mode, [*paths, *captured.names[len(paths) :]], captured)
    names = {
        (i, axis % leaf.dim()): name
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
        if isinstance(given := dynamic_axes.get(path), Mapping)
        for axis, name in given.items()
    }
    sizes, ranges = _sizes(mode, captured, called or paths, axes, names)
    return WholeGraph(mode, paths, leaves, spec, captured.names[len(paths) :], captured, lowered, sizes, ranges)


def unknown_argument(dynamic_axes: DynamicAxes, arguments: Sequence[str]) -> str:
    """What is wrong with names of `dynamic_axes`, or nothing."""
    unknown = [name for name in dynamic_axes if name not in arguments]
    if not unknown:
        return ""
    return f"dynamic_axes has {unknown[0]!r}, expected one of {', '.join(map(repr, sorted(arguments)))}"


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Within, all of a module is in training mode, or in evaluation without gradients."""
    before = [(m, m.training) for m in module.modules()]
    module.train(training)
    try:
        with torch.set_grad_enabled(training):
            yield
    finally:
        for m, was in before:
            m.training = was


def _axes(paths: Sequence[str], leaves: Sequence[Tensor], dynamic: DynamicAxes) -> Axes:
    """By leaf the axes that are left open."""
    found = []
    for path, leaf in zip(paths, leaves, strict=True):
        for axis in dynamic.get(path, ()):
            if not -leaf.dim() <= axis < leaf.dim():
                raise ValueError(f"dynamic_axes has axis {axis} of {path!r}, which has {leaf.dim()} dims")
        found.append(tuple(sorted({axis % leaf.dim() for axis in dynamic.get(path, ())})))
    return tuple(found)


def _sizes(
    mode: str, captured: Captured, paths: Sequence[str], axes: Axes, names: Mapping[tuple[int, int], str]
) -> tuple[list[list[int | str]], list[tuple[str, int, int | None]]]:
    """Those of the arguments, and the ranges of open ones."""
    fit = Fit([n.meta["val"] for n in captured.placeholders()[0][: len(paths)]])
    for i, axis in sorted(fit.pinned(axes)):
        raise NotExportable(f"in {mode} the size of {paths[i]!r} along axis {axis} cannot be left open")
    try:
        return fit.plain(paths, names)
    except NotExportable as error:
        raise NotExportable(f"in {mode} {error}") from None


def _refuse_other_dtypes(mode: str, names: Sequence[str], captured: Captured) -> None:
    """Of tensors at the border: within, what the core holds them as is known."""
    inputs = zip(names, captured.placeholders()[0], strict=True)
    results = zip(leaf_paths(captured.out_spec), captured.results()[0], strict=False)
    for name, node in [*inputs, *[(_plain(path), r) for path, r in results]]:
        val = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(val, Tensor) and val.dtype not in DTYPES:
            raise NotExportable(f"in {mode} {name!r} is of {val.dtype}, which no file has")


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
