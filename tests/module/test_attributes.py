"""Attributes that a forward reads or sets: what eager leaves in them is there, and no stale value is used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError, verify
from wrapped import Function, assert_same_state, assert_same_step, close, n_graphs, pair


class Auxiliary(nn.Module):
    """Leaves a second loss and some plain facts behind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = nn.Linear(4, 4), nn.Linear(4, 2), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.aux = y.pow(2).mean()
        self.facts = {"mean": y.detach().mean(), "name": "y"}
        return self.b(y)


def test_a_loss_left_in_an_attribute() -> None:
    eager, ours = pair(Auxiliary())
    for n in (3, 3, 4, 5, 3):
        x = torch.randn(n, 4)
        for m in (eager, ours):
            m.zero_grad()
            (m(x).sum() + m.aux).backward()
        assert_same_state(ours, eager)
        assert ours.facts["name"] == "y"
        close(ours.facts["mean"], eager.facts["mean"])
    with torch.no_grad():
        ours(x)
    assert not ours.aux.requires_grad and not ours.fallback_report()
    before = n_graphs(ours)
    ours(x)
    assert n_graphs(ours) == before


def test_a_cache_filled_at_the_first_call() -> None:
    class Caching(nn.Linear):
        cache: Any = None
        _scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = torch.ones(4).tril() if x.dim() > 2 else torch.full((4,), 0.5)
            return super().forward(x) * self.cache * self._scale

    eager, ours = pair(Caching(4, 4))
    for change in (None, None, ("cache", None), ("_scale", 3.0), ("cache", torch.ones(4)), None):
        for m in (eager, ours):
            m.zero_grad()
            if change is not None:
                setattr(m, *change)
        assert_same_step(eager, ours, torch.randn(3, 4))
        close(ours.cache, eager.cache)
    assert not ours.fallback_report()


def test_tensors_that_are_no_buffers() -> None:
    class Constants(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.t, self.many, self.named = torch.ones(4), [torch.ones(4)], {"k": torch.ones(4)}

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.t * self.many[0] * self.named["k"]

    def replace(m: Any) -> None:
        m.t = torch.full((4,), 2.0)

    def change(m: Any) -> None:
        m.t.mul_(2)

    def replace_in_list(m: Any) -> None:
        m.many[0] = torch.full((4,), 3.0)

    def replace_list(m: Any) -> None:
        m.many = [torch.full((4,), 5.0)]

    def change_in_dict(m: Any) -> None:
        m.named["k"].add_(1)

    eager, ours = pair(Constants())
    for act in (lambda m: None, replace, change, replace_in_list, replace_list, change_in_dict):
        for m in (eager, ours):
            m.zero_grad()
            act(m)
        assert_same_step(eager, ours, torch.randn(3, 4))
    assert not ours.fallback_report()


def test_attributes_added_after_the_first_call() -> None:
    class Growing(nn.Linear):
        scale: Any = 1.0

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) * self.scale
            return y + self.shift if hasattr(self, "shift") else y

    def replace_forward(m: nn.Module) -> None:
        m.forward = lambda x: x @ m.weight

    eager, ours = pair(Growing(4, 4))
    for act in (
        lambda m: None,
        lambda m: setattr(m, "scale", 2.0),
        lambda m: setattr(m, "shift", 3.0),
        lambda m: setattr(m, "scale", torch.full((4,), 0.5)),
        lambda m: delattr(m, "shift"),
        replace_forward,
    ):
        for m in (eager, ours):
            m.zero_grad()
            act(m)
        assert_same_step(eager, ours, torch.randn(3, 4))
    assert not ours.fallback_report()


def test_attributes_nobody_reads_cost_no_export() -> None:
    class Config:
        scale, note = 2.0, "first"

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.config, self.step, self.factor = Config(), 0, 1.0
            self.config.scale, self.config.note = 2.0, "first"

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor * self.config.scale

    eager, ours = pair(Net())

    def step(**changes: Any) -> int:
        for m in (eager, ours):
            m.zero_grad()
            for name, value in changes.items():
                setattr(m.config if hasattr(m.config, name) else m, name, value)
        assert_same_step(eager, ours, torch.randn(3, 4))
        return n_graphs(ours)

    assert step() == 1
    assert [step(step=i) for i in range(3)] == [1, 1, 1]
    assert step(note="second") == 1
    assert step(factor=0.5) == 2
    assert step(scale=3.0) == 3


