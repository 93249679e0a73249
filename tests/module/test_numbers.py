"""Numbers of Python's that change from call to call are inputs of one graph, and computed as eager computes them."""

import copy
import gc
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule
from ortmodule_c.capture.numbers import Numbers
from ortmodule_c.changing import standing_in
from ortmodule_c.guards.held import Attribute
from wrapped import BFLOAT16, Function, assert_same_step, n_graphs, pair

ANNEALED = [1 / (step + 2) for step in range(8)]
COUNTED = [step + 2 for step in range(8)]
ODD = [0.5, 0.3, -2.5, 1.0, 0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, 3e38, 2.0]
ODD_WHOLE = [2, 3, -1, 0, 1, 2**53 + 1, 2**63 - 1, -7]

Op = Callable[[Tensor, Any], Tensor]

OPS: dict[str, Op] = {
    "times": lambda x, n: x * n,
    "plus": lambda x, n: x + n,
    "minus": lambda x, n: x - n,
    "less it": lambda x, n: n - x,
    "divided": lambda x, n: x / n,
    "divides": lambda x, n: n / (x + 5),
    "power": lambda x, n: (x * x + 1) ** n,
    "base": lambda x, n: abs(n) ** x,
    "remainder": lambda x, n: x % n,
    "alpha": lambda x, n: torch.add(x.sin(), x, alpha=n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "addmm": lambda x, n: torch.addmm(x[:, :3], x, x.T, beta=n, alpha=n + 1),
    "clamp": lambda x, n: x.clamp(max=n),
    "full": lambda x, n: x + torch.full((3, 4), n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "masked fill": lambda x, n: x.masked_fill(x > 0, n),
    "compared": lambda x, n: x * (x > n) + x * (x == n),
    "lerp": lambda x, n: torch.lerp(x, x.cos(), n),
    "leaky": F.leaky_relu,
    "in place": lambda x, n: x.sin().mul_(n).sub_(x, alpha=n),
    "softmax": lambda x, n: torch.softmax(x / (n + 1), -1),
    "without a kernel": lambda x, n: torch.addcdiv(x, x, x + 5, value=n),
    "computed with": lambda x, n: x * (n * 0.1 * 3 + 1 / (n + 0.25) - abs(n) // 0.3),
    "rounded": lambda x, n: x * round(n, 1),
    "in a list": lambda x, n: x * torch.tensor([n]),
}
# Where PyTorch has the number before, or between, the tensors.
WEIGHTS = torch.tensor([0.5, 1.5, 2.0, 1.0])
LABELS = torch.tensor([0, 3, 1])
BEFORE: dict[str, Op] = {
    "xlogy": lambda x, n: torch.xlogy(n, x.abs()),
    "xlogy, after": torch.xlogy,
    "xlog1py": lambda x, n: torch.special.xlog1py(n, x.abs()),
    "power": lambda x, n: torch.pow(n, x),
    "power of floats": lambda x, n: torch.float_power(n, x),
    "remainder": lambda x, n: torch.remainder(n, x),
    "less": lambda x, n: torch.rsub(x, n, alpha=n),
    "where": lambda x, n: torch.where(x > 0, n, x),
    "where else": lambda x, n: torch.where(x > 0, x, n),
    "zeta": lambda x, n: x * torch.special.zeta(n, x.detach().abs() + 2),
    "polynomial": lambda x, n: x * torch.special.chebyshev_polynomial_t(n, x.detach().abs().round()),
    "hermite": lambda x, n: x * torch.special.hermite_polynomial_h(n, x.detach().abs().round()),
    "bucket": lambda x, n: x * torch.bucketize(n, x.detach().flatten()),
    "place": lambda x, n: x * torch.searchsorted(x.detach().flatten(), n),
    "among": lambda x, n: x * torch.isin(n, WEIGHTS * 2),
    "line": lambda x, n: x + torch.linspace(n, x.detach().sum(), 4),
    "margin": lambda x, n: F.multi_margin_loss(x, LABELS, margin=n, weight=WEIGHTS),
    "hardtanh": lambda x, n: F.hardtanh(x, -n, n),
    "threshold": lambda x, n: F.threshold(x, n - 2, n),
    "softplus": lambda x, n: F.softplus(x, n, n),
    "elu": F.elu,
    "celu": F.celu,
    "softshrink": lambda x, n: F.softshrink(x, n / 4),
    "norm": torch.linalg.vector_norm,
    "distance": lambda x, n: torch.dist(x, x.sin(), n),
    "renorm": lambda x, n: torch.renorm(x, n, 0, n),
    "addr": lambda x, n: torch.addr(x, x[:, 0], x[0], beta=n, alpha=n + 1),
    "addbmm": lambda x, n: torch.addbmm(x, x.view(1, 3, 4), torch.ones(1, 4, 4), beta=n, alpha=n + 1),
    "addcdiv of two": lambda x, n: torch.addcdiv(WEIGHTS, x, x + 5, value=n),
    "xlogy of two": lambda x, n: torch.xlogy(n, x.abs()) * torch.xlogy(x, x.detach().abs() * n),
}
OUTSIDE_OF_GRAPHS = pytest.mark.filterwarnings("ignore:ortmodule_c.*runs in PyTorch")


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1.7, 1.9, 12, dtype=torch.float64).view(3, 4).to(dtype).requires_grad_()


def steps(function: Callable[..., Any], x: Tensor, number: Any) -> list[Any]:
    """The result and the gradient, or what was raised."""
    try:
        y = function(x, number)
        return [y, *torch.autograd.grad(y.sum(), x)]
    except (RuntimeError, ArithmeticError, ValueError) as error:
        return [type(error)]


def assert_as_eager(op: Op, ours: Callable[..., Any], numbers: Sequence[Any], dtype: torch.dtype) -> None:
    for number in numbers:
        expected, got = steps(op, batch(dtype), number), steps(ours, batch(dtype), number)
        message = f"{number}: {got} instead of {expected}"
        if isinstance(expected[0], Tensor):
            torch.testing.assert_close(got, expected, equal_nan=True, msg=message)
        else:
            assert got == expected, message


@OUTSIDE_OF_GRAPHS
@pytest.mark.parametrize("numbers", [ANNEALED, COUNTED], ids=["real", "whole"])
@pytest.mark.parametrize("op", OPS)
def test_a_second_value_opens_the_number_for_all(op: str, numbers: list[Any]) -> None:
    ours = ORTModule(Function(lambda _, x, n: OPS[op](x, n)))
    assert_as_eager(OPS[op], ours, numbers, torch.float32)
    assert n_graphs(ours) == 2 and ours.stats()["dynamo_graphs"] == 0


@OUTSIDE_OF_GRAPHS
@pytest.mark.parametrize("numbers", [[1.5, 2.5, 2.0, 0.25, 3.0], [1, 3, 2, 4]], ids=["real", "whole"])
@pytest.mark.parametrize("op", BEFORE)
def test_gradients_reach_the_tensors_behind_an_open_number(op: str, numbers: list[Any]) -> None:
    assert_as_eager(BEFORE[op], ORTModule(Function(lambda _, x, n: BEFORE[op](x, n))), numbers, torch.float32)


@OUTSIDE_OF_GRAPHS
@pytest.mark.parametrize("numbers", [ODD, ODD_WHOLE], ids=["real", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["times", "plus", "less it", "divided", "where", "compared", "softmax"])
def test_zeros_infinities_and_what_no_float_holds(op: str, dtype: torch.dtype, numbers: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_eager(OPS[op], ORTModule(Function(lambda _, x, n: OPS[op](x, n))), numbers, dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16, torch.float64])
@pytest.mark.parametrize("numbers", [[2.5, 0.5, 3.0], [2, 3, 7]], ids=["real", "whole"])
def test_a_number_does_not_change_a_dtype_more_than_in_eager(dtype: torch.dtype, numbers: list[Any]) -> None:
    def both(_: Any, x: Tensor, n: Any) -> tuple[Tensor, Tensor]:
        return x * n, x + n

    eager, ours = pair(Function(both))
    for number in numbers:
        x = torch.tensor([0, 1, 1, 0]).to(dtype)
        for y, expected in zip(ours(x, number), eager(x, number), strict=True):
            torch.testing.assert_close(y, expected)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 2)
        self.beta = 0.7

    def forward(self, x: Tensor, beta: float | None = None) -> Tensor:
        return self.l(x).square().mean() * (self.beta if beta is None else beta)


@pytest.mark.parametrize("how", ["argument", "keyword", "attribute"])
def test_an_annealed_weight_trains_in_c(how: str) -> None:
    eager, ours = pair(Annealed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(60):
            beta = 1 / (step + 2)
            for m in (eager, ours):
                m.zero_grad()
                if how == "attribute":
                    m.beta = beta
            x = torch.randn(3 + step % 2, 4)
            args, kwargs = ((beta,) if how == "argument" else ()), ({"beta": beta} if how == "keyword" else {})
            assert_same_step(eager, ours, x, *args, **kwargs)
            assert ours.module.beta == eager.beta
    assert n_graphs(ours) == 2


def test_an_attribute_of_an_object_and_an_argument_change_together() -> None:
    class Schedule:
        tau = 1.0

    def softened(s: Any, x: Tensor, by: float) -> Tensor:
        return torch.softmax(s.l(x) / s.schedule.tau, -1) * by

    eager, ours = pair(Function(softened, l=nn.Linear(4, 2), schedule=Schedule()))
    for step in range(8):
        for m in (eager, ours):
            m.zero_grad()
            m.schedule.tau = 1 / (step + 1)
        assert_same_step(eager, ours, torch.randn(3, 4), step / 10)
    assert n_graphs(ours) <= 4


REGIONS: dict[str, Callable[[], Any]] = {
    "without gradients": torch.no_grad,
    "with them": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("region", REGIONS)
def test_numbers_reach_regions(region: str) -> None:
    def within(s: Any, x: Tensor, n: float) -> Tensor:
        with REGIONS[region]():
            y = (x @ x.T) * n + s.by
        return s.l(x) * y.float().sum() * n

    eager, ours = pair(Function(within, l=nn.Linear(4, 2), by=1.0))
    for number in ANNEALED:
        for m in (eager, ours):
            m.zero_grad()
            m.by = number * 3
        rtol = BFLOAT16 if region == "autocast" else 1e-4
        assert_same_step(eager, ours, batch().detach(), number, rtol=rtol)
    assert n_graphs(ours) == 2


def test_numbers_reach_what_is_changed_through_views() -> None:
    def changed(s: Any, x: Tensor, n: float) -> Tensor:
        y = s.l(x).clone()
        y[0, 1] = n
        y[1:] *= n
        return y

    eager, ours = pair(Function(changed, l=nn.Linear(4, 2)))
    for number in ANNEALED:
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(3, 4), number)
    assert n_graphs(ours) == 2


def test_a_counter_of_the_forward_itself_counts() -> None:
    def counting(s: Any, x: Tensor) -> Tensor:
        s.calls += 1
        return s.l(x) * s.calls

    eager, ours = pair(Function(counting, l=nn.Linear(4, 2), calls=0))
    for _ in range(8):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(3, 4))
        assert ours.calls == eager.calls and type(ours.calls) is int
    assert n_graphs(ours) == 2


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * grad, None


@pytest.mark.filterwarnings("ignore:ortmodule_c.*a custom autograd.Function")
@pytest.mark.parametrize("numbers", [ANNEALED, COUNTED], ids=["real", "whole"])
def test_a_custom_function_gets_the_number_of_the_call(numbers: list[Any]) -> None:
    eager, ours = pair(Function(lambda s, x, by: Reversed.apply(s.l(x), by * 2).sin(), l=nn.Linear(4, 2)))
    for number in numbers:
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(3, 4), number)
    assert n_graphs(ours) == 2


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, lambda n: torch.tensor(n, dtype=torch.float64)])
@pytest.mark.parametrize("numbers", [ANNEALED, COUNTED], ids=["real", "whole"])
def test_a_tensor_made_of_a_number_is_of_the_one_of_the_call(make: Callable[[Any], Tensor], numbers: list[Any]) -> None:
    eager, ours = pair(Function(lambda s, x, by: s.l(x) * make(by) + make(by), l=nn.Linear(4, 2)))
    for number in numbers:
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(3, 4), number)
    assert n_graphs(ours) == 2


