"""The emulated GPU for each test, which makes no mistake there; with ``pytest --on cuda`` one of hardware."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import on_device
import pytest
from cold_gpu import Cold
from emulated_gpu import Gpu
from hardware_gpu import Hardware


@pytest.fixture(scope="module")
def gpu(request: pytest.FixtureRequest) -> Gpu:
    if name := request.config.getoption("on"):
        return Hardware(on_device.Session.core, name)
    on_device.build()
    on_device.load_stand_ins()
    core, device = on_device.loaded()
    return Gpu(core, device, ctypes.CDLL("libcuda.so.1"))


@pytest.fixture(scope="module")
def cold(request: pytest.FixtureRequest) -> Iterator[Cold]:
    """For tests of processes that have just been started."""
    if request.config.getoption("on"):
        pytest.skip("hardware has no stand-ins")
    on_device.build()
    server = Cold()
    yield server
    server.end()


@pytest.fixture(autouse=True)
def no_mistakes(gpu: Gpu) -> Iterator[None]:
    """Stand-ins say what their user does wrong, and what it leaves behind."""
    if isinstance(gpu, Hardware):
        yield
        return
    before = gpu.counted().mistakes
    yield
    gpu.fail(-1, None, 0)
    assert gpu.counted().mistakes == before
    assert gpu.tensors() == 0
