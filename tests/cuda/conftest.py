"""The emulated GPU for each test, which makes no mistake there; with ``pytest --on cuda`` one of hardware."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import on_device
import pytest
import torch
from cold_gpu import Cold
from emulated_gpu import Gpu
from hardware_gpu import Hardware


def build() -> None:
    if torch.version.cuda is not None:
        pytest.skip("a GPU is emulated where PyTorch has no CUDA of its own")
    on_device.build()


@pytest.fixture(scope="module")
def gpu(request: pytest.FixtureRequest) -> Gpu:
    if name := request.config.getoption("on"):
        return Hardware(on_device.Session.core, name)
    build()
    on_device.load_stand_ins()
    core, device = on_device.loaded()
    return Gpu(core, device, ctypes.CDLL("libcuda.so.1"))


@pytest.fixture(scope="module")
def stand_ins(request: pytest.FixtureRequest) -> None:
    """For tests of processes of their own, in which a GPU is emulated."""
    if request.config.getoption("on"):
        pytest.skip("hardware has no stand-ins")
    build()


@pytest.fixture(scope="module")
def cold(stand_ins: None) -> Iterator[Cold]:
    """For tests of processes that have just been started."""
    server = Cold()
    yield server
    server.end()


@pytest.fixture(autouse=True)
def no_mistakes(request: pytest.FixtureRequest, gpu: Gpu) -> Iterator[None]:
    """Stand-ins say what their user does wrong, and what it leaves behind."""
    if isinstance(gpu, Hardware):
        if request.node.get_closest_marker("at_once") and os.environ.get("OMC_SYNC") != "1":
            pytest.skip("on hardware the op itself raises under OMC_SYNC=1 alone")
        yield
        return
    before = gpu.counted().mistakes
    yield
    gpu.fail(-1, None, 0)
    assert gpu.counted().mistakes == before
    assert gpu.tensors() == 0