def test_what_a_forward_asks_of_a_number_is_asked_again() -> None:
    eager, ours = pair(Function(lambda s, x, n: s.l(x) * n if n > 0.3 else s.l(x) + n, l=nn.Linear(4, 2)))
    for number in (0.9, 0.1, 0.8, 0.2, 0.3, -math.inf, 0.4, 0.31, 0.29):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.ones(3, 4), number)
    assert n_graphs(ours) == 3


ASKED: dict[str, Callable[[Any], float]] = {
    "text": lambda n: float(f"{n:.1f}"),
    "a float": float,
    "an int": int,
    "a function of C": math.exp,
    "a key": lambda n: {1.0: 2.0}.get(n, 3.0),
    "a count": lambda n: float(len([0] * int(n))),
    "its type": lambda n: 2.0 if type(n) is float else 3.0,
    "its kind": lambda n: 2.0 if isinstance(n, float) else 3.0,
    "its truth": lambda n: 2.0 if n else 3.0,
    "none": lambda n: 2.0 if n is None else n,
    "whole": lambda n: 2.0 if n.is_integer() else 3.0,
    "the larger": lambda n: max(n, 1.5),
    "the smaller": lambda n: min(1.5, n),
    "their sum": lambda n: sum([n, n]),
    "times one of NumPy's": lambda n: float(np.float32(0.1) * n),
    "one of NumPy's": lambda n: 2.0 if np.float64(1.5) == n else n * np.float64(0.1),
    "a fraction": lambda n: 2.0 if n == Fraction(3, 2) else 3.0,
    "a text": lambda n: 2.0 if n == "1.5" else 3.0,
    "a complex number": lambda n: abs(n * 1j),
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("asked", ASKED)
def test_whatever_a_forward_makes_of_a_number_it_is_the_one_of_the_call(asked: str) -> None:
    eager, ours = pair(Function(lambda s, x, n: s.l(x) * ASKED[asked](n), l=nn.Linear(4, 2)))
    for number in (1.0, 2.5, 1.5, -0.0, 0.0, 3.0, 1.25):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.ones(3, 4), number)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_whole_number_that_is_a_size_or_an_index_stays_one() -> None:
    def taken(s: Any, x: Tensor, n: int) -> Tensor:
        return s.l(x)[:, :n].sum() * n + x.view(n, -1)[n - 1].sum() + torch.arange(n).sum()

    eager, ours = pair(Function(taken, l=nn.Linear(4, 4)))
    for number in (1, 2, 3, 4, 2):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(3, 4), number)


