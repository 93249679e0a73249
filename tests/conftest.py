"""Shared by all tests: seeds."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent / "ops")]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
