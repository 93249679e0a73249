"""Where a module's graphs are opened, and what is said of devices that none can be opened on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import on_device
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ortmodule_c.devices import device_refusal, provider_of

WITHOUT_CUDA = """\
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from ortmodule_c.devices import device_refusal
with FakeTensorMode():
    print(device_refusal([torch.empty(3, device="cuda")]))
"""


def on(*devices: str) -> list[Tensor]:
    """Tensors without elements, for which no such device is needed."""
    with FakeTensorMode():
        return [torch.empty(3, device=device) for device in devices]


@pytest.mark.parametrize("name", ["cpu", "cuda:0", "cuda:1"])
def test_a_provider_has_the_name_of_its_device(name: str) -> None:
    assert provider_of(torch.device(name)) == name


def test_a_graph_is_for_tensors_of_one_device_that_opens() -> None:
    assert device_refusal([]) == device_refusal(on("cpu", "cpu")) == device_refusal(on("cuda:0")) == ""
    assert device_refusal(on("cuda:0", "cpu")) == "tensors are on cpu and cuda:0"
    assert device_refusal(on("meta")) == "there are no kernels for device 'meta'"
    assert "CUDA_ERROR_INVALID_DEVICE" in device_refusal(on("cuda:2"))


def test_without_cuda_it_is_said_what_lacks() -> None:
    said = subprocess.run([sys.executable, "-c", WITHOUT_CUDA], capture_output=True, text=True, check=True).stdout
    assert "device cuda:0 cannot be computed on: not supported: no libcuda.so.1 in this process" in said


@pytest.mark.parametrize(
    ("option", "tests"),
    [pytest.param("--gpu", "modules.py", marks=pytest.mark.long), ("--gpu", "images.py"), ("--gpus", "gpus.py")],
)
def test_modules_run_there(option: str, tests: str) -> None:
    command = [sys.executable, "-m", "pytest", option, "-q", "-p", "no:cacheprovider", f"tests/cuda/{tests}"]
    ran = subprocess.run(command, cwd=on_device.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]


# Of heads: what is stored, their elements, whether gradients are wanted, and whether 99 KiB are enough.
HEADS = [
    *[("bf16", 256, False, True), ("bf16", 160, True, True), ("bf16", 161, True, False)],
    *[("f32", 128, False, True), ("f32", 90, True, True), ("f32", 91, True, False)],
    *[("f64", 58, False, True), ("f64", 59, False, False), ("f64", 29, True, True), ("f64", 30, True, False)],
]
PLANS = f"""
import sys
sys.path[:0] = {[str(on_device.ROOT / "tests" / name) for name in ("device", "ops")]}
import on_device, torch
from case import DTYPE_TEXT
on_device.load_stand_ins()
core, device = on_device.loaded()
dtypes = {{text: dtype for dtype, text in DTYPE_TEXT.items()}}
for text, dim, grad, _ in {HEADS}:
    lines = [f"input %{{n}} : {{text}}[1,1,2,{{dim}}] grad" for n in "qkv"]
    graph = chr(10).join([*lines, "%y, %lse = Attention(%q, %k, %v)", "return %y", ""])
    given = [device.put(torch.zeros(1, 1, 2, dim, dtype=dtypes[text]), "gpu")] * 3
    try:
        core.Session(graph, {{}}, provider="gpu").plan(given, [grad] * 3, [grad])
        print("planned")
    except NotImplementedError as error:
        print(error)
"""


def test_heads_are_refused_that_take_more_of_a_block_than_it_has(tmp_path: Path) -> None:
    """As on a GPU of sm_86, sm_89 or sm_120. Sources are kept, not compiled."""
    environment = {**os.environ, "EMULATED_SHARED_BYTES": str(99 << 10), "EMULATED_SOURCES": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", PLANS], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    for (*heads, fits), line in zip(HEADS, ran.stdout.splitlines(), strict=True):
        assert ("planned" if fits else "no kernel for heads that take") in line, (heads, line)
