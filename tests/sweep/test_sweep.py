"""PyTorch's own samples of its operators and modules: native, or in PyTorch, or refused alike; never wrong.

The samples run in processes of their own beside the tests, which wait for their results.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import page
from compare import FAILURES, NATIVE
from pool import Result, run
from samples import Group, groups

# Of these TorchDynamo captures some samples: one of each kind of op.
BY_DYNAMO = (
    "add",
    "add (in place)",
    "cat",
    "cumsum",
    "index_put",
    "masked_fill",
    "mean",
    "nn.functional.cross_entropy",
    "nn.functional.dropout",
    "nn.functional.embedding",
    "nn.functional.layer_norm",
    "nn.functional.scaled_dot_product_attention",
    "nonzero",
    "split",
    "nn.BatchNorm1d (module)",
    "nn.Linear (module)",
    "nn.MultiheadAttention (module)",
)

GROUPS: dict[str, list[Group]] = {}
for _group in groups():
    GROUPS.setdefault(_group.name, []).append(_group)


class Results:
    """Results of the operators that were selected, in the order of the tests."""

    def __init__(self, names: list[str]) -> None:
        wanted = [g for n in names for g in GROUPS[n]]
        self._left = {n: len(GROUPS[n]) for n in names}
        self._stream: Iterator[Result | Group] = run(wanted, page.MOST)
        self._by_name: dict[str, list[Result]] = {n: [] for n in names}

    def of(self, name: str) -> list[Result]:
        """All results of one operator, once they are there."""
        while self._left[name]:
            told = next(self._stream)
            if isinstance(told, Result):
                self._by_name[told.group.name].append(told)
            else:
                self._left[told.name] -= 1
        return self._by_name[name]


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    items = [i for i in request.session.items if i.path == Path(__file__) and hasattr(i, "callspec")]
    return Results([i.callspec.params["name"] for i in items])


@pytest.fixture(scope="session")
def committed() -> page.Counts:
    return page.read()


@pytest.mark.parametrize("name", GROUPS)
def test_samples(name: str, results: Results, committed: page.Counts) -> None:
    found = results.of(name)
    assert not [str(r) for r in found if r.outcome.kind in FAILURES]
    counts = page.counted(found)
    less = [str(g) for g in GROUPS[name] if g in committed and counts[g][NATIVE] < committed[g][NATIVE]]
    assert not less, f"fewer samples run in C than docs/coverage.md says: {less}"


def test_samples_by_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_CAPTURE", "dynamo")
    wanted = [g for n in BY_DYNAMO for g in GROUPS[n] if g.dtype == "float32"]
    assert len(wanted) == len(BY_DYNAMO)
    found = [r for r in run(wanted, most=2) if isinstance(r, Result)]
    assert not [str(r) for r in found if r.outcome.kind in FAILURES]
    assert sum(r.outcome.kind == NATIVE for r in found) > len(found) / 2
