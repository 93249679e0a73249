"""Texts among the arguments: one that nobody reads is open, one that is read has a graph for each."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule

Batch = dict[str, Any]


class Of(nn.Module):
    """A layer, and how much of a batch is read beside it."""

    def __init__(self, read: Callable[[Batch], Any]) -> None:
        super().__init__()
        self.layer, self.read, self.steps = nn.Linear(4, 3), read, 0

    def forward(self, batch: Batch) -> Tensor:
        return self.layer(batch["x"]).sum() * self.read(batch)


def handed_on(batch: Batch) -> int:
    return given(**batch)


def given(x: Tensor, names: list[str], **_others: Any) -> int:
    return x.dim() * len(names)


def with_a_type(batch: Batch) -> int:
    return 2 if type(batch["names"][0]) is str and batch["names"][0] == "3" else 1


def within_a_match(batch: Batch) -> int:
    match batch["names"][0]:
        case "3":
            return 2
    return 1


def caught(batch: Batch) -> int:
    try:
        return len(",".join(batch["names"]))
    except TypeError:
        return 7


UNREAD: dict[str, Callable[[Batch], Any]] = {
    "not touched": lambda batch: 1,
    "handed on": handed_on,
    "tensors picked": lambda batch: len({k: v for k, v in batch.items() if isinstance(v, Tensor)}),
    "asked for str": lambda batch: 2 if isinstance(batch["names"][0], str) else 1,
    "asked for None": lambda batch: 2 if batch["names"][0] is None else 1,
    "counted": lambda batch: len(batch["names"]),
}
READ: dict[str, Callable[[Batch], Any]] = {
    "length": lambda batch: len(batch["names"][0]),
    "equal": lambda batch: 2 if batch["names"][0] == "3" else 1,
    "truth": lambda batch: 2 if batch["names"][1] else 1,
    "method": lambda batch: 2 if batch["names"][0].endswith("3") else 1,
    "item": lambda batch: 2 if batch["names"][0][0] == "3" else 1,
    "in a list": lambda batch: 2 if "3" in batch["names"] else 1,
    "key": lambda batch: {"3": 2}.get(batch["names"][0], 1),
    "order": lambda batch: 1 + sorted([*batch["names"], "2"]).index("2"),
    "format": lambda batch: len(f"{batch['names'][0]}%s" % batch["names"][1]),
    "sum": lambda batch: len("a" + batch["names"][1]),
    "number": lambda batch: int(batch["names"][0]),
    "type": with_a_type,
    "match": within_a_match,
    "caught": caught,
}


def graphs(read: Callable[[Batch], Any], told: list[warnings.WarningMessage]) -> float:
    """How many graphs six batches take; losses and gradients are eager's."""
    torch.manual_seed(0)
    eager = Of(read)
    ours = ORTModule(Of(read))
    ours.load_state_dict(eager.state_dict())
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        for i in range(6):
            batch = {"x": torch.randn(2, 4), "names": [str(i), "x" * (i % 2)], "set": "train"}
            for model in (eager, ours):
                model.zero_grad()
                model(dict(batch)).backward()
            torch.testing.assert_close(ours.layer.weight.grad, eager.layer.weight.grad)
            torch.testing.assert_close(ours(dict(batch)), eager(dict(batch)))
    told += caught_warnings
    return ours.stats()["graphs"]


@pytest.mark.parametrize("what", UNREAD)
def test_a_text_that_nobody_reads_is_open(what: str) -> None:
    told: list[warnings.WarningMessage] = []
    assert graphs(UNREAD[what], told) == 2 and not told


@pytest.mark.parametrize("what", READ)
def test_a_text_that_is_read_has_a_graph_for_each(what: str) -> None:
    told: list[warnings.WarningMessage] = []
    assert graphs(READ[what], told) > 2
    assert all("argument batch['names']" in str(w.message) for w in told)


def test_of_several_texts_those_that_are_read_are_known() -> None:
    told: list[warnings.WarningMessage] = []
    assert graphs(lambda batch: 2 if batch["set"] == "train" else 1, told) == 2 and not told


class Counting(Of):
    def forward(self, batch: Batch) -> Tensor:
        self.steps += 1
        return super().forward(batch) * self.steps


def test_texts_and_a_counter_are_open_together() -> None:
    model = ORTModule(Counting(lambda batch: 1))
    for i in range(6):
        x = torch.randn(2, 4)
        torch.testing.assert_close(model({"x": x, "name": str(i)}), model.module.layer(x).sum() * (i + 1))
    assert model.stats()["graphs"] == 2


class Keeping(Of):
    def forward(self, batch: Batch) -> Tensor:
        self.last = batch["name"]
        return super().forward(batch)


def test_a_text_that_the_forward_keeps_is_the_text() -> None:
    model: Any = ORTModule(Keeping(lambda batch: 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(4):
            model({"x": torch.randn(2, 4), "name": str(i)}).backward()
            assert model.module.last == str(i) and type(model.module.last) is str


def test_a_text_that_is_returned_is_the_text() -> None:
    model = ORTModule(Named())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(4):
            loss, name = model(torch.randn(2, 4), str(i))
            loss.backward()
            assert name == str(i) and type(name) is str


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, name: str) -> tuple[Tensor, str]:
        return self.layer(x).sum(), name


def test_graphs_that_serve_one_call_each_are_made_less_and_less() -> None:
    """Nothing of what changes here can be open: past `max_graphs` trying again has to cost less each time."""
    model = ORTModule(Of(lambda batch: 1))
    made, x = 0, torch.randn(2, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(900):
            before = model.stats()["export_seconds"]
            model({"x": x, "id": str(i).encode()})
            made += model.stats()["export_seconds"] > before
    assert made <= 16 + 6
    assert [str(w.message).partition(": ")[2][:40] for w in told] == [
        "Of is exported anew each time argument b",
        "Of runs in PyTorch: more than max_graphs",
    ]
