"""Steps that keep to a budget of memory: the same bits, in less of it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from ortmodule_c import DebugOptions, ORTModule
from wrapped import Branching, Function, assert_same_step, two_losses

MIB = 2**20
STRICT = DebugOptions(fallback="error")


def residual(channels: int) -> nn.Module:
    def block(s: Function, x: Tensor) -> Tensor:
        return torch.relu(x + s.second(torch.relu(s.first(x))))

    def part() -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))

    return Function(block, first=part(), second=part())


def images() -> tuple[nn.Module, tuple[Any, ...]]:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), *[residual(8) for _ in range(3)], nn.Flatten())
    return net, (torch.randn(9, 3, 37, 33),)


def layers() -> tuple[nn.Module, tuple[Any, ...]]:
    block = [nn.Linear(65, 130), nn.GELU(), nn.Dropout(0.3), nn.Linear(130, 65), nn.LayerNorm(65), nn.SiLU()]
    return nn.Sequential(nn.Linear(65, 65), *copy.deepcopy(block), *block), (torch.randn(999, 65),)


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    said = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 3}
    ids = torch.randint(0, 99, (19, 37))
    return BertForMaskedLM(BertConfig(vocab_size=99, max_position_embeddings=40, **said)), (ids, (ids > 5).long())


def gpt2() -> tuple[nn.Module, tuple[Any, ...]]:
    config = GPT2Config(vocab_size=99, n_positions=40, n_embd=32, n_head=2, n_layer=3, use_cache=False)
    return GPT2LMHeadModel(config), (torch.randint(0, 99, (19, 37)),)


def recurrent() -> tuple[nn.Module, tuple[Any, ...]]:
    net = Function(lambda s, x: s.head(torch.tanh(s.lstm(x)[0])), lstm=nn.LSTM(6, 9, 2), head=nn.Linear(9, 4))
    return net, (torch.randn(37, 29, 6),)


def in_pytorch() -> tuple[nn.Module, tuple[Any, ...]]:
    """With an op that has no kernel here amid others."""
    net = Function(
        lambda s, x: s.b(torch.logcumsumexp(s.a(x).tanh().exp(), 1).sin().exp()), a=nn.Linear(9, 9), b=nn.Linear(9, 9)
    )
    return net, (torch.randn(4999, 9),)


# And the share of an arena that the least of their budgets reaches.
NETS: list[tuple[Callable[[], tuple[nn.Module, tuple[Any, ...]]], float]]
NETS = [(images, 0.95), (layers, 0.8), (bert, 0.6), (gpt2, 0.6), (recurrent, 1.0), (in_pytorch, 0.9)]


def first_tensor(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def steps(model: ORTModule, args: tuple[Any, ...], n: int = 2) -> list[Tensor]:
    """Results, gradients and buffers of some steps."""
    found = []
    for i in range(n):
        torch.manual_seed(i)
        y = first_tensor(model(*args))
        y.float().square().sum().backward()
        found.append(y.detach())
    return [*found, *[p.grad for p in model.parameters()], *[b.clone() for b in model.buffers()]]


def wrap(net: nn.Module, budget: float | int | None, **more: Any) -> ORTModule:
    return ORTModule(copy.deepcopy(net), more.pop("options", None), memory_budget=budget, **more)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("make", "share"), NETS, ids=lambda f: getattr(f, "__name__", ""))
@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_bits_are_the_same_in_less_memory(make: Any, share: float, precision: Any) -> None:
    if make is recurrent and precision is not None:
        pytest.skip("eager PyTorch has LSTMs under autocast only where oneDNN has")
    torch.manual_seed(0)
    net, args = make()
    arenas, bits = [], []
    for budget in (None, 0.9, 0.5, 0.0):
        model = wrap(net, budget, precision=precision)
        bits.append(steps(model, args))
        arenas.append(model.stats()["arena_bytes"])
        for ours, without in zip(bits[-1], bits[0], strict=True):
            assert torch.equal(ours, without)
    assert all(less <= 1.1 * more for more, less in pairwise(arenas))  # an arena is not packed without gaps
    assert arenas[1] <= max(0.9, share) * arenas[0]
    assert arenas[3] <= share * arenas[0]


@pytest.mark.host
@pytest.mark.filterwarnings("ignore:.*goes through TorchDynamo")
def test_graphs_by_dynamo_keep_to_it() -> None:
    arenas = []
    for budget in (None, 0.0):
        torch.manual_seed(0)
        body = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(9)])
        net, x = Function(lambda s, x: s.tail(s.body(x)), body=body, tail=Branching()), torch.randn(9999, 4)
        model = ORTModule(net, memory_budget=budget)
        assert_same_step(copy.deepcopy(net), model, x)
        arenas.append(model.stats()["arena_bytes"])
        assert model.stats()["dynamo_graphs"] > 1
    assert arenas[1] < arenas[0]


def test_torch_compile_has_it_as_an_option() -> None:
    torch.manual_seed(0)
    net, args = layers()
    net.eval()  # no masks, which Dynamo draws one by one
    plain, ours = copy.deepcopy(net), torch.compile(net, backend="ortmodule_c", options={"memory_budget": 0.0})
    for model in (plain, ours):
        model(*args).square().sum().backward()
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(Exception, match=r"memory_budget is 2\.0, expected a share"):
        torch.compile(copy.deepcopy(net), backend="ortmodule_c", options={"memory_budget": 2.0})(*args)


def test_budget_in_bytes() -> None:
    """What it is for one size is not what it is for another."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
    x = torch.randn(2048, 256)
    unbounded = wrap(net, None)
    steps(unbounded, (x,))
    needed = int(unbounded.stats()["arena_bytes"])
    most = int(0.8 * needed)
    model = wrap(net, most)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bits = steps(model, (x,))
    assert model.stats()["arena_bytes"] <= most
    assert all(map(torch.equal, bits, steps(unbounded, (x,))[:2]))  # results, before gradients are added up
    with pytest.warns(
        UserWarning, match=r"a step takes [\d.]+ MiB at least, more than the memory_budget of [\d.]+ MiB"
    ):
        steps(model, (torch.randn(8192, 256),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, (torch.randn(8192, 256),))


def test_evaluation_is_not_bounded() -> None:
    model = wrap(nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 4)), MIB).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(torch.randn(256, 256))


