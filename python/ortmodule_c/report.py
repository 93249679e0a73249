"""What runs in PyTorch instead of here, told once and listed on request."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import Mistake, NotExportable, ORTModuleError, first_lines, out_of_memory
from .options import Fallback, logger
from .stack import users_level

mistakes_raise = os.environ.get("OMC_VERIFY") == "1"


def mistake(what: str, error: Exception) -> str:
    """The cause of running in PyTorch what failed here without having been refused.

    Raises
    ------
    Mistake
        Instead, where the core verifies its graphs too.
    MemoryError
        If memory ran out, which is no mistake.
    """
    exhausted = out_of_memory(error)
    if exhausted is not None:
        raise exhausted
    if mistakes_raise:
        raise Mistake(f"{what}: {type(error).__name__}: {error}") from error
    logger.debug("a mistake in %s", what, exc_info=error)
    return f"a mistake of ortmodule_c in {what}: {type(error).__name__}: {first_lines(error)}"


@dataclass(frozen=True)
class FallbackRecord:
    """One thing that runs in PyTorch.

    Attributes
    ----------
    name
        The ATen op, the class of the module, or the file and line of a statement.
    cause
        Why it cannot run here.
    count
        How many times it occurs in the graphs made so far; 1 for a module.
    """

    name: str
    cause: str
    count: int


class FallbackReport:
    """Collects fallbacks of one module; tells each name and cause once.

    What is told waits for :meth:`warn`: a warning that is an error must not break into the making of a graph.
    """

    def __init__(self, policy: Fallback) -> None:
        self._policy = policy
        self._counts: dict[tuple[str, str], int] = {}
        self._untold: list[str] = []
        self._waiting = 0

    def cause(self, name: str, error: Exception) -> str:
        """Why `name` cannot run here, in a line.

        Running out of memory is no cause: the caller tries again with less.
        """
        logger.debug("%s cannot run here", name, exc_info=error)
        exhausted = out_of_memory(error)
        if exhausted is not None:
            raise exhausted
        if isinstance(error, ORTModuleError) and not isinstance(error, NotExportable):
            raise error
        cause = first_lines(error)
        if not isinstance(error, NotExportable):
            cause = f"{type(error).__name__}: {cause}"
        return cause

    def check(self, name: str, cause: str, error: Exception | None = None) -> None:
        """Raise ORTModuleError if the policy is ``"error"``."""
        if self._policy == "error":
            message = f"{name} cannot run in ortmodule_c ({cause}) and falling back to PyTorch is off"
            raise ORTModuleError(message) from error

    def add(self, name: str, cause: str) -> None:
        """Record one fallback; ORTModuleError if the policy is ``"error"``."""
        self.check(name, cause)
        key = (name, cause)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] == 1:
            self.tell(f"{name} runs in PyTorch: {cause}")

    def tell(self, what: str, first: bool = False) -> None:
        """Have something told at the next :meth:`warn`, perhaps before all else."""
        self._untold.insert(0 if first else len(self._untold), f"ortmodule_c: {what}")

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it nothing is told, so that a reason may come before what follows from it."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def warn(self) -> None:
        """Warn at the user's line of what was not told yet."""
        if self._waiting or not self._untold:
            return
        untold, self._untold = self._untold, []
        for what in untold:
            warnings.warn(what, UserWarning, users_level())

    def records(self) -> list[FallbackRecord]:
        """All fallbacks so far, in the order they were met."""
        return [FallbackRecord(name, cause, n) for (name, cause), n in self._counts.items()]
