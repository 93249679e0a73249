"""A stale graph is never run: every change of what it assumed gives the result eager gives."""

import copy
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c import ORTModule
from ortmodule_c.guards.frames import is_trusted
from ortmodule_c.guards.held import MISSING, Held, Snapshot, Write, scan
from ortmodule_c.guards.watch import Watch
from ortmodule_c.lowering.lower import lower
from ortmodule_c.stack import users_line_in
from wrapped import Function, assert_same_step, mlp, n_graphs, pair


def freeze(m: nn.Module) -> None:
    m[0].weight.requires_grad_(False)


def eval_of_one(m: nn.Module) -> None:
    m[1].eval()


def replace(m: nn.Module) -> None:
    m[1] = nn.Tanh()


def tie(m: nn.Module) -> None:
    m[2].weight = m[0].weight


def attribute(m: nn.Module) -> None:
    m[1].p = 0.0


def to_double(m: nn.Module) -> None:
    m.double()


def drop_bias(m: nn.Module) -> None:
    m[0].bias = None


@pytest.mark.parametrize("change", [freeze, eval_of_one, replace, tie, attribute, drop_bias])
def test_change_of_the_module(change: Callable[[nn.Module], None]) -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    assert_same_step(eager, ours, x)
    for m in (eager, ours.module):
        m.zero_grad()
        change(m)
    assert_same_step(eager, ours, x)
    assert n_graphs(ours) == (1 if change is replace else 2)  # nobody has the submodule that was replaced


def test_change_of_dtype() -> None:
    eager, ours = pair(mlp())
    assert_same_step(eager, ours, torch.randn(3, 6))
    for m in (eager, ours):
        m.zero_grad()
        m.double()
    out = assert_same_step(eager, ours, torch.randn(3, 6, dtype=torch.float64))
    assert out.dtype == torch.float64


def test_python_values_are_part_of_the_signature() -> None:
    eager, ours = pair(Function(lambda s, x, scale, flag=True: s.l(x) * scale if flag else s.l(x), l=nn.Linear(2, 2)))
    x = torch.randn(3, 2)
    for args, kwargs in (((2,), {}), ((3,), {}), ((2.0,), {}), ((True,), {}), ((2,), {"flag": False})):
        assert_same_step(eager, ours, x, *args, **kwargs)


def test_configuration_object() -> None:
    class Config:
        scale = 1.0

    config = Config()
    config.scale = 2.0
    ours = pair(Function(lambda s, x: s.l(x) * config.scale, l=nn.Linear(2, 2)))[1]
    ours.module.config = config
    x = torch.randn(1, 2)
    first = ours(x)
    config.scale = 4.0
    torch.testing.assert_close(ours(x), first * 2)


def test_grad_mode_and_inputs_that_require_grad() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(3, 6)
    with torch.no_grad():
        assert not ours(x).requires_grad
    assert_same_step(eager, ours, x)
    y, z = x.clone().requires_grad_(), x.clone().requires_grad_()
    eager(y).sum().backward()
    ours(z).sum().backward()
    torch.testing.assert_close(z.grad, y.grad)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), eager(x))


def test_same_call_uses_the_same_graph() -> None:
    ours = pair(mlp())[1]
    for _ in range(3):
        ours(torch.randn(3, 6)).sum().backward()
    assert n_graphs(ours) == 1


def test_survey_counts_a_tied_tensor_once() -> None:
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    separate = scan(m)
    m[1].weight = m[0].weight
    tied = scan(m)
    assert len(tied.parameters) == len(separate.parameters) - 1
    assert tied.fingerprint != separate.fingerprint
    assert [t for t in tied.buffers] == list(m.buffers())


def test_facts_are_the_same_object_until_the_module_changes() -> None:
    m = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2), nn.Dropout()))
    first = scan(m).fingerprint
    assert scan(m, first).fingerprint is first
    assert scan(m).fingerprint == first
    assert hash(scan(m).fingerprint) == hash(first)
    changes = {
        "mode of one submodule": (m[2][1].eval, m[2][1].train),
        "mode of the last submodule": (m[2].eval, m[2].train),
        "requires_grad": (lambda: m[0].weight.requires_grad_(False), lambda: m[0].weight.requires_grad_(True)),
        "dtype": (m.double, m.float),
        "a submodule more": (lambda: m.append(nn.ReLU()), lambda: m.pop(3)),
        "a submodule less": (lambda: m[2].__delitem__(1), lambda: m[2].append(nn.Dropout())),
        "a class": (lambda: m.__setitem__(1, nn.SyncBatchNorm(4)), lambda: m.__setitem__(1, nn.BatchNorm1d(4))),
        "a buffer": (lambda: m.register_buffer("scale", torch.ones(1)), lambda: delattr(m, "scale")),
        "a missing bias": (
            lambda: setattr(m[0], "bias", None),
            lambda: setattr(m[0], "bias", nn.Parameter(torch.ones(4))),
        ),
        "a shape": (
            lambda: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 5))),
            lambda: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 3))),
        ),
    }
    for name, (change, undo) in changes.items():
        change()
        changed = scan(m, first).fingerprint
        assert changed != first, name
        assert scan(m, changed).fingerprint is changed, name
        undo()
        assert scan(m, changed).fingerprint == first, name


