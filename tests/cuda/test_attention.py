"""Attention and its gradient on the emulated GPU, beside the CPU's and eager: tiles, heads, masks, dropout."""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from case import DTYPE_TEXT, type_text

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *HALVES)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Samples, heads, heads of keys, queries, keys, elements of a head and of its values.
Shape = tuple[int, int, int, int, int, int, int]
TILES: Shape = (1, 4, 2, 70, 130, 12, 12)
SHAPES: tuple[Shape, ...] = (
    (2, 2, 1, 33, 65, 64, 64),
    (1, 2, 2, 130, 31, 80, 80),
    (1, 1, 1, 17, 40, 96, 96),
    (1, 2, 1, 40, 70, 128, 128),
    (1, 1, 1, 20, 33, 160, 160),
    (1, 1, 1, 35, 36, 200, 256),
    (1, 2, 1, 21, 44, 24, 37),
    (1, 2, 2, 19, 18, 3, 66),
    (16, 16, 16, 16, 16, 16, 16),
    (2, 3, 3, 1, 1, 16, 16),
    (2, 2, 2, 3, 0, 16, 16),
    (2, 2, 2, 0, 3, 16, 16),
)


def operands(shape: Shape, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """q, k and v, and a gradient of y."""
    b, h, kv, t, s, d, dv = shape
    g = torch.Generator().manual_seed(seed)
    shapes = (b, h, t, d), (b, kv, s, d), (b, kv, s, dv), (b, h, t, dv)
    *inputs, dy = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    return inputs, dy


def step(
    gpu: Gpu, provider: str, inputs: list[Tensor], dy: Tensor, how: str, mask: Tensor | None = None, steps: int = 1
) -> list[Tensor]:
    """y, dq, dk and dv; of the last of several steps, before each but the first of which forward ran once more."""
    put, get = (gpu.put, gpu.get) if provider == "gpu" else (Tensor.clone, Tensor.clone)
    lines = [f"input %{n} : {DTYPE_TEXT[t.dtype]}{[*t.shape]} grad" for n, t in zip("qkv", inputs, strict=True)]
    lines += [] if mask is None else [f"input %m : {type_text(mask)}"]
    names = "%q, %k, %v" if mask is None else "%q, %k, %v, %m"
    text = "\n".join([*lines, f"%y, %lse = Attention({names}) {{{how}}}", "return %y", ""]).replace(", ", ",")
    given = [put(t) for t in (inputs if mask is None else [*inputs, mask])]
    plan = gpu.core.Session(text, {}, provider=provider).plan(given, [True] * 3 + [False] * (len(given) - 3), [True])
    grads = [put(dy)]
    for _ in range(steps - 1):
        outputs, run = plan.forward(given, 11)
        plan.backward(run, given, outputs, grads)
        plan.forward(given, 11)
    outputs, run = plan.forward(given, 11)
    return [get(t) for t in (*outputs, *plan.backward(run, given, outputs, grads)[:3])]


def eager(inputs: list[Tensor], dy: Tensor, mask: Tensor | None = None, causal: bool = False) -> list[Tensor]:
    """A step of PyTorch's in float64, by its kernel that loses nothing where scores are of the least number."""
    q, k, v = (t.double().requires_grad_() for t in inputs)
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, k, v, wide, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dy.double())]


