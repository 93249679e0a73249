"""Which input shapes a captured graph is valid for."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ..errors import NotExportable

Sizes = tuple[torch.Size, ...]
Axes = tuple[tuple[int, ...], ...]  # of each tensor, those whose size is left open
_MAX_KNOWN = 256
_MAX_SEEN = 16
_MAX_OPEN = 4  # graphs with open sizes for calls that differ in sizes alone; more than that, and each fits little
_PINNED = "the forward compares it, or takes it apart in Python"
MAX_RANK = 3  # of tensors that hold sequences; above it are images, whose height and width rarely change


class Fit:
    """The sizes a graph accepts: numbers, symbols with ranges, and the guards the trace took.

    Parameters
    ----------
    examples
        What torch.export knows of each user tensor; sizes may be symbolic.

    Attributes
    ----------
    dynamic
        Whether some size may differ.
    """

    def __init__(self, examples: Sequence[Tensor]) -> None:
        self._dims: list[list[Any]] = [[dim_of(s) for s in t.shape] for t in examples]
        symbolic: list[Any] = [s for t in examples for s in t.shape if isinstance(s, torch.SymInt)]
        self.dynamic = any(not isinstance(dim, int) for dims in self._dims for dim in dims)
        env = symbolic[0].node.shape_env if symbolic else None
        self._replacements = dict(env.replacements) if env is not None else {}
        self._ranges = dict(env.var_to_range) if env is not None else {}
        self._guards = [g.expr for g in env.guards] if env is not None else []
        self._of_memory = _symbols([n for t in examples for n in (*t.stride(), t.storage_offset())]) - _symbols(
            symbolic
        )
        self._met = {s.node.expr: s.node.hint for s in symbolic}
        self._known: dict[Sizes, bool] = {}

    def accepts(self, sizes: Sizes) -> bool:
        """Whether tensors of these sizes may be given to the graph."""
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[sizes] = self._check(sizes)
        return known

    def pinned(self, axes: Axes) -> set[tuple[int, int]]:
        """The tensor and the axis of those whose size was to be left open, and is a number."""
        dims = zip(self._dims, axes, strict=True)
        return {(i, a) for i, (of, to_open) in enumerate(dims) for a in to_open if isinstance(of[a], int)}

    def plain(
        self, called: Sequence[str], same: Mapping[tuple[int, int], str] | None = None
    ) -> tuple[list[list[int | str]], list[tuple[str, int, int | None]]]:
        """The sizes of each tensor, as numbers and names, and of each name from what to what it may be.

        Parameters
        ----------
        called
            The names of the tensors, for messages.
        same
            Names of sizes by tensor and axis, which are the same where their names are; others are ``s0``, ``s1``, ...

        Raises
        ------
        NotExportable
            If a graph asks more of sizes than that.
        """
        open_at = {(i, a): d for i, dims in enumerate(self._dims) for a, d in enumerate(dims) if not isinstance(d, int)}
        named: dict[str, Any] = {}
        equal: dict[Any, Any] = {}
        for at, name in (same or {}).items():
            if at in open_at and named.setdefault(name, open_at[at]) != open_at[at]:
                equal[open_at[at]] = named[name]
        symbols: list[Any] = list(dict.fromkeys(equal.get(d, d) for d in open_at.values()))
        ranges = {s: self._ranges[s] for s in symbols if s in self._ranges}
        for s, first in equal.items():
            if s in self._ranges and first in ranges:
                ranges[first] &= self._ranges[s]
        told = {d: sympy.Symbol(f"{called[i]}.shape[{a}]") for (i, a), d in reversed(open_at.items())}
        for asked in [*self._guards, *[s for s in symbols if s not in ranges]]:
            guard = asked
            while any(s in self._replacements for s in guard.free_symbols):
                guard = guard.xreplace(self._replacements)
            guard = guard.xreplace(equal)
            if guard == sympy.true or guard in symbols or not self._of_memory.isdisjoint(guard.free_symbols):
                continue
            narrowed = _narrowed(guard, ranges, self._met) if isinstance(guard, sympy.Rel) else None
            if narrowed is None:
                raise NotExportable(f"the forward asks of open sizes, or binds them, that {guard.xreplace(told)}")
            ranges.update(narrowed)
        names: dict[Any, str] = {s: f"s{i}" for i, s in enumerate(symbols)} | {s: name for name, s in named.items()}
        bounds = [(names[s], int(ranges[s].lower), _finite(ranges[s].upper)) for s in symbols]
        sizes = [[equal.get(d, d) for d in dims] for dims in self._dims]
        return [[names.get(d, d) for d in dims] for dims in sizes], bounds

    def _check(self, sizes: Sizes) -> bool:
        bound: dict[sympy.Symbol, int] = {}
        derived: list[tuple[Any, int]] = []
        for dims, shape in zip(self._dims, sizes, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                if not isinstance(dim, int) and dim.is_Symbol:
                    if bound.setdefault(dim, size) != size:
                        return False
                else:
                    derived.append((dim, size))
        if any(value_of(dim, bound) != size for dim, size in derived):
            return False
        if any(s in self._ranges and not self._ranges[s].lower <= v <= self._ranges[s].upper for s, v in bound.items()):
            return False
        return all(self._holds(g, bound) for g in self._guards)

    def _holds(self, guard: Any, bound: dict[sympy.Symbol, int]) -> bool:
        """A guard that cannot be decided does not hold; how tensors lie in memory is not asked here."""
        while any(s in self._replacements for s in guard.free_symbols):
            guard = guard.xreplace(self._replacements)
        if not self._of_memory.isdisjoint(guard.free_symbols):
            return True
        return value_of(guard, bound) in (True, sympy.true)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer and bound < sys.maxsize - 1 else None


def _narrowed(
    guard: Any, ranges: dict[Any, ValueRanges[Any]], met: dict[Any, int]
) -> dict[Any, ValueRanges[Any]] | None:
    """The ranges around the sizes `met` in which a guard holds, as far as that is known; None: there are none."""

    def holds(among: dict[Any, ValueRanges[Any]]) -> bool:
        return guard.free_symbols <= among.keys() and bound_sympy(guard, among).lower is sympy.true

    if holds(ranges):
        return {}
    if len(guard.free_symbols) == 1 and guard.free_symbols <= met.keys():
        (symbol,) = guard.free_symbols
        lower, upper = ranges[symbol].lower, ranges[symbol].upper
        ends = {n + d for n in guard.atoms(sympy.Integer) for d in (-1, 0, 1)} | {lower + d for d in range(1, 9)}
        ends = {n for n in ends if lower <= n <= upper}
        narrower = [ValueRanges(n, upper) for n in ends] + [ValueRanges(lower, n) for n in ends]
        found = [{symbol: r} for r in narrower if r.lower <= met[symbol] <= r.upper and holds({symbol: r})]
        return max(found, key=lambda narrow: narrow[symbol].upper - narrow[symbol].lower, default=None)
    return None


class Openings:
    """Which sizes to leave open in the graphs of calls that differ in sizes alone.

    Attributes
    ----------
    seen
        Sizes of the last calls that graphs were made for.
    """

    def __init__(self) -> None:
        self.seen: list[Sizes] = []
        self._why = ""  # sizes could not be left open, as found last; empty if a graph could be made for what was asked
        self._pinned: set[tuple[int, int]] = set()  # in the last graph that has others open
        self._before: list[Sizes] = []
        self._failed: set[Axes] = set()
        self._made = 0

    def inherited(self) -> "Openings":
        """For the graphs of calls that differ from these in numbers of Python's too."""
        other = Openings()
        other._before, other._failed = [*self._before, *self.seen][-_MAX_SEEN:], {*self._failed}
        return other

    def add(self, sizes: Sizes, axes: Axes, fit: Fit) -> None:
        """Note the sizes of a call that a graph was made for, and what of them was to be left open in it."""
        self.seen = [*self.seen[1 - _MAX_SEEN :], sizes]
        if fit.dynamic:
            self._made += 1
            self._pinned = fit.pinned(axes)
        elif any(axes):
            self.fail(axes)

    def fail(self, axes: Axes, why: str = _PINNED) -> None:
        """Note that no graph has these axes open."""
        self._failed.add(axes)
        self._why = why

    def changed(self, now: Sizes) -> tuple[int, int, str] | None:
        """The tensor and the axis whose size is another than in the last graph's call and not open, and why it is not.

        One that is open only within a range, or not yet, is none.
        """
        pairs = zip(self.seen[-1], now, strict=True) if self.seen else ()
        changed = [(i, a) for i, (old, new) in enumerate(pairs) for a in range(len(new)) if old[a] != new[a]]
        pinned = next((at for at in changed if at in self._pinned), None)
        if pinned is not None:
            return *pinned, _PINNED
        return (*changed[0], self._why) if changed and self._why else None

    def candidates(self, now: Sizes) -> list[Axes]:
        """What to leave open for a call of these sizes, in the order to be tried.

        What may change is open from the first call on: batches and lengths, and what they cannot differ from. A
        size of 0 or 1 is never open, as it computes something else where it broadcasts; the others stay open beside it.
        """
        sizes = [*self._before, *self.seen, now]
        history = [[tuple(old[i][a] for old in sizes) for a in range(len(s))] for i, s in enumerate(now)]
        changed = {sizes for tensor in history for sizes in tensor if len(set(sizes)) > 1}
        if self._made >= _MAX_OPEN:
            return []
        batches = [tensor[:1] if len(tensor) > MAX_RANK else tensor for tensor in history]
        found = []
        for opened in (changed.union(*batches), changed):
            axes = tuple(
                tuple(a for a, sizes in enumerate(tensor) if sizes in opened and sizes[-1] > 1) for tensor in history
            )
            if any(axes) and axes not in found and axes not in self._failed:
                found.append(axes)
        return found


def dim_of(size: Any) -> Any:
    """A size as a number, or what it is in symbols."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = size.node.expr
    return int(expr) if expr.is_Integer else expr


def _symbols(numbers: Sequence[Any]) -> set[Any]:
    return set().union(*[n.node.expr.free_symbols for n in numbers if isinstance(n, torch.SymInt)])


def value_of(expr: Any, bound: dict[sympy.Symbol, int]) -> Any:
    """What this is for these symbols; it may have others left."""
    return expr if isinstance(expr, int) else expr.xreplace({s: sympy.Integer(v) for s, v in bound.items()}).doit()
