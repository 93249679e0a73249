"""The provider for CUDA on the emulated GPU: results, failures of the driver, and what becomes of them.

Kernels are those of a GPU, compiled as C++ and run by stand-ins for the driver, the compiler and PyTorch's memory,
which say what their user does wrong (`mistakes`). ``pytest --gpu`` runs other tests there.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import ModuleType

import on_device
import pytest
import torch
from torch import Tensor

OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719
PROGRAM = """\
input %x : f32[5,37] grad
input %b : f32[37] grad
const %c : f32[1] = [0.5]
%0 = Add(%x, %b)
%1 = Gelu(%0)
%2 = Dropout(%1) {p=0.3, subsequence=5}
%3 = Mul(%2, %c)
%y = Cast(%3) {to=16}
return %y
"""
FORWARD = PROGRAM.replace(" grad", "")


class Counts(ctypes.Structure):
    _fields_ = [
        ("launches", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("compiled", ctypes.c_uint64),
        ("mistakes", ctypes.c_uint64),
        ("allocated_bytes", ctypes.c_size_t),
        ("events", ctypes.c_uint64),
    ]


class Gpu:
    """Sessions and tensors of the emulated GPU."""

    def __init__(self, core: ModuleType, device: ModuleType, driver: ctypes.CDLL) -> None:
        self.core, self._device, self.driver = core, device, driver
        driver.emulated_counted.restype = Counts

    def put(self, t: Tensor) -> Tensor:
        return self._device.put(t, "gpu")

    def get(self, t: Tensor) -> Tensor:
        return self._device.get(t, "gpu")

    def counted(self) -> Counts:
        return self.driver.emulated_counted()

    def fail(self, n: int, name: bytes | None, error: int) -> None:
        self.driver.emulated_fail(ctypes.c_int64(n), name, error)

    def forward(self, text: str, inputs: list[Tensor], seed: int = 7) -> list[Tensor]:
        given = [self.put(t) for t in inputs]
        outputs, _ = (
            self.core.Session(text, {}, provider="gpu").plan(given, [False] * len(given), [False]).forward(given, seed)
        )
        return [self.get(t) for t in outputs]


def on_the_cpu(core: ModuleType, text: str, inputs: list[Tensor], seed: int = 7) -> list[Tensor]:
    return core.Session(text, {}).plan(inputs, [False] * len(inputs), [False]).forward(inputs, seed)[0]


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    on_device.build()
    on_device.load_stand_ins()
    core, device = on_device.loaded()
    return Gpu(core, device, ctypes.CDLL("libcuda.so.1"))


@pytest.fixture(autouse=True)
def no_mistakes(gpu: Gpu) -> None:
    before = gpu.counted().mistakes
    yield
    gpu.fail(-1, None, 0)
    assert gpu.counted().mistakes == before


INPUTS = [torch.randn(5, 37, generator=torch.Generator().manual_seed(0)), torch.linspace(-2, 2, 37)]


def test_a_program_gives_what_the_cpu_gives(gpu: Gpu) -> None:
    (got,), (want,) = gpu.forward(FORWARD, INPUTS), on_the_cpu(gpu.core, FORWARD, INPUTS)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    assert torch.equal(got == 0, want == 0)  # the same elements are dropped


def test_another_shape_is_not_compiled_again(gpu: Gpu) -> None:
    gpu.forward(FORWARD, INPUTS)
    before = gpu.counted().launches
    text = FORWARD.replace("5,37", "3,2,41").replace("[37]", "[41]")
    inputs = [torch.randn(3, 2, 41), torch.randn(41)]
    (got,), (want,) = gpu.forward(text, inputs), on_the_cpu(gpu.core, text, inputs)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    assert gpu.counted().launches == before + 1


def test_nothing_is_launched_for_nothing(gpu: Gpu) -> None:
    before = gpu.counted().launches
    text = FORWARD.replace("5,37", "0,37")
    (got,) = gpu.forward(text, [torch.empty(0, 37), INPUTS[1]])
    assert got.shape == (0, 37) and gpu.counted().launches == before


def test_an_integer_divided_by_0_is_told_once_with_its_node(gpu: Gpu) -> None:
    text = "input %a : i64[3]\ninput %b : i64[3]\n%q = FloorDiv(%a, %b)\nreturn %q\n"
    a = torch.tensor([7, -7, 5])
    with pytest.raises(RuntimeError, match=r"divides an integer by 0"):
        gpu.forward(text, [a, torch.tensor([2, 0, 1])])
    assert gpu.forward(text, [a, torch.tensor([2, 2, 1])])[0].tolist() == [3, -4, 5]


def test_an_op_without_a_kernel_is_refused_by_name(gpu: Gpu) -> None:
    text = "input %x : f32[3,3]\n%y = MatMul(%x, %x)\nreturn %y\n"
    with pytest.raises(NotImplementedError, match=r"MatMul.*cuda has no kernel for f32"):
        gpu.forward(text, [torch.randn(3, 3)])


def test_there_is_no_second_gpu(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_DEVICE"):
        gpu.core.Session(FORWARD, {}, provider="cuda:1")


def test_a_kernel_that_fails_is_told_when_somebody_waits(gpu: Gpu) -> None:
    gpu.fail(0, b"cuStreamSynchronize", LAUNCH_FAILED)
    given = [gpu.put(t) for t in INPUTS]
    gpu.fail(-1, None, 0)
    plan = gpu.core.Session(FORWARD, {}, provider="gpu").plan(given, [False, False], [False])
    outputs, _ = plan.forward(given, 7)
    gpu.fail(0, b"cuStreamSynchronize", LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED"):
        gpu.get(outputs[0])
    gpu.get(outputs[0])


def test_a_gpu_without_memory_is_told_as_pytorch_tells_it(gpu: Gpu) -> None:
    text = FORWARD.replace("5,37", "1009,37")  # a block that nobody has given back
    inputs = [torch.randn(1009, 37), INPUTS[1]]
    given = [gpu.put(t) for t in inputs]
    plan = gpu.core.Session(text, {}, provider="gpu").plan(given, [False, False], [False])
    gpu.fail(0, b"cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="out of memory"):
        plan.forward(given, 7)
    outputs, _ = plan.forward(given, 7)
    assert gpu.get(outputs[0]).shape == (1009, 37)


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, LAUNCH_FAILED])
def test_whichever_call_fails_it_is_an_exception_and_the_next_step_works(gpu: Gpu, error: int) -> None:
    """Each call to the driver in turn, until a whole step has fewer."""
    (want,) = gpu.forward(FORWARD, INPUTS)
    for n in range(100):
        gpu.fail(n, None, error)
        try:
            gpu.forward(FORWARD, INPUTS)
        except RuntimeError as failure:
            assert "CUDA_ERROR" in str(failure) or "out of memory" in str(failure)
            gpu.fail(-1, None, 0)
        else:
            break
        assert torch.equal(gpu.forward(FORWARD, INPUTS)[0], want), n
    else:
        pytest.fail("a step makes more than 100 calls")
    assert n > 3


def test_gradients_run_there_too(gpu: Gpu) -> None:
    given, dy = [gpu.put(t) for t in INPUTS], torch.randn(5, 37)
    text = "input %x : f32[5,37] grad\n%0 = Tanh(%x)\n%1 = Silu(%0)\nreturn %1\n"
    plan = gpu.core.Session(text, {}, provider="gpu").plan(given[:1], [True], [True])
    outputs, run = plan.forward(given[:1], 0)
    (dx,) = plan.backward(run, given[:1], outputs, [gpu.put(dy)])
    x = INPUTS[0].clone().requires_grad_()
    torch.nn.functional.silu(x.tanh()).backward(dy)
    torch.testing.assert_close(gpu.get(dx), x.grad)


def test_what_programs_know_passes_the_table_of_ops() -> None:
    """All elementwise ops; those that have no kernel yet are skipped."""
    command = [sys.executable, "-m", "pytest", "--gpu", "-q", "-p", "no:cacheprovider", "tests/ops/test_ops.py"]
    only = ["-k", "test_forward_equals_torch and base"]
    ran = subprocess.run([*command, *only], cwd=on_device.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
