"""Losses of logits that are never there as a whole: chunks of rows, of which the last is shorter than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor, inf
from torch.nn import functional as F

from case import type_text

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALLOC_FAILED, LAUNCH_FAILED = 2, 719  # of the driver; cuBLASLt has its own for both
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-5}  # by what is stored
CHUNKED = (2056, 3, 512)  # rows, features, classes of two chunks


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(
    rows: int,
    features: int,
    classes: int,
    dtype: torch.dtype = torch.float32,
    biased: bool = True,
    weighted: bool = True,
) -> list[Tensor | None]:
    """x, w, targets of which every third is class 1, bias, weights."""
    t = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1))
    t[::3] = 1
    x, w = random(rows, features, dtype=dtype), random(classes, features, dtype=dtype, seed=2)
    bias, weight = random(classes, dtype=dtype, seed=3), random(classes, dtype=dtype, seed=4).abs()
    return [x, w, t, bias if biased else None, weight if weighted else None]


def graph(inputs: list[Tensor | None], attributes: str = "") -> str:
    lines = [f"input %x{i} : {type_text(t)}" for i, t in enumerate(inputs) if t is not None]
    names = ", ".join("_" if t is None else f"%x{i}" for i, t in enumerate(inputs))
    call = f"%loss, %dx, %dw, %db = LinearCrossEntropy({names.removesuffix(', _').removesuffix(', _')})"
    return "\n".join([*lines, f"{call} {attributes and '{' + attributes + '}'}", "return %loss, %dx, %dw, %db", ""])


def run(gpu: Gpu, inputs: list[Tensor | None], attributes: str = "") -> list[Tensor]:
    return gpu.forward(graph(inputs, attributes), [t for t in inputs if t is not None], outputs=4)


def of_rounded_logits(inputs: list[Tensor | None], how: dict[str, Any]) -> list[Tensor]:
    """Loss and gradients in PyTorch of operands of bf16: logits and their gradients are rounded to it."""
    x, w, t, bias, weight = inputs
    leaves = [a if a is None else a.float().requires_grad_() for a in (x, w, bias)]
    logits = F.linear(*leaves).bfloat16().float()
    loss = F.cross_entropy(logits, t, weight if weight is None else weight.float(), **how)
    gradients = torch.autograd.grad(loss, [a for a in leaves if a is not None])
    return [loss.detach(), *gradients]


def assert_right(gpu: Gpu, inputs: list[Tensor | None], **how: Any) -> None:
    """Within rounding of sums; beside the CPU, or PyTorch where logits are of bf16."""
    attributes = ", ".join(f'{name}="{v}"' if isinstance(v, str) else f"{name}={v}" for name, v in how.items())
    text, given = graph(inputs, attributes), [t for t in inputs if t is not None]
    rounded = given[0].dtype == torch.bfloat16
    wanted = of_rounded_logits(inputs, how) if rounded else gpu.on_the_cpu(text, given, outputs=4)
    for got, want in zip(gpu.forward(text, given, outputs=4), wanted, strict=not rounded):
        tolerance = TOLERANCE[given[0].dtype]
        scale = want.abs().max().item() if want.numel() and want.isfinite().all() else 0
        torch.testing.assert_close(got.to(want.dtype), want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", [(7, 5, 11), (1, 1, 1), (40, 9, 3), (3, 0, 4), (0, 3, 4), (9, 4, 1100)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_in_every_dtype(
    gpu: Gpu, dtype: torch.dtype, sizes: tuple[int, int, int], biased: bool, weighted: bool
) -> None:
    inputs = operands(*sizes, dtype, biased, weighted)
    if sizes[2] == 1:
        inputs[2].zero_()
    assert_right(gpu, inputs)
    assert_right(gpu, inputs, reduction="sum", ignore_index=1, label_smoothing=0.25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chunks_are_those_of_one_loss(gpu: Gpu, dtype: torch.dtype) -> None:
    assert_right(gpu, operands(2 * CHUNKED[0], *CHUNKED[1:], dtype), ignore_index=1, label_smoothing=0.1)


def test_chunks_are_pytorchs_and_sums_have_one_order(gpu: Gpu) -> None:
    x, w, t, bias, weight = operands(*CHUNKED)
    leaves = [a.double().requires_grad_() for a in (x, w, bias)]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits, t, weight.double(), ignore_index=1, label_smoothing=0.1)
    loss.backward()
    got, again = (run(gpu, [x, w, t, bias, weight], "ignore_index=1, label_smoothing=0.1") for _ in range(2))
    for a, b, want in zip(got, again, [loss.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def test_no_memory_is_of_all_logits(gpu: Gpu) -> None:
    rows, features, classes = 9000, 1, 600
    inputs = operands(rows, features, classes)
    plan, _ = gpu.plan(graph(inputs), inputs, outputs=4)
    assert plan.live_bytes < rows * classes * 4 / 2


def test_where_all_are_ignored_gradients_are_0(gpu: Gpu) -> None:
    inputs = operands(5, 3, 4)
    inputs[2].fill_(-100)
    loss, *gradients = run(gpu, inputs)
    assert loss.isnan()
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("ignored", [-1, 2], ids=str)
def test_what_is_not_finite_is_pytorchs(gpu: Gpu, ignored: int) -> None:
    """Also where the target is ignored."""
    x, w, t, *_ = operands(6, 3, 4)
    x[2, 1], t[2] = inf, 2
    loss, dx, dw, _ = run(gpu, [x, w, t], f"ignore_index={ignored}")
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    want = F.cross_entropy(leaves[0] @ leaves[1].T, t, ignore_index=ignored)
    want.backward()
    torch.testing.assert_close([loss, dx, dw], [want.detach(), *(leaf.grad for leaf in leaves)], equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("classes", [11, 16])
def test_a_class_may_be_impossible(gpu: Gpu, classes: int, dtype: torch.dtype) -> None:
    """By a bias of -inf, which meets no row of the weight but its own."""
    inputs = operands(6, 3, classes, dtype, weighted=False)
    inputs[2][inputs[2] == 0] = 1
    inputs[3][0] = -inf
    assert all(t.isfinite().all() for t in run(gpu, inputs))
    assert_right(gpu, inputs)


@pytest.mark.at_once
def test_a_target_that_is_no_class_is_told_with_its_node(gpu: Gpu) -> None:
    inputs = operands(4, 3, 5)
    inputs[2][3] = 5
    with pytest.raises((IndexError, gpu.core.DeviceError), match=r"LinearCrossEntropy.*index 5 .* there are 5"):
        run(gpu, inputs)
    inputs[2][3] = 0
    run(gpu, inputs)


HEAD = """input %x : f32[1024,2] grad
input %w : f32[1024,2] grad
input %t : i64[1024]
%y = FusedMatMul(%x, %w) {transB=1}
%loss, %top, %log_sum, %total = CrossEntropy(%y, %t)
return %loss
"""


def test_a_large_head_is_rewritten_and_trained(gpu: Gpu) -> None:
    x, w, t, *_ = operands(1024, 2, 1024)
    given = [gpu.put(a) for a in (x, w, t)]
    plan = gpu.core.Session(HEAD, {}, provider="gpu").plan(given, [True, True, False], [True])
    assert "LinearCrossEntropy" in plan.text()
    outputs, run = plan.forward(given, 0)
    gradients = plan.backward(run, given, outputs, [gpu.put(torch.tensor(2.0))])
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    want = F.cross_entropy(leaves[0] @ leaves[1].T, t)
    (2 * want).backward()
    torch.testing.assert_close(gpu.get(outputs[0]), want.detach())
    for got, leaf in zip(gradients, leaves, strict=False):
        torch.testing.assert_close(gpu.get(got), leaf.grad)


@pytest.mark.parametrize("error", [ALLOC_FAILED, LAUNCH_FAILED])
@pytest.mark.parametrize(
    "name", [b"cublasLtMatmul", b"cuLaunchKernel", b"cublasLtMatmulAlgoGetHeuristic"], ids=bytes.decode
)
def test_whichever_call_fails_it_is_an_exception_and_the_next_step_works(gpu: Gpu, name: bytes, error: int) -> None:
    inputs = operands(7, 5, 11, torch.bfloat16)
    want = run(gpu, inputs)
    before = gpu.used_bytes()
    for n in range(100):
        gpu.fail(n, name, error)
        try:
            run(gpu, inputs)
        except (MemoryError, RuntimeError):
            gpu.fail(-1, None, 0)
        else:
            break
        assert all(torch.equal(a, b) for a, b in zip(run(gpu, inputs), want, strict=True)), n
    assert 0 < n < 100
    assert gpu.used_bytes() == before