def test_backwards_of_several_losses_in_any_order() -> None:
    torch.manual_seed(0)
    net, x = two_losses(), torch.randn(50, 4)
    for order in ((0, 1), (1, 0)):
        grads = []
        for budget in (None, 0.0):
            model = wrap(net, budget)
            for _ in range(3):
                model.zero_grad()
                out = model(x)
                out[order[0]].backward(retain_graph=True)
                out[order[1]].backward()
            grads.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *grads))


def test_a_loss_beside_its_logits() -> None:
    """Both may go back, so the plan has a backward for each."""
    torch.manual_seed(0)
    net, (ids,) = gpt2()
    arenas, grads = [], []
    for budget in (None, 0.5):
        model = wrap(net, budget)
        for i in range(2):
            model.zero_grad()
            torch.manual_seed(i)
            model(input_ids=ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
        arenas.append(model.stats()["arena_bytes"])
    assert all(map(torch.equal, *grads))
    assert arenas[1] <= 0.85 * arenas[0]


def test_backward_twice_over_a_retained_graph() -> None:
    torch.manual_seed(0)
    net, args = layers()
    grads = []
    for budget in (None, 0.0):
        model = wrap(net, budget)
        for i in range(2):
            model.zero_grad()
            torch.manual_seed(i)
            loss = model(*args).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_gradients_of_some_inputs_only() -> None:
    torch.manual_seed(0)
    net, (x,) = layers()
    net.eval()
    found = []
    for budget in (None, 0.0):
        model = wrap(net, budget)
        given = x.clone().requires_grad_()
        weights = list(model.parameters())
        found.append(torch.autograd.grad(model(given).square().sum(), [weights[4], given]))
    assert all(map(torch.equal, *found))


def test_an_argument_that_no_gradient_reads_may_change_before_the_backward() -> None:
    net = Function(lambda s, x: ((x + s.w).sin().exp() * s.w).sum(), w=nn.Parameter(torch.randn(500)))
    grads = []
    for make in (copy.deepcopy, lambda m: wrap(m, 0.0, options=STRICT)):
        model, x = make(net), torch.linspace(0, 1, 500)
        loss = model(x)
        x.zero_()
        loss.backward()
        grads.append(next(model.parameters()).grad)
    torch.testing.assert_close(*grads)


def test_what_a_forward_writes_over_is_computed_with_as_it_was() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        h = s.a(x).tanh() * s.scale.clone()
        s.scale.mul_(1.5).add_(h.detach().mean(0))
        return s.b(torch.sin(h * s.scale.clone()).exp())

    torch.manual_seed(0)
    net, x = Function(forward, a=nn.Linear(9, 9), b=nn.Linear(9, 9)).double(), torch.randn(999, 9).double()
    net.register_buffer("scale", torch.ones(9).double())
    eager, ours = net, wrap(net, 0.0, options=STRICT)
    for _ in range(2):
        assert_same_step(eager, ours, x)


def test_running_statistics_are_updated_once() -> None:
    torch.manual_seed(0)
    net, (x,) = images()
    eager = copy.deepcopy(net.double())
    assert_same_step(eager, wrap(net, 0.0, options=STRICT), x.double())


def test_a_wrapper_of_a_wrapper_and_copies_keep_it() -> None:
    torch.manual_seed(0)
    net, args = layers()
    arenas = {}
    for name, budget in (("none", None), ("some", 0.0)):
        first = wrap(net, budget)
        for i, model in enumerate((first, ORTModule(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first)))):
            steps(model, args)
            arenas[name, i] = model.stats()["arena_bytes"]
    assert len({n for (name, _), n in arenas.items() if name == "some"}) == 1
    assert arenas["some", 0] < arenas["none", 0]
    again = ORTModule(wrap(net, 0.0), memory_budget=1.0)
    steps(again, args)
    assert again.stats()["arena_bytes"] == arenas["some", 0]  # 1.0 asks for nothing


