"""How much memory a step may take for what it computes."""

import math
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .report import FallbackReport

if TYPE_CHECKING:
    from . import _C

MemoryBudget = float | int
_MIB = 2**20


@dataclass(frozen=True)
class Budget:
    """A bound for the arena of a training step: what it takes beyond inputs, results and gradients.

    Attributes
    ----------
    share
        Of what it would take, from 0 to 1, which is no bound.
    bytes
        None is no bound.
    """

    share: float = 1.0
    bytes: int | None = None

    @classmethod
    def of(cls, given: MemoryBudget | None) -> "Budget":
        """That which a user asks for: a float is a share, an int is bytes.

        Raises
        ------
        TypeError, ValueError
            If it is neither, or none that could be meant.
        """
        if given is None:
            return UNBOUNDED
        if isinstance(given, bool) or not isinstance(given, numbers.Real):  # as those of NumPy are
            raise TypeError(f"memory_budget is a {type(given).__name__}, expected a float, a share, or an int, bytes")
        if isinstance(given, numbers.Integral):
            if given < _MIB:
                raise ValueError(
                    f"memory_budget is {given}, expected at least {_MIB} bytes, or a share of the memory as a float"
                )
            return cls(bytes=min(int(given), sys.maxsize))
        if math.isnan(given) or not 0 <= given <= 1:
            raise ValueError(f"memory_budget is {given}, expected a share from 0.0 to 1.0, or bytes as an int")
        return cls(share=float(given))

    def watchers(self, report: FallbackReport) -> "list[Callable[[_C.Plan], None]]":
        """What is to see each plan before it runs: it tells, once, of one that takes more bytes than were asked for."""
        if self.bytes is None:
            return []
        most, told = self.bytes, False

        def watch(plan: "_C.Plan") -> None:
            nonlocal told
            if plan.arena_bytes > most and not told and any(map(any, plan.out_grads)):
                told = True
                least, asked = plan.arena_bytes / _MIB, most / _MIB
                report.tell(f"a step takes {least:.2f} MiB at least, more than the memory_budget of {asked:.2f} MiB")

        return [watch]


UNBOUNDED = Budget()
