"""What runs in PyTorch instead of here, told once and listed on request."""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import ORTModuleError
from .options import Fallback


@dataclass(frozen=True)
class FallbackRecord:
    """One thing that runs in PyTorch.

    Attributes
    ----------
    name
        The ATen op or the class of the module.
    cause
        Why it cannot run here.
    count
        How many times it occurs in the graphs exported so far; 1 for a module.
    """

    name: str
    cause: str
    count: int


class FallbackReport:
    """Collects fallbacks of one module; warns once about each name and cause."""

    def __init__(self, policy: Fallback) -> None:
        self._policy = policy
        self._counts: dict[tuple[str, str], int] = {}

    def check(self, name: str, cause: str) -> None:
        """Raise ORTModuleError if the policy is ``"error"``."""
        if self._policy == "error":
            raise ORTModuleError(f"{name} cannot run in ortmodule_c ({cause}) and falling back to PyTorch is off")

    def add(self, name: str, cause: str) -> None:
        """Record one fallback, if the policy lets it pass."""
        self.check(name, cause)
        key = (name, cause)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] == 1:
            warnings.warn(f"ortmodule_c: {name} runs in PyTorch: {cause}", UserWarning, _users_level())

    def records(self) -> list[FallbackRecord]:
        """All fallbacks so far, in the order they were met."""
        return [FallbackRecord(name, cause, n) for (name, cause), n in self._counts.items()]


_LIBRARIES = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def _users_level() -> int:
    """How far up the stack the user's own line is, as `warnings.warn` counts for its caller."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level + 1