def assert_near(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype and x.shape == y.shape
        torch.testing.assert_close(x.double(), y.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["is_causal=0", "is_causal=1", "is_causal=1,p=0.4,subsequence=9"])
def test_a_step_is_that_of_the_cpu(gpu: Gpu, dtype: torch.dtype, how: str) -> None:
    inputs, dy = operands(TILES, dtype)
    found, expected = (step(gpu, provider, inputs, dy, how) for provider in ("gpu", "cpu"))
    assert_near(found, expected, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_on_tensor_cores_is_that_of_eager(gpu: Gpu, shape: Shape, dtype: torch.dtype) -> None:
    causal = (SHAPES.index(shape) + HALVES.index(dtype)) % 2 == 1  # each compiles kernels
    inputs, dy = operands(shape, dtype, seed=1)
    found = step(gpu, "gpu", inputs, dy, f"is_causal={int(causal)}")
    assert_near(found, eager(inputs, dy, causal=causal), dtype)
    assert_near(found, step(gpu, "cpu", inputs, dy, f"is_causal={int(causal)}"), dtype)


def masks(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    b, h, _, t, s, _, _ = shape
    g = torch.Generator().manual_seed(2)
    low = torch.finfo(dtype).min
    return {
        "of all scores": torch.rand(b, h, t, s, generator=g) < 0.7,
        "of keys": (torch.arange(s) < s - 35).expand(b, 1, 1, s).contiguous(),
        "rows of nothing": (torch.arange(t)[:, None] % 3 != 1).expand(t, s).contiguous(),
        "added": torch.randn(h, t, s, generator=g),
        "added, of keys": torch.zeros(b, 1, 1, s).masked_fill(torch.arange(s) >= s - 35, -torch.inf),
        "added, lowest": torch.zeros(b, 1, t, s).masked_fill(torch.arange(t)[:, None] % 3 == 1, low),
    }


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", masks(TILES))
def test_masks_on_tensor_cores_hide_what_they_hide_in_eager(gpu: Gpu, name: str, dtype: torch.dtype) -> None:
    shape = (2, 2, 1, 35, 70, 24, 24)
    inputs, dy = operands(shape, dtype, seed=3)
    mask = masks(shape, dtype)[name]
    mask = mask.to(dtype) if mask.is_floating_point() else mask
    found = step(gpu, "gpu", inputs, dy, "is_causal=0", mask)
    assert_near(found, eager(inputs, dy, mask), dtype)
    assert_near(found, step(gpu, "cpu", inputs, dy, "is_causal=0", mask), dtype)


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
@pytest.mark.parametrize("keys", [37, 72])
def test_the_same_probabilities_are_dropped(gpu: Gpu, keys: int, dtype: torch.dtype) -> None:
    """Values are one for each key, so that y shows which of them a query has kept; 37 keys share no counters evenly.

    So are gradients of y one for each query, which dv shows.
    """
    queries = 41
    q, k = torch.zeros(2, 3, queries, 4, dtype=dtype), torch.zeros(2, 3, keys, 4, dtype=dtype)
    v = torch.eye(keys, dtype=dtype).expand(2, 3, keys, keys).contiguous()
    dy = torch.eye(queries, keys, dtype=dtype).expand(2, 3, queries, keys).contiguous()
    found, expected = (step(gpu, name, [q, k, v], dy, "p=0.5,subsequence=3") for name in ("gpu", "cpu"))
    assert torch.equal(found[0] == 0, expected[0] == 0) and 0.4 < (found[0] == 0).double().mean() < 0.6
    assert torch.equal(found[3] == 0, expected[3] == 0)
    seen = min(queries, keys)
    assert torch.equal(found[3][..., :seen].mT == 0, found[0][..., :seen, :] == 0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("keys", [70, 72])
def test_a_step_with_dropout_on_tensor_cores_is_that_of_the_cpu(gpu: Gpu, keys: int, dtype: torch.dtype) -> None:
    inputs, dy = operands((1, 2, 1, 45, keys, 16, 16), dtype, seed=4)
    found, expected = (step(gpu, name, inputs, dy, "p=0.3,subsequence=5") for name in ("gpu", "cpu"))
    assert_near(found, expected, dtype)


@pytest.mark.parametrize("how", ["p=0.3,subsequence=5", "is_causal=1,p=0.3,subsequence=5"])
def test_what_dropout_keeps_is_drawn_for_some_heads_after_others(gpu: Gpu, how: str) -> None:
    """The emulated cache has room for few: 40 heads take three times as many launches as 16 do."""
    launches = []
    for samples in (2, 5):
        inputs, dy = operands((samples, 8, 4, 40, 36, 8, 8), torch.bfloat16, seed=6)
        before = gpu.counted().launches
        found = step(gpu, "gpu", inputs, dy, how)
        launches.append(gpu.counted().launches - before)
        assert_near(found, step(gpu, "cpu", inputs, dy, how), torch.bfloat16)
    assert launches[1] - launches[0] == 2 * (2 + 3)  # each after one that draws


def test_heads_that_take_turns_do_so_in_even_numbers(gpu: Gpu) -> None:
    """Bits of 16 at a time are kept: of 18 heads 10 and 8, in whole groups, and not 16 and 2."""
    inputs, dy = operands((9, 2, 1, 40, 36, 8, 8), torch.bfloat16, seed=6)
    how = "p=0.3,subsequence=5"
    with gpu.launches() as launches:
        found = step(gpu, "gpu", inputs, dy, how)
    assert_near(found, step(gpu, "cpu", inputs, dy, how), torch.bfloat16)
    assert [n for name, n in launches if name == "attention"] == [10, 8]  # a block for each


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("how", ["p=0.3,subsequence=5", "is_causal=1,p=0.3,subsequence=5"])
def test_what_would_take_much_memory_is_not_drawn_ahead(gpu: Gpu, how: str, dtype: torch.dtype) -> None:
    """The emulated cache is of 1 KiB, and bits may take eight times that: those of a head here are 10 KiB."""
    inputs, dy = operands((1, 1, 1, 266, 270, 8, 8), dtype, seed=7)
    before = gpu.counted().launches
    found = step(gpu, "gpu", inputs, dy, how)
    assert gpu.counted().launches - before == 1 + 3
    assert_near(found, step(gpu, "cpu", inputs, dy, how), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_order_of_blocks_and_threads_changes_no_bit(gpu: Gpu, dtype: torch.dtype) -> None:
    """Each launch of a unit takes them from the other end; a step is four."""
    inputs, dy = operands((2, 2, 1, 70, 66, 16, 16), dtype, seed=5)
    steps = [step(gpu, "gpu", inputs, dy, "is_causal=1,p=0.2,subsequence=1", steps=n) for n in (1, 2)]
    for x, y in zip(*steps, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 128), (torch.float64, 64), (torch.bfloat16, 256)], ids=str)
def test_heads_that_are_too_long_for_registers_are_refused(gpu: Gpu, dtype: torch.dtype, most: int) -> None:
    x = torch.zeros(1, 1, 2, most + 1, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"no kernel for heads of {most + 1} and {most + 1} elements"):
        step(gpu, "gpu", [x, x, x], x, "is_causal=0")
