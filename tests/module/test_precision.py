"""`ORTModule(module, precision=...)`: what it computes in, whatever surrounds it; parameters stay as they are."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule, verify
from wrapped import Function, float_sum

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in module.named_parameters()}


def assert_close(ours: Tensor, eager: Tensor, tolerance: float) -> None:
    """As parts of the largest element."""
    assert ours.dtype is eager.dtype
    assert (ours - eager).abs().max() <= tolerance * eager.abs().max()


@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize("precision", HALVES)
def test_a_step_is_that_of_eager_under_autocast(precision: str, capture: Any) -> None:
    eager = network()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture), precision=precision)
    x = torch.randn(4, 5)
    given = [x.clone().requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", HALVES[precision]):
        want = eager(given[0])
    got = ours(given[1])
    assert got.dtype is torch.float32
    assert_close(got, want.float(), TOLERANCE[precision])
    for out in (want, got):
        float_sum(out).backward()
    assert_close(given[1].grad, given[0].grad, TOLERANCE[precision])
    for of_eager, of_ours in zip(gradients(eager).values(), gradients(ours).values(), strict=True):
        assert_close(of_ours, of_eager, TOLERANCE[precision])
    assert not ours.fallback_report()


@pytest.mark.parametrize("precision", HALVES)
def test_it_is_not_that_of_float32(precision: str) -> None:
    x = torch.randn(4, 5)
    assert not torch.equal(ORTModule(network(), precision=precision)(x), ORTModule(network())(x))


@pytest.mark.parametrize("outer", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["fp32", *HALVES])
def test_it_is_the_same_whatever_surrounds_it(precision: str, outer: torch.dtype | None) -> None:
    ours, x = ORTModule(network(), precision=precision), torch.randn(4, 5)
    want = ours(x)
    with torch.autocast("cpu", outer) if outer else contextlib.nullcontext():
        got = ours(x)
        assert torch.is_autocast_enabled("cpu") == (outer is not None)
    assert torch.equal(got, want)


def test_without_it_the_caller_decides() -> None:
    ours, x = ORTModule(network()), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype is torch.bfloat16


Pair = namedtuple("Pair", "left right")


@dataclass
class Fields:
    left: Tensor
    right: list[Tensor]


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda y: (y, y + 1), lambda out: [*out]),
    "list": (lambda y: [y, (y + 1,)], lambda out: [out[0], *out[1]]),
    "dict": (lambda y: {"a": y, "b": {"c": y + 1}}, lambda out: [out["a"], out["b"]["c"]]),
    "namedtuple": (lambda y: Pair(y, y + 1), lambda out: [out.left, out.right]),
    "dataclass": (lambda y: Fields(y, [y + 1]), lambda out: [out.left, *out.right]),
}


@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_outputs_come_out_in_float32_in_containers_too(name: str, capture: Any) -> None:
    make, parts = CONTAINERS[name]
    module = Function(lambda m, x: make(m.layer(x)), layer=nn.Linear(5, 3))
    out = ORTModule(module, DebugOptions(capture=capture), precision="bf16")(torch.randn(2, 5))
    assert type(out) is type(make(torch.zeros(1)))
    assert [t.dtype for t in parts(out)] == [torch.float32] * 2


def test_outputs_that_are_not_of_16_bits_are_left_alone() -> None:
    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return m.layer(x).argmax(-1), x.double(), m.layer(x) > 0

    out = ORTModule(Function(forward, layer=nn.Linear(5, 3)), precision="bf16")(torch.randn(2, 5))
    assert [t.dtype for t in out] == [torch.int64, torch.float64, torch.bool]


@pytest.mark.parametrize("precision", ["fp32", *HALVES])
def test_a_module_in_bfloat16_keeps_its_parameters(precision: str) -> None:
    module = nn.Linear(5, 3).bfloat16()
    ours = ORTModule(module, precision=precision)
    out = ours(torch.randn(2, 5).bfloat16())
    assert out.dtype is (torch.bfloat16 if precision == "fp32" else torch.float32)
    out.sum().backward()
    assert {t.dtype for p in module.parameters() for t in (p, p.grad)} == {torch.bfloat16}


@pytest.mark.parametrize("precision", HALVES)
def test_evaluation_is_in_the_same_precision(precision: str) -> None:
    eager = network().eval()
    ours, x = ORTModule(copy.deepcopy(eager), precision=precision), torch.randn(4, 5)
    with torch.no_grad():
        got = ours(x)
        with torch.autocast("cpu", HALVES[precision]):
            want = eager(x)
    assert_close(got, want.float(), TOLERANCE[precision])


def test_the_state_is_that_of_the_module() -> None:
    module = network()
    ours = ORTModule(module, precision="bf16")
    assert {n: t.dtype for n, t in ours.state_dict().items()} == dict.fromkeys(module.state_dict(), torch.float32)


@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_have_it(twin: Any) -> None:
    ours, x = ORTModule(network(), precision="bf16"), torch.randn(4, 5)
    assert torch.equal(twin(ours)(x), ours(x))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_pytorch_runs_what_it_has_to_in_the_same_precision() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return m.layer(x)

    module = Function(forward, layer=nn.Linear(5, 3), seen=[])
    ours = ORTModule(module, DebugOptions(capture="export"), precision="fp16")
    assert ours(torch.randn(2, 5)).dtype is torch.float32
    assert ours.fallback_report()
    assert module.seen[-1] is torch.float16


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_graphs_of_torchdynamo_are_in_the_same_precision() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.first(x)
        print("", end="")
        return m.second(y)

    torch.manual_seed(0)
    module = Function(forward, first=nn.Linear(5, 3), second=nn.Linear(3, 2))
    ours, x = ORTModule(copy.deepcopy(module), precision="bf16"), torch.randn(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        want = module(x)
    got = ours(x)
    assert_close(got, want.float(), TOLERANCE["bf16"])
    assert ours.stats()["dynamo_graphs"] == 2


@pytest.mark.parametrize("precision", ["fp32", *HALVES])
def test_a_step_can_be_verified(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours = ORTModule(network(), precision=precision)
    assert verify(ours, torch.randn(4, 5, requires_grad=True)).ok, capsys.readouterr()


def test_hooks_of_the_wrapper_see_what_the_caller_gets() -> None:
    module = nn.Linear(5, 3)
    ours, seen = ORTModule(module, precision="bf16"), []
    ours.register_forward_hook(lambda _m, _args, out: seen.append(out.dtype))
    ours(torch.randn(2, 5))
    assert seen == [torch.float32]


@pytest.mark.parametrize("precision", ["bfloat16", "16-mixed", 16, torch.bfloat16, ""])
def test_others_are_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=r'precision is .*, expected one of "fp32", "bf16", "fp16" or None'):
        ORTModule(nn.Linear(2, 2), precision=precision)


# Loss scaling


def scaled_steps(model: nn.Module, batches: list[tuple[Tensor, Tensor]], scale: float) -> tuple[list[Any], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    seen = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), loss.item()))
    return seen, [p.detach().clone() for p in model.parameters()]


def test_the_scale_of_a_loss_is_halved_and_the_step_skipped_where_a_gradient_overflows() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(6)]
    before = [p.detach().clone() for p in network().parameters()]
    once, parameters = scaled_steps(ORTModule(network(), precision="fp16"), batches[:1], 2.0**24)
    assert once[0][0] == 2.0**23
    assert all(map(torch.equal, parameters, before))

    eager = network()
    eager.forward = torch.autocast("cpu", torch.float16)(eager.forward)  # type: ignore[method-assign]
    seen, parameters = scaled_steps(ORTModule(network(), precision="fp16"), batches, 2.0**12)
    of_eager, want = scaled_steps(eager, batches, 2.0**12)
    assert [s for s, _ in seen] == [s for s, _ in of_eager]
    assert seen[-1][0] > 2.0**12  # it has grown again
    for p, q in zip(parameters, want, strict=True):
        assert_close(p, q, TOLERANCE["fp16"])


def test_small_gradients_need_a_scale_in_fp16() -> None:
    model, x = ORTModule(nn.Linear(4, 4, bias=False), precision="fp16"), torch.randn(3, 4)
    for scale, is_zero in ((1.0, True), (2.0**16, False)):
        model.zero_grad()
        (model(x).mean() * 1e-8 * scale).backward()
        assert (model.weight.grad.count_nonzero() == 0) == is_zero


def test_a_wrapper_around_a_wrapper_has_its_terms() -> None:
    inner = ORTModule(nn.Linear(40, 40), precision="bf16", outputs=["loss"])
    assert ORTModule(inner)._ort_terms == inner._ort_terms
    assert ORTModule(inner, precision="fp32")._ort_terms.precision == "fp32"
