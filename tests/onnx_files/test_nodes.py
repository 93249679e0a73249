"""ONNX's own tests of its nodes, run by its own runner on the backend."""

from __future__ import annotations

import nodes
import pytest


@pytest.fixture(scope="module")
def result() -> nodes._Result:
    return nodes.run()


def test_what_runs_gives_the_numbers_that_it_should(result: nodes._Result) -> None:
    assert not {name: error for name, error in result.failed.items() if not nodes.explained(name)}


def test_what_is_refused_is_refused_by_name(result: nodes._Result) -> None:
    told = ("node ", "there are no ", "dtype ", "the model has ", "input ", "output ")
    assert not {name: reason for name, reason in result.refused.items() if not reason.startswith(told)}


def test_as_many_pass_as_the_page_says(result: nodes._Result) -> None:
    """Of those that the installed `onnx` brings along: an older one has fewer, a newer one others besides."""
    now = nodes.table(result)
    for op, (passing, of) in nodes.read().items():
        passing_now, of_now = now.get(op, (0, 0))
        assert passing_now >= passing or (of_now < of and of_now - passing_now <= of - passing), op
