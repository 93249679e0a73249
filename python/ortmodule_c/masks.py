"""Dropout in PyTorch by the masks that the C core draws, so that both sides drop the same elements."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _C

aten = torch.ops.aten


class Masks(TorchDispatchMode):
    """Within it, the n-th dropout in PyTorch keeps what the n-th random node of a graph keeps.

    A graph numbers its random nodes in the order in which PyTorch runs them.

    Parameters
    ----------
    seed
        Seed of the step.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._drawn = 0

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
        """Which elements stay, as the C core draws it."""
        self._drawn += 1
        text = f"input %x : f32[?]\n%y = Dropout(%x) {{p={float(p)!r}, stream={self._drawn}}}\nreturn %y\n"
        ones = torch.ones(like.numel(), dtype=torch.float32)
        plan = _C.Session(text, {}).plan([ones], [False], [False])
        (scaled,), _ = plan.forward([ones], self._seed)
        return (scaled != 0).reshape(like.shape)
