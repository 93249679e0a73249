"""The cost model of a GPU: counts of a plan beside those by hand, and what follows from them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu_model import (
    ASSUMED,
    GPUS,
    Step,
    Value,
    goals,
    kernels_of,
    kind_of,
    occupancy,
    plan_of,
    predicted,
    seconds_of,
    steps_of,
    waves,
)

pytestmark = pytest.mark.host
A100, H100, H200 = GPUS

# A product, a bias and a ReLU in one program, attention, a picked row.
GRAPH = """\
input %x : bf16[64,32] grad
input %w : bf16[32,48] grad
input %b : bf16[48]
input %q : bf16[2,3,16,8] grad
input %k : bf16[2,3,24,8]
input %v : bf16[2,3,24,8]
%0 = MatMul(%x, %w)
%1 = Softmax(%0) {axis=-1}
%2, %lse = Attention(%q, %k, %v) {is_causal=0}
return %1, %2
"""
DUMP = """
import torch
from ortmodule_c import _C
shapes = (64, 32), (32, 48), (48,), (2, 3, 16, 8), (2, 3, 24, 8), (2, 3, 24, 8)
given = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes]
_C.Session({!r}, {{}}).plan(given, [True, True, False, True, False, False], [True, True])
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    """The steps of the graph's plan by op."""
    folder = tmp_path_factory.mktemp("plan")
    environment = {**os.environ, "OMC_DUMP": str(folder)}
    subprocess.run([sys.executable, "-c", DUMP.format(GRAPH)], env=environment, check=True)
    (plan,) = folder.glob("plan*-plan.txt")
    found: dict[str, list[Step]] = {}
    for step in steps_of(plan.read_text()):
        found.setdefault(step.op, []).append(step)
    return found


def test_products_are_counted_as_by_hand(steps: dict[str, list[Step]]) -> None:
    forward, *backward = [s for op, those in steps.items() if "MatMul" in op for s in those]
    assert forward.inputs == (Value("bf16", (64, 32)), Value("bf16", (32, 48)))
    assert forward.outputs == (Value("bf16", (64, 48)),)
    assert forward.flops == 2 * 64 * 32 * 48
    assert forward.bytes == 2 * (64 * 32 + 32 * 48 + 64 * 48)
    # dx = dy wᵀ and dw = xᵀ dy: as many operations each.
    assert [s.flops for s in backward] == [2 * 64 * 32 * 48] * 2
    assert sorted(s.bytes for s in backward) == [2 * (64 * 48 + 32 * 48 + 64 * 32)] * 2


def test_attention_and_softmax_are_counted_as_by_hand(steps: dict[str, list[Step]]) -> None:
    (attention,), (gradient,), (softmax,) = steps["Attention"], steps["AttentionGrad"], steps["Softmax"]
    pairs = 2 * 3 * 16 * 24
    assert attention.flops == pairs * (2 * 8 + 2 * 8)
    q, k, lse = 2 * 3 * 16 * 8, 2 * 3 * 24 * 8, 2 * 3 * 16
    assert attention.bytes == 2 * (q + 2 * k + q) + 4 * lse
    assert gradient.flops == pairs * (6 * 8 + 4 * 8)
    assert softmax.bytes == 2 * 2 * 64 * 48


def test_a_step_takes_the_longer_of_bytes_and_operations() -> None:
    large = Value("bf16", (8192, 8192))
    product = Step("MatMul", (large, large), (large,), 2 * 8192**3, 3 * 2 * 8192**2)
    busy = 4096 / (math.ceil(4096 / 132) * 132)
    assert waves(product, H100) == pytest.approx(busy * 1.0, rel=0.05)
    assert seconds_of(product, H100, {}) == pytest.approx(2 * 8192**3 / (0.8 * 989e12 * waves(product, H100)))
    add = Step("Add", (large, large), (large,), 8192**2, 3 * 2 * 8192**2)
    assert seconds_of(add, H200, {}) == pytest.approx(3 * 2 * 8192**2 / (0.9 * 4.8e12))
    assert seconds_of(add, A100, {}) / seconds_of(add, H100, {}) == pytest.approx(3.35 / 2.04)
    f32 = Value("f32", (8192, 8192))
    wide = Step("MatMul", (f32, f32), (f32,), 2 * 8192**3, 3 * 4 * 8192**2)
    assert seconds_of(wide, H100, {}) > 3 * seconds_of(wide, H100, {}, tf32=True)


@pytest.mark.parametrize(
    ("registers", "shared", "filled"),
    [
        (32, 0, 1.0),
        (33, 0, 6 * 8 / 64),
        (64, 0, 0.5),
        (128, 0, 0.25),
        (255, 0, 1 * 8 / 64),
        (32, 100 << 10, 2 * 8 / 64),
    ],
)
def test_occupancy_is_that_of_nvidia_s_calculator(registers: int, shared: int, filled: float) -> None:
    """256 threads a block; registers are given to warps by 256."""
    assert occupancy({"registers": registers, "shared": shared}, 256, H100) == filled


def test_kernels_that_leave_few_warps_move_bytes_slower() -> None:
    x = Value("f32", (1 << 24,))
    relu = Step("Relu", (x,), (x,), 1 << 24, 8 << 24)
    name = "program 4 Relu: f32 -> f32"
    thin = {name: {"registers": 32, "shared": 0, "instructions": 40}}
    thick = {name: {"registers": 255, "shared": 0, "instructions": 40}}
    assert seconds_of(relu, H200, thin) == seconds_of(relu, H200, {})
    assert seconds_of(relu, H200, thick) == pytest.approx(
        (4 << 24) * ASSUMED.latency / (8 * 32 * ASSUMED.load_bytes * 132)
    )
    others = {name.replace("Relu", "Exp"): thick[name], name.replace("f32 ->", "bf16 ->"): thick[name]}
    assert seconds_of(relu, H200, others) == seconds_of(relu, H200, {})


