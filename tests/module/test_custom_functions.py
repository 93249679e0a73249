"""A custom `torch.autograd.Function` keeps its own backward, however it is written and applied."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function as Base
from torch.autograd.function import BackwardCFunction

from ortmodule_c import ORTModuleError
from wrapped import Function, assert_same_state, assert_same_step, pair


class Scaled(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-1, 1) * ctx.scale, None


applied_early = Scaled.apply


class Separate(Base):
    @staticmethod
    def forward(x: Tensor, scale: float = 3.0) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale * ctx.saved_tensors[0], None


class Several(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        floor, positive = x.floor(), x > 0
        ctx.mark_non_differentiable(floor)
        return x * 2, floor, positive, None, "tag"

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
        return grad * 7


class Many(Base):
    @staticmethod
    def forward(ctx: Any, n: int, *xs: Tensor) -> Tensor:
        ctx.n = len(xs)
        return torch.stack(xs).sum(0) * n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, *[grad * i for i in range(ctx.n)])


class Reversed(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Saving(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T if ctx.needs_input_grad[0] else None, 2 * (x.T @ grad)


class Inherited(Reversed):
    pass


class OwnApply(Reversed):
    @classmethod
    def apply(cls, x: Tensor, by: float) -> Tensor:  # type: ignore[override]
        return super().apply(x * by)


class Nested(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = Scaled.apply(ctx.x.exp(), 2.0)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.autograd.grad(ctx.y, ctx.x, grad)[0]


class Source(Base):
    @staticmethod
    def forward(ctx: Any, n: int) -> Tensor:
        return torch.full((n,), 2.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class InPlace(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(3))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


def without_gradients(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = Scaled.apply(s.l(x), 2.0)
    return factor * s.l(x)


def in_place(s: Any, x: Tensor) -> Tensor:
    y = s.l(x) * 1
    return InPlace.apply(y) + y


class Second(Base):
    """Has a gradient for its first argument alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


