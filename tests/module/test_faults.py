"""Whatever goes wrong before the first number is computed, training goes on in PyTorch, and says so."""

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import _has_any_global_hook

import ortmodule_c
from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from wrapped import Function, assert_same_step, graphs, pair

pytestmark = pytest.mark.usefixtures("export_only", "users")

PACKAGE = str(Path(ortmodule_c.__file__).parent)
# Their steps leave something behind on purpose: an exception may come after it.
STATEFUL = {"/custom_function.py", "/export.py", "/graphs.py", "/ortmodule.py"}
# Nothing puts back what these put back.
CLEANS_UP = {"Snapshot.restore", "Instances._put_back", "_Exchange.put_back"}

Step = tuple[str, str, str]  # file, qualified name, "call" or "return"


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def something_of_everything(s: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
    y = s.drop(s.norm(s.l(x))).mul_(scale)
    with torch.no_grad():
        y = y + s.table
    s.last = y.detach()
    return torch.cdist(Scaled.apply(y).clamp(-2, 2), x)


def module(forward: Callable[..., Any] = something_of_everything) -> nn.Module:
    return Function(
        forward, l=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), drop=nn.Dropout(0.0), table=torch.arange(4.0), last=None
    )


def batch(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * n).view(n, 4).sin()


@functools.cache
def events(code: CodeType) -> dict[str, Step]:
    """What of running this code is a step of the package."""
    file = code.co_filename.removeprefix(PACKAGE)
    if file == code.co_filename or code.co_name.startswith("<") or code.co_qualname in CLEANS_UP:
        return {}
    ends = file in STATEFUL and not code.co_flags & CO_GENERATOR  # a generator's yield is no return
    return {e: (file, code.co_qualname, e) for e in ("call", "return")[: 1 + ends]}


def while_preparing(act: Callable[[Step], Any], call: Callable[[], Any]) -> Any:
    """Call, and act at each step between the arguments and the plan."""
    preparing = False

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal preparing
        step = events(frame.f_code).get(event)
        if step is not None:
            preparing = preparing or step[1] == "ORTModule._ort_prepare"
            if preparing:
                act(step)
                preparing = step[1:] != ("ORTModule._ort_prepare", "return")

    sys.setprofile(profile)
    try:
        return call()
    finally:
        sys.setprofile(None)


def steps_of(call: Callable[[], Any]) -> list[Step]:
    """The steps of preparing a call, in order."""
    seen: dict[Step, None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while_preparing(seen.setdefault, call)
    return list(seen)


def injecting(at: Step, error: BaseException) -> Callable[[Step], None]:
    def act(step: Step) -> None:
        if step == at:
            raise error

    return act


def assert_nothing_is_left_behind() -> None:
    assert "__init__" not in vars(BackwardCFunction) and Scaled.forward.__qualname__ == "Scaled.forward"
    assert not _has_any_global_hook() and not torch.compiler.is_exporting()
    assert not [c for m in module().modules() for c in type(m).__mro__[:-1] if "__getattribute__" in vars(c)]


class Injected(Exception):
    """Nothing expects it."""


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_an_exception_at_any_step(every: int) -> None:
    eager, ours = pair(module())
    steps = steps_of(lambda: ORTModule(module())(batch(3), 2.0))
    assert len(steps) > 100
    for step in steps[::every]:
        ours = ORTModule(ours.module)
        for m in (eager, ours):
            m.zero_grad()
        act = injecting(step, Injected(str(step)))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            while_preparing(act, lambda ours=ours: assert_same_step(eager, ours, batch(3), 2.0))
        assert_nothing_is_left_behind()
        in_c = any(g.runner is not None for g in graphs(ours))
        recorded = [r for r in ours.fallback_report() if r.name == "Function" and str(step) in r.cause]
        assert in_c or (len(recorded) == 1 and any(str(step) in str(w.message) for w in told)), step


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_an_exception_at_any_step_of_a_graph_of_open_sizes() -> None:
    def prepare(ours: ORTModule) -> Callable[[], Any]:
        ours(batch(3), 2.0)
        return lambda: ours(batch(4), 2.0)

    first = steps_of(lambda: ORTModule(module())(batch(3), 2.0))
    steps = [s for s in steps_of(prepare(ORTModule(module()))) if s not in first]
    assert steps
    for step in steps:
        eager, ours = pair(module())
        assert_same_step(eager, ours, batch(3), 2.0)
        act = injecting(step, Injected(str(step)))
        while_preparing(act, lambda pair=(eager, ours): assert_same_step(*pair, batch(4), 2.0))
        assert_nothing_is_left_behind()


@pytest.mark.parametrize(("error", "first"), [(Injected, 0), (KeyboardInterrupt, 1)])
def test_an_exception_that_may_not_end_in_pytorch(error: type[BaseException], first: int, every: int) -> None:
    """Told to raise, the package raises and names the cause; what is no error passes through everything."""

    def forward(s: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        return s.l(x).mul_(scale)

    options = DebugOptions(fallback="error")
    user = module(forward)
    steps = steps_of(lambda: ORTModule(module(forward), options)(batch(3), 2.0))
    assert len(steps) > 100
    for step in steps[first % every :: every]:
        ours = ORTModule(user, options)
        ours.zero_grad()
        raised = None
        try:
            while_preparing(injecting(step, error()), lambda ours=ours: ours(batch(3), 2.0))
        except BaseException as e:
            raised = e
        assert_nothing_is_left_behind()
        if raised is not None:
            assert type(raised) is (ORTModuleError if error is Injected else error), step
            told = str(raised)
            while raised is not None and not isinstance(raised, error):
                raised = raised.__cause__
            assert raised is not None or error.__name__ in told, step  # of a translation that fails the words are kept
        assert not ours.fallback_report()
        assert_same_step(copy.deepcopy(user), ours, batch(3), 1.0)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_running_out_of_memory_is_told_and_forgotten(error: Exception) -> None:
    """Whoever raised the batch size lowers it again; the module does not stay in PyTorch because of that."""
    eager, ours = pair(module())
    steps = steps_of(lambda: ORTModule(module())(batch(3), 2.0))
    for function in ("capture", "lower", "to_text", "Runner.prepare"):
        [step] = [s for s in steps if s[1] == function and s[2] == "call"]
        with pytest.raises(type(error), match=str(error)):
            while_preparing(injecting(step, error), lambda: ours(batch(3), 2.0))
    assert_same_step(eager, ours, batch(3), 2.0)
    assert not any(r.name == "Function" for r in ours.fallback_report())


def test_the_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ours = ORTModule(Function(lambda s, x: s.l(x) if x.sum() > 0 else -s.l(x), l=nn.Linear(2, 2)))
    with caplog.at_level("DEBUG", "ortmodule_c"), pytest.warns(UserWarning, match="values of a tensor"):
        ours(torch.ones(1, 2))
    assert "Traceback" in caplog.text and "GuardOnDataDependentSymNode" in caplog.text


def test_warnings_that_are_errors_break_nothing() -> None:
    eager, ours = pair(module())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="Scaled runs in PyTorch"):
            ours(batch(3), 2.0)
        assert_same_step(eager, ours, batch(3), 2.0)
