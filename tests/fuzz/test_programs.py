"""Random programs equal eager: results, gradients, state, arguments and exceptions, over several steps and sizes."""

from __future__ import annotations

from typing import Any

import pytest
from fuzz import summary, told, verdicts

N_SEEDS, BATCH = 300, 25


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config, every: int) -> dict[int, dict[str, Any]]:
    """The verdict of every seed."""
    device = "device" if pytestconfig.getoption("device") else pytestconfig.getoption("on")
    return {v["seed"]: v for v in verdicts(range(0, N_SEEDS, every), processes=2, device=device)}


@pytest.mark.parametrize("first", range(0, N_SEEDS, BATCH))
def test_random_programs(first: int, found: dict[int, dict[str, Any]]) -> None:
    failures = [told(found[seed]) for seed in range(first, first + BATCH) if seed in found and found[seed]["what"]]
    assert not failures, "\n".join(failures)


def test_most_random_programs_run_in_the_core(found: dict[int, dict[str, Any]]) -> None:
    """What always falls back proves nothing."""
    wholly = [v for v in found.values() if v["ran"] not in ("native", "per op")]
    assert len(wholly) < 0.4 * len(found), summary([*found.values()])
