"""Environment variables: those that a forward reads count, and no others."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wrapped import Function, assert_same_step, n_graphs, pair

READ: dict[str, Callable[[], object]] = {
    "get": lambda: os.environ.get("OMC_TESTS_A"),
    "getenv": lambda: os.getenv("OMC_TESTS_A"),
    "in": lambda: "OMC_TESTS_A" in os.environ,
    "item": lambda: os.environ["OMC_TESTS_A"] if "OMC_TESTS_A" in os.environ else None,  # noqa: SIM401
    "bytes": lambda: os.environb.get(b"OMC_TESTS_A"),
    "getenvb": lambda: os.getenvb(b"OMC_TESTS_A"),
}
ALL: dict[str, Callable[[], object]] = {
    "number": lambda: len(os.environ) % 2,
    "names": lambda: "OMC_TESTS_B" in list(os.environ),
    "copy": lambda: dict(os.environ).get("OMC_TESTS_B"),
    "items": lambda: ("OMC_TESTS_B", "1") in os.environ.items() or ("OMC_TESTS_B", "2") in list(os.environ.items()),
}


def reading(read: Callable[[], object]) -> Function:
    return Function(lambda s, x: s.l(x) * (2.0 if s.read() else 3.0), l=nn.Linear(4, 2), read=read)


def steps(read: Callable[[], object], monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """How many graphs there are after each step beside eager, while a variable comes, changes and goes."""
    monkeypatch.delenv(name, raising=False)
    eager, ours = pair(reading(read))
    x: Tensor = torch.randn(3, 4)
    counts = []
    for value in (None, "1", "2", None):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
        eager.zero_grad()
        ours.zero_grad()
        assert_same_step(eager, ours, x)
        counts.append(n_graphs(ours))
    return counts


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_a_variable_that_is_read_counts_and_another_does_not(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps(read, monkeypatch, "OMC_TESTS_A")[1] == 2
    assert steps(read, monkeypatch, "OMC_TESTS_B") == [1, 1, 1, 1]


@pytest.mark.parametrize("read", ALL.values(), ids=ALL)
def test_who_reads_all_variables_is_told_of_each(read: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(read, monkeypatch, "OMC_TESTS_B")[1] == 2
