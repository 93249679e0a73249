"""Shared by all tests: seeds, graphs that are verified after every pass, mistakes that raise."""

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ["OMC_VERIFY"] = "1"  # read when the package is imported
sys.path[:0] = [str(Path(__file__).parent / "ops")]


def pytest_collectstart() -> None:
    torch.manual_seed(0)  # for the modules that a file of tests makes when it is imported


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
