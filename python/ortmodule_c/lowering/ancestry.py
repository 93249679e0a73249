"""What autograd would go through from each value of a graph.

It is an int with one bit for each graph input, and one for each thing on the way there that matters later.
"""

from collections.abc import Collection
from dataclasses import dataclass

Operand = tuple[int, int]  # number of an op that runs in PyTorch, position among its operands


@dataclass(frozen=True)
class _Way:
    """From a result of an op that runs in PyTorch to one of its operands.

    Attributes
    ----------
    operand
        The operand; its gradient may turn out to be None.
    bit
        What stands for the way in the ancestry of the results.
    behind, whole
        The ancestry of the operand, and with what lies behind the ways in it.
    """

    operand: Operand
    bit: int
    behind: int
    whole: int


class Ancestry:
    """Gives out the bits of one graph.

    Parameters
    ----------
    n_inputs
        Of the graph; bit `i` stands for input `i`.

    Attributes
    ----------
    somewhere
        A bit of all that requires grad, whether or not it leads to an input.
    """

    def __init__(self, n_inputs: int) -> None:
        self.somewhere = 1 << n_inputs
        self._inputs = self.somewhere - 1
        self._last = self.somewhere
        self._saving = 0
        self._materializing = 0  # ways through custom functions, which get zeros where there is no gradient
        self._ways: list[_Way] = []

    def bit(self) -> int:
        """A new one."""
        self._last <<= 1
        return self._last

    def saving(self) -> int:
        """A new one, for what saves tensors for its backward."""
        bit = self.bit()
        self._saving |= bit
        return bit

    def way(self, operand: Operand, ancestry: int, is_custom: bool) -> int:
        """A new one, for the way from a result of an op that runs in PyTorch to an operand of this ancestry."""
        bit = self.bit()
        self._ways.append(_Way(operand, bit, ancestry, self.whole(ancestry)))
        self._materializing |= bit * is_custom
        return bit

    def whole(self, ancestry: int, none: Collection[Operand] = ()) -> int:
        """With what lies behind the ways in it, but for those whose gradients are None."""
        for way in reversed(self._ways):
            if ancestry & way.bit:
                ancestry |= way.whole & self._materializing if way.operand in none else way.behind
        return ancestry

    def saved(self, ancestry: int) -> int:
        """What saves tensors, of a whole ancestry."""
        return ancestry & self._saving

    def custom(self, ancestry: int) -> int:
        """The ways through custom functions, of a whole ancestry."""
        return ancestry & self._materializing

    def inputs(self, ancestry: int, none: Collection[Operand]) -> int:
        """The inputs that get a gradient if these operands get none."""
        return self.whole(ancestry, none) & self._inputs
