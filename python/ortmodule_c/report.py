"""What runs in PyTorch instead of here, told once and listed on request."""

import warnings
from dataclasses import dataclass

from .errors import ORTModuleError
from .options import Fallback
from .stack import users_level


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
            self.tell(f"{name} runs in PyTorch: {cause}")

    def tell(self, what: str) -> None:
        """Warn at the user's line."""
        warnings.warn(f"ortmodule_c: {what}", UserWarning, users_level())

    def records(self) -> list[FallbackRecord]:
        """All fallbacks so far, in the order they were met."""
        return [FallbackRecord(name, cause, n) for (name, cause), n in self._counts.items()]
