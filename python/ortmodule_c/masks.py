"""Dropout in PyTorch by the masks that the C core draws, so that both sides drop the same elements; random states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _C

aten = torch.ops.aten


class Masks(TorchDispatchMode):
    """Within it, the n-th dropout in PyTorch keeps what the n-th random node of the graphs keeps.

    A graph numbers its random nodes in the order in which PyTorch runs them.

    Parameters
    ----------
    seeds
        Of each graph in the order in which they ran the seed and how many random nodes it has; the last may have more.

    Attributes
    ----------
    again
        Whether dropout ran once more in a backward, as in a checkpoint, for which there are no such numbers.
    """

    def __init__(self, seeds: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._seeds = list(seeds)
        self._drawn = 0  # of the first of them
        self.again = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.bernoulli_.float:
            noise, keep = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return noise.copy_(self._kept(noise, 1 - keep))
        if func is aten.native_dropout.default and args[2] is not False and 0 < args[1] < 1:
            kept = self._kept(args[0], args[1])
            return args[0] * kept.to(args[0].dtype) / (1 - args[1]), kept
        return func(*args, **kwargs)

    def _kept(self, like: Tensor, p: float) -> Tensor:
        """Which elements stay, as the C core draws it on any device."""
        self.again = self.again or torch._C._current_graph_task_id() >= 0
        while len(self._seeds) > 1 and self._drawn >= self._seeds[0][1]:
            del self._seeds[0]
            self._drawn = 0
        self._drawn += 1
        text = f"input %x : f32[?]\n%y = Dropout(%x) {{p={float(p)!r}, subsequence={self._drawn}}}\nreturn %y\n"
        ones = torch.ones(like.numel(), dtype=torch.float32)
        plan = _C.Session(text, {}).plan([ones], [False], [False])
        (scaled,), _ = plan.forward([ones], self._seeds[0][0])
        return (scaled != 0).reshape(like.shape).to(like.device)


def random_states() -> list[Tensor]:
    """Of PyTorch's generators, that of the CPU first, then those of GPUs if there are any in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def set_random_states(states: Sequence[Tensor]) -> None:
    """Let PyTorch's generators go on from what :func:`random_states` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether these are the same states."""
    return all(map(torch.equal, some, others))
