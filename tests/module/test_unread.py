"""What a forward does not read of its arguments may be anything; a text that it reads has a graph for each."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any, NamedTuple

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


class ByKeys(Of):
    def forward(self, batch: Batch) -> Tensor:
        factor = 2 if "mask" in batch else batch.get("factor", 1)
        return self.layer(batch["x"]).sum() * factor


class OverKeys(Of):
    """What is written in a comprehension reads no more of a batch than what is written beside it."""

    def forward(self, batch: Batch) -> Tensor:
        heads = {k: self.layer(batch["x"]).sum() * i for i, k in enumerate("ab") if "mask" not in batch}
        return sum(v * batch["x"].shape[0] for v in heads.values())


class Counting(Of):
    def forward(self, batch: Batch) -> Tensor:
        self.steps += 1
        return self.layer(batch["x"]).sum() * self.steps


class ByNames(Of):
    def forward(self, x: Tensor, names: Any = None, *rest: Any, **others: Any) -> Tensor:
        return self.layer(x).sum()


class Stored(Of):
    def forward(self, batch: Batch) -> Tensor:
        batch["y"] = 2 * batch["x"]
        return self.layer(batch["y"]).sum()


class Hooked(Of):
    """A hook of the module's own sees all of its arguments."""

    def __init__(self, read: Callable[[Batch], Any]) -> None:
        super().__init__(read)
        self.register_forward_hook(lambda module, args, result: result * len(args[0]["names"][0]))

    def forward(self, batch: Batch) -> Tensor:
        return self.layer(batch["x"]).sum()


class AroundItself(Of):
    def __call__(self, batch: Batch) -> Tensor:
        return super().__call__(batch) * len(batch["names"][0])

    def forward(self, batch: Batch) -> Tensor:
        return self.layer(batch["x"]).sum()


class ByLocals(Of):
    def forward(self, batch: Batch) -> Tensor:
        return self.layer(batch["x"]).sum() * len(locals()["batch"]["names"][0])


class InAFunction(Of):
    def forward(self, batch: Batch) -> Tensor:
        def of(part: Any) -> Any:
            return batch, part

        return self.layer(batch["x"]).sum() * len(of(0)[0]["names"][0])


class InAComprehension(Of):
    def forward(self, batch: Batch) -> Tensor:
        return self.layer(batch["x"]).sum() * sum(len(batch[key]) for key in ("names", "set"))


def caught(batch: Batch) -> int:
    try:
        return int(batch["names"][0])
    except (TypeError, ValueError):
        return 7


def is_one(batch: Batch) -> int:
    return next((2 for name in ("0", "3") if name is batch["names"][0]), 1)


READ: dict[str, Callable[[Batch], Any]] = {
    "length": lambda batch: len(batch["names"][0]),
    "equal": lambda batch: 2 if batch["names"][0] == "3" else 1,
    "method": lambda batch: 2 if batch["names"][0].endswith("3") else 1,
    "in a list": lambda batch: 2 if "3" in batch["names"] else 1,
    "in a text": lambda batch: 2 if batch["names"][0] in "345" else 1,
    "key": lambda batch: {"3": 2}.get(batch["names"][0], 1),
    "format": lambda batch: len(f"{batch['names'][0]}%s" % batch["names"][-1]),
    "number": lambda batch: int(batch["names"][0]),
    "of a file": lambda batch: 2 if hasattr(batch["names"][0], "read") else 1,
    "caught": caught,
}


def graphs(make: Callable[[], nn.Module], call: Callable[[nn.Module, Batch], Tensor] | None = None) -> float:
    """How many graphs six batches take; losses and gradients are eager's."""
    call = call or (lambda model, batch: model(batch))
    torch.manual_seed(0)
    eager: Any = make()
    ours: Any = ORTModule(make())
    ours.load_state_dict(eager.state_dict())
    for i in range(6):
        batch = {"x": torch.randn(2, 4), "names": [str(i), *"x" * (i % 3)], "set": "train"}
        found = []
        for model in (eager, ours):
            model.zero_grad()
            given = dict(batch)
            loss = call(model, given)
            loss.backward()
            found.append([loss, model.layer.weight.grad.clone()])
            assert sorted(given) == sorted({*batch, "y"} if isinstance(eager, Stored) else batch)
        torch.testing.assert_close(found[1], found[0])
    return float(ours.stats()["graphs"])


@pytest.mark.filterwarnings("error:ortmodule_c")
@pytest.mark.parametrize(("cls", "n"), [(ByKeys, 1), (OverKeys, 1), (Counting, 2)])
def test_what_is_not_taken_from_a_batch_may_be_anything(cls: type[Of], n: int) -> None:
    assert graphs(lambda: cls(lambda batch: 1)) == n