def test_a_program_of_many_instructions_takes_as_long_as_they_are_issued() -> None:
    x = Value("bf16", (1 << 24,))
    gelu = Step("Gelu", (x,), (x,), 1 << 24, 4 << 24)
    kernels = {"program 8 Gelu: bf16 -> bf16": {"registers": 32, "shared": 0, "instructions": 800}}
    assert seconds_of(gelu, H200, kernels) == pytest.approx((1 << 24) / 8 / 32 * 800 / (132 * 4 * 1.98e9))


def test_what_is_summed_before_it_is_used_is_read_twice() -> None:
    x, gamma = Value("bf16", (1 << 20, 64)), Value("f32", (64,))
    forward = Step("BatchNorm", (x, gamma), (x,), 0, 4 << 26)
    assert seconds_of(forward, H200, {}) == pytest.approx((6 << 26) / (0.9 * 4.8e12))
    gradient = Step("BatchNormGrad", (x, x, gamma), (x,), 0, 6 << 26)
    assert seconds_of(gradient, H200, {}) == pytest.approx((10 << 26) / (0.9 * 4.8e12))
    for n, passes in ((64, 1), (1028, 2)):
        dy = Value("f32", (1 << 14, n))
        moved = 4 * n << 14
        rows = Step("LayerNormGrad", (dy, dy), (dy,), 0, 3 * moved)
        assert seconds_of(rows, H200, {}) == pytest.approx((2 * passes + 1) * moved / (0.9 * 4.8e12))
    rows = Step("LayerNormalization", (x, gamma), (x,), 0, 4 << 26)
    assert seconds_of(rows, H200, {}) == pytest.approx((4 << 26) / (0.9 * 4.8e12))


def test_launches_are_counted_and_the_optimizer() -> None:
    x = Value("f32", (4,))
    steps = [Step("Relu", (x,), (x,), 4, 32)] * 1000
    p = predicted(steps, {}, 1e9, H200)
    assert p.launches == 1010 and p.optimizer == pytest.approx(28e9 / (0.9 * 4.8e12))
    assert p.replayed == pytest.approx(sum(p.kinds.values()) + p.optimizer + 1010 * ASSUMED.replayed)
    assert p.launched - p.replayed == pytest.approx(1010 * (ASSUMED.launched - ASSUMED.replayed))
    few = predicted(steps, {}, 0, H200)
    assert few.launched == 1010 * ASSUMED.host  # the host is behind


@pytest.mark.parametrize(("dtype", "rate", "layouts"), [("bf16", 0.8 * 989e12, 0), ("f32", 0.8 * 67e12, 1)])
def test_a_step_with_convolutions_is_never_replayed_and_copies_what_pytorch_gives(
    dtype: str, rate: float, layouts: int
) -> None:
    """Layouts change where channels do not come last."""
    image, weight = Value(dtype, (8, 64, 56, 56)), Value(dtype, (64, 64, 3, 3))
    numel, size = 8 * 64 * 56 * 56, 2 if dtype == "bf16" else 4
    all_of_it = 2 * numel + 64 * 64 * 9
    step = Step("Conv", (image, weight), (image,), 2 * numel * 64 * 9, size * all_of_it)
    apart = size * 2 * (numel + layouts * all_of_it) / (0.9 * 4.8e12)
    plain = replace(step, op="MatMul")
    assert seconds_of(step, H200, {}) == pytest.approx(apart + max(step.bytes / (0.9 * 4.8e12), step.flops / rate))
    assert predicted([step], {}, 0, H200).replayed is None
    assert predicted([plain], {}, 0, H200).replayed is not None
    assert predicted([step], {}, 0, H200).launches == 10 + 2 + 3 * layouts


def test_the_backward_of_attention_of_16_bits_does_seven_products(steps: dict[str, list[Step]]) -> None:
    (forward,), (gradient,) = steps["Attention"], steps["AttentionGrad"]
    assert kind_of(gradient).work * gradient.flops == pytest.approx(7 / 2 * forward.flops)


def test_goals_are_told_where_they_are_missed() -> None:
    slow = Step("Relu", (), (), 0, 1e12)
    (line,) = goals({"bert": ([slow], {})}, "gpu")
    assert "2.8 ms" in line and "**missed**" in line
    (line,) = goals({"bert": ([], {})}, "gpu")
    assert "met" in line and "missed" not in line


def test_every_step_of_a_model_is_of_some_kind_and_nothing_is_run() -> None:
    steps, kernels = plan_of("gpt2", "bf16", "tiny")
    kinds = {kind_of(step).name for step in steps}
    assert {"products", "attention", "norms", "elementwise"} <= kinds and "PyTorch" not in kinds
    for step in steps if kernels else ():
        kind = kind_of(step)
        assert [*kernels_of(step, kind, kernels)] or kind.name not in ("norms", "elementwise"), step
    assert any(step.inputs[0].dtype == "bf16" for step in steps if kind_of(step).name == "products")
    programs = [numbers for name, numbers in kernels.items() if name.startswith("program ")]
    assert not kernels or (programs and all(numbers["registers"] > 8 for numbers in programs))
