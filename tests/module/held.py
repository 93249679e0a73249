"""What the tests of what a forward reads share: objects that it reads, and modules that read them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ortmodule_c import DebugOptions, ORTModule
from wrapped import Function

ON_THE_FAST_WAY = DebugOptions(capture="export", fallback="error")
Read = Callable[[Any, Tensor], Tensor]


class Plain:
    scale: Any = 2.0

    def get(self) -> Any:
        return self.scale

    def __call__(self, y: Tensor) -> Tensor:
        return y * self.scale

    @property
    def doubled(self) -> Any:
        return 2 * self.scale


def with_scale(cls: Any, scale: Any = 2.0) -> Any:
    made = cls()
    made.scale = scale
    return made


def setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, value)


def both(read: Read, make: Callable[[], Any], fallback: str = "error") -> tuple[nn.Module, ORTModule]:
    """For PyTorch and for the fast way; they share nothing."""
    made = [Function(lambda s, x: read(s, s.l(x)), l=nn.Linear(4, 4), held=make()) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], ORTModule(made[1], DebugOptions(capture="export", fallback=fallback))
