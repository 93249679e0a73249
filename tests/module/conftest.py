"""Puts the shared helpers on the path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def export_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.export refuses runs in PyTorch: TorchDynamo is not asked."""
    monkeypatch.setenv("ORTMODULE_CAPTURE", "export")
