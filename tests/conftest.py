"""Shared by all tests: seeds, graphs that are verified after every pass, mistakes that raise."""

import argparse
import os
import sys
import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

os.environ["OMC_VERIFY"] = "1"  # read when the package is imported
torch.backends.cudnn.allow_tf32 = False  # float32 is compared as such, on hardware too; products are so by default
FEW = 6  # rows of a test that are always run
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("ops", "device")]


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"one in {number} is no part of anything")
    return number


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", action="store_true", help="every session runs on the device of tests/c")
    parser.addoption("--gpu", action="store_true", help="every session runs on the emulated GPU of tests/cuda")
    parser.addoption("--gpus", action="store_true", help="PyTorch has the emulated GPUs of tests/cuda: cuda:0, cuda:1")
    parser.addoption("--on", default="", metavar="DEVICE", help="every session runs on a device of PyTorch's: cuda")

    parser.addoption(
        "--every",
        type=_at_least_one,
        default=1,
        metavar="N",
        help=f"of tests with more than {FEW} rows, and of loops over steps and seeds, one in N; none that takes long",
    )


def other_device(config: pytest.Config) -> str:
    named: str = config.getoption("on")
    return "device" if config.getoption("device") else "gpu" if config.getoption("gpu") else named


def check_device(name: str) -> None:
    """Raises UsageError, with PyTorch's reason, where it has no such device."""
    try:
        torch.empty(0, device=name)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise pytest.UsageError(f"--on {name}: torch {torch.__version__} has no such device here: {reason}") from None


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("gpus"):
        import emulated_cuda
        import on_device

        on_device.build()
        emulated_cuda.install()
    if other_device(config):
        import on_device

        if other_device(config) in on_device.BUILT:
            on_device.build()
        else:
            check_device(other_device(config))
        on_device.install(other_device(config))


def test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def is_whole(item: pytest.Item) -> bool:
    return item.get_closest_marker("whole") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if other_device(config):
        items[:] = [item for item in items if item.get_closest_marker("host") is None]
    every, rows = config.getoption("every"), Counter(map(test_of, items))
    left_out = [
        item
        for item in items
        if (every > 1 and item.get_closest_marker("long"))
        or (rows[test_of(item)] > FEW and not is_whole(item) and zlib.crc32(item.nodeid.encode()) % every)
    ]
    config.hook.pytest_deselected(items=left_out)
    without = {*left_out}
    items[:] = [item for item in items if item not in without]


@pytest.fixture(scope="session")
def every(pytestconfig: pytest.Config) -> int:
    """Of steps and seeds in a loop, one in so many is to be tried."""
    number: int = pytestconfig.getoption("every")
    return number


def pytest_collectstart() -> None:
    torch.manual_seed(0)  # for the modules that a file of tests makes when it is imported


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        yield
    except NotImplementedError as error:
        if other_device(item.config) in ("", "device") or "cuda has no kernel" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def second_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PyTorch 2.13 there is none: a test that comes to it ends there, but for those of what is so then."""
    if torch.__version__ < "2.13" and request.node.get_closest_marker("any_pytorch") is None:
        missed = "TorchDynamo makes graphs for ORTModule from PyTorch 2.13 on"
        monkeypatch.setattr("ortmodule_c.dynamo.second_way.SecondWay.__call__", lambda *_: pytest.skip(missed))
