"""What eager PyTorch refuses of values, indices and dtypes, refused with the same error."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corners import INTEGERS
from ortmodule_c import ORTModule
from wrapped import Function


def _rounded(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: torch.div(x, y, rounding_mode=mode)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder, torch.fmod, _rounded("trunc")])
def test_integers_are_not_divided_by_zero(divide: Callable[..., Tensor], dtype: torch.dtype) -> None:
    module = Function(lambda _, x, y: divide(x, y))
    for model in (module, ORTModule(module)):
        model(torch.ones(3000, dtype=dtype), torch.ones(3000, dtype=dtype))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            model(torch.ones(3000, dtype=dtype), torch.arange(2999, -1, -1).clamp(max=9).to(dtype))


@pytest.mark.parametrize("target", [-1, 4])
@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy])
def test_a_target_has_to_be_a_class(loss: Callable[..., Tensor], target: int) -> None:
    module = Function(lambda _, x, t: loss(x, t))
    x = torch.randn(2, 4, requires_grad=True)
    for model in (module, ORTModule(module)):
        model(x, torch.tensor([0, -100])).backward()
        with pytest.raises(IndexError, match=rf"Target {target} is out of bounds\."):
            model(x, torch.tensor([0, target]))


OUTSIDE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[list[int]], type[Exception], str]] = {
    "rows": (lambda x, i: x[i], [[0, 4], [-5, 0]], IndexError, "is out of bounds for dimension 0 with size 4"),
    "columns": (lambda x, i: x[:, i], [[0, 3], [-4, 0]], IndexError, "is out of bounds for dimension 0 with size 3"),
    "elements": (lambda x, i: x[i, i], [[0, 3]], IndexError, "index 3 is out of bounds for dimension 1 with size 3"),
    "gather": (
        lambda x, i: x.gather(1, i[:, None]),
        [[0, 3], [-1, 0]],
        RuntimeError,
        "is out of bounds for dimension 1 with size 3",
    ),
    "index_select": (lambda x, i: x.index_select(0, i), [[0, 4], [-1, 0]], IndexError, "index out of range in self"),
    "embedding": (lambda x, i: F.embedding(i, x), [[0, 4], [-1, 0]], IndexError, "index out of range in self"),
}


@pytest.mark.parametrize("row", OUTSIDE.items(), ids=lambda r: r[0])
def test_an_index_has_to_be_inside(row: tuple[str, Any]) -> None:
    _, (read, outside, error, says) = row
    module = Function(lambda _, x, i: read(x, i))
    x = torch.randn(4, 3, requires_grad=True)
    for model in (module, ORTModule(module)):
        model(x, torch.tensor([0, 2])).sum().backward()
        for ids in outside:
            with pytest.raises(error, match=says):
                model(x, torch.tensor(ids))


def test_a_probability_has_to_be_one() -> None:
    module = Function(lambda _, x, t: F.binary_cross_entropy(x, t))
    target = torch.tensor([0.0, 1, 0.5])
    for model in (module, ORTModule(module)):
        model(torch.tensor([0.0, 1, 0.5], requires_grad=True), target).backward()
        for outside in (-1e-3, 1.001, float("nan"), float("inf")):
            with pytest.raises(RuntimeError, match="all elements of input should be between 0 and 1"):
                model(torch.tensor([0.5, outside, 0.5], requires_grad=True), target)
            with pytest.raises(RuntimeError, match="all elements of target should be between 0 and 1"):
                model(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.5, outside, 0.5]))


BOOL, INT32, INT64 = torch.bool, torch.int32, torch.int64
DTYPES_REFUSED: dict[str, tuple[Callable[[Tensor], Any], tuple[torch.dtype, ...]]] = {
    "relu": (torch.relu, (BOOL,)),
    "abs": (torch.abs, (BOOL,)),
    "neg": (torch.neg, (BOOL,)),
    "subtraction": (lambda x: 1 - x, (BOOL,)),
    "softsign": (F.softsign, (BOOL,)),
    "tanhshrink": (F.tanhshrink, (BOOL,)),
    "threshold": (lambda x: F.threshold(x, 0.5, 2.0), (BOOL,)),
    "hardsigmoid": (F.hardsigmoid, (BOOL, INT32, INT64)),
    "clamp, up to more than there is": (lambda x: x.clamp_max(3e38), (torch.float16,)),
    "clamp, from less than there is": (lambda x: x.clamp(min=-1e39), (torch.float32, torch.bfloat16)),
    "hardshrink": (F.hardshrink, (BOOL, INT32, INT64)),
    "addcmul": (lambda x: torch.addcmul(x, x, x), (BOOL,)),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x), (BOOL, INT64)),
    "std": (torch.std, (BOOL, INT32, INT64)),
    "one_hot": (lambda x: F.one_hot(x, 5), (INT32, torch.uint8)),
    "index_select": (lambda x: torch.arange(5).index_select(0, x), (BOOL, torch.uint8, torch.int16)),
    "average pool 3d": (lambda x: F.avg_pool3d(x.view(1, 4, 1, 1), 1), (torch.float16, torch.bfloat16)),
    "max pool 3d": (lambda x: F.max_pool3d(x.view(1, 4, 1, 1), 1), (BOOL,)),
    "interpolate": (lambda x: F.interpolate(x.view(1, 1, 4), scale_factor=2), (BOOL, INT32, INT64)),
}


@pytest.mark.parametrize("name", DTYPES_REFUSED)
def test_a_dtype_without_a_kernel_in_pytorch_is_refused(name: str) -> None:
    function, dtypes = DTYPES_REFUSED[name]
    for dtype in dtypes:
        x = torch.tensor([0, 1, 1, 0]).to(dtype)
        module = Function(lambda _, x: function(x))
        with pytest.raises((RuntimeError, NotImplementedError)) as refused:
            module(x)
        with pytest.raises(type(refused.value)) as ours:
            ORTModule(module)(x)
        assert str(ours.value) == str(refused.value)


@pytest.mark.parametrize("divide", [torch.floor_divide, lambda x, y: x // y])
def test_a_floored_quotient_has_no_gradient(divide: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = Function(lambda _, x, y: divide(x, y))
    for model in (module, ORTModule(module)):
        x = torch.tensor([3.0, -2], requires_grad=True)
        out = model(x, torch.tensor([2.0, 2]))
        assert out.tolist() == [1, -1]
        with pytest.raises(RuntimeError, match="derivative for aten::floor_divide is not implemented"):
            out.sum().backward()


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda bias, x, y: F.linear(x, y, bias), (2,), (4, 2), (1, 2)),
    "linear of three dims": (lambda bias, x, y: F.linear(x, y, bias), (1, 2), (4, 1, 2), (1, 2)),
    "linear of no rows": (lambda bias, x, y: F.linear(x, y, bias), (2,), (0, 2), (1, 2)),
    "addmm": (torch.addmm, (2,), (2, 2), (2, 1)),
    "addmm of three dims": (torch.addmm, (5, 2, 1), (2, 2), (2, 1)),
    "addmm that reads no bias": (lambda bias, x, y: torch.addmm(bias, x, y, beta=0), (2,), (1, 5), (5, 1)),
    "addmv": (torch.addmv, (5,), (1, 2), (2,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_bias_may_not_widen_a_product(name: str) -> None:
    add, *shapes = PRODUCTS[name]
    _refuses_alike(Function(lambda _, *given: add(*given)), *map(torch.ones, shapes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_a_bias_is_of_the_dtype_of_the_product(dtype: torch.dtype) -> None:
    bias = torch.ones(3, dtype=dtype)
    _refuses_alike(Function(lambda _, *given: F.linear(*given)), torch.ones(4, 2), torch.ones(3, 2), bias)
    _refuses_alike(Function(lambda _, *given: torch.addmm(*given, alpha=2)), bias, torch.ones(4, 2), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (F.adaptive_avg_pool1d, (3, 2, 0)),
        (F.adaptive_avg_pool2d, (2, 3, 0, 4)),
        (F.adaptive_avg_pool2d, (2, 0, 3, 4)),
        (F.adaptive_avg_pool3d, (2, 3, 4, 0, 2)),
    ],
)
def test_nothing_is_not_pooled(pool: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    _refuses_alike(Function(lambda _, x: pool(x, 2)), torch.ones(shape, requires_grad=True))


@pytest.mark.parametrize(
    ("pool", "size"), [(F.adaptive_avg_pool1d, 0), (F.adaptive_avg_pool2d, (0, 1)), (F.adaptive_avg_pool3d, (1, 2, 0))]
)
def test_what_is_pooled_to_nothing_has_no_gradient(pool: Callable[..., Tensor], size: Any) -> None:
    shape = (2, 3, *(5, 4, 2)[: 1 if isinstance(size, int) else len(size)])
    _refuses_alike(Function(lambda _, x: pool(x, size)), torch.ones(shape, requires_grad=True))


@pytest.mark.parametrize("pool", [F.max_pool3d, functools.partial(F.max_pool3d, return_indices=True)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_sample_of_max_pool3d_is_refused_by_its_strides(pool: Callable[..., Tensor]) -> None:
    module = Function(lambda s, x: pool(x * s.w, 2)[0], w=nn.Parameter(torch.ones(())))
    x = torch.randn(2, 4, 4, 4)
    strided = x.to(memory_format=torch.channels_last)
    _refuses_alike(module, strided)
    integers = Function(lambda s, x: pool(x, 2)[0] * s.w, w=nn.Parameter(torch.ones(())))
    _refuses_alike(integers, strided.long())
    model = ORTModule(module)
    for _ in range(2):
        torch.testing.assert_close(model(x), module(x), rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="Unsupported memory format"):
            model(strided)


def _refuses_alike(module: Function, *given: Tensor) -> None:
    """In forward, or in backward."""
    said = []
    for model in (module, ORTModule(module)):
        with warnings.catch_warnings(), pytest.raises(RuntimeError) as error:
            warnings.simplefilter("ignore")
            model(*given).sum().backward()
        said.append(str(error.value))
    assert said[1] == said[0]


NUMBERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "full": lambda x, n: x * torch.full((4,), n, dtype=x.dtype),
    "fill_": lambda x, n: x * torch.zeros_like(x).fill_(n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "product": lambda x, n: x * n,
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("how", ["constant", "argument"])
@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, -1e39), (torch.float16, -1e9)], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_to_be_one_of_the_dtype(name: str, dtype: torch.dtype, number: float, how: str) -> None:
    function, x = NUMBERS[name], torch.randn(3, 4).to(dtype)

    def results(model: nn.Module) -> list[Any]:
        found: list[Any] = []
        for n in (2.0, 3.0, number, 4.0):
            try:
                found.append(model(x, n))
            except RuntimeError as error:
                found.append(str(error))
        return found

    module = Function(lambda _, x, n: function(x, number if how == "constant" else n))
    for want, got in zip(results(module), results(ORTModule(module)), strict=True):
        assert want == got if isinstance(want, str) else torch.equal(want, got)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("subtract", [lambda x: True - x, lambda x: x - False, lambda x: torch.sub(x, x, alpha=True)])
def test_a_bool_is_not_subtracted(subtract: Callable[[Tensor], Tensor]) -> None:
    module = Function(lambda _, x: subtract(x))
    for model in (module, ORTModule(module)):
        with pytest.raises(RuntimeError, match=r"bool|Boolean"):
            model(torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("add", [torch.add, torch.sub, torch.rsub])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_integers_are_not_scaled_by_a_float(add: Callable[..., Tensor], dtype: torch.dtype, alpha: float) -> None:
    _refuses_alike(Function(lambda _, x: add(x, x, alpha=alpha)), torch.ones(4, dtype=dtype))


WHOLE, SOME = torch.linspace(-1, 1, 16).reshape(4, 4), torch.tensor([1, 2, 3])
LABELS = torch.tensor([[3, -1, 0, 9], [1, 2, -1, 0]])
MISFITS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a short diagonal": (torch.diagonal_scatter, (WHOLE, torch.ones(1))),
    "a long diagonal": (lambda x, s: torch.diagonal_scatter(x, s, 1), (WHOLE, torch.ones(4))),
    "rows for an index": (lambda x, i, s: x.index_reduce(0, i, s, "prod"), (WHOLE, SOME[:1], WHOLE[:3])),
    "parts of rows": (lambda x, i, s: x.index_reduce(0, i, s, "amax"), (WHOLE, SOME[:1], WHOLE[:1, :3])),
    "a sum by index_reduce": (lambda x, i, s: x.index_reduce(0, i, s, "sum"), (WHOLE, SOME, WHOLE[:3])),
    "an element for places": (lambda x, i, s: x.put(i, s), (WHOLE, SOME, torch.ones(1))),
    "an index in 32 bits": (lambda x, i, s: x.index_copy(0, i, s), (WHOLE, SOME.int(), WHOLE[:3])),
    "a pad that cuts off too much": (lambda x: F.pad(x, (3, -5)), (WHOLE,)),
    "a dim of a sort": (lambda x: x.sort(dim=-3)[0], (WHOLE,)),
    "a dim of a number's sort": (lambda x: x.sort(dim=1)[0], (WHOLE[0, 0],)),
    "a dim of a softmax": (lambda x: x.softmax(-3), (WHOLE,)),
    "a label after the end": (F.multilabel_margin_loss, (WHOLE[:2], LABELS)),
    "margins in 16 bits": (F.multi_margin_loss, (WHOLE.bfloat16(), torch.tensor([0, 1, 2, 3]))),
    "labels in 16 bits": (F.multilabel_margin_loss, (WHOLE[:2].half(), torch.tensor([[3, -1, 0, 0], [1, 2, -1, 0]]))),
    "a target of another shape": (F.soft_margin_loss, (WHOLE[0], WHOLE)),
    "the first of bools": (lambda x: x.topk(1)[0], (WHOLE > 0,)),
    "windows of integers": (lambda x: F.unfold(x, 2), (torch.ones(1, 1, 4, 4, dtype=torch.int64),)),
    "two dtypes of a cross product": (torch.linalg.cross, (WHOLE[:, :3], WHOLE[:, :3].double())),
}


@pytest.mark.parametrize("name", MISFITS)
def test_operands_that_do_not_fit_are_refused(name: str) -> None:
    op, operands = MISFITS[name]
    module = Function(lambda _, *given: op(*given))
    with pytest.raises((RuntimeError, IndexError)) as eager:
        module(*operands)
    with pytest.raises((RuntimeError, IndexError)) as ours:
        ORTModule(module)(*operands)
    assert type(ours.value) is type(eager.value)