def test_a_value_that_is_always_new_is_told_once() -> None:
    def scaled(s: Any, x: Tensor, *, scale: float, by: list[float]) -> Tensor:
        return s.l(x) * float(str(scale)) * float(str(by[0])) * float(str(s.factor))

    ours = ORTModule(Function(scaled, l=nn.Linear(4, 4), factor=1.0))
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="anew") as caught:
        for i in range(8):
            ours(x, scale=float(i), by=[1.0])
        for i in range(8):
            ours(x, scale=1.0, by=[float(i)])
        for i in range(8):
            ours.factor = float(i)
            ours(x, scale=1.0, by=[1.0])
        for n in range(2, 10):
            ours(torch.randn(n, 4), scale=1.0, by=[1.0])
    named = [str(w.message).split("each time ")[1].split(" takes")[0] for w in caught]
    assert named == ["argument scale", "argument by[0]", "attribute factor of Function"]


def test_why_a_module_is_exported_once_more_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ours = ORTModule(Function(lambda s, x: s.l(x) * float(str(s.by)), l=nn.Linear(4, 4), by=2.0))
    with caplog.at_level("INFO", "ortmodule_c"):
        for by in (2.0, 3.0):
            ours.by = by
            ours(torch.ones(2, 4))
    assert "exported once more: attribute by of Function takes a new value" in caplog.text


def test_a_forward_that_looks_at_all_its_attributes() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x) * vars(s)["scale"], l=nn.Linear(4, 4), scale=2.0))
    assert_same_step(eager, ours, torch.randn(3, 4))
    for m in (eager, ours):
        m.zero_grad()
        m.scale = 3.0
    assert_same_step(eager, ours, torch.randn(3, 4))


class Recurrent(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.state = torch.zeros(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(super().forward(x) + self.state).detach()
        return super().forward(x) + self.state


class Recording(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach() * len(self.seen))
        return super().forward(x)


@pytest.mark.parametrize(("kind", "cause"), [(Recurrent, "state"), (Recording, "seen")])
@pytest.mark.usefixtures("export_only")
def test_state_in_attributes_runs_in_pytorch(kind: type[nn.Module], cause: str) -> None:
    eager, ours = pair(kind(4, 4))
    with pytest.warns(UserWarning, match=f"attribute {cause} of"):
        for _ in range(4):
            x = torch.randn(2, 4)
            close(ours(x), eager(x))
    for name in ("state", "seen"):
        close(getattr(ours, name, None), getattr(eager, name, None))
    assert len(ours.fallback_report()) == 1


@pytest.mark.parametrize("capture", ["export", "dynamo", "auto"])
def test_parameters_without_a_shape_are_drawn_where_eager_draws_them(capture: Any) -> None:
    def trained(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(1)
        model = wrap(nn.Sequential(nn.LazyLinear(3), nn.Dropout(0.5), nn.LazyBatchNorm1d(), nn.LazyLinear(2)))
        model(torch.ones(4, 6)).sum().backward()
        return model, torch.rand(2)

    eager, expected = trained(lambda m: m)
    ours, drawn = trained(lambda m: ORTModule(m, DebugOptions(capture=capture, fallback="error", verify=1)))
    assert torch.equal(drawn, expected), "what is drawn next"
    assert_same_state(ours, eager)
    assert ours.eval()(torch.ones(4, 6)).shape == (4, 2)
    assert ours.stats()["graphs"] == 1 and ours.fallback_report() == []


def test_a_lazy_part_that_is_never_called_is_told() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x), l=nn.Linear(2, 2), unused=nn.LazyLinear(3)))
    x = torch.ones(1, 2)
    with pytest.warns(UserWarning, match="Function runs in PyTorch: its forward leaves parameters without a shape"):
        close(ours(x), eager(x))
    close(ours(x), eager(x))


def test_verify_wants_parameters_with_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.LazyLinear(3)
    with pytest.raises(ORTModuleError, match="call the module once before"):
        verify(model, torch.ones(2, 4))
    model(torch.ones(2, 4))
    assert verify(model, torch.ones(2, 4)).ok
