"""A step in PyTorch and in the C core, side by side."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .capture import autocast_region
from .distance import NEGLIGIBLE, backward_from, distance, infinities, largest, mismatches, rounding, widened
from .dynamo.noted import noting
from .errors import ORTModuleError
from .flatten import Spec, flatten, leaf_paths, unflatten
from .guards.held import Snapshot
from .masks import Masks, are_alike, random_states, set_random_states
from .ortmodule import ORTModule, awaits_first_call
from .terms import Terms

if TYPE_CHECKING:
    from .locate import Place

_SLACK = 8.0  # ours may be this many times as far from float64 as PyTorch is


@dataclass(frozen=True)
class Row:
    """One output, gradient or buffer.

    Attributes
    ----------
    kind, name
        ``"output"``, ``"gradient"`` or ``"buffer"``, and which.
    distance
        Largest distance of ours from PyTorch's, as part of the largest element.
    ours_from_exact, eager_from_exact
        The same from PyTorch in float64; None if that could not be had.
    problem
        What is wrong with it, or nothing.
    remark
        What both sides have in common that is worth a look, or nothing.
    """

    kind: str
    name: str
    distance: float = 0.0
    ours_from_exact: float | None = None
    eager_from_exact: float | None = None
    problem: str = ""
    remark: str = ""


@dataclass(frozen=True, repr=False)
class Verification:
    """What :func:`verify` found.

    Attributes
    ----------
    rows
        Every output, gradient and buffer.
    place
        Where the two sides part, if some row has a problem and the place could be found.
    notes
        What could not be compared, and why.
    comparable
        Whether both sides drew the same random numbers, or none; else distances say nothing.
    """

    rows: list[Row]
    place: Place | None = None
    notes: list[str] = field(default_factory=list)
    comparable: bool = True

    @property
    def ok(self) -> bool | None:
        """Whether nothing has a problem; None if that cannot be told."""
        return not any(row.problem for row in self.rows) if self.comparable else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.rows)} tensors: {self._verdict()}>"

    def _verdict(self) -> str:
        out = sum(bool(row.problem) for row in self.rows)
        return "equal within rounding" if self.ok else f"{out} out" if self.comparable else "not comparable"

    def __str__(self) -> str:
        width = max([len(r.name) for r in self.rows] + [4])
        lines = [
            "largest distance of an element, as part of the largest element: ours from eager, and both from float64",
            f"{'':9} {'name':{width}} {'from eager':>10} {'ours, f64':>10} {'eager, f64':>10}",
        ]
        for r in self.rows:
            figures = " ".join(f"{_figure(x):>10}" for x in (r.distance, r.ours_from_exact, r.eager_from_exact))
            lines.append(f"{r.kind:9} {r.name:{width}} {figures}{'  ' + (r.problem or r.remark)}".rstrip())
        lines += self.notes
        lines.append(self._verdict())
        if self.place is not None:
            lines.append(str(self.place))
        return "\n".join(lines)


def verify(model: nn.Module, *args: Any, **kwargs: Any) -> Verification:
    """Run one step in PyTorch and one in the C core, and print how far they are apart.

    The module runs in the state it is in: its mode, its buffers, its precision or the ambient autocast, the random
    state; dropout drops the same elements on both sides, unless some random op runs in PyTorch beside those
    that run in C, or PyTorch drops within a kernel, as its attention does on a GPU: then there is no verdict. With
    gradients enabled both sides go backward too, from the first output if that is a scalar that requires grad, else
    from all of them. Afterwards parameters, gradients, buffers, attributes and random states are as before.

    Distances are the largest of any element, as part of the tensor's largest element; a gradient or buffer much
    smaller than the largest of its kind is measured by that. A third run
    in float64 tells rounding from faults: ours may be no more than 8 times as far from it as
    PyTorch is.

    Parameters
    ----------
    model
        The module, wrapped or not. A wrapped one runs with the graphs it has.
    *args, **kwargs
        What it is called with. Left as they are.

    Returns
    -------
    Verification
        Also printed.

    Raises
    ------
    ORTModuleError
        If arguments or outputs are of a kind that cannot be copied, or parameters have no shape yet.

    Examples
    --------
    >>> from ortmodule_c import verify
    >>> assert verify(model, x, labels=y).ok
    """
    found = _compared(model if isinstance(model, ORTModule) else ORTModule(model), args, kwargs)
    print(found)
    return found


def compare(model: ORTModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verification:
    """As :func:`verify`, printing nothing, beside a step that is run all the same: any error is an ORTModuleError."""
    try:
        return _compared(model, args, kwargs)
    except ORTModuleError:
        raise
    except Exception as error:
        raise ORTModuleError(_in_words(error)) from error


def _compared(model: ORTModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verification:
    module = model.module
    if awaits_first_call(module):
        raise ORTModuleError("verify cannot copy what a first call makes of a module: call the module once before")
    try:
        leaves, spec = flatten((args, kwargs))
    except TypeError as error:
        raise ORTModuleError(f"verify cannot copy the arguments: {error}") from error
    paths = leaf_paths(spec)
    notes: list[str] = []
    with kept_as_it_is(module):
        state = random_states()
        with noting() as runs:
            ours, after = _restored_step(model, Terms(), spec, leaves, paths)
        drawn = [run.n_masks for run in runs if run.n_masks] or [0]
        eager, exact, seeds, comparable = _eager_like(
            module, model._ort_terms, spec, leaves, paths, (state, after), drawn, notes
        )
        rows = _rows(ours, eager, exact)
    place = None
    if comparable and any(row.problem for row in rows):
        from .locate import locate, locate_in

        try:
            with kept_as_it_is(module):
                seed = seeds[0][0] if seeds else None
                place = locate_in(runs) if runs else locate(module, model._ort_terms, spec, leaves, seed)
            if place is None:
                notes.append(
                    "every node of the graphs agrees: they part between graphs, or the graphs are not the module's"
                )
        except Exception as error:
            notes.append(f"where they part could not be found: {_in_words(error)}")
    return Verification(rows, place, notes, comparable)


@dataclass
class _Arm:
    """What one run gave: by kind, then by name."""

    tensors: dict[str, dict[str, Tensor | None]]
    plain: Spec  # the outputs but for their tensors


Seeds = list[tuple[int, int]]  # of each graph that drew masks, and of how many it did


def _step(module: nn.Module, terms: Terms, spec: Spec, leaves: Sequence[Tensor], paths: Sequence[str]) -> _Arm:
    """One forward on copies of `leaves`, one backward if gradients are enabled."""
    copies: dict[int, Tensor] = {}
    for t in leaves:
        copies.setdefault(id(t), t.detach().clone().requires_grad_(t.requires_grad))
    args, kwargs = unflatten(spec, iter([copies[id(t)] for t in leaves]))
    try:
        outputs, plain = flatten(terms.call(module, *args, **kwargs))
    except TypeError as error:
        raise ORTModuleError(f"verify cannot read the outputs: {error}") from error
    names = [f"output{p}" for p in leaf_paths(plain)]
    tensors: dict[str, dict[str, Tensor | None]] = {"output": dict(zip(names, outputs, strict=True)), "gradient": {}}
    wanted: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf.requires_grad:
            wanted.setdefault(f"input{path}", copies[id(leaf)])
    roots, directions = backward_from(outputs)
    if roots and wanted:
        directions = [d.to(root.device) for d, root in zip(directions, roots, strict=True)]
        found = torch.autograd.grad(roots, list(wanted.values()), directions, allow_unused=True)
        tensors["gradient"] = dict(zip(wanted, found, strict=True))
    tensors["buffer"] = {n: b.clone() for n, b in module.named_buffers()}
    return _Arm(tensors, plain)


def _eager_like(
    module: nn.Module,
    terms: Terms,
    spec: Spec,
    leaves: Sequence[Tensor],
    paths: Sequence[str],
    states: tuple[list[Tensor], list[Tensor]],
    drawn: Sequence[int],
    notes: list[str],
) -> tuple[_Arm, _Arm | None, Seeds, bool]:
    """PyTorch's step, that in float64, the seeds of the masks that both drew, if any were, and if all is alike.

    `states` are PyTorch's random states before and after our step: they tell who drew. `drawn` has the number of
    masks of each graph that draws some.
    """
    before, after_ours = states
    set_random_states(before)
    eager, after = _restored_step(module, terms, spec, leaves, paths)
    seeds: Seeds = []
    masks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not are_alike(after, after_ours):
        set_random_states(before)
        seeds = [(int(torch.randint(1, 2**63 - 1, ())), n) for n in drawn]  # as the runner of a graph draws it
        if not are_alike(random_states(), after_ours):
            notes.append("random numbers are drawn partly in C and partly in PyTorch: the sides have different ones")
            return eager, None, [], False
        set_random_states(before)
        with Masks(seeds) as mode:
            eager, after = _restored_step(module, terms, spec, leaves, paths)
        if mode.again:
            notes.append("a checkpoint drops again in backward, where PyTorch cannot be given the masks of its forward")
            return eager, None, [], False
        if not are_alike(after, before):
            notes.append("PyTorch draws random numbers in a kernel that cannot be given the masks drawn in C")
            return eager, None, [], False
        masks = Masks(seeds)
    if not are_alike(after, before):
        notes.append("no run in float64: PyTorch draws other random numbers there")
        return eager, None, seeds, True
    exact = None
    try:
        set_random_states(before)
        with masks:
            exact = _double_step(module, terms, spec, leaves, paths)
    except Exception as error:
        notes.append(f"no run in float64: {_in_words(error)}")
    return eager, exact, seeds, True


def _restored_step(
    module: nn.Module, terms: Terms, spec: Spec, leaves: Sequence[Tensor], paths: Sequence[str]
) -> tuple[_Arm, list[Tensor]]:
    """The step, and PyTorch's random states after it; everything of the user's is put back."""
    with kept_as_it_is(module.module if isinstance(module, ORTModule) else module):
        return _step(module, terms, spec, leaves, paths), random_states()


def _double_step(module: nn.Module, terms: Terms, spec: Spec, leaves: Sequence[Tensor], paths: Sequence[str]) -> _Arm:
    """The step of a copy of the module in float64."""
    wide = [widened(t.detach()).requires_grad_(t.requires_grad) for t in leaves]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with autocast_region.none():
            return _step(copy.deepcopy(module)._apply(widened), replace(terms, precision=None), spec, wide, paths)
    finally:
        torch.set_default_dtype(default)


@contextlib.contextmanager
def kept_as_it_is(module: nn.Module) -> Iterator[None]:
    """Buffers, attributes and the random states of PyTorch, Python and NumPy are put back at the end."""
    import numpy as np

    attributes = Snapshot(module)
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    states = random_states(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        attributes.restore()
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        set_random_states(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


# Distances


def _rows(ours: _Arm, eager: _Arm, exact: _Arm | None) -> list[Row]:
    rows = []
    if ours.plain != eager.plain:
        rows.append(Row("output", "structure", problem="the outputs are nested differently, or plain values differ"))
    for kind, of_eager in eager.tensors.items():
        of_ours = ours.tensors[kind]
        of_exact = {} if exact is None else exact.tensors[kind]
        floor = 0.0 if kind == "output" else NEGLIGIBLE * max(map(largest, of_eager.values()), default=0.0)
        rows += [Row(kind, n, problem="only here") for n in of_ours if n not in of_eager]
        for name, want in of_eager.items():
            if name not in of_ours:
                rows.append(Row(kind, name, problem="only in PyTorch"))
            else:
                rows.append(_row(kind, name, of_ours[name], want, of_exact.get(name), floor))
    return rows


def _row(kind: str, name: str, got: Tensor | None, want: Tensor | None, exact: Tensor | None, floor: float) -> Row:
    if got is None or want is None:
        problem = "" if got is want else f"{_kind(got)}, in PyTorch {_kind(want)}"
        return Row(kind, name, problem=problem)
    for attribute in ("dtype", "layout", "device", "shape", "requires_grad"):
        a, b = getattr(got, attribute), getattr(want, attribute)
        if a != b:
            a, b = (tuple(a), tuple(b)) if attribute == "shape" else (a, b)
            return Row(kind, name, problem=f"{attribute} {a}, in PyTorch {b}")
    a, b = got.detach(), want.detach()
    if not (a.is_floating_point() or a.is_complex()):
        wrong = int((a != b).sum())
        return Row(kind, name, float(wrong > 0), problem=f"{wrong} of {a.numel()} elements differ" if wrong else "")
    odd = mismatches(a, b)
    if odd:
        return Row(kind, name, float("inf"), problem=f"{odd} of {a.numel()} elements are not finite on one side only")
    infinite = infinities(a)
    remark = f"{infinite} of {a.numel()} elements are infinite or NaN on both sides" if infinite else ""
    apart = distance(a, b, floor)
    limit = rounding(a.dtype)
    if exact is None or a.dtype == torch.float64 or exact.shape != a.shape or mismatches(b, exact):
        out = apart > _SLACK * limit
        return Row(kind, name, apart, problem="out" if out else "", remark=remark)
    ours_off, eager_off = (distance(t, exact, floor) for t in (a, b))
    out = ours_off > max(_SLACK * eager_off, limit)
    return Row(kind, name, apart, ours_off, eager_off, "out" if out else "", remark)


def _kind(t: Tensor | None) -> str:
    return "none" if t is None else "a tensor"


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _figure(x: float | None) -> str:
    return "-" if x is None else f"{x:.1e}" if x else "0"