def held_of(m: nn.Module, name: str) -> Held:
    """What a graph holds whose forward read one attribute of every submodule."""
    states = [(s, s.__dict__, type(s).__name__) for s in m.modules()]
    values = [tuple([v if n == name else MISSING for n, v in state.items()]) for _, state, _ in states]
    return Held([(s, state, tuple(state), v, what) for (s, state, what), v in zip(states, values, strict=True)], [])


def test_a_survey_compares_what_is_held_of_submodules_as_far_as_nothing_changed() -> None:
    m = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Dropout(0.5), nn.ReLU()), nn.Dropout(0.5))
    held = held_of(m, "p")
    changes = {
        "a value": (lambda: setattr(m[1][0], "p", 0.25), lambda: setattr(m[1][0], "p", 0.5), 3),
        "another value that is equal": (lambda: setattr(m[1][0], "p", 1 / 2), lambda: None, 6),
        "what nobody read": (lambda: setattr(m[1][0], "inplace", True), lambda: setattr(m[1][0], "inplace", False), 6),
        "a name more": (lambda: setattr(m[1], "p", 1), lambda: delattr(m[1], "p"), 2),
        "a name less": (lambda: m[0].__dict__.pop("in_features"), lambda: setattr(m[0], "in_features", 3), 1),
        "the order of names": (lambda: m[0].__dict__.update(training=m[0].__dict__.pop("training")), lambda: None, 1),
    }
    for name, (change, undo, checked) in changes.items():
        fingerprint = scan(m).fingerprint
        assert scan(m, fingerprint, held).fingerprint == fingerprint, name
        change()
        now = scan(m, fingerprint, held)
        assert now.checked == checked, name
        assert held.hold(now.checked) == held.hold() == (held.changed() is None), name
        assert now.fingerprint == scan(m).fingerprint, name
        assert [*map(id, now.parameters)] == [*map(id, m.parameters())], name
        undo()
        assert held.hold(), name


def test_survey_names_what_no_graph_can_stand_for() -> None:
    m = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert scan(m).refusal == ""
    handle = m[1].register_full_backward_hook(lambda *_: None)
    assert "ReLU" in scan(m).refusal
    handle.remove()
    assert scan(m).refusal == ""
    assert "RecursiveScriptModule" in scan(nn.Sequential(torch.jit.script(m))).refusal


@pytest.mark.usefixtures("export_only")
def test_a_scripted_submodule_runs_in_pytorch() -> None:
    m = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 2)))
    x = torch.randn(4, 3)
    with pytest.warns(UserWarning, match="RecursiveScriptModule"):
        y = ORTModule(m)(x)
    torch.testing.assert_close(y, m(x))


def test_of_an_attribute_that_the_forward_sets_the_type_is_held() -> None:
    m = Function(lambda s, x: setattr(s, "last", x * s.last.sum()), last=None)
    m.last = torch.ones(1)
    watch = Watch(m)
    with watch.active():
        m(torch.ones(2))
    kept = watch.held([Write(m, "last", watch._seen[id(m)].before["last"], m.last)], [], [])
    m.last = torch.ones(3)
    assert kept.hold()
    m.last = None
    assert kept.changed() == "attribute last of Function"


def test_restore_puts_back_what_changed() -> None:
    m = nn.Sequential(nn.Linear(2, 2))
    before = copy.deepcopy(m.state_dict())
    m[0].seen = [1]
    kept = Snapshot(m)
    weight = m[0].weight
    m[0].weight = nn.Parameter(torch.zeros(2, 2))
    m[0].extra, m[0].in_features = 1, 7
    assert {(w.module, w.name, w.after) for w in kept.writes()} == {(m[0], "extra", 1), (m[0], "in_features", 7)}
    m[0].seen.append(2)
    assert dict(kept.changed()) == dict.fromkeys((f"attribute {n} of Linear" for n in ("_parameters", "seen")), False)
    kept.restore()
    assert m[0].weight is weight and m[0].in_features == 2 and not hasattr(m[0], "extra") and m[0].seen == [1]
    torch.testing.assert_close(m.state_dict(), before)


class Scale:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


HELD: dict[str, Callable[[float], object]] = {
    "an object": Scale,
    "a tensor": lambda value: torch.full((2,), value),
    "a function": lambda value: lambda x: x * value,
    "an object in a list": lambda value: [Scale(value)],
    "a module in a list": lambda value: [nn.Linear(2, 2)],
}
USES: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "a tensor": lambda s, x: s.l(x) * s.held,
    "an object in a list": lambda s, x: s.held[0](s.l(x)),
    "a module in a list": lambda s, x: s.l(x) * s.held[0].in_features,
}


