"""What the emulated GPU fails in: who is told of it, when and in which words, and that the next step works."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import on_device
import pytest
import torch
from cold_gpu import Cold
from emulated_gpu import Gpu

OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719
PICKING = "input %t : f32[10,4]\ninput %i : i64[3]\n%y = Gather(%t, %i) {axis=0}\nreturn %y\n"
TABLE, GOOD, BAD = torch.randn(10, 4), torch.tensor([1, 0, 9]), torch.tensor([1, 10, 2])


def doubling(rows: int, times: float = 2.0) -> str:
    """Programs with other numbers are other device code."""
    return f"input %x : f32[{rows},37]\nconst %c : f32[1] = [{times}]\n%y = Mul(%x, %c)\nreturn %y\n"


def test_memory_that_has_run_out_is_pytorchs_error_and_a_smaller_step_works(gpu: Gpu) -> None:
    (plan, given), (less, of_less) = (gpu.plan(doubling(n), [torch.ones(n, 37)]) for n in (4001, 5))
    gpu.get(less.forward(of_less, 0)[0][0])
    gpu.fail(0, b"cuMemAlloc_v2", OUT_OF_MEMORY)
    with contextlib.suppress(torch.OutOfMemoryError):
        gpu.put(torch.ones(4001, 43))  # what is kept of other plans makes room once
    gpu.fail(0, b"cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(torch.OutOfMemoryError, match=r"\d+ bytes on GPU 0 failed in PyTorch: CUDA out of memory"):
        plan.forward(given, 0)
    assert gpu.get(less.forward(of_less, 0)[0][0]).eq(2).all()
    assert gpu.get(plan.forward(given, 0)[0][0]).eq(2).all()


SILENT = """
import json
def told(failing, error):
    large = "input %x : f32[1]\\nconst %s : i64[1] = [2147483648]\\n%y = Expand(%x, %s)\\nreturn %y\\n"
    plan, given = gpu.plan(large, [torch.ones(1)])
    gpu.fail(0, failing, error)
    try:
        plan.forward(given, 0)
    except RuntimeError as failure:
        less, of_less = gpu.plan("input %x : f32[3]\\n%y = Neg(%x)\\nreturn %y\\n", [torch.ones(3)])
        right = gpu.get(less.forward(of_less, 0)[0][0]).eq(-1).all().item()
        print(json.dumps([type(failure).__name__, str(failure), right]))
