"""Which backwards a plan is made for: sets of outputs, by what a graph allows and what was met lately."""

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Sequence

from .lowering.lower import Lowered
from .process import noting_lock

Mask = tuple[bool, ...]  # for each output of a graph, whether its gradient is given

_MOST_MET = 4  # backwards for several outputs that a plan is made for
_MOST_DIVIDED = 3  # outputs for each of whose sets there is a backward, where it is no sum


class Habits:
    """The backwards to be ready for: those of which all others are sums, those that are likely, and those met lately.

    So none ever needs what forward has not left behind.

    Parameters
    ----------
    basis
        Backwards of which all others are sums.
    likely
        Backwards for several outputs that may be the first.
    leaves
        Whether PyTorch would let others follow a backward that does not retain its graph.

    Attributes
    ----------
    expected
        The backwards to be ready for, and whether several may follow one forward.
    """

    def __init__(self, basis: Sequence[Mask], likely: Sequence[Mask], leaves: Callable[[Mask], bool]) -> None:
        self._basis, self._likely = tuple(basis), tuple(likely)
        self._leaves = leaves
        self._met: list[Mask] = []  # the latest last
        self._several = False
        self._noted: tuple[Mask, bool] | None = None  # last
        self.expected = self._expected()

    def note(self, mask: Mask, several: bool) -> None:
        """A backward was asked for."""
        if self._noted == (mask, several):
            return
        with noting_lock:
            self._noted = mask, several
            several = self._several or several or self._leaves(mask)
            if several == self._several and self._met[-1:] == [mask]:
                return
            self._several = several
            self._met = [*[m for m in self._met if m != mask], mask][-_MOST_MET:]
            self.expected = self._expected()

    def _expected(self) -> tuple[tuple[Mask, ...], bool]:
        return tuple(sorted({*self._basis, *(self._met or self._likely)})), self._several


def grouped(custom: Sequence[int]) -> list[list[int]]:
    """The outputs, together where a custom function is behind several: its backward of a sum is no sum."""
    groups: list[tuple[int, list[int]]] = []
    for i, bits in enumerate(custom):
        met = [g for g in groups if g[0] & bits]
        groups = [g for g in groups if not g[0] & bits]
        joined = [k for _, places in met for k in places]
        groups.append((functools.reduce(operator.or_, [b for b, _ in met], bits), [*joined, i]))
    return [places for _, places in groups]


def basis(differentiable: Sequence[bool], apart: Sequence[Sequence[int]]) -> list[Mask]:
    """Backwards of which all others are sums: for each set of outputs of a group, or each alone if they are many."""
    masks = []
    for group in apart:
        places = [i for i in group if differentiable[i]]
        most = len(places) if len(places) <= _MOST_DIVIDED else 1
        masks += [only(of, len(differentiable)) for k in range(1, most + 1) for of in itertools.combinations(places, k)]
    return masks


def likely(lowered: Lowered) -> list[Mask]:
    """Backwards for several outputs that may come first: of all losses, and of all outputs if the first is no loss."""
    n = len(lowered.differentiable)
    places = [i for i in range(n) if lowered.differentiable[i]]
    losses = [i for i in places if lowered.ranks[i] == 0]
    return [only(losses, n)] * (len(losses) > 1) + [only(places, n)] * (losses[:1] != places[:1])


def only(places: Collection[int], n: int) -> Mask:
    """That for these of `n` outputs."""
    return tuple([i in places for i in range(n)])
