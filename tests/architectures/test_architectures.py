"""Architectures that take more than one way: they train as in PyTorch, and none runs there as a whole."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

from architectures import PAGE, measure
from zoo import ARCHITECTURES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ALBERT", "FNet", "HuBERT", "Mixtral", "SegFormer", "XLNet"])
def test_trains_as_in_pytorch(name: str) -> None:
    row = measure(ARCHITECTURES[name])
    assert row.equal, row
    assert not row.whole and row.share > 0.5, row


def test_the_page_has_all_of_them() -> None:
    page = PAGE.read_text()
    assert re.findall(r"^\| ([^|]+?) \| (?:export|dynamo)", page, re.M) == list(ARCHITECTURES)
    n = len(ARCHITECTURES)
    assert f"{n} of {n} train as eager does; 0 run in PyTorch as a whole" in page