"""
HAS_NONE = r" failed in PyTorch: CUDA out of memory\. \d+ of 4294967296 bytes are free"


@pytest.mark.parametrize(
    ("failing", "error", "kind", "words"),
    [
        (b"none", 0, "OutOfMemoryError", HAS_NONE),
        (b"cuMemGetInfo_v2", LAUNCH_FAILED, "DeviceError", ": CUDA_ERROR_LAUNCH_FAILED .*"),
    ],
)
def test_memory_that_has_run_out_is_told_where_pytorch_has_no_words(
    cold: Cold, failing: bytes, error: int, kind: str, words: str
) -> None:
    """As before PyTorch 2.13. Nothing says so where the device has failed."""
    ran = cold.run(SILENT + f"told({failing!r}, {error})", EMULATED_SILENT="1")
    assert (ran.err, ran.code) == ("", 0)
    raised, said, is_right = json.loads(ran.out)
    assert (raised, is_right) == (kind, True)
    assert re.search(f"an allocation of 8589934592 bytes on GPU 0{words}$", said)


def test_graphs_make_room_before_memory_has_run_out(gpu: Gpu) -> None:
    before = gpu.counted().graphs
    (plan, given), (kept, of_kept) = (gpu.plan(doubling(n), [torch.ones(n, 37)]) for n in (5003, 5))
    for _ in range(3):
        gpu.get(kept.forward(of_kept, 0)[0][0])
    assert gpu.counted().graphs > before
    gpu.fail(0, b"cuMemAlloc_v2", OUT_OF_MEMORY)
    assert gpu.get(plan.forward(given, 0)[0][0]).eq(2).all()
    assert gpu.counted().graphs <= before
    replays = gpu.counted().replays
    for _ in range(2):
        assert gpu.get(kept.forward(of_kept, 0)[0][0]).eq(2).all()
    assert gpu.counted().replays > replays


def test_an_index_out_of_range_is_told_by_the_next_step_which_waits_for_nothing(stand_ins: None, gpu: Gpu) -> None:
    plan, given = gpu.plan(PICKING, [TABLE, BAD])
    plan.forward(given, 0)
    gpu.wait(0)  # as whoever reads the loss
    gpu.write(given[1], GOOD)
    gpu.fail(0, b"cuStreamSynchronize", LAUNCH_FAILED)
    with pytest.raises(gpu.core.DeviceError, match=r"work given before: .*Gather.*: index 10 is out of range"):
        plan.forward(given, 0)
    outputs, _ = plan.forward(given, 0)
    gpu.fail(-1, None, 0)
    assert torch.equal(gpu.get(outputs[0]), TABLE[GOOD])


def test_a_step_of_an_optimizer_tells_what_a_kernel_has_written_before_it_changes_anything(gpu: Gpu) -> None:
    plan, given = gpu.plan(PICKING, [TABLE, BAD])
    weight, grad = gpu.put(torch.ones(3)), gpu.put(torch.ones(3))
    plan.forward(given, 0)
    gpu.wait(0)  # as whoever reads the loss

    def step() -> None:
        tensors = [(0, weight, grad, None, None, True, ())]
        gpu.core.optim_step("sgd", tensors, [{"lr": 0.5}], provider="gpu")

    with pytest.raises(gpu.core.DeviceError, match=r"work given before: .*Gather.*: index 10 is out of range"):
        step()
    assert gpu.get(weight).eq(1).all()
    step()
    assert gpu.get(weight).eq(0.5).all()


AT_EXIT = f"""
from ortmodule_c import devices
devices._C = gpu.core
devices.tell_at_exit("gpu")
plan, given = gpu.plan({PICKING!r}, [torch.ones(10, 4), torch.tensor([1, 10, 2])])
plan.forward(given, 0)
gpu.wait(0)
"""


def test_what_nobody_has_asked_for_is_a_warning_when_the_process_ends(cold: Cold) -> None:
    ran = cold.run(AT_EXIT)
    assert (ran.out, ran.code) == ("", 0)
    assert re.search(
        r"UserWarning: at the end of the process: .*Gather.*: index 10 is out of range, there are 10", ran.err
    )


def test_a_forked_child_looks_at_nothing_of_the_devices(cold: Cold) -> None:
    ran = cold.run(AT_EXIT + "import os\nif os.fork(): os.wait(), os._exit(0)")
    assert ran == ("", "", 0)


def test_a_device_that_has_failed_is_told_with_the_op_that_met_it(gpu: Gpu) -> None:
    plan, given = gpu.plan(PICKING, [TABLE, GOOD])
    gpu.fail(0, b"cuLaunchKernel", LAUNCH_FAILED)
    with pytest.raises(gpu.core.DeviceError, match=r"noticed at .*Gather.*, perhaps of an earlier step.*LAUNCH_FAILED"):
        plan.forward(given, 0)
    assert torch.equal(gpu.get(plan.forward(given, 0)[0][0]), TABLE[GOOD])


def test_a_device_that_has_failed_is_not_one_without_memory(gpu: Gpu) -> None:
    plan, given = gpu.plan(doubling(6007), [torch.ones(6007, 37)])
    gpu.fail(0, b"cuMemAlloc_v2", LAUNCH_FAILED)
    with pytest.raises(
        gpu.core.DeviceError, match=r"\d+ bytes on GPU 0 failed in PyTorch: .*unspecified launch failure"
    ):
        plan.forward(given, 0)
    assert gpu.get(plan.forward(given, 0)[0][0]).eq(2).all()


WAITING = f"""
import sys
sys.path.insert(0, {str(Path(on_device.__file__).parent)!r})
import ctypes, on_device, torch
on_device.load_stand_ins()
core, device = on_device.loaded()
text = {PICKING!r}.replace("%y = Gather", "%0 = Neg(%t)\\n%y = Gather")
def told(indices, fails):
    given = [device.put(torch.ones(10, 4), "gpu"), device.put(torch.tensor(indices), "gpu")]
    plan = core.Session(text, {{}}, provider="gpu").plan(given, [False, False], [False])
    if fails:
        ctypes.CDLL("libcuda.so.1").emulated_fail(ctypes.c_int64(0), b"cuStreamSynchronize", 719)
    try:
        plan.forward(given, 0)
    except core.DeviceError as error:
        print(type(error).__name__, error)
