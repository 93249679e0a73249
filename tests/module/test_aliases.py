"""Results that share memory, and changes in place that autograd does not see: as in eager, or told and run there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule
from ortmodule_c.errors import ORTModuleError
from wrapped import Function, assert_same_step, pair


def native(function: Callable[..., Any], **members: Any) -> ORTModule:
    """A module that may not run in PyTorch."""
    return ORTModule(Function(function, **members), DebugOptions(fallback="error", capture="export"))


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


VIEWS = {
    "view": lambda s, x: x.view(-1),
    "first row": lambda s, x: x[0],
    "transposed": lambda s, x: x.mT,
    "contiguous": lambda s, x: x.contiguous(),
    "cast to its own dtype": lambda s, x: x.float(),
    "second half": lambda s, x: x.chunk(2, 1)[1],
    "detached": lambda s, x: x.detach()[1:],
    "data": lambda s, x: x.data,
    "dropout in evaluation": lambda s, x: F.dropout(x, 0.5, False),
    "dropout of nothing": lambda s, x: F.dropout(x, 0.0, True),
    "itself": lambda s, x: x,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_result_that_is_a_view_of_an_input_shares_its_memory(name: str) -> None:
    x = torch.zeros(4, 4)
    native(VIEWS[name])(x).add_(1)
    assert x.sum() == VIEWS[name](None, torch.ones(4, 4)).sum()


def test_a_view_of_an_input_has_the_gradient_of_eager() -> None:
    assert_same_step(*pair(Function(lambda s, x: (x[0].view(-1), x * 2))), ones(2, 3, 2))


def test_a_parameter_returned_is_the_parameter() -> None:
    ours = native(lambda s, x: (s.weight, s.weight[0], x * s.weight), weight=nn.Parameter(torch.zeros(2, 2)))
    whole, row, _ = ours(torch.ones(2, 2))
    assert whole is ours.weight
    with torch.no_grad():
        row.add_(1)
    assert ours.weight.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("source", ["input", "parameter", "buffer"])
def test_a_clone_is_a_snapshot(source: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return {"input": x, "parameter": s.weight, "buffer": s.running}[source].clone()

    ours = native(forward, weight=nn.Parameter(torch.zeros(2)))
    ours.module.register_buffer("running", torch.zeros(2))
    x = torch.zeros(2)
    with torch.no_grad():
        ours(x).add_(1)
    assert not any(t.any() for t in (x, ours.weight, ours.running))


def test_a_clone_taken_before_a_change_keeps_the_old_value() -> None:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        before = x.clone()
        x.add_(1)
        return before, x

    x = torch.zeros(2)
    before, after = native(forward)(x)
    assert after is x
    assert (before.tolist(), x.tolist()) == ([0, 0], [1, 1])


def test_results_that_are_views_of_another_result_share_its_memory() -> None:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = x.tanh()
        return hidden[:, 0], hidden, hidden.view(-1), hidden

    first, hidden, flat, again = native(forward)(torch.zeros(2, 3))
    assert again is hidden
    first.add_(1)
    assert flat.tolist() == [1, 0, 0, 1, 0, 0]
    assert_same_step(*pair(Function(forward)), ones(2, 3))


def test_results_that_are_views_of_a_tensor_that_is_no_result_share_its_memory() -> None:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = x.tanh()
        return hidden[:, 0], hidden[1:], x * 2

    column, rest, _ = native(forward)(torch.zeros(2, 3))
    column.add_(1)
    assert rest.tolist() == [[1, 0, 0]]
    assert_same_step(*pair(Function(forward)), ones(2, 3))


def test_results_with_the_same_value_but_not_the_same_memory_stay_apart() -> None:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = x.tanh()
        return hidden, hidden.clone()

    hidden, copy = native(forward)(torch.zeros(2))
    hidden.add_(1)
    assert copy.tolist() == [0, 0]


def test_a_result_that_is_contiguous_only_for_some_arguments_is_not_its_argument_for_others() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        copy = x.contiguous()
        copy.sub_(1)
        return copy

    x = torch.ones(1, 3).expand(2, 3)
    assert not native(forward)(x).any()
    assert x.all()


def test_parts_that_do_not_overlap_run_natively() -> None:
    native(lambda s, x: x.tanh().chunk(2, 1))(ones(2, 4))
    native(lambda s, x: (x.tanh() * 1)[:, :3])(ones(2, 4))


# Changes in place: the forward, whose result must have eager's value and gradient.


def clamped_without_gradients(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    with torch.no_grad():
        h.clamp_(0, 1)
    return h * 3


def clamped_through_an_alias(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.detach().clamp_(0, 1)
    return h * 3


def clamped_data(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.data.clamp_(0, 1)
    return h * 3


def alias_of_what_is_changed(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    alias = h.detach()
    h.mul_(x.detach())
    return h + alias


def detached_in_place(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.detach_()
    return h * x


def argument_detached_in_place(s: Any, x: Tensor) -> Tensor:
    x.detach_()
    return x * torch.ones(2, 2, requires_grad=False)


def own_leaf(s: Any, x: Tensor) -> Tensor:
    return x.detach().requires_grad_() * x


def view_made_without_gradients(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        row = x[0]
    return row * 2


def gradients_inside_none(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = x * 2
        with torch.enable_grad():
            y = h * x
        z = y * 3
    return y + z + h


def filled_without_gradients(s: Any, x: Tensor) -> Tensor:
    mask = torch.zeros_like(x)
    with torch.no_grad():
        mask.add_(x)
        mask[0] = x.exp()[0]
    return mask * x


def changed_after_dropout_of_nothing(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    F.dropout(h, 0.5, False).add_(1)
    F.dropout(h, 0.0, True, inplace=True)
    return h * x


def changed_through_hidden_aliases(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.type_as(x)[0].add_(1)
    return h * x


def changed_through_broadcast_tensors(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    torch.broadcast_tensors(x, h)[1].unsqueeze(0).add_(1)
    return h * x


def changed_through_unfold(s: Any, x: Tensor) -> Tensor:
    h = x * 2
    h.unfold(0, 1, 3).add_(1)
    return h * x


def dropout_of_nothing_without_gradients(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.dropout(x * 2, 0.5, False)[0]
    return scale * x


def changed_constant(s: Any, x: Tensor) -> Tensor:
    steps = torch.tensor([1.0, 2.0])
    steps[:1].add_(1)
    return steps * x


FOLLOWED = [
    dropout_of_nothing_without_gradients,
    changed_constant,
    gradients_inside_none,
    filled_without_gradients,
    changed_after_dropout_of_nothing,
]
REFUSED = [
    clamped_without_gradients,
    clamped_through_an_alias,
    clamped_data,
    alias_of_what_is_changed,
    detached_in_place,
    argument_detached_in_place,
    own_leaf,
    view_made_without_gradients,
    changed_through_hidden_aliases,
    changed_through_broadcast_tensors,
    changed_through_unfold,
]


@pytest.mark.parametrize("forward", FOLLOWED, ids=lambda f: f.__name__)
def test_a_change_in_place_is_followed(forward: Callable[..., Any]) -> None:
    native(forward)(ones(2, 2))
    assert_same_step(*pair(Function(forward)), torch.randn(2, 2, requires_grad=True))


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_change_in_place_that_histories_see_differently_runs_in_pytorch(forward: Callable[..., Any]) -> None:
    with pytest.raises(ORTModuleError):
        native(forward)(ones(2, 2))
    assert_same_step(*pair(Function(forward)), torch.randn(2, 2, requires_grad=True))


@pytest.mark.parametrize("forward", REFUSED[:3], ids=lambda f: f.__name__)
def test_nothing_is_refused_where_nothing_has_gradients(forward: Callable[..., Any]) -> None:
    x = torch.randn(2, 2)
    assert torch.equal(native(forward)(x), forward(None, x))


def test_no_grad_under_autocast_stops_gradients() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * x).sum()
        return x * scale

    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(*pair(Function(forward)), torch.randn(3, requires_grad=True))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_change_of_one_argument_shows_in_another_that_shares_its_memory() -> None:
    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    for first_shares in (False, True):
        ours = ORTModule(Function(forward))
        for shares in (first_shares, not first_shares, first_shares):
            x = torch.ones(2)
            assert ours(x, x if shares else torch.ones(2)).tolist() == ([4, 4] if shares else [2, 2])
            assert x.tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_change_of_an_alias_without_elements_comes_before_what_is_saved() -> None:
    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        y.sub_(1)
        return F.hardswish(x)

    x = torch.zeros(0, requires_grad=True)
    ORTModule(Function(forward))(x, x.detach()).sum().backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_an_expanded_argument_is_changed_as_in_eager() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        x[0] = 1
        return x * 2

    ours = ORTModule(Function(forward))
    for x in (torch.zeros(3), torch.zeros(1).expand(3)):
        ours(x)
        assert x[0] == 1


@pytest.mark.parametrize(
    "value", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, requires_grad=True)], ids=str
)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_buffer_set_to_a_tensor_of_another_kind(value: Tensor) -> None:
    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        s.running = y * 2
        return x + s.running.sum()

    eager, ours = pair(Function(forward))
    for m in (eager, ours.module):
        m.register_buffer("running", torch.zeros(2))
    eager(torch.zeros(()), value)
    ours(torch.zeros(()), value)
    assert ours.running.requires_grad == eager.running.requires_grad
    torch.testing.assert_close(ours.running, eager.running)


@pytest.mark.parametrize("view", [lambda z: z.t().view(-1), lambda z: z.t().reshape(-1)[1:], lambda z: z.t().flatten()])
def test_a_view_of_a_result_that_does_not_lie_densely_is_one(view: Callable[[Tensor], Tensor]) -> None:
    def both(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        z = x.t() * 2
        return (x * s.w).sum(), z, view(z)

    for model in pair(Function(both, w=nn.Parameter(torch.ones(1)))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss, z, result = model(torch.arange(6.0).reshape(2, 3))
        loss.backward()
        result.add_(100)
        torch.testing.assert_close(z.t().flatten()[-2:], torch.tensor([108.0, 110.0]))