def test_numbers_that_are_results_or_kept_are_numbers() -> None:
    def kept(s: Any, x: Tensor, n: float) -> tuple[Tensor, float, list[float]]:
        s.last = n * 2
        return s.l(x) * n, n, [n * 3, 4.0]

    eager, ours = pair(Function(kept, l=nn.Linear(4, 2), last=None))
    for number in ANNEALED:
        _, got, many = ours(torch.ones(3, 4), number)
        assert (got, many, ours.last) == (*eager(torch.ones(3, 4), number)[1:], number * 2)
        assert type(got) is float and type(ours.last) is float


WRITTEN: dict[str, Callable[[Any], str]] = {
    "f-string": lambda n: f"{n}",
    "in a text": lambda n: f"step {n}",
    "in its own words": lambda n: f"{n!r}{n!s}",
    "named": lambda n: f"{n=}",
    "in a list": lambda n: f"{[n]}",
    "in a tuple": lambda n: str((n, 1)),
    "format": format,
    "formatted": "{}".format,
    "as Python 2 did": lambda n: "%s" % n,  # noqa: UP031
    "with digits": lambda n: f"{n:5}",
    "joined": lambda n: "".join([f"{n}"]),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("numbers", [ANNEALED[:4], COUNTED[:4]], ids=["real", "whole"])
def test_a_text_of_a_number_is_that_of_the_number(write: Callable[[Any], str], numbers: Sequence[Any]) -> None:
    def named(s: Any, x: Tensor, n: Any) -> tuple[Tensor, str]:
        s.last = write(n)
        return s.l(x) * s.scales.get(write(n), 1.0) + s.scales.get(write(s.k), 1.0), write(n)

    scales = {write(n): float(i) for i, n in enumerate(numbers)}
    eager, ours = pair(Function(named, l=nn.Linear(4, 2), last="", scales=scales, k=0))
    for n in numbers:
        eager.k = ours.k = n
        assert_same_step(eager, ours, torch.ones(3, 4), n)
        assert ours.last == write(n)


def test_a_number_that_has_to_be_known_ends_in_pytorch_and_not_in_an_export_per_call() -> None:
    eager = Function(lambda m, x, by: m.a(x) * float(str(by)), a=nn.Linear(6, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(max_graphs=3))
    with pytest.warns(UserWarning, match=r"more than max_graphs=3 graphs .* argument args\[1\] takes a new value"):
        for step in range(8):
            for m in (eager, ours):
                m.zero_grad()
            assert_same_step(eager, ours, torch.randn(2, 6), 1 / (step + 2))
    assert ours.stats()["graphs"] == 3


@pytest.mark.parametrize("numbers", [ANNEALED * 3, COUNTED * 3], ids=["real", "whole"])
@pytest.mark.parametrize("op", ["times", "plus", "divides", "power", "alpha", "clamp", "computed with", "in a list"])
def test_the_backend_takes_numbers_that_change_as_inputs(op: str, numbers: list[Any]) -> None:
    from ortmodule_c.dynamo.backend import Compiled, backend

    made: list[Compiled] = []

    def noting(*given: Any) -> Compiled:
        made.append(backend(*given))
        return made[-1]

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_eager(OPS[op], torch.compile(OPS[op], backend=noting), numbers, torch.float32)
    assert [len(m.runners()) for m in made] == [1] * len(made) and len(made) <= 3


class Opaque:
    tau = 1.0

    def __call__(self, y: Tensor) -> Tensor:
        return y * self.tau


class Bare:
    __slots__ = ("__weakref__",)

    def __call__(self, y: Tensor) -> Tensor:
        return y


GIVEN: dict[str, Callable[[float], Any]] = {
    "a function": lambda value: lambda y: y * value,
    "an object": lambda value: Opaque(),
    "an object without attributes": lambda value: Bare(),
}


@OUTSIDE_OF_GRAPHS
@pytest.mark.parametrize("what", GIVEN)
def test_what_is_known_of_numbers_keeps_no_object_that_came_with_them(what: str) -> None:
    ours = ORTModule(Function(lambda s, x, f, by: s.l(x) * by if f is not None else x, l=nn.Linear(4, 4)))
    gone = []
    for step in range(12):
        given = GIVEN[what](step)
        gone.append(weakref.ref(given))
        ours(torch.ones(2, 4), given, 1 / (1 + step % 3))
        del given
    gc.collect()
    assert sum(alive() is not None for alive in gone) <= 1


@OUTSIDE_OF_GRAPHS
def test_numbers_in_attributes_of_replaced_objects_are_forgotten_with_these() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x) * s.schedule.tau, l=nn.Linear(4, 4), schedule=Opaque()))
    gone = []
    for step in range(12):
        for m in (eager, ours):
            m.zero_grad()
            if step % 3 == 0:
                m.schedule = Opaque()
                m.schedule.kept = Bare()
            m.schedule.tau = 1 / (step + 1)
        gone.append(weakref.ref(ours.module.schedule.kept))
        assert_same_step(eager, ours, torch.ones(2, 4))
    gc.collect()
    assert len({id(alive()) for alive in gone if alive() is not None}) == 1