told([1, 10, 2], False)
told([1, 2, 3], True)
told([1, 2, 3], False)
"""


def test_who_waits_after_each_op_is_told_at_once(stand_ins: None) -> None:
    environment = {**os.environ, "OMC_SYNC": "1"}
    ran = subprocess.run([sys.executable, "-c", WAITING], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    first, second = ran.stdout.splitlines()
    assert first.startswith("DeviceError") and "'Gather': index 10 is out of range, there are 10" in first
    assert second.startswith("DeviceError") and "CUDA_ERROR_LAUNCH_FAILED" in second and "noticed" not in second


# Modules whose tensors are there, and what PyTorch, which does not look at numbers there, is never to compute with.
MODULES_WAITING = f"""
import sys
sys.path.insert(0, {str(Path(on_device.__file__).parent)!r})
import emulated_cuda, torch
emulated_cuda.install()
from ortmodule_c import DebugOptions, ORTModule
class Words(torch.nn.Embedding):
    def forward(self, ids, by):
        return super().forward(ids) + torch.div(ids, by, rounding_mode="floor")[:, None]
for capture in ("export", "dynamo"):
    model, (ids, bad, ones, zeros) = ORTModule(Words(5, 3).to("cuda"), DebugOptions(capture=capture)), (
        torch.tensor(of).to("cuda") for of in ([1, 2], [1, 7], [1, 1], [1, 0])
    )
    for given in ((ids, ones), (bad, ones), (ids, zeros), (ids, ones)):
        try:
            model(*given)
            print("right")
        except RuntimeError as error:
            print(type(error).__name__, error)
    print(model.fallback_report())
"""


def test_so_are_modules_there_which_do_not_run_in_pytorch_then(stand_ins: None) -> None:
    environment = {**os.environ, "OMC_SYNC": "1"}
    command = [sys.executable, "-c", MODULES_WAITING]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = [
        *("right", "DeviceError .*Embedding.*: index 7 is out of range, there are 5"),
        *("DeviceError .*FloorDiv.* divides an integer by 0", "right", r"\[\]"),
    ]
    lines = ran.stdout.splitlines()
    assert len(lines) == 2 * len(told)
    for line, pattern in zip(lines, 2 * told, strict=True):
        assert re.fullmatch(pattern, line), lines


# A constant, two kernels, one of which asks for shared memory, and their gradients.
STEP = """
import json
attention = "%0 = Mul(%x, %c)\\n%y, %lse = Attention(%0, %x, %x) {scale=0.125}\\n"
plain = "%y = Mul(%x, %c)\\n"
x, c = torch.linspace(-1, 1, 384).view(1, 2, 3, 64), torch.linspace(1, 2, 64)
def step(ops):
    given = [gpu.put(x)]
    text = "input %x : f32[1,2,3,64] grad\\nconst %c : f32[64] = @\\n" + ops + "return %y\\n"
    plan = gpu.core.Session(text, {"c": c}, provider="gpu").plan(given, [True], [True])
    outputs, run = plan.forward(given, 0)
    return [gpu.get(t) for t in (*outputs, *plan.backward(run, given, outputs, [gpu.put(x)]))]
def is_right(ops):
    leaf = x.clone().requires_grad_()
    y = leaf * c
    if ops == attention:
        y = torch.nn.functional.scaled_dot_product_attention(y, leaf, leaf, scale=0.125)
    y.backward(x)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(step(ops), (y, leaf.grad)))