@pytest.mark.parametrize(
    ("budget", "kind", "message"),
    [
        ("1GiB", TypeError, "memory_budget is a str, expected a float, a share, or an int, bytes"),
        (True, TypeError, "memory_budget is a bool"),
        (1, ValueError, "memory_budget is 1, expected at least 1048576 bytes, or a share of the memory as a float"),
        (-(2**30), ValueError, "memory_budget is -1073741824"),
        (1.5, ValueError, "memory_budget is 1.5, expected a share from 0.0 to 1.0, or bytes as an int"),
        (-0.1, ValueError, "memory_budget is -0.1"),
        (float("nan"), ValueError, "memory_budget is nan"),
    ],
)
def test_what_is_no_budget(budget: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ORTModule(nn.Linear(2, 2), memory_budget=budget)


@pytest.mark.parametrize("budget", [np.float32(0.5), np.float64(0.5), np.int64(MIB), 2**80])
def test_numbers_of_numpy_are_budgets(budget: Any) -> None:
    net, args = layers()
    steps(wrap(net, budget, options=STRICT), args, 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rows", [0, 1, 65])  # 65 is the number of columns too
def test_sizes_at_the_edge(rows: int, precision: Any) -> None:
    torch.manual_seed(0)
    net, _ = layers()
    x = torch.randn(rows, 65)
    outcomes = [steps(wrap(net, b, precision=precision, options=STRICT), (x,)) for b in (None, 0.0)]
    assert all(map(torch.equal, *outcomes))
