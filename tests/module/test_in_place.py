"""Ops that write over their operands: what they leave there is PyTorch's, and what PyTorch refuses is refused."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule
from ortmodule_c.capture.export import Captured
from wrapped import Function, assert_same_step, pair

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "the functional op has other overloads": lambda y: (y.clone().ldexp_(y), y.abs().pow_(2.5), y.abs().pow_(y)),
    "the functional op has its arguments in another order": lambda y: (y.abs() + 1).polygamma_(1),
    "the functional op has another dtype": lambda y: y * y.detach().clone().logical_not_() + y.detach().clone().gt_(0),
    "broadcast over the operand": lambda y: (
        y.clone().hypot_(y[0]),
        y.clone().atan2_(y[:1]),
        y.clone().clamp_min_(y[0]),
    ),
    "into results": lambda y: torch.add(y.detach(), 1, out=torch.empty(4, 4)) + y,
    "from the column before": lambda y: (y, (z := y.detach().clone())[:, 1:].copy_(z[:, :-1])),
    "by a column of its own": lambda y: (y, (z := y.detach().clone()).sub_(z[:, :1])),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a result of another shape": lambda y: y[:, :1].clone().pow_(y),
    "the shape of empty operands": lambda y: y[:0, :1].clone().atan2_(y[:0]),
    "another rank": lambda y: y[0, 0].clone().addr_(y[0], y[0]),
    "a mask that is larger": lambda y: y[0].clone().masked_scatter_(y > 0, y),
    "fractions over integers": lambda y: y + y.long().logit_(),
    "from the row before": lambda y: (z := y.clone())[1:].copy_(z[:-1]),
    "from the transpose": lambda y: (z := y.clone()).add_(z.mT),
    "by a row of its own": lambda y: (z := y.clone()).mul_(z[0]),
    "results of another dtype": lambda y: (
        y + torch.aminmax(y.detach(), out=(torch.empty(()), torch.empty(()).double()))[0]
    ),
}


def after_linear(function: Callable[[Tensor], Any]) -> Function:
    return Function(lambda s, x: function(s.l(x)), l=nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
@pytest.mark.parametrize("row", WRITES.items(), ids=lambda r: r[0])
def test_what_is_written(row: tuple[str, Any]) -> None:
    assert_same_step(*pair(after_linear(row[1])), torch.randn(4, 4))


NEEDED: dict[str, Callable[[Tensor], Tensor]] = {
    "a result that its own gradient reads": lambda y: y.exp().mul_(2),
    "an operand of a product": lambda y: ((z := y * 2) * z, z.add_(1))[0],
    "one element": lambda y: ((z := y.sigmoid())[0].zero_(), z)[1],
    "an operand of a layer": lambda y: (F.linear(z := y * 1, y), z.tanh_())[0],
}


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
@pytest.mark.parametrize("function", NEEDED.values(), ids=NEEDED)
def test_what_gradients_need_may_not_be_changed(function: Callable[[Tensor], Tensor]) -> None:
    eager, ours = pair(after_linear(function))
    for _ in range(2):
        for m in (eager, ours):
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                m(torch.randn(4, 4)).sum().backward()
        x = torch.randn(4, 4)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), eager(x))


@pytest.mark.parametrize("function", NEEDED.values(), ids=NEEDED)
def test_without_gradients_nothing_is_needed(function: Callable[[Tensor], Tensor]) -> None:
    eager, ours = pair(after_linear(function))
    with torch.no_grad():
        assert_same_step(eager, ours, torch.randn(4, 4))
    assert not ours.fallback_report()


def test_what_no_gradient_needs_is_changed_natively() -> None:
    eager, ours = pair(after_linear(lambda y: (y.relu_() + 1).mul_(2).clamp_(max=3).sigmoid_()))
    assert_same_step(eager, ours, torch.randn(4, 4))
    assert not ours.fallback_report()


def test_views_with_no_element_in_common_are_written_and_read_natively() -> None:
    def forward(y: Tensor) -> Tensor:
        z = y.clone()
        z[:, :2].add_(z[:, 2:])
        z[0] = z[1]
        z[1:] += z[1:]
        return z

    eager, ours = pair(after_linear(forward))
    assert_same_step(eager, ours, torch.randn(4, 4))
    assert not ours.fallback_report()


def shifted(ids: Tensor) -> Tensor:
    z = ids.new_zeros(ids.shape)
    z[..., 1:] = ids[..., :-1].clone()
    z[..., 0] = 3
    return z.masked_fill_(z == -1, 0)


ASSIGNED: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {  # whether the whole graph has to be made functional
    "labels to what a decoder reads": (False, shifted),
    "twice": (False, lambda ids: shifted(shifted(ids))),
    "a part of a part": (False, lambda ids: ((z := ids.clone())[1:][:, -1].fill_(2), z)[1]),
    "a part of what was assigned to": (False, lambda ids: ((z := ids + 1)[0].fill_(4), z[:, 1].copy_(z[0, 0]), z)[2]),
    "from the column before": (False, lambda ids: ((z := ids.clone())[:, 1:].copy_(z[:, :-1].clone()), z * 1)[1]),
    "counted from the end": (False, lambda ids: ((z := ids * 1)[:, -2:].copy_(ids[:, :1]), z[-1].fill_(5), z + 0)[2]),
    "every second column": (False, lambda ids: ((z := ids * 1)[:, ::2].fill_(1), z + 0)[1]),
    "what is assigned is read": (False, lambda ids: (z := ids * 1)[1:].copy_(ids[:-1] + 1) + z[1:]),
    "bools": (False, lambda ids: ((z := ids > 2)[:, 0].fill_(True), z.long())[1]),
    "a view that was there before": (True, lambda ids: (v := (z := ids * 1)[0], z[:, 1].copy_(z[:, 0]), v + z[1])[2]),
    "the transpose": (True, lambda ids: ((z := ids * 1).mT[0].fill_(7), z + 0)[1]),
    "an argument": (True, lambda ids: (ids[:, 0].fill_(6), ids + 0)[1]),
}


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
@pytest.mark.parametrize("row", ASSIGNED.items(), ids=lambda r: r[0])
def test_integers_are_assigned_to_parts(row: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, (is_functional, assign) = row
    made, functionalise = [], Captured.functionalise
    monkeypatch.setattr(Captured, "functionalise", lambda c: (made.append(c), functionalise(c)))
    eager, ours = pair(Function(lambda s, ids: (s.e(z := assign(ids) % 9), z + 0), e=nn.Embedding(9, 4)))
    for shape in ((3, 4), (4, 4), (2, 7), (2, 2)):
        ids = torch.randint(0, 9, shape)
        assert_same_step(eager, ours, ids)
    assert ours.stats()["graphs"] >= 1
    assert bool(made) == is_functional, name


@pytest.mark.parametrize("shape", [(1, 1), (0, 4), (4, 1), (1, 4)])
def test_labels_of_few_elements_are_shifted(shape: tuple[int, int]) -> None:
    eager, ours = pair(Function(lambda s, ids: s.e(shifted(ids)), e=nn.Embedding(9, 4)))
    assert_same_step(eager, ours, torch.randint(0, 9, shape))
    with torch.no_grad():
        assert torch.equal(ours(torch.full(shape, 2)), eager(torch.full(shape, 2)))


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch", "ignore:An output .* was resized")
@pytest.mark.parametrize("row", REFUSED.items(), ids=lambda r: r[0])
def test_what_pytorch_refuses_to_write_is_refused(row: tuple[str, Any]) -> None:
    eager, ours = pair(after_linear(row[1]))
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError) as expected:
        eager(x)
    with pytest.raises(RuntimeError) as refused:
        ours(x)
    assert str(refused.value) == str(expected.value)


def of_tokens(s: Function, x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), x[:, 0] > 0
    out[mask] += s.l(x[mask])
    return out


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_what_is_written_where_a_mask_is_names_the_size_as_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    """As experts do that take their tokens."""
    module = Function(of_tokens, l=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(module), DebugOptions(capture="export"))
    assert_same_step(module, ours, torch.randn(5, 4))
    (record,) = ours.fallback_report()
    assert record.cause.startswith("the size of the result of aten.index.Tensor depends on the data, at ")
    assert "does not say" not in caplog.text


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda a: a.reshape(-1),
    "torch.reshape": lambda a: torch.reshape(a, (2, 6)),
    "contiguous": Tensor.contiguous,
    "flatten": Tensor.flatten,
    "ravel": torch.ravel,
    "of a view": lambda a: a[1:].flatten(),
}


@pytest.mark.parametrize("first", ["dense", "transposed"])
@pytest.mark.parametrize("name", VIEWS)
def test_how_an_argument_lies_decides_whether_a_view_or_a_copy_of_it_is_changed(name: str, first: str) -> None:
    eager, ours = pair(Function(lambda s, a: (VIEWS[name](a).add_(1) * s.w, a * s.w), w=nn.Parameter(torch.ones(()))))
    for which in range(4):
        transposed = (which % 2 == 1) == (first == "dense")
        given = [torch.ones(3, 4).t() if transposed else torch.ones(4, 3) for _ in range(2)]
        with torch.no_grad():
            want, got = eager(given[0]), ours(given[1])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(given[1], given[0])
    assert ours.stats()["graphs"] == 2 and not ours.fallback_report()


@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 4, 5)])
def test_a_view_that_an_argument_does_not_have_is_refused_as_in_pytorch(sizes: tuple[int, ...]) -> None:
    eager, ours = pair(Function(lambda s, a: s.w + a.view(-1).sum(), w=nn.Parameter(torch.ones(()))))
    for n in sizes:
        torch.testing.assert_close(ours(torch.ones(n, 4)), eager(torch.ones(n, 4)))
        for m in (eager, ours):
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                m(torch.ones(4, n).t())


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize(
    "write", [lambda y: y.fill_diagonal_(0.5), lambda y: y.as_strided((4,), (5,)).zero_()], ids=["diagonal", "strided"]
)
def test_what_is_written_over_by_memory_has_no_gradient(write: Callable[[Tensor], Any], capture: Any) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.l(x)
        write(y)
        return y * y

    eager, _ = pair(Function(forward, l=nn.Linear(4, 4)))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    for _ in range(2):
        assert_same_step(eager, ours, torch.randn(4, 4))


DIAGONALS: dict[str, Callable[[Tensor], Any]] = {
    "of a matrix": lambda y: y.fill_diagonal_(0.5),
    "of a wide matrix": lambda y: y[:3].fill_diagonal_(-math.inf),
    "of a tall one": lambda y: y[:, :3].fill_diagonal_(2, wrap=False),
    "by a view": lambda y: y.diagonal().fill_(0.5),
    "beside it": lambda y: y.diagonal(1).mul_(2),
    "below it": lambda y: y.diagonal(-1).sub_(y[0, 1:].detach()),
}


@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize("write", DIAGONALS.values(), ids=DIAGONALS)
def test_a_diagonal_of_any_size_is_written_in_c(write: Callable[[Tensor], Any], capture: Any) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.l(x)
        y = y @ y.t()
        write(y)
        return y.softmax(-1)

    eager, _ = pair(Function(forward, l=nn.Linear(4, 4)))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture, fallback="error"))
    for n in (4, 5, 3):
        assert_same_step(eager, ours, torch.randn(n, 4))


@pytest.mark.filterwarnings("ignore:ortmodule_c. aten._foreach")
@pytest.mark.parametrize("capture", ["export", "dynamo"])
def test_tensors_in_a_list_are_changed_by_ops_of_pytorch(capture: Any) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        means = [s.norm.running_mean, s.norm.running_var]
        torch._foreach_mul_(means, 0.9)
        torch._foreach_add_(means, [x.mean(0), x.var(0)], alpha=0.1)
        return s.l(x) * s.norm.running_mean

    eager = Function(forward, l=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    for n in (4, 4, 5):
        assert_same_step(eager, ours, torch.randn(n, 4))
    assert {r.name for r in ours.fallback_report()} == {"aten._foreach_mul.Scalar", "aten._foreach_add.List"}


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "what is left out has a default": lambda t: t.bernoulli_(),
    "what is given is the default": lambda t: t.bernoulli_(0.5),
    "a number": lambda t: t.bernoulli_(0.3),
    "a tensor": lambda t: t.bernoulli_(torch.full_like(t, 0.3)),
    "normal": lambda t: t.normal_(std=2),
    "uniform": lambda t: t.uniform_(-1, 2),
    "exponential": lambda t: t.exponential_(2.0),
    "geometric": lambda t: t.geometric_(0.4),
    "integers": lambda t: t.random_(5),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_is_drawn_in_place_is_one_op_in_pytorch(draw: Callable[[Tensor], Tensor]) -> None:
    eager, ours = pair(Function(lambda s, x: x + s.l(x) * draw(x.new_ones(x.shape[0], 1)), l=nn.Linear(8, 8)))
    for n in (5, 4):
        x, results = torch.randn(n, 8), []
        for m in (eager, ours):
            torch.manual_seed(n)
            results.append(m(x))
        torch.testing.assert_close(*results)
    assert len(ours.fallback_report()) == 1 and not ours.stats()["dynamo_graphs"]


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t[:, :4].contiguous(),
    "a slice": lambda t: t[:, :4],
    "sliced and transposed": lambda t: t[:4].t()[:, :4],
    "transposed": lambda t: t[:4, :4].contiguous().t(),
}


@pytest.mark.parametrize("first", TURNS)
@pytest.mark.parametrize("second", TURNS)
def test_a_view_or_a_copy_of_what_lies_as_an_argument_does_is_written(first: str, second: str) -> None:
    def write(s: Any, x: Tensor) -> Tensor:
        y = x * s.w
        y.detach().reshape(-1).add_(1)
        (z := torch.zeros_like(x)).reshape(-1)[:2] += 3
        return y + z

    eager, ours = pair(Function(write, w=nn.Parameter(torch.ones(4))))
    for n, name in ((4, first), (4, second), (4, first)):
        x = TURNS[name](torch.arange(8.0 * n).reshape(n, 8))
        torch.testing.assert_close(ours(x), eager(x))


@pytest.mark.parametrize("second", TURNS)
def test_what_lies_as_asked_is_written_and_a_copy_is_not(second: str) -> None:
    def write(s: Any, x: Tensor) -> Tensor:
        (z := torch.zeros_like(x)).contiguous().add_(5)
        return x * s.w + z

    eager, ours = pair(Function(write, w=nn.Parameter(torch.ones(4))))
    for name in ("dense", second, "dense"):
        x = TURNS[name](torch.arange(32.0).reshape(4, 8))
        torch.testing.assert_close(ours(x), eager(x))
    assert not ours.fallback_report() and not ours.stats()["dynamo_graphs"]


OF_SEVERAL: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda z: z.split(2)[0],
    "unbind": lambda z: z[None].unbind(0)[0],
    "gone through": lambda z: next(iter([r for r in z[None]])),
    "sorted": lambda z: z.clone().sort(0)[0],
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("take", OF_SEVERAL.values(), ids=OF_SEVERAL)
@pytest.mark.parametrize("first", ["dense", "transposed"])
def test_one_of_several_results_lies_as_what_they_are_of(first: str, take: Callable[[Tensor], Tensor]) -> None:
    def write(s: Any, x: Tensor) -> Tensor:
        taken = take(z := torch.zeros_like(x))
        taken.reshape(-1).add_(5)
        return x * s.w + z + taken.sum()

    eager, ours = pair(Function(write, w=nn.Parameter(torch.ones(4))))
    for name in (first, *TURNS, first):
        x = TURNS[name](torch.arange(32.0).reshape(4, 8))[:4, :4]
        torch.testing.assert_close(ours(x), eager(x))


@pytest.mark.parametrize("first", ["dense", "channels last"])
def test_what_has_a_memory_format_already_is_written_and_a_copy_is_not(first: str) -> None:
    def write(s: Any, x: Tensor) -> Tensor:
        (z := torch.zeros_like(x)).to(memory_format=torch.channels_last).add_(5)
        return x * s.w + z

    eager, ours = pair(Function(write, w=nn.Parameter(torch.ones(()))))
    for turn in range(4):
        x = torch.randn(2, 3, 4, 5)
        if (turn % 2 == 1) == (first == "dense"):
            x = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(ours(x), eager(x))


def test_how_an_argument_lies_does_not_matter_where_another_decides() -> None:
    def attend(s: Any, x: Tensor, mask: Tensor) -> Tensor:
        return s.m(x, x, x, key_padding_mask=mask, need_weights=False)[0]  # fills what it makes of the mask in place

    eager, ours = pair(Function(attend, m=nn.MultiheadAttention(8, 2, batch_first=True)))
    for n in (5, 8, 4, 15, 7, 11):
        assert_same_step(eager, ours, torch.randn(4, n + 1, 8)[:, 1:], torch.arange(n).expand(4, n) > 2)
    assert ours.stats()["graphs"] == 1 and not ours.fallback_report()


def test_warnings_that_are_errors_cost_nothing() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    ours = ORTModule(layer, DebugOptions(fallback="error", capture="export"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(torch.ones(3, 4)).sum().backward()


def test_how_each_of_two_arguments_lies_is_looked_at() -> None:
    def write(s: Any, x: Tensor, y: Tensor) -> Tensor:
        (z := y.clone()).reshape(-1).add_(1)
        return x * s.w + z

    eager, ours = pair(Function(write, w=nn.Parameter(torch.ones(()))))
    square = torch.arange(16.0).reshape(4, 4)
    for x, y in ((square, square), (square.t(), square), (square, square.t()), (square.t(), square.t())):
        assert_same_step(eager, ours, x, y)
    assert ours.stats()["graphs"] == 2


@pytest.mark.parametrize("second", TURNS)
def test_a_window_by_strides_is_of_the_memory_that_a_call_has(second: str) -> None:
    windows = Function(
        lambda s, x: (x.as_strided((3,), (x.shape[1] + 1,)), (x * s.w).as_strided((4,), (1,))), w=torch.ones(1)
    )
    eager, ours = pair(windows)
    for name in ("dense", second):
        x = TURNS[name](torch.arange(32.0).reshape(4, 8))
        for got, want in zip(ours(x), eager(x), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("capture", ["auto", "export", "dynamo"])
@pytest.mark.parametrize("first", [False, True])
def test_arguments_that_share_memory_leave_the_graph_to_others(first: bool, capture: Any) -> None:
    def added(s: Function, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a * b * s.w

    eager = Function(added, w=nn.Parameter(torch.ones(3)))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    apart: list[Callable[[Tensor], tuple[Tensor, Tensor]]] = [lambda x: (x[:3], x[3:])] * 2
    as_one: list[Callable[[Tensor], tuple[Tensor, Tensor]]] = [lambda x: (x[1:4], x[:3]), lambda x: (x[:3], x[:3])]
    natives = []
    for take in (*as_one, *apart) if first else (*apart, *as_one, *apart):
        expected, got = torch.arange(6.0), torch.arange(6.0)
        a, b = ([t.clone() for t in take(x)] if take in apart else take(x) for x in (expected, got))
        want, result = eager(*a), ours(*b)
        torch.testing.assert_close(result, want)
        torch.testing.assert_close([*b, got], [*a, expected])
        natives.append(result.grad_fn.name() == "_RunBackward")
    assert all(natives[-2:]) and natives.count(False) >= (capture != "auto")