def attempt(ops, n, name, error):
    gpu.fail(n, name, error)
    told = "", ""
    try:
        step(ops)
    except Exception as failure:
        told = type(failure).__name__, str(failure)
    print(json.dumps([gpu.fail(-1, None, 0), *told, is_right(ops)]))
"""
# Tensors that the tests themselves make there have no exceptions of their own.
KINDS = {
    OUT_OF_MEMORY: [("OutOfMemoryError", "device memory")],
    LAUNCH_FAILED: [("DeviceError", "the device failed"), ("RuntimeError", "the device failed")],
}
HARMLESS = 2  # calls of that step: whether a stream is captured, forward and backward


def attempted(
    cold: Cold, ops: str, n: int, name: bytes | None, error: int, **environment: str
) -> tuple[bool, str, str]:
    """Of a new process whose call `n` is to fail: whether its step went by before that, and its exception.

    The next step of that process is right.
    """
    ran = cold.run(STEP + f"attempt({ops}, {n}, {name}, {error})", **environment)
    assert (ran.err, ran.code) == ("", 0)
    pending, kind, words, is_right = json.loads(ran.out)
    assert is_right, (n, kind, words)
    return pending, kind, words


@pytest.mark.long
@pytest.mark.parametrize("error", KINDS)
def test_whichever_call_of_a_new_process_fails_its_kind_is_told_and_the_next_step_is_right(
    cold: Cold, error: int, every: int
) -> None:
    tried, told = 0, []
    for n in itertools.count(step=every):
        pending, kind, words = attempted(cold, "attention", n, None, error)
        if pending:
            break
        tried += 1
        told += [(kind, words.partition(":")[0])] if kind else []
    harmless = tried - len(told)
    assert n > 40 and (harmless == HARMLESS or (every > 1 and harmless < HARMLESS))
    assert {*told} <= {*KINDS[error]}


@pytest.mark.parametrize("error", KINDS)
@pytest.mark.parametrize(
    "name", [b"nvrtcCreateProgram", b"nvrtcCompileProgram", b"nvrtcGetCUBINSize", b"nvrtcGetCUBIN"]
)
def test_code_that_a_new_process_cannot_compile_is_compiled_by_the_next_step(
    cold: Cold, name: bytes, error: int, tmp_path: Path
) -> None:
    pending, kind, words = attempted(cold, "plain", 0, name, error, XDG_CACHE_HOME=str(tmp_path))
    assert (pending, kind) == (False, "RuntimeError")
    named = {OUT_OF_MEMORY: "NVRTC_ERROR_OUT_OF_MEMORY", LAUNCH_FAILED: "NVRTC_ERROR_INTERNAL_ERROR"}[error]
    assert words.endswith(f"device code does not compile: {named}")


def test_code_that_was_not_compiled_for_want_of_memory_is_compiled_again(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is kept there
    text = "input %x : f32[5,37]\n%0 = LeakyRelu(%x) {alpha=0.123}\n%y = Neg(%0)\nreturn %y\n"
    gpu.fail(0, b"nvrtcCompileProgram", OUT_OF_MEMORY)
    plan, given = gpu.plan(text, [torch.ones(5, 37)])
    with pytest.raises(RuntimeError, match="device code does not compile"):
        plan.forward(given, 0)
    assert gpu.get(plan.forward(given, 0)[0][0]).eq(-1).all()


def test_a_function_is_told_once_how_much_memory_its_blocks_may_have(gpu: Gpu) -> None:
    q = torch.randn(1, 2, 5, 64)
    lines = [f"input %{n} : f32[1,2,5,64]" for n in "qkv"]
    text = "\n".join([*lines, "%y, %lse = Attention(%q, %k, %v) {scale=0.125}", "return %y", ""])
    (first,) = gpu.forward(text, [q, q, q])
    gpu.fail(0, b"cuFuncSetAttribute", LAUNCH_FAILED)
    assert torch.equal(gpu.forward(text, [q, q, q])[0], first)
