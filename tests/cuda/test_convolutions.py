"""Convolutions on the emulated GPU, which are PyTorch's ops.

The stand-in for these counts as a mistake a tensor over memory that is not out, one that is read after it was given
back or is never given back, windows that do not fit, ops under autocast; and what it computes it has from PyTorch
for the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from cold_gpu import Cold
from emulated_gpu import Gpu
from hardware_gpu import Hardware
from torch import Tensor
from torch.nn import functional as F

from case import type_text

OUT_OF_MEMORY, LAUNCH_FAILED, CAPTURE_INVALIDATED = 2, 719, 901
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CALLS = (
    b"aoti_torch_get_current_cuda_stream",
    b"aoti_torch_create_tensor_from_blob",
    b"aoti_torch_cuda_convolution",
    b"aoti_torch_cuda_convolution_backward",
    b"aoti_torch_get_data_ptr",
    b"aoti_torch_get_strides",
)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def graph(op: str, inputs: Sequence[Tensor], **attributes: object) -> str:
    lines = [f"input %x{i} : {type_text(t)} grad" for i, t in enumerate(inputs)]
    names = ", ".join(f"%x{i}" for i in range(len(inputs)))
    text = ", ".join(f"{name}={value}" for name, value in attributes.items())
    return "\n".join([*lines, f"%y = {op}({names}) {text and '{' + text + '}'}", "return %y", ""])


def step(gpu: Gpu, text: str, inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """The result and all gradients."""
    *given, grad = [gpu.put(t.detach()) for t in (*inputs, dy)]
    plan = gpu.core.Session(text, {}, provider="gpu").plan(given, [True] * len(given), [True])
    outputs, run = plan.forward(given, 0)
    grads = plan.backward(run, given, outputs, [grad])
    return [gpu.get(t) for t in (outputs[0], *grads)]


def assert_close(gpu: Gpu, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Of 16 bits cuDNN rounds before it adds a bias, which may cancel a sum: a rounding of the largest is allowed."""
    for g, w in zip(got, want, strict=True):
        rtol = atol = None
        if isinstance(gpu, Hardware) and w.element_size() == 2:
            rtol, atol = 2 * torch.finfo(w.dtype).eps, torch.finfo(w.dtype).eps * w.abs().max().item()
        torch.testing.assert_close(g, w, rtol=rtol, atol=atol)


def last(images: Sequence[Tensor]) -> list[Tensor]:
    """With channels last, weights of convolutions too."""
    return [t.movedim(1, -1).contiguous() if t.dim() > 2 else t for t in images]


