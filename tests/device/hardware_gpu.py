"""A GPU that PyTorch has, for tests of the emulated one that ask for results alone: ``pytest --on cuda``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor


class Hardware(Gpu):
    """A device of PyTorch's under the emulated one's name; a test that asks for more than it has is skipped.

    Parameters
    ----------
    core
        The extension, without what `on_device.install` has put in its place.
    name
        PyTorch's name of the device.
    """

    def __init__(self, core: SimpleNamespace, name: str) -> None:
        def session(*args: Any, provider: str = "cpu") -> Any:
            return core.Session(*args, provider=name if provider == "gpu" else provider)

        def optim_step(*args: Any, provider: str, **how: Any) -> Any:
            return core.optim_step(*args, provider=name if provider == "gpu" else provider, **how)

        self.core = SimpleNamespace(**{**vars(core), "Session": session, "optim_step": optim_step})
        self.name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"hardware has no {name} of stand-ins")

    def put(self, t: Tensor) -> Tensor:
        return t.to(self.name, copy=True)

    def get(self, t: Tensor) -> Tensor:
        return t.to("cpu", copy=True)

    def wait(self, stream: int) -> None:
        """A test that is skipped here, behind a step that fails, would leave its error to the next one."""
        if stream:
            super().wait(stream)
        elif self.name != "cpu":
            torch.cuda.synchronize(self.name)

    @contextlib.contextmanager
    def waits_for_nothing(self) -> Iterator[None]:
        """Nobody sees to it."""
        yield
