"""Functions of two tensors of different dtypes, against eager PyTorch: what is computed in which of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from corners import Row, difference, pieces
from ortmodule_c import ORTModule
from wrapped import Function

f16, bf16, f32, f64, i32, i64 = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
)
DTYPES = [(f32, f64), (f64, f32), (bf16, f32), (f32, bf16), (f16, f32), (bf16, f16)]
DTYPES += [(i64, f32), (i64, f64), (f32, i64), (bf16, i32), (i32, bf16)]
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pow": torch.pow,
    "add": torch.add,
    "add scaled": lambda x, y: torch.add(x, y, alpha=2.5) if (x + y).is_floating_point() else x + y,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "clamp": torch.clamp,
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "l1": F.l1_loss,
}
LOSSES = {"bce with logits": F.binary_cross_entropy_with_logits, "huber": F.huber_loss, "kl": F.kl_div}


def _numbers(dtype: torch.dtype, shift: int) -> Tensor:
    values = torch.cat([torch.linspace(0.1, 3, 57), torch.tensor([0.0, 1, 2, -1, -2, 1e-3, 0])]).roll(shift)
    return values.to(dtype)


def _differences(function: Callable[[Tensor, Tensor], Any], dtypes: tuple[torch.dtype, torch.dtype]) -> list[str]:
    xs = [_numbers(d, 3 * i) for i, d in enumerate(dtypes)]
    module = Function(lambda _, *xs: (function(*xs),))
    try:
        want, slopes = _step(module, xs)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            _step(ORTModule(module), xs)
        return []
    got, got_slopes = _step(ORTModule(module), xs)
    told = []
    for ours, eager in zip([*got, *got_slopes], [*want, *slopes], strict=True):
        exact = eager.dtype in (f16, bf16)
        told.append(difference(ours.detach(), eager.detach(), Row(function, ulps=0 if exact else 4), False))
    return [t for t in told if t]


def _step(module: Any, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
    outputs = pieces(module(*leaves))
    torch.autograd.backward(outputs, [torch.linspace(-1, 2, y.numel()).to(y.dtype).view(y.shape) for y in outputs])
    return outputs, [x.grad for x in leaves if x.grad is not None]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("function", [*FUNCTIONS.values(), *LOSSES.values()], ids=[*FUNCTIONS, *LOSSES])
def test_values_and_gradients(
    function: Callable[[Tensor, Tensor], Any], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert not _differences(function, dtypes)