def in_pytorch(y: Tensor, inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def convolved(
    x: Tensor, w: Tensor, b: Tensor | None, strides: list[int], pads: list[int], dilations: list[int]
) -> Tensor:
    """With pads of their own before and after each axis."""
    n = x.dim() - 2
    x = F.pad(x, [p for a in reversed(range(n)) for p in (pads[a], pads[n + a])])
    groups = x.shape[1] // w.shape[1]
    return (F.conv1d, F.conv2d, F.conv3d)[n - 1](x, w, b, strides, 0, dilations, groups)


def assert_step_is_pytorchs(
    gpu: Gpu, x: Tensor, w: Tensor, strides: list[int], pads: list[int], dilations: list[int], bias: bool = True
) -> None:
    """Wherever the channels are."""
    inputs = [t.requires_grad_() for t in (x, w, random(w.shape[0], dtype=x.dtype, seed=2))[: 2 + bias]]
    y = convolved(*(*inputs, None)[:3], strides, pads, dilations)
    dy = random(*y.shape, dtype=x.dtype, seed=3)
    how = {"strides": strides, "pads": pads, "dilations": dilations, "group": x.shape[1] // w.shape[1]}
    want = in_pytorch(y, inputs, dy)
    assert_close(gpu, step(gpu, graph("Conv", inputs, **how), inputs, dy), want)
    given = last(inputs)
    got = step(gpu, graph("Conv", given, **how, channels_last=1), given, *last([dy]))
    assert_close(gpu, got, last(want))


def test_the_copy_of_a_result_is_compiled_from_when_the_plan_is_made(cold: Cold, tmp_path: Path) -> None:
    text = graph("Conv", [random(2, 3, 6, 5), random(4, 3, 3, 3)])
    ran = cold.run(
        f"import glob, time\n"
        f"plan, _ = gpu.plan({text!r}, [torch.ones(2, 3, 6, 5), torch.ones(4, 3, 3, 3)])\n"
        f"end = time.monotonic() + 20\n"
        f"while not (found := glob.glob({str(tmp_path)!r} + '/*.cu')) and time.monotonic() < end: time.sleep(0.01)\n"
        f"print(*[open(at).readline().strip() for at in found])",
        EMULATED_SOURCES=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert ran == ("#define OMC_WANTED_copy_16 ,\n", "", 0)


@pytest.fixture
def channels_last(gpu: Gpu) -> Iterator[None]:
    gpu.channels_last(True)
    yield
    gpu.channels_last(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_of_each_dtype(gpu: Gpu, dtype: torch.dtype, bias: bool) -> None:
    x, w = random(2, 3, 6, 5, dtype=dtype), random(4, 3, 3, 2, dtype=dtype, seed=1)
    assert_step_is_pytorchs(gpu, x, w, [1, 2], [1, 0, 1, 0], [1, 1], bias)


@pytest.mark.parametrize(
    ("x", "w", "strides", "pads", "dilations"),
    [
        ((2, 3, 9), (4, 3, 3), [2], [1, 1], [2]),
        ((2, 3, 4, 5, 6), (2, 3, 2, 1, 3), [1, 2, 1], [1, 0, 2, 1, 0, 2], [1, 1, 2]),
        ((2, 6, 7, 5), (9, 2, 3, 3), [1, 2], [2, 1, 2, 1], [2, 1]),  # groups
        ((2, 5, 6, 6), (5, 1, 3, 3), [1, 1], [1, 1, 1, 1], [1, 1]),  # one for each channel
        ((2, 5, 6, 6), (10, 1, 3, 3), [2, 1], [1, 1, 1, 1], [1, 1]),  # two
        ((3, 1, 4, 4), (1, 1, 1, 1), [1, 1], [0, 0, 0, 0], [1, 1]),
        ((1, 1, 1, 1), (1, 1, 3, 3), [1, 1], [1, 1, 1, 1], [1, 1]),  # a kernel larger than x
        ((1, 2, 1, 3), (2, 2, 5, 7), [3, 2], [2, 2, 2, 2], [1, 1]),
        ((2, 2, 2, 2), (2, 2, 2, 2), [2, 2], [0, 0, 0, 0], [1, 1]),  # all sizes are one
        ((1, 3, 8, 1), (3, 3, 3, 1), [1, 1], [1, 0, 1, 0], [1, 1]),
    ],
)
def test_a_step_of_each_form(
    gpu: Gpu, x: tuple[int, ...], w: tuple[int, ...], strides: list[int], pads: list[int], dilations: list[int]
) -> None:
    assert_step_is_pytorchs(gpu, random(*x), random(*w, seed=1), strides, pads, dilations)


@pytest.mark.parametrize(
    ("x", "w", "strides", "pads"),
    [
        ((2, 3, 6, 5), (4, 3, 2, 4), [1, 1], [0, 1, 1, 2]),  # as padding="same" has them
        ((2, 3, 6, 5), (4, 3, 2, 3), [2, 3], [3, 0, 0, 1]),
        ((2, 4, 7), (2, 2, 3), [2], [0, 5]),
        ((1, 2, 3, 2, 4), (3, 2, 2, 2, 2), [1, 2, 1], [0, 1, 0, 1, 0, 2]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_that_differs_between_the_sides(
    gpu: Gpu, dtype: torch.dtype, x: tuple[int, ...], w: tuple[int, ...], strides: list[int], pads: list[int]
) -> None:
    dilations = [1] * len(strides)
    assert_step_is_pytorchs(gpu, random(*x, dtype=dtype), random(*w, dtype=dtype, seed=1), strides, pads, dilations)


@pytest.mark.parametrize("pads", [[1, 0, 1, 0], [0, 1, 2, 0]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_transposed_step(gpu: Gpu, dtype: torch.dtype, pads: list[int]) -> None:
    inputs = [random(2, 4, 3, 5, dtype=dtype), random(4, 3, 3, 2, dtype=dtype, seed=1), random(6, dtype=dtype, seed=2)]
    inputs = [t.requires_grad_() for t in inputs]
    whole = F.conv_transpose2d(*inputs, stride=[2, 3], output_padding=[1, 2], groups=2)
    y = whole[:, :, pads[0] : whole.shape[2] - pads[2], pads[1] : whole.shape[3] - pads[3]]
    dy = random(*y.shape, dtype=dtype, seed=3)
    how = {"strides": [2, 3], "pads": pads, "output_padding": [1, 2], "group": 2}
    want = in_pytorch(y, inputs, dy)
    assert_close(gpu, step(gpu, graph("ConvTranspose", inputs, **how), inputs, dy), want)
    given = last(inputs)
    got = step(gpu, graph("ConvTranspose", given, **how, channels_last=1), given, *last([dy]))
    assert_close(gpu, got, last(want))


@pytest.mark.usefixtures("channels_last")
def test_results_may_lie_as_pytorch_likes(gpu: Gpu) -> None:
    x, w = random(2, 3, 6, 5), random(4, 3, 3, 2, seed=1)
    assert_step_is_pytorchs(gpu, x, w, [1, 2], [1, 0, 1, 0], [1, 1])
    assert_step_is_pytorchs(gpu, x, w, [2, 2], [0, 1, 2, 0], [1, 1])


def test_a_sum_of_nothing_is_0(gpu: Gpu) -> None:
    inputs = [random(0, 3, 4, 4), random(2, 3, 3, 3, seed=1), random(2, seed=2)]
    y, dx, dw, db = step(gpu, graph("Conv", inputs), inputs, torch.empty(0, 2, 2, 2))
    assert y.shape == (0, 2, 2, 2) and dx.shape == (0, 3, 4, 4)
    assert torch.equal(dw, torch.zeros(2, 3, 3, 3)) and torch.equal(db, torch.zeros(2))


def test_a_bias_of_sums_of_nothing_is_left_to_pytorch(gpu: Gpu) -> None:
    inputs = [random(1, 0, 4, 4), random(2, 0, 3, 3), random(2)]
    with pytest.raises(NotImplementedError, match="cuda has no kernel for a bias of sums of nothing"):
        gpu.forward(graph("Conv", inputs), inputs)


def test_it_is_done_in_the_stream_of_the_run(gpu: Gpu) -> None:
    inputs = [random(2, 3, 6, 5, seed=8), random(4, 3, 3, 3, seed=9)]
    given = [gpu.put(t) for t in inputs]
    plan = gpu.core.Session(graph("Conv", inputs), {}, provider="gpu").plan(given, [False, False], [False])
    stream = gpu.stream()
    gpu.use(stream)
    gpu.pause(stream)
    outputs, _ = plan.forward(given, 0)
    before, want = gpu.get(outputs[0]), F.conv2d(*inputs)  # the first waits for the default stream alone
    gpu.resume(stream)
    gpu.wait(stream)
    gpu.use(0)
    assert not torch.allclose(before, want)
    torch.testing.assert_close(gpu.get(outputs[0]), want)


def test_in_another_stream_than_pytorchs_it_is_refused(gpu: Gpu) -> None:
    inputs = [random(2, 3, 6, 5), random(4, 3, 3, 3, seed=1)]
    plan, given = gpu.plan(graph("Conv", inputs), inputs)
    gpu.torch.emulated_use(0, ctypes.c_void_p(gpu.stream()))
    with pytest.raises(NotImplementedError, match="is an op of PyTorch's, which works in another stream"):
        plan.forward(given, 0)
    gpu.use(0)
    torch.testing.assert_close(gpu.get(plan.forward(given, 0)[0][0]), F.conv2d(*inputs))


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, LAUNCH_FAILED])
@pytest.mark.parametrize("name", CALLS, ids=lambda name: name.decode())
def test_whichever_call_fails_it_is_an_exception_and_the_next_step_works(gpu: Gpu, name: bytes, error: int) -> None:
    inputs, dy = [random(2, 3, 6, 5), random(4, 3, 3, 2, seed=1), random(4, seed=2)], random(2, 4, 4, 4, seed=3)
    text = graph("Conv", inputs)
    want = step(gpu, text, inputs, dy)
    before = gpu.used_bytes()
    for n in range(100):
        gpu.fail(n, name, error)
        try:
            step(gpu, text, inputs, dy)
        except RuntimeError as failure:
            assert "failed in PyTorch: CUDA" in str(failure)
            kind = torch.OutOfMemoryError if error == OUT_OF_MEMORY else gpu.core.DeviceError
            assert isinstance(failure, kind)
            gpu.fail(-1, None, 0)
        else:
            break
        assert gpu.tensors() == 0
        assert all(map(torch.equal, step(gpu, text, inputs, dy), want)), n
    assert 0 < n < 100
    assert gpu.used_bytes() == before


def test_a_step_that_comes_again_is_not_captured(gpu: Gpu) -> None:
    """A graph would use memory that PyTorch has given to others since."""
    inputs = [random(2, 3, 6, 5), random(4, 3, 3, 3, seed=1)]
    given = [gpu.put(t) for t in inputs]
    session = gpu.core.Session(graph("Conv", inputs), {}, provider="gpu")
    plan = session.plan(given, [False, False], [False])
    gpu.fail(0, b"cuStreamBeginCapture_v2", CAPTURE_INVALIDATED)
    for _ in range(5):
        torch.testing.assert_close(gpu.get(plan.forward(given, 0)[0][0]), F.conv2d(*inputs))
    assert session.stats()["replays"] == 0
    with gpu.entered():
        assert gpu.driver.cuStreamBeginCapture_v2(None, 0) == CAPTURE_INVALIDATED  # the first that there has been