class ByAttributes(Of):
    def forward(self, batch: Any) -> Tensor:
        return self.layer(batch.x).sum() * (2 if batch.set == "train" else 1)


class Computed(Of):
    def forward(self, batch: Any) -> Tensor:
        return self.layer(batch.x).sum() * batch.first


class Asked(Of):
    def forward(self, batch: Any) -> Tensor:
        return self.layer(batch.x).sum() * batch.count()


class Assigned(Of):
    def forward(self, batch: Any) -> Tensor:
        batch.y = 2 * batch.x
        return self.layer(batch.y).sum()


@dataclass
class Data:
    x: Tensor
    names: list[str]
    set: str

    @property
    def first(self) -> int:
        return len(self.names[0]) + len(self.names)

    def count(self) -> int:
        return len(self.names)


Frozen = make_dataclass("Frozen", [("x", Tensor), ("names", list), ("set", str)], frozen=True)


class Named(NamedTuple):
    x: Tensor
    names: list[str]
    set: str

    @property
    def first(self) -> int:
        return len(self.names)

    def count(self) -> int:  # type: ignore[override]
        return len(self.names)


class Cached(Data):
    """Its `x` is not what its dictionary has by that name."""

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        return vars(self)["x"] * len(self.names)

    @x.setter
    def x(self, value: Tensor) -> None:
        vars(self)["x"] = value


class Looked(Data):
    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value * len(super().__getattribute__("names")) if name == "x" else value


def of_kind(kind: Callable[..., Any]) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: model(kind(**batch))


@pytest.mark.filterwarnings("error:ortmodule_c")
@pytest.mark.parametrize("kind", [Data, Frozen, Named])
def test_attributes_that_are_not_taken_may_be_anything(kind: Callable[..., Any]) -> None:
    assert graphs(lambda: ByAttributes(lambda batch: 1), of_kind(kind)) == 1


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("cls", [Computed, Asked])
@pytest.mark.parametrize("kind", [Data, Named])
def test_what_is_computed_of_others_reads_all(cls: type[Of], kind: Callable[..., Any]) -> None:
    graphs(lambda: cls(lambda batch: 1), of_kind(kind))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize(("cls", "kind"), [(ByAttributes, Cached), (ByAttributes, Looked), (Assigned, Data)])
def test_objects_that_answer_for_themselves_are_read_whole(cls: type[Of], kind: Callable[..., Any]) -> None:
    graphs(lambda: cls(lambda batch: 1), of_kind(kind))


@pytest.mark.filterwarnings("error:ortmodule_c")
@pytest.mark.parametrize(
    "call",
    [
        lambda model, batch: model(batch["x"], batch["names"]),
        lambda model, batch: model(x=batch["x"], names=batch["names"], more=batch["set"]),
        lambda model, batch: model(batch["x"], None, *batch["names"]),
        lambda model, batch: model(batch["x"], names=object()),
    ],
)
def test_a_parameter_that_is_not_named_may_be_anything(call: Callable[[nn.Module, Batch], Tensor]) -> None:
    assert graphs(lambda: ByNames(lambda batch: 1), call) == 1


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("cls", [Hooked, AroundItself, ByLocals, InAComprehension, InAFunction, Stored])
def test_what_others_may_see_is_read(cls: type[Of]) -> None:
    graphs(lambda: cls(lambda batch: 1))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("what", READ)
def test_a_text_that_is_read_has_a_graph_for_each(what: str) -> None:
    assert graphs(lambda: Of(READ[what])) == 6


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_text_that_is_compared_by_identity_is_read() -> None:
    graphs(lambda: Of(is_one))


def test_a_missing_key_is_pythons_error() -> None:
    model = ORTModule(ByKeys(lambda batch: 1))
    with pytest.raises(KeyError, match="x"):
        model({"names": "a"})


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


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("kind", [str, int, bytes])
def test_what_settles_after_too_many_values_gets_a_graph(kind: type) -> None:
    model = ORTModule(Of(lambda batch: len(str(batch["names"])) + (batch["names"] == batch["set"])))
    x = torch.randn(2, 4)

    def call(value: int) -> None:
        name = str(value) if kind is str else value if kind is int else str(value).encode()
        model({"x": x, "names": name, "set": "train"})

    for i in range(30):
        call(i)
    made = model.stats()["export_seconds"]
    for _ in range(250):
        call(77)
    assert made < model.stats()["export_seconds"]
    assert model._ort_graph is not None and model._ort_graph.runner is not None