@pytest.mark.parametrize("looked_up", [False, True], ids=["by ours alone", "by eager before"])
def test_a_number_of_a_class_that_changes_is_read_as_it_is(looked_up: bool) -> None:
    for _ in range(5):
        schedule = type("Schedule", (), {"k": 2.0})
        eager = Function(lambda m, x, schedule=schedule: x * schedule.k)
        ours = ORTModule(copy.deepcopy(eager))
        for step in range(4):
            schedule.k = step + 2.5
            assert not looked_up or eager(torch.ones(3))[0] == step + 2.5
            assert ours(torch.ones(3))[0] == step + 2.5
            assert type(schedule.k) is float


def test_a_branch_that_an_annealed_number_leaves_for_good_is_no_hindrance() -> None:
    """What is computed beyond it runs in PyTorch whether the number is open or not."""

    def with_drop_path(s: Any, x: Tensor) -> Tensor:
        y = s.l(x)
        return y if s.p == 0.0 else y / (1 - s.p) * (1 - s.p + torch.rand(len(x), 1)).floor()

    eager, ours = pair(Function(with_drop_path, l=nn.Linear(4, 4), p=0.0))
    with pytest.warns(UserWarning, match="rand"):
        for step in range(8):
            eager.p = ours.module.p = step / 16
            torch.manual_seed(step)
            expected = eager(torch.ones(3, 4))
            torch.manual_seed(step)
            torch.testing.assert_close(ours(torch.ones(3, 4)), expected)
    assert n_graphs(ours) == 2