class Shifted(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 1


class Sometimes(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        (x,) = ctx.saved_tensors
        return grad * x if x.sum() > 0 else None


class Vectorized(Base):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


USES: dict[str, Any] = {
    "by its class": lambda s, x: Scaled.apply(s.l(x), 5.0),
    "by a name taken before": lambda s, x: applied_early(s.l(x), 5.0),
    "several times": lambda s, x: applied_early(s.l(Scaled.apply(s.l(x), 3.0)), 2.0),
    "with a separate context": lambda s, x: Separate.apply(s.l(x)),
    "results of all kinds": lambda s, x: Several.apply(s.l(x)),
    "a result without gradient used again": lambda s, x: Several.apply(s.l(x))[1] * s.l(x),
    "many arguments": lambda s, x: Many.apply(2, s.l(x), s.l(x) * 2, x),
    "its argument returned": lambda s, x: Reversed.apply(s.l(x)),
    "the module's argument returned": lambda s, x: Reversed.apply(x) * s.l(x),
    "a parameter as argument": lambda s, x: Saving.apply(x, s.l.weight),
    "saved results": lambda s, x: Saving.apply(s.l(x), s.l.weight),
    "inherited": lambda s, x: Inherited.apply(s.l(x)) + Reversed.apply(x),
    "an apply of its own": lambda s, x: OwnApply.apply(s.l(x), 2.0),
    "one within another": lambda s, x: Nested.apply(s.l(x)),
    "no tensors": lambda s, x: Source.apply(4) * s.l(x),
    "without gradients": without_gradients,
    "in place": in_place,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_own_backward(use: Any) -> None:
    eager, ours = pair(Function(use, l=nn.Linear(4, 4)))
    for batch in (3, 4, 2):
        for m in (eager, ours):
            m.zero_grad()
        x = torch.randn(batch, 4)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        assert_same_step(eager, ours, x)
        eager(a)[0].sum().backward()
        ours(b)[0].sum().backward()
        torch.testing.assert_close(b.grad, a.grad)
    alone = not any(r.name == "Function" for r in ours.fallback_report())
    assert alone == (use is not in_place), "the function alone runs in PyTorch"


@pytest.mark.parametrize(
    "use",
    [
        lambda s, x: torch.vmap(lambda row: Vectorized.apply(row) * row.sum())(s.l(x)),
        lambda s, x: torch.vmap(torch.vmap(lambda v: Vectorized.apply(v) * v))(s.l(x)),
        lambda s, x: torch.vmap(torch.func.grad(lambda row: (Vectorized.apply(row) ** 2).sum()))(s.l(x)),
    ],
    ids=["a call", "a call in a call", "a gradient"],
)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_own_backward_within_vmap(use: Any) -> None:
    eager, ours = pair(Function(use, l=nn.Linear(4, 4)))
    for batch in (3, 4):
        assert_same_step(eager, ours, torch.randn(batch, 4))
    assert any("autograd.Function within torch.vmap" in r.cause for r in ours.fallback_report())


NONES: dict[str, Any] = {
    "at once": lambda s, x: Second.apply(s.l(x), s.other(x)),
    "behind other ops": lambda s, x: Second.apply(s.l(x), s.other(x).exp().sum(1, keepdim=True)),
    "beside another way": lambda s, x: Second.apply(s.l(x), s.other(x).exp()) + s.other(x),
    "beside a way to a part": lambda s, x: Second.apply(s.l(x), s.other(x).exp()) + s.other.bias,
    "behind a function that gets zeros for it": lambda s, x: Second.apply(s.l(x), Shifted.apply(s.other(x)).exp()),
    "behind two": lambda s, x: Second.apply(s.l(x), Second.apply(s.other(x), s.l.weight[0])),
    "by the values": lambda s, x: Sometimes.apply(s.other(x)) + s.l(x),
    "for an op that runs in PyTorch": lambda s, x: s.l(x) + (s.other(x)).norm(0, dim=1, keepdim=True),
}


@pytest.mark.parametrize("use", NONES.values(), ids=NONES)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_gradient_that_is_none(use: Any) -> None:
    """... stays none, unless there is another way to what it is of."""
    eager, ours = pair(Function(use, l=nn.Linear(4, 4), other=nn.Linear(4, 4)))
    for shift in (4.0, -4.0, 4.0):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.rand(3, 4) + shift)
    assert not any(r.name == "Function" for r in ours.fallback_report())


def test_it_is_named() -> None:
    _, ours = pair(Function(lambda s, x: applied_early(s.l(x), 5.0), l=nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match=r"Scaled runs in PyTorch: a custom autograd\.Function"):
        ours(torch.randn(3, 4))


def test_it_is_all_that_is_told_where_something_is_changed_in_place_too() -> None:
    eager, ours = pair(Function(lambda s, x: applied_early(s.l(x).mul_(x), 5.0).add_(1), l=nn.Linear(4, 4)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_same_step(eager, ours, torch.randn(3, 4))
    assert [str(w.message).partition(" runs in PyTorch: ")[2] for w in told] == ["a custom autograd.Function"]


def test_capture_leaves_the_class_as_it_was() -> None:
    forward, apply = vars(Scaled)["forward"], vars(Base)["apply"]
    _, ours = pair(Function(lambda s, x: Inherited.apply(Scaled.apply(s.l(x), 5.0)), l=nn.Linear(4, 4)))
    with pytest.warns(UserWarning):
        ours(torch.randn(3, 4))
    assert vars(Scaled)["forward"] is forward and vars(Base)["apply"] is apply
    assert "forward" not in vars(Inherited) and "__init__" not in vars(BackwardCFunction)


class Product(Base):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        [x] = ctx.saved_tensors
        return grad * 2, grad * x


@pytest.mark.parametrize("changed", [0, 1])
def test_what_it_saves_may_not_change(changed: int) -> None:
    for m in pair(
        Function(
            lambda s, x, y: Product.apply(x * s.w, y).sum() + Product.apply(x, y).sum(), w=nn.Parameter(torch.ones(3))
        )
    ):
        given = torch.randn(3), torch.randn(3)
        out = m(*given)
        given[changed].add_(1)
        if changed == 0:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward()
        else:
            out.backward()


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_outputs_that_go_back_in_ever_other_sets_end_in_pytorch() -> None:
    """A custom function behind more than three of them: there is no plan for each set."""
    heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(4)])
    eager, ours = pair(
        Function(
            lambda s, x: [f(y).mean() for y in [Scaled.apply(s.l(x), 3.0)] for f in s.heads],
            l=nn.Linear(4, 4),
            heads=heads,
        )
    )
    refused = 0
    for first, second in list(itertools.combinations(range(4), 2)) * 2:
        x = torch.randn(5, 4)
        out = ours(x)
        try:
            (out[first] + out[second]).backward()
        except ORTModuleError:
            refused += 1
            continue
        expected = eager(x)
        (expected[first] + expected[second]).backward()
        assert_same_state(ours, eager)
    assert 0 < refused <= 2
    assert "other outputs go back together" in ours.fallback_report()[-1].cause


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_what_it_saves_may_not_change_within_the_forward() -> None:
    def changed(s: Any, x: Tensor) -> Tensor:
        h = s.l(x)
        y = Product.apply(h, x)
        h.add_(1)
        return y + h

    for m in pair(Function(changed, l=nn.Linear(4, 4))):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            m(torch.randn(3, 4)).sum().backward()
