"""What a training script may do with a wrapped module gives what eager gives."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule
from wrapped import Function, assert_same_state, assert_same_step, close, float_sum, mlp, pair


def linear_of(function: Any) -> Function:
    return Function(function, l=nn.Linear(4, 4))


def test_forms_of_a_call() -> None:
    def forward(s: Function, a: Any, b: Any = None, *rest: Any, c: float = 1.0, **more: Any) -> torch.Tensor:
        return s.l(a) * c + (0 if b is None else b) + sum(rest) + more.get("d", 0)

    eager, ours = pair(linear_of(forward))
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    for args, kwargs in (
        ((x,), {}),
        ((x, y), {}),
        ((x, y, y, y), {}),
        ((x,), {"b": y, "c": 2.0}),
        ((), {"a": x, "d": y}),
        ((), {"d": y, "a": x}),
    ):
        assert_same_step(eager, ours, *args, **kwargs)
    assert not ours.fallback_report()


def test_unused_arguments_and_parameters() -> None:
    eager, ours = pair(Function(lambda s, a, unused=None: s.l(a), l=nn.Linear(4, 4), idle=nn.Linear(2, 2)))
    assert_same_step(eager, ours, torch.randn(2, 4), unused=torch.randn(1))


def test_frozen_parameters_get_no_gradient() -> None:
    module = mlp()
    module[0].requires_grad_(False)
    assert_same_step(*pair(module), torch.randn(2, 6))


def test_everything_frozen() -> None:
    eager, ours = pair(mlp().requires_grad_(False))
    assert not assert_same_step(eager, ours, torch.randn(2, 6)).requires_grad


def test_tied_weights() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    eager, ours = pair(module)
    assert_same_step(eager, ours, torch.randn(3, 4))
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in eager.named_parameters()]


def test_batch_norm_statistics() -> None:
    eager, ours = pair(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)))
    for _ in range(3):
        assert_same_step(eager, ours, torch.randn(2, 3, 6, 6))
    before = copy.deepcopy(ours.state_dict())
    eager.eval()
    ours.eval()
    assert_same_step(eager, ours, torch.randn(2, 3, 6, 6))
    close(dict(ours.state_dict()), dict(before))


def test_buffers_changed_in_place_and_assigned() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("average", torch.zeros(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.detach().sum(0)
            self.average = 0.5 * self.average + x.detach().mean(0)
            return self.l(x) * self.seen.sum() + self.average

    eager, ours = pair(Counting())
    for _ in range(3):
        assert_same_step(eager, ours, torch.randn(3, 2))


def test_dropout_follows_manual_seed() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)))
    x = torch.randn(16, 8)

    def step(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        ours.zero_grad()
        torch.manual_seed(seed)
        out = ours(x)
        out.sum().backward()
        return out.detach(), ours.get_parameter("0.weight").grad.clone()

    (a, ga), (b, gb), (c, _) = step(1), step(1), step(2)
    assert torch.equal(a, b) and torch.equal(ga, gb) and not torch.equal(a, c)
    zeros = (a == 0).float().mean().item()
    assert 0.4 < zeros < 0.6
    # The gradient is that of the very mask the forward drew.
    scaled = (a != 0).float() * 2
    close(ga, scaled.T @ x, "gradient")
    ours.eval()
    assert torch.equal(ours(x), ours.module(x)) or bool((ours(x) - ours.module(x)).abs().max() < 1e-5)


def test_seed_is_drawn_only_for_random_plans() -> None:
    ours = ORTModule(mlp())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    ours(torch.randn(2, 6, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert torch.equal(torch.rand(1), expected)


def test_accumulation_and_zero_grad() -> None:
    eager, ours = pair(mlp())
    for _ in range(2):
        assert_same_step(eager, ours, torch.randn(3, 6))
    for set_to_none in (False, True):
        for m in (eager, ours):
            m.zero_grad(set_to_none=set_to_none)
        assert_same_step(eager, ours, torch.randn(3, 6))
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (eager, ours)]
    close(norms[1], norms[0])
    assert_same_state(ours, eager)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
        torch.optim.AdamW,
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.AdamW, foreach=True, amsgrad=True),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adafactor,
    ],
)
def test_optimizers(optimizer: Any) -> None:
    eager, ours = pair(mlp())
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    losses: list[list[float]] = []
    for m in (eager, ours):
        steps = optimizer(m.parameters(), lr=0.01)
        losses.append([])
        for _ in range(10):
            steps.zero_grad()
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            steps.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_several_forwards_before_one_backward() -> None:
    eager, ours = pair(mlp())
    xs = [torch.randn(2, 6) for _ in range(3)]
    for m in (eager, ours):
        sum(m(x).pow(2).sum() for x in xs).backward()
    assert_same_state(ours, eager)


def test_interleaved_and_dropped_forwards() -> None:
    eager, ours = pair(mlp())
    x, y = torch.randn(2, 6), torch.randn(3, 6)
    for m in (eager, ours):
        first = m(x).sum()
        m(y)  # never used
        second = m(y).sum()
        first.backward()
        second.backward()
    assert_same_state(ours, eager)


def test_two_wrapped_modules_and_a_plain_one_in_a_chain() -> None:
    parts = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    copies = copy.deepcopy(parts)
    ours = [ORTModule(copies[0]), copies[1], ORTModule(copies[2])]
    x = torch.randn(2, 4)
    for a, b, c in (parts, ours):
        c(torch.tanh(b(torch.tanh(a(x))))).sum().backward()
    for p, q in zip(parts, copies, strict=True):
        assert_same_state(q, p)


def test_a_wrapped_module_inside_a_wrapped_module() -> None:
    inner = nn.Linear(4, 4)
    eager = nn.Sequential(inner, nn.Tanh())
    ours = ORTModule(nn.Sequential(ORTModule(copy.deepcopy(inner)), nn.Tanh()))
    x = torch.randn(2, 4)
    close(ours(x), eager(x))


def test_retain_graph() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(2, 6)
    for m in (eager, ours):
        loss = m(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_state(ours, eager)


def test_retain_graph_with_dropout_repeats_the_same_mask() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5)))
    loss = ours(torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    once = ours.get_parameter("0.weight").grad.clone()
    loss.backward()
    close(ours.get_parameter("0.weight").grad, 2 * once)


def test_gradients_of_some_outputs_only() -> None:
    eager, ours = pair(linear_of(lambda s, x: (s.l(x).sum(), s.l(x) * 2, s.l(x).exp())))
    x = torch.randn(2, 4)
    for which in ((0,), (1,), (2, 0), (0,)):
        for m in (eager, ours):
            out = m(x)
            sum(out[i].sum() for i in which).backward()
        assert_same_state(ours, eager)


def test_outputs_that_carry_no_gradient() -> None:
    eager, ours = pair(
        linear_of(
            lambda s, x: (s.l(x), s.l(x).argmax(1), x > 0, s.l(x).detach(), torch.ones(2), 5, None, "text", x.shape[0])
        )
    )
    assert_same_step(eager, ours, torch.randn(2, 4))


def test_kinds_of_outputs() -> None:
    def outputs(s: Function, x: torch.Tensor) -> Any:
        y = s.l(x)
        return {"a": y, "b": [y, (y * 2, x)]}

    eager, ours = pair(linear_of(outputs))
    x = torch.randn(2, 4)
    got = assert_same_step(eager, ours, x)
    assert got["b"][0] is got["a"], "an output given twice is one tensor"
    assert got["b"][1][1] is x, "an output that is an input is that input"


def test_an_output_changed_in_place_by_the_user() -> None:
    eager, ours = pair(linear_of(lambda s, x: s.l(x)))
    x = torch.randn(2, 4)
    for m in (eager, ours):
        out = m(x)
        out *= 3
        out.sum().backward()
    assert_same_state(ours, eager)


def test_an_input_changed_in_place_by_the_module() -> None:
    def forward(s: Function, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return s.l(x)

    eager, ours = pair(linear_of(forward))
    x, y = torch.zeros(2, 4), torch.zeros(2, 4)
    close(ours(y), eager(x))
    close(y, x)


def test_gradients_of_inputs() -> None:
    eager, ours = pair(linear_of(lambda s, x, y: s.l(x) * y))
    grads = []
    for m in (eager, ours):
        torch.manual_seed(0)
        x, y = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        m(x.tanh(), y).sum().backward()
        grads.append((x.grad, y.grad))
    close(grads[1], grads[0])


def test_inputs_made_in_inference_mode() -> None:
    with torch.inference_mode():
        mask = torch.ones(2, 4)
    assert_same_step(*pair(Function(lambda s, x, mask: s.l(x) + mask, l=nn.Linear(4, 4))), torch.randn(2, 4), mask)


def test_one_tensor_as_two_arguments() -> None:
    eager, ours = pair(linear_of(lambda s, x, y: s.l(x) * y))
    x = torch.randn(2, 4, requires_grad=True)
    assert_same_step(eager, ours, x, x)
    z = torch.randn(2, 4)
    assert_same_step(eager, ours, z, torch.ones(2, 4))


def test_an_argument_whose_gradient_is_not_taken_is_apart_from_autograd() -> None:
    """Nothing runs behind it, nothing there is freed, and its producers get no gradient instead of zeros."""
    forwards: dict[str, Any] = {
        "detached": lambda s, x, h: s.l(x + h.detach()),
        "under no_grad": lambda s, x, h: s.l(x) + without_gradient(h),
        "compared": lambda s, x, h: s.l(x) * (h > 0),
        "unused": lambda s, x, h: s.l(x),
    }
    for name, forward in forwards.items():
        for m in pair(linear_of(forward)):
            h = torch.zeros(2, 4)
            for _ in range(3):
                h = m(torch.ones(2, 4), h)
                h.sum().backward()  # not twice through one graph
            before = nn.Linear(4, 4)
            h, met = before(torch.ones(2, 4)), list[Any]()
            h.register_hook(met.append)
            m(torch.ones(2, 4), h).sum().backward()
            assert (met, before.weight.grad) == ([], None), name


def without_gradient(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h * 2


def test_steps_have_a_gradient_of_zeros() -> None:
    steps = (torch.round, torch.floor, torch.ceil, torch.sign, lambda y: torch.div(y, 0.3, rounding_mode="floor"))
    for step in steps:
        eager, ours = pair(Function(lambda s, x, f=step: f(s.l(x)), l=nn.Linear(4, 4)))
        assert_same_step(eager, ours, torch.randn(3, 4))
        assert ours.l.weight.grad is not None


def test_views_and_strides_of_inputs() -> None:
    eager, ours = pair(linear_of(lambda s, x: s.l(x)))
    assert_same_step(eager, ours, torch.randn(4, 2).t())
    assert_same_step(eager, ours, torch.randn(2, 8)[:, ::2])
    assert_same_step(eager, ours, torch.randn(1, 4).expand(3, 4))


def test_no_grad_inside_the_module() -> None:
    def forward(s: Function, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = s.l(x)
        return s.l(x) + y

    assert_same_step(*pair(linear_of(forward)), torch.randn(2, 4))


def test_hooks_on_parameters() -> None:
    eager, ours = pair(mlp())
    for m in (eager, ours):
        for p in m.parameters():
            p.register_hook(lambda grad: grad * 2)
    assert_same_step(eager, ours, torch.randn(3, 6))


def test_backward_in_another_thread() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(3, 6)
    for m in (eager, ours):
        thread = threading.Thread(target=m(x).pow(2).sum().backward)
        thread.start()
        thread.join()
    assert_same_state(ours, eager)


def test_modes_in_turn() -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    for n in (4, 4, 3):
        for m in (eager, ours):
            m.train()
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 6))
        for training in (False, True):
            for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with context():
                    x = torch.randn(n, 6)
                    a, b = eager.train(training)(x), ours.train(training)(x)
                    close(b, a)
                    assert b.requires_grad == a.requires_grad and b.is_inference() == a.is_inference()
        assert_same_state(ours, eager)
    assert not ours.fallback_report()


def test_parameters_changed_between_steps() -> None:
    eager, ours = pair(mlp())
    start = copy.deepcopy(eager.state_dict())

    def load(m: Any) -> None:
        m.load_state_dict(copy.deepcopy(start))

    def assign(m: Any) -> None:
        m.load_state_dict(copy.deepcopy(start), assign=True)

    def set_data(m: Any) -> None:
        m[0].weight.data = torch.ones(8, 6)

    def replace(m: Any) -> None:
        m[2].bias = nn.Parameter(torch.ones(3))

    def freeze(m: Any) -> None:
        m[0].requires_grad_(False)

    def unfreeze(m: Any) -> None:
        m[0].requires_grad_(True)

    for act in (lambda m: None, load, assign, set_data, replace, freeze, unfreeze):
        for m in (eager, ours):
            m.zero_grad()
            act(m)
        assert_same_step(eager, ours, torch.randn(3, 6))
        for m in (eager, ours):
            torch.optim.SGD(m.parameters(), lr=0.1).step()


def test_state_loaded_between_forward_and_backward() -> None:
    for m in pair(mlp()):
        loss = m(torch.randn(3, 6)).pow(2).sum()
        m.load_state_dict(copy.deepcopy(m.state_dict()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_kept_by_the_user_stay() -> None:
    ours = ORTModule(mlp())
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(4):
        ours.zero_grad()
        ours(torch.randn(3, 6) * i).pow(2).sum().backward()
        kept += [(p.grad, p.grad.clone()) for p in ours.parameters()]
    assert all(torch.equal(a, b) for a, b in kept)


def test_some_gradients_only() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(3, 6)
    for m in (eager, ours):
        m(x).pow(2).sum().backward(inputs=[m[2].weight])
    assert_same_state(ours, eager)
    few = [torch.autograd.grad(m(x).pow(2).sum(), [m[0].bias, m[2].weight]) for m in (eager, ours)]
    close(few[1], few[0])


def test_double_precision_is_computed_here() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    eager, ours = pair(net)
    assert_same_step(eager, ours, torch.randn(4, 6, dtype=torch.float64))
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-11)
    assert not ours.fallback_report()


@pytest.mark.parametrize("way", ["weight_norm", "spectral_norm"])
def test_parametrizations(way: str) -> None:
    parametrize = getattr(nn.utils.parametrizations, way)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(parametrize(nn.Linear(6, 8)), nn.Tanh()))
    ours = ORTModule(models[1])
    for _ in range(3):
        for m in (models[0], ours):
            m.zero_grad()
        assert_same_step(models[0], ours, torch.randn(4, 6))
    assert not ours.fallback_report()


def test_autocast() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = eager(x), ours(x)
    assert b.dtype == torch.bfloat16
    torch.testing.assert_close(b, a, rtol=0.02, atol=0.02)
    float_sum(b).backward()


def test_state_is_freed_with_the_graph() -> None:
    ours = ORTModule(mlp())
    session = None
    for _ in range(3):
        loss = ours(torch.randn(2, 6)).sum()
        session = next(iter(ours._ort_graphs._graphs.values())).runner.session
        assert session.stats()["runs_live"] == 1
        loss.backward()
        assert session.stats()["runs_live"] == 0
    ours(torch.randn(2, 6))
    assert session.stats()["runs_live"] == 0


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_random_numbers_are_drawn_only_where_pytorch_draws_some(p: float, train: bool) -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.scaled_dot_product_attention(x, x, x) + nn.functional.dropout(x, p, m.training)
        return nn.functional.dropout(y, p, m.training)

    states = []
    for m in pair(Function(forward).train(train)):
        torch.manual_seed(1)
        m(torch.ones(2, 3, 4, requires_grad=True)).sum().backward()
        states.append(torch.equal(torch.get_rng_state(), torch.manual_seed(1).get_state()))
    assert states[0] == states[1]


UNUSED: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: torch.rand(3) * 2,
    "of a shape": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "in place": lambda x: x.detach().clone().uniform_(),
    "a permutation": lambda x: torch.randperm(5),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize("draw", UNUSED.values(), ids=UNUSED)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_numbers_that_nobody_uses_are_drawn_as_in_eager(draw: Callable[[Tensor], Any], capture: Any) -> None:
    eager = Function(lambda s, x: (draw(s.l(x)), s.l(x) * torch.rand(3), draw(x))[1], l=nn.Linear(3, 3))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    for _ in range(2):
        found = []
        for m in (eager, ours):
            torch.manual_seed(7)
            found.append((m(torch.ones(3)), torch.rand(1)))
        close(found[1], found[0])
    assert ours.stats()["graphs"] == 1


LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: torch.randn_like(y.transpose(1, 2)),
    "channels last": lambda y: torch.rand_like(y[None].to(memory_format=torch.channels_last)),
    "repeated": lambda y: torch.rand_like(y[:, :1].transpose(1, 2).expand(-1, -1, 4)),
    "of each": lambda y: torch.bernoulli(y.transpose(0, 1).sigmoid()),
    "two that lie differently": lambda y: torch.normal(y.transpose(0, 2), y.square().permute(2, 1, 0).contiguous()),
    "dense in another format": lambda y: torch.randn_like(y.mT, memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize("draw", LIKE.values(), ids=LIKE)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_numbers_are_drawn_in_the_order_in_which_an_operand_lies(
    draw: Callable[[Tensor], Tensor], capture: Any
) -> None:
    eager = Function(lambda s, x: draw(s.l(x)), l=nn.Linear(7, 5))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    for rows in (3, 3, 6):
        x, found = torch.randn(4, rows, 7), []
        for m in (eager, ours):
            torch.manual_seed(7)
            found.append(m(x))
        close(found[1], found[0])
    assert ours.stats()["graphs"] > 0