def test_what_somebody_keeps_of_a_trace_is_a_number() -> None:
    """Another thread may put what it reads meanwhile into another attribute, which a forward reads."""
    eager, ours = pair(Function(lambda s, x: s.l(x) * s.scale + s.best, l=nn.Linear(4, 4), scale=2.0, best=1.0))
    state = vars(ours.module)
    with standing_in([Attribute(state, "scale", "it")], Numbers([2.0], ["scale"]).symbols):
        state["best"] = state["scale"]
    eager.best = 2.0
    for step in range(5):
        eager.scale = ours.module.scale = step + 2.5
        if step > 2:
            eager.best = ours.module.best = step + 3.5
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.ones(2, 4))


past = object.__getattribute__


@pytest.mark.parametrize("also", [False, True], ids=["alone", "and as others do"])
def test_a_number_that_is_read_past_the_lookup_is_as_it_is(also: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.l(x) * past(s, "scale") * (s.scale if also else 1.0)

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4), scale=2.0))
    for step in range(4):
        eager.scale = ours.module.scale = step + 2.5
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.ones(2, 4))


def test_what_somebody_sets_while_a_symbol_stands_for_a_number_stays() -> None:
    state: dict[str, Any] = {"set": 1.0, "read": 2.0, "computed": 3.0, "deleted": 4.0}
    attributes = [Attribute(state, name, "it") for name in state]
    with standing_in(attributes, Numbers([*state.values()], [*state]).symbols):
        state["set"] = 5.0
        state["computed"] = state["computed"].symbol + 1
        del state["deleted"]
    assert state == {"set": 5.0, "read": 2.0, "computed": 3.0}


def test_another_thread_that_looks_while_a_number_is_open_gets_the_number() -> None:
    got: list[Any] = []
    numbers = Numbers([2.5, 2, 3.5], ["real", "whole", "unseen"])

    def asked(n: Any) -> tuple[Any, ...]:
        return f"{n:.3f}", float(n), int(n), n + 1, -n, n > 1, divmod(n, 2)

    def look() -> None:
        got.extend(asked(stands) for stands in numbers.symbols[:2])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert got == [asked(2.5), asked(2)]
    assert {type(v) for row in got for v in row} == {str, float, int, bool, tuple}
    assert numbers.needed == {0, 1}
