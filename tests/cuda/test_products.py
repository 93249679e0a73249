"""Products by cuBLASLt, of which tests/cuda has a stand-in that computes on the host what it is asked for.

The stand-in counts as a mistake what the library would refuse or not see: layouts that do not fit, pointers less
aligned than a plan was made for, workspace or operands that are not out, a plan for another product.
"""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor

from case import DTYPE_TEXT

ALLOC_FAILED, LAUNCH_FAILED = 2, 719  # of the driver; cuBLASLt has its own for both
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ONNX_F32 = 1
CALLS = (
    b"cublasLtMatmulDescInit_internal",
    b"cublasLtMatmulDescSetAttribute",
    b"cublasLtMatrixLayoutInit_internal",
    b"cublasLtMatrixLayoutSetAttribute",
    b"cublasLtMatmulPreferenceInit_internal",
    b"cublasLtMatmulPreferenceSetAttribute",
    b"cublasLtMatmulAlgoGetHeuristic",
    b"cublasLtMatmul",
)


def product(inputs: list[Tensor], attributes: str = "") -> str:
    lines = [f"input %x{i} : {DTYPE_TEXT[t.dtype]}[{','.join(map(str, t.shape))}]" for i, t in enumerate(inputs)]
    names = ", ".join(f"%x{i}" for i in range(len(inputs)))
    return "\n".join([*lines, f"%y = FusedMatMul({names}) {attributes and '{' + attributes + '}'}", "return %y", ""])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_as_on_the_cpu(gpu: Gpu, text: str, inputs: list[Tensor]) -> None:
    (got,), (want,) = gpu.forward(text, inputs), gpu.on_the_cpu(text, inputs)
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("ta", "tb"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_every_dtype_every_way_round(gpu: Gpu, dtype: torch.dtype, biased: bool, ta: int, tb: int) -> None:
    m, n, k = 7, 13, 5
    inputs = [
        random(*((k, m) if ta else (m, k)), dtype=dtype),
        random(*((n, k) if tb else (k, n)), dtype=dtype, seed=1),
    ]
    inputs += [random(n, dtype=dtype, seed=2)] if biased else []
    assert_as_on_the_cpu(gpu, product(inputs, f"transA={ta}, transB={tb}, alpha=-0.5"), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4, 5), (3, 5, 2)), ((2, 1, 4, 5), (3, 5, 2)), ((2, 3, 1, 4, 5), (2, 1, 6, 5, 2)), ((4, 5), (3, 5, 2)),
        ((3, 1, 5), (1, 5, 1)), ((0, 4, 5), (5, 2)), ((3, 0, 5), (3, 5, 2)), ((5,), (3, 5, 2)), ((3, 4, 5), (5,)),
    ],
)  # fmt: skip
def test_batches_that_are_broadcast(gpu: Gpu, dtype: torch.dtype, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    inputs = [random(*a, dtype=dtype), random(*b, dtype=dtype, seed=1)]
    assert_as_on_the_cpu(gpu, product(inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_nothing_is_the_bias(gpu: Gpu, dtype: torch.dtype) -> None:
    inputs = [random(3, 0, dtype=dtype), random(0, 5, dtype=dtype)]
    assert gpu.forward(product(inputs), inputs)[0].tolist() == [[0.0] * 5] * 3
    inputs += [random(5, dtype=dtype)]
    assert torch.equal(gpu.forward(product(inputs), inputs)[0], inputs[2].expand(3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide_right", [False, True])
@pytest.mark.parametrize("wide_result", [False, True])
def test_16_bits_by_what_is_kept_in_32(gpu: Gpu, dtype: torch.dtype, wide_right: bool, wide_result: bool) -> None:
    inputs = [random(2, 5, 9, dtype=dtype), random(9, 7, dtype=torch.float32 if wide_right else dtype, seed=1)]
    inputs += [random(7, dtype=torch.float32 if wide_result else dtype, seed=2)]
    assert_as_on_the_cpu(gpu, product(inputs, f"to={ONNX_F32}" if wide_result else ""), inputs)


def test_sums_of_16_bits_are_rounded_once(gpu: Gpu) -> None:
    inputs = [torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(4096, 1, dtype=torch.bfloat16)]
    inputs += [torch.ones(1, dtype=torch.bfloat16)]
    assert gpu.forward(product(inputs), inputs)[0].item() == 4096  # 4097 in between


def test_float32_is_rounded_to_tf32_where_pytorch_says_so(gpu: Gpu) -> None:
    inputs = [torch.full((16, 16), 1 + 2**-12), torch.eye(16)]  # what is as small as (1, 1) cuBLAS need not round
    plan, given = gpu.plan(product(inputs), inputs)
    seen = []
    for precision in ("ieee", "tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = precision
        try:
            seen.append(gpu.get(plan.forward(given, 0)[0][0])[0, 0].item())
        finally:
            torch.backends.cuda.matmul.fp32_precision = "none"
    assert seen == [1 + 2**-12, 1, 1 + 2**-12]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_at_any_address(gpu: Gpu, dtype: torch.dtype) -> None:
    """One that cuBLASLt cannot add there is what the product is added to."""
    inputs = [random(7, 5, dtype=dtype), random(5, 13, dtype=dtype, seed=1), random(13, dtype=dtype, seed=2)]
    plan, given = gpu.plan(product(inputs), inputs)
    longer = gpu.put(torch.cat([inputs[2][:1], inputs[2]]))
    given[2] = gpu.rest(longer, 1)
    (got,), (want,) = (gpu.get(t) for t in plan.forward(given, 0)[0]), gpu.on_the_cpu(product(inputs), inputs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_at_any_address(gpu: Gpu, dtype: torch.dtype) -> None:
    """Matrices of an odd size lie in a row: those of a batch that cuBLASLt does not step through, and of views."""
    inputs = [random(2, 3, 1, 5, 3, dtype=dtype), random(2, 1, 3, 3, 1, dtype=dtype, seed=1), random(1, dtype=dtype)]
    assert_as_on_the_cpu(gpu, product(inputs), inputs)


def test_no_plan_is_asked_for_in_a_step(gpu: Gpu) -> None:
    inputs = [random(4, 8), random(8, 4, seed=1)]
    plan, given = gpu.plan(product(inputs), inputs)
    gpu.fail(0, b"cublasLtMatmulAlgoGetHeuristic", LAUNCH_FAILED)
    gpu.get(plan.forward(given, 0)[0][0])


def moved(gpu: Gpu, x: Tensor, by: int, kept: list[Tensor]) -> Tensor:
    """So many elements behind an aligned address, in a tensor that is kept."""
    kept.append(gpu.put(torch.cat([x.new_zeros(by), x])))
    return gpu.rest(kept[-1], by)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", [(1, 0), (1, 1), (0, 1), (2, 4), (4, 2)], ids=str)
def test_of_operands_at_any_address_one_is_asked_for_once(gpu: Gpu, dtype: torch.dtype, by: tuple[int, int]) -> None:
    """Where they lie so again, as in all steps but the first."""
    inputs = [random(8, dtype=dtype), random(8, 8, dtype=dtype, seed=1), random(8, dtype=dtype, seed=2)]
    (plan, given), (want,) = gpu.plan(product(inputs), inputs), gpu.on_the_cpu(product(inputs), inputs)
    kept: list[Tensor] = []
    given[0], given[2] = moved(gpu, inputs[0], by[0], kept), moved(gpu, inputs[2], by[1], kept)
    torch.testing.assert_close(gpu.get(plan.forward(given, 0)[0][0]), want)
    gpu.fail(0, b"cublasLtMatmulAlgoGetHeuristic", LAUNCH_FAILED)
    torch.testing.assert_close(gpu.get(plan.forward(given, 0)[0][0]), want)
    assert gpu.fail(-1, None, 0)  # nor while it is captured, where a failure is not told


def test_what_was_said_of_one_address_or_precision_is_not_anothers(gpu: Gpu) -> None:
    """The stand-in checks at each product that its plan is one for what it is given."""
    inputs = [torch.full((16,), 1 + 2**-12), torch.eye(16), torch.zeros(16)]
    plan, given = gpu.plan(product(inputs), inputs)
    seen, kept = [], []
    for precision, n, of_bias in (("ieee", 1, 0), ("tf32", 1, 0), ("ieee", 1, 4), ("ieee", 1, 1), ("ieee", 2, 1)) * 2:
        given[0], given[2] = moved(gpu, inputs[0], n, kept), moved(gpu, inputs[2], of_bias, kept)
        torch.backends.cuda.matmul.fp32_precision = precision
        try:
            seen.append(gpu.get(plan.forward(given, 0)[0][0])[0].item())
        finally:
            torch.backends.cuda.matmul.fp32_precision = "none"
    assert seen == [1 + 2**-12, 1, *[1 + 2**-12] * 3] * 2


@pytest.mark.parametrize("error", [ALLOC_FAILED, LAUNCH_FAILED])
@pytest.mark.parametrize("name", CALLS, ids=lambda name: name.decode())
def test_whichever_call_fails_it_is_an_exception_and_the_next_step_works(gpu: Gpu, name: bytes, error: int) -> None:
    inputs = [random(2, 3, 4, 8), random(3, 8, 5, seed=1), random(5, seed=2)]
    text = product(inputs)
    (want,) = gpu.forward(text, inputs)
    before = gpu.used_bytes()
    for n in range(100):
        gpu.fail(n, name, error)
        try:
            gpu.forward(text, inputs)
        except (MemoryError, RuntimeError) as failure:
            assert "CUBLAS_STATUS_" in str(failure)
            gpu.fail(-1, None, 0)
        else:
            break
        assert torch.equal(gpu.forward(text, inputs)[0], want), n
    assert 0 < n < 100
    assert gpu.used_bytes() == before
