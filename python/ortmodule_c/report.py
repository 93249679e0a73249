"""What runs in PyTorch instead of here, told once and listed on request."""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import Mistake, NotExportable, ORTModuleError, first_lines, of_the_machine
from .options import Fallback, logger
from .stack import users_frame, users_level

mistakes_raise = os.environ.get("OMC_VERIFY") == "1"


def mistake(what: str, error: Exception) -> str:
    """The cause of running in PyTorch what failed here without having been refused.

    Raises
    ------
    Mistake
        Instead, where the core verifies its graphs too.
    MemoryError
        If memory ran out, or whatever says that a device failed, which is no mistake.
    """
    exhausted = of_the_machine(error)
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

    What is told waits for :meth:`warn`: a warning that is an error must not break into the making of a graph, and of a
    call that ends in an error of PyTorch's nothing is told.
    """

    def __init__(self, policy: Fallback) -> None:
        self._policy = policy
        self._counts: dict[tuple[str, str], int] = {}
        # What a thread has added since it was warned: a key, perhaps, and what to tell, perhaps.
        self._new: dict[int, list[tuple[tuple[str, str] | None, str]]] = {}
        self._waiting: set[int] = set()  # threads

    def cause(self, name: str, error: Exception) -> str:
        """Why `name` cannot run here, in a line.

        Running out of memory is no cause, as the caller tries again with less, and a failed device none of the graph's.
        """
        logger.debug("%s cannot run here", name, exc_info=error)
        exhausted = of_the_machine(error)
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
        self._news.append((key, f"ortmodule_c: {name} runs in PyTorch: {cause}" if self._counts[key] == 1 else ""))

    def add_once(self, name: str, cause: str) -> None:
        """Record one fallback that may be met again and again, as :meth:`add` does."""
        self.check(name, cause)
        if (name, cause) not in self._counts:
            self.add(name, cause)

    def tell(self, what: str, first: bool = False) -> None:
        """Have something told at the next :meth:`warn`, perhaps before all else."""
        self._news.insert(0 if first else len(self._news), (None, f"ortmodule_c: {what}"))

    @property
    def _news(self) -> list[tuple[tuple[str, str] | None, str]]:
        return self._new.setdefault(threading.get_ident(), [])

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it this thread tells nothing, so that a reason may come before what follows from it."""
        thread = threading.get_ident()
        outermost = thread not in self._waiting
        self._waiting.add(thread)
        try:
            yield
        finally:
            if outermost:
                self._waiting.discard(thread)

    def warn(self) -> None:
        """Warn at the user's line of what was not told yet."""
        if threading.get_ident() in self._waiting or not self._new:
            return
        for _, what in self._new.pop(threading.get_ident(), ()):
            if what:
                warnings.warn(what, UserWarning, users_level())

    def raises(self) -> bool:
        """Whether :meth:`warn` would raise: warnings are errors."""
        if threading.get_ident() in self._waiting or not self._new:
            return False
        return any(what and _is_error(what) for _, what in self._new.get(threading.get_ident(), ()))

    def forget(self) -> None:
        """Take back what was added since: the call for which it was so ends in an error that PyTorch has, too."""
        for key, _ in self._new.pop(threading.get_ident(), ()):
            if key is not None:
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]

    def records(self) -> list[FallbackRecord]:
        """All fallbacks so far, in the order they were met."""
        return [FallbackRecord(name, cause, n) for (name, cause), n in self._counts.items()]


def _is_error(what: str) -> bool:
    """Whether a warning at the user's line is raised, by the first filter for it."""
    frame = users_frame()
    places = str(frame.f_globals.get("__name__", "")), frame.f_lineno

    def is_for(pattern: Any, text: str) -> bool:
        return pattern is None or bool(pattern == text if isinstance(pattern, str) else pattern.match(text))

    for action, message, category, module, line in warnings.filters:
        if (
            is_for(message, what)
            and issubclass(UserWarning, category)
            and is_for(module, places[0])
            and line in (0, places[1])
        ):
            return action == "error"
    return False
