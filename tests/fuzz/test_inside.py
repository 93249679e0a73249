"""What a forward changes of what it holds is as in eager, at every step, whichever way makes the graph."""

from __future__ import annotations

from typing import Any

import pytest
from inside import Program, verdict

N_SEEDS = 120


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_what_a_forward_changes_is_as_in_eager(capture: Any, every: int) -> None:
    failures = [what for seed in range(0, N_SEEDS, every) if (what := verdict(seed, capture)[0])]
    assert not failures, "\n".join(failures)


def test_programs_of_a_seed_are_alike() -> None:
    assert Program(3).words == Program(3).words