@pytest.mark.parametrize("what", HELD)
def test_a_graph_does_not_keep_what_was_replaced(what: str) -> None:
    use = USES.get(what, lambda s, x: s.held(s.l(x)))
    ours = ORTModule(Function(use, l=nn.Linear(2, 2), held=HELD[what](2.0)))
    x = torch.randn(3, 2)
    for _ in range(2):
        ours(x)
        held = ours.module.held
        gone = weakref.ref(held[0] if isinstance(held, list) else held)
        del held
        ours.module.held = HELD[what](3.0)
        torch.testing.assert_close(ours(x), ours.module(x))
        gc.collect()
        assert gone() is None
    assert n_graphs(ours) == 1 and ours.stats()["dynamo_graphs"] == 0


@pytest.mark.parametrize("what", HELD)
def test_a_graph_waits_for_what_somebody_keeps(what: str) -> None:
    use = USES.get(what, lambda s, x: s.held(s.l(x)))
    both = [HELD[what](2.0), HELD[what](3.0)]
    ours = ORTModule(Function(use, l=nn.Linear(2, 2), held=both[0]))
    x = torch.randn(3, 2)
    seconds = []
    for i in range(6):
        ours.module.held = both[i % 2]
        torch.testing.assert_close(ours(x), ours.module(x))
        seconds.append(ours.stats()["export_seconds"])
    assert seconds[-1] == seconds[1]


class End(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, End])
def test_what_ends_the_first_forward_keeps_what_that_did_before(error: type[BaseException]) -> None:
    done: list[str] = []

    def forward(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not done:
            done.append("begun")
            raise error
        return s.l(x)

    ours = ORTModule(Function(forward, l=nn.Linear(2, 2)))
    x = torch.randn(3, 2)
    with pytest.raises(error):
        ours(x)
    assert done == ["begun"]
    for _ in range(2):
        torch.testing.assert_close(ours(x), ours.module(x))


def test_an_interrupt_of_a_trace_comes_after_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ours = ORTModule(nn.BatchNorm1d(2))
    x = torch.randn(3, 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ortmodule_c.graphs.lower", interrupt)
        ours(x)
    assert ours.module.num_batches_tracked == 1
    ours(x)
    assert ours.module.num_batches_tracked == 2 and n_graphs(ours) == 1


class Late(Exception):
    pass


@pytest.mark.parametrize("error", [Late, SystemExit])
def test_what_a_signals_handler_raises_is_no_failure_to_trace(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[bool] = []
    tracing: list[bool] = []

    def handle(_number: int, _frame: object) -> None:
        came.append(bool(tracing))
        raise error

    def lower_late(*args: Any) -> Any:
        tracing.append(True)
        signal.raise_signal(signal.SIGALRM)
        found = lower(*args)
        tracing.clear()
        return found

    ours = ORTModule(nn.BatchNorm1d(2))
    x = torch.randn(3, 2)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr("ortmodule_c.graphs.lower", lower_late)
            ours(x)
        assert came == [False] and signal.getsignal(signal.SIGALRM) is handle
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ours.module.num_batches_tracked == 0
    ours(x)
    assert ours.module.num_batches_tracked == 1 and n_graphs(ours) == 1 and not ours.fallback_report()


LIBRARIES = ("numpy", "sympy", "mpmath", "typing_extensions")
WHERE_THEY_ARE = f"""
import importlib, inspect
from ortmodule_c.guards.frames import is_trusted
for name, function in zip({LIBRARIES}, ("linspace", "simplify", "nsum", "override"), strict=True):
    code = inspect.unwrap(getattr(importlib.import_module(name), function))
    code = getattr(code, "__func__", code).__code__
    print(is_trusted(code.co_filename, {{}}), "dist-packages" in code.co_filename)
"""


def test_libraries_are_known_in_whatever_folder_they_are(tmp_path: Path) -> None:
    """Such as dist-packages, Debian's, beside Python's own library or within its folder."""
    folder = tmp_path / "dist-packages"
    folder.mkdir()
    for name in LIBRARIES:
        file = Path(sys.modules[name].__file__ or "")
        where = file.parent if file.name == "__init__.py" else file
        (folder / where.name).symlink_to(where)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    said = subprocess.run([sys.executable, "-c", WHERE_THEY_ARE], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "True"] * len(LIBRARIES)
    for folder_of_others in ("site-packages", "dist-packages"):
        others = os.path.join(os.path.dirname(os.__file__), folder_of_others, "others", "layers.py")
        assert not is_trusted(others, {}) and users_line_in(f'File "{others}", line 3') == f"{others}:3"
    assert is_trusted(os.path.join(os.path.dirname(os.__file__), "collections", "__init__.py"), {})
