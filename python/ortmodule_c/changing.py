"""Which numbers of Python's change from call to call: a graph that is made because of that leaves them open."""

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from .flatten import Spec, StandIn, with_numbers
from .guards.held import Attribute, Opened

Key = tuple[Spec, Hashable]  # what a call looks like, and what was there when it came


def bare(key: Key) -> Key:
    """What calls have in common that differ in numbers alone."""
    spec, rest = key
    return with_numbers(spec, itertools.repeat(...)), rest


def opened(key: Key, places: frozenset[int]) -> Key:
    """The key of graphs that leave the numbers at these places of a call open."""
    spec, rest = key
    return (with_numbers(spec, (... if i in places else None for i in itertools.count())), rest) if places else key


class Changing:
    """The numbers of calls that differ in numbers alone.

    Attributes
    ----------
    open
        The places of numbers that graphs leave open.
    needed
        Those of numbers that have to be known.
    """

    def __init__(self) -> None:
        self.open: list[frozenset[int]] = []
        self.needed: set[int] = set()
        self._first: Sequence[Any] | None = None
        self._changed: set[int] = set()
        self._refused = 0

    def see(self, values: Sequence[Any]) -> None:
        """A graph is asked for, for these numbers."""
        first = self._first = values if self._first is None else self._first
        self._changed |= {i for i, v in enumerate(values) if repr(v) != repr(first[i])}

    def changed(self, needed: bool = False) -> frozenset[int]:
        """The places of numbers that were not always the same, but for those, or with those, that are needed."""
        return frozenset(self._changed if needed else self._changed - self.needed)

    def note(self, places: frozenset[int]) -> None:
        """There is a graph that leaves them open."""
        if places and places not in self.open:
            self.open.append(places)

    def refused(self) -> bool:
        """Whether it happens again, now, that there is no graph for a call."""
        self._refused += 1
        return self._refused > 1


@contextlib.contextmanager
def standing_in(attributes: Sequence[Attribute], symbols: Sequence[Any]) -> Iterator[None]:
    """Within it the thread that traces reads symbols in these attributes, for what others do not set meanwhile."""
    before = [a.now for a in attributes]
    instead = [Opened.of(a, symbol) for a, symbol in zip(attributes, symbols, strict=True)]
    try:
        for a, opened in zip(attributes, instead, strict=True):
            a.state[a.name] = opened
        yield
    finally:
        for a, value, opened in zip(attributes, before, instead, strict=True):
            if isinstance(a.now, (Opened, StandIn)):
                a.state[a.name] = value
            opened.symbol = None  # others may have copied it
