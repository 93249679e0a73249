"""Where a module's graphs are opened, and what is said of devices that none can be opened on."""

from __future__ import annotations

import subprocess
import sys

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
    assert "CUDA_ERROR_INVALID_DEVICE" in device_refusal(on("cuda:1"))


def test_without_cuda_it_is_said_what_lacks() -> None:
    said = subprocess.run([sys.executable, "-c", WITHOUT_CUDA], capture_output=True, text=True, check=True).stdout
    assert "device cuda:0 cannot be computed on: not supported: no libcuda.so.1 in this process" in said


def test_modules_run_there() -> None:
    command = [sys.executable, "-m", "pytest", "--gpu", "-q", "-p", "no:cacheprovider", "tests/cuda/modules.py"]
    ran = subprocess.run(command, cwd=on_device.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
