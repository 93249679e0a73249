"""The provider for CUDA on the emulated GPU: results, failures of the driver, and what becomes of them.

Kernels are those of a GPU, compiled as C++ and run by stand-ins for the driver, the compiler and PyTorch's memory.
``pytest --gpu`` runs other tests there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import on_device
import pytest
import torch
from emulated_gpu import Gpu

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
INPUTS = [torch.randn(5, 37, generator=torch.Generator().manual_seed(0)), torch.linspace(-2, 2, 37)]


def test_a_program_gives_what_the_cpu_gives(gpu: Gpu) -> None:
    (got,), (want,) = gpu.forward(FORWARD, INPUTS), gpu.on_the_cpu(FORWARD, INPUTS)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    assert torch.equal(got == 0, want == 0)  # the same elements are dropped


def test_another_shape_is_not_compiled_again(gpu: Gpu) -> None:
    gpu.forward(FORWARD, INPUTS)
    before = gpu.counted().launches
    text = FORWARD.replace("5,37", "3,2,41").replace("[37]", "[41]")
    inputs = [torch.randn(3, 2, 41), torch.randn(41)]
    (got,), (want,) = gpu.forward(text, inputs), gpu.on_the_cpu(text, inputs)
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
    inputs = [torch.randn(1, 1, 2, 129) for _ in range(3)]
    heads = "".join(f"input %{name} : f32[1,1,2,129]\n" for name in "qkv")
    with pytest.raises(NotImplementedError, match=r"Attention.*cuda has no kernel for heads of 129"):
        gpu.forward(heads + "%y, %lse = Attention(%q, %k, %v)\nreturn %y\n", inputs)


def test_there_is_no_third_gpu(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_DEVICE"):
        gpu.core.Session(FORWARD, {}, provider="cuda:2")


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
    text = FORWARD.replace("5,37", "4099,37")  # a block that nobody has given back
    inputs = [torch.randn(4099, 37), INPUTS[1]]
    given = [gpu.put(t) for t in inputs]
    plan = gpu.core.Session(text, {}, provider="gpu").plan(given, [False, False], [False])
    gpu.fail(0, b"cuMemAlloc_v2", OUT_OF_MEMORY)
    with contextlib.suppress(RuntimeError):
        gpu.put(torch.ones(4099, 41))  # what is kept of other plans makes room once
    gpu.fail(0, b"cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="out of memory"):
        plan.forward(given, 7)
    outputs, _ = plan.forward(given, 7)
    assert gpu.get(outputs[0]).shape == (4099, 37)


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, LAUNCH_FAILED])
def test_whichever_call_fails_it_is_an_exception_and_the_next_step_works(gpu: Gpu, error: int) -> None:
    """Each call to the driver in turn, of which a step has fewer than 60; giving memory back cannot fail."""
    (want,) = gpu.forward(FORWARD, INPUTS)
    told = []
    for n in range(60):
        gpu.fail(n, None, error)
        try:
            gpu.forward(FORWARD, INPUTS)
        except RuntimeError as failure:
            assert any(text in str(failure) for text in ("CUDA_ERROR", "CUDA error", "CUBLAS_STATUS", "out of memory"))
            told.append(n)
        gpu.fail(-1, None, 0)
        assert torch.equal(gpu.forward(FORWARD, INPUTS)[0], want), n
    assert len(told) > 3 and told[-1] < 59


def test_gradients_run_there_too(gpu: Gpu) -> None:
    given, dy = [gpu.put(t) for t in INPUTS], torch.randn(5, 37)
    text = "input %x : f32[5,37] grad\n%0 = Tanh(%x)\n%1 = Silu(%0)\nreturn %1\n"
    plan = gpu.core.Session(text, {}, provider="gpu").plan(given[:1], [True], [True])
    outputs, run = plan.forward(given[:1], 0)
    (dx,) = plan.backward(run, given[:1], outputs, [gpu.put(dy)])
    x = INPUTS[0].clone().requires_grad_()
    torch.nn.functional.silu(x.tanh()).backward(dy)
    torch.testing.assert_close(gpu.get(dx), x.grad)


def test_memory_is_given_back_once_the_stream_that_used_it_last_is_done(gpu: Gpu) -> None:
    """By a thread that has done nothing else on the GPU."""
    text = "input %x : f32[5,37] grad\n%0 = Tanh(%x)\n%1 = Silu(%0)\nreturn %1\n"
    given, dy, others = [gpu.put(INPUTS[0])], gpu.put(torch.ones(5, 37)), [gpu.stream(), gpu.stream()]
    plan = gpu.core.Session(text, {}, provider="gpu").plan(given, [True], [True])
    before = gpu.counted().events
    gpu.use(others[0])
    outputs, run = plan.forward(given, 0)
    gpu.use(others[1])
    held = [plan.backward(run, given, outputs, [dy])[0], run, outputs]
    gpu.use(0)
    del run, outputs
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    dropping.join()
    assert gpu.counted().events == before


def test_a_process_ends_while_kernels_are_compiled(tmp_path: Path) -> None:
    source = f"""
import sys
sys.path.insert(0, {str(Path(on_device.__file__).parent)!r})
import on_device, torch
on_device.load_stand_ins()
core, device = on_device.loaded()
given = [device.put(torch.ones(5, 37), "gpu"), device.put(torch.ones(37), "gpu")]
core.Session({FORWARD!r}, {{}}, provider="gpu").plan(given, [False, False], [False])
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_programs_know_passes_the_table_of_ops() -> None:
    """All elementwise ops; those that have no kernel yet are skipped."""
    command = [sys.executable, "-m", "pytest", "--gpu", "-q", "-p", "no:cacheprovider", "tests/ops/test_ops.py"]
    only = ["-k", "test_forward_equals_torch and base"]
    ran = subprocess.run([*command, *only], cwd=on_device.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
