"""Puts the shared helpers on the path; under what the tests run."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo

from ortmodule_c import report

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def export_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.export refuses runs in PyTorch: TorchDynamo is not asked."""
    monkeypatch.setenv("ORTMODULE_CAPTURE", "export")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """TorchDynamo has compiled nothing, and keeps nothing afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The policy outside of tests."""
    monkeypatch.setattr(report, "mistakes_raise", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs in PyTorch")
        yield
