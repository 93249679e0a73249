"""What a forward changes of what it holds is as in eager, at every step, whichever way makes the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inside import Program, verdict

N_SEEDS = 120


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_what_a_forward_changes_is_as_in_eager(capture: Any, every: int) -> None:
    failures = []
    for seed in range(0, N_SEEDS, every):
        torch._dynamo.reset()
        failures.append(verdict(seed, capture)[0])
    assert not any(failures), "\n".join(filter(None, failures))


def test_programs_of_a_seed_are_alike() -> None:
    assert Program(3).words == Program(3).words
