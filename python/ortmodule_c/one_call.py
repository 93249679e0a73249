"""Refusals that are for one call alone, whose graph serves others like it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import NotExportable

if TYPE_CHECKING:
    from .function import Runner


def is_for_one_call(runner: Runner, error: Exception) -> bool:
    """Whether what a runner raised, as it prepared a call, is for this call's tensors, which no key tells apart.

    Such are tensors of inference mode, and those that share memory. What a plan refuses, it refuses of others too, and
    so it is with habits of the outputs.
    """
    lasts = runner.unprepared > 1 or isinstance(error.__cause__, (NotImplementedError, ValueError))
    return isinstance(error, NotExportable) and not lasts
