"""Threads that run modules, one of which is traced: none sees a trace of another, and none waits for ever."""

import logging
import os
import pickle
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd import Function as Differentiable
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode

from ortmodule_c import ORTModule, process
from ortmodule_c.capture.export import quiet
from ortmodule_c.capture.recurrent import one_step_for_all
from ortmodule_c.capture.regions import left_as_traced
from ortmodule_c.capture.symbols import remembered
from ortmodule_c.process import tracing
from wrapped import Branching, Function, close, n_graphs, pair

aten = torch.ops.aten
LONG = 60.0  # seconds after which something hangs


def together(*functions: Callable[[], object]) -> None:
    """Each in a thread of its own, from one moment on; what they raise is raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        try:
            start.wait(LONG)
            function()
        except BaseException as error:  # raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LONG)
        assert not t.is_alive(), "it hangs"
    if failures:
        raise failures[0]


class InPyTorchInTraining(nn.Module):
    """In training it does what no graph does: it looks for a while at what its weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.seen: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20 if self.training else 0):
            self.seen.append(type(self.l.weight))
            time.sleep(0.005)
        return self.l(x).exp()


def shapes() -> Iterator[tuple[int, ...]]:
    """Of different ranks: each needs a trace."""
    for n in range(6):
        yield (*[2] * n, 3, 4)


@pytest.mark.usefixtures("export_only")
@pytest.mark.filterwarnings("ignore")
def test_what_pytorch_runs_does_not_see_the_stand_ins_of_a_trace() -> None:
    module = InPyTorchInTraining()
    in_pytorch, traced = ORTModule(module), ORTModule(Function(lambda s, x: s.l(x) * 2, l=module.l))
    done = threading.Event()

    def trace() -> None:
        for shape in shapes():
            traced(torch.ones(shape))
        done.set()

    def run() -> None:
        while not done.is_set():
            in_pytorch(torch.ones(2, 4))

    together(run, run, trace)
    assert {*module.seen} == {nn.Parameter}
    assert not traced.fallback_report()


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_dynamo_compiles_is_not_the_trace_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told names lines of the user's alone."""
    told: list[str] = []
    # Not by catch_warnings: PyTorch has one in either thread, and any of them takes what another thread tells.
    monkeypatch.setattr(warnings, "warn", lambda what, *_, **__: told.append(str(what)))
    eager, branching = pair(Branching())
    module, exported = pair(nn.Linear(4, 2))

    def run() -> None:
        for shape in shapes():
            x = torch.ones(shape)
            close(branching(x), eager(x))

    def trace() -> None:
        for shape in shapes():
            close(exported(torch.ones(shape)), module(torch.ones(shape)))

    together(run, run, trace)
    ours = re.escape(str(Path(process.__file__).parent)), re.escape(str(Path(os.__file__).parent)) + "/[a-z]+/?[^/]*$"
    assert told and not [what for what in told if re.search("|".join(ours), what)]
    assert {r.name.partition(":")[0] for r in branching.fallback_report()} == {Branching.forward.__code__.co_filename}
    assert not exported.fallback_report()


class Inside(nn.Module):
    """Its part is a wrapper, so that PyTorch runs it and a graph its part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ORTModule(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_modules_that_run_in_pytorch_and_trace_a_part_do_not_wait_for_each_other() -> None:
    wrappers = [ORTModule(Inside()) for _ in range(2)]
    shared = ORTModule(Inside())

    def run(wrapper: ORTModule) -> None:
        for shape in shapes():
            x = torch.randn(shape)
            for m in (wrapper, shared):
                close(m(x), 2 * nn.functional.linear(x, *m.inner.parameters()))

    together(*[lambda w=w: run(w) for w in wrappers])
    assert all(not m.inner.fallback_report() for m in (*wrappers, shared))


def test_a_trace_waits_for_what_runs_and_what_runs_next_waits_for_it() -> None:
    order: list[str] = []
    runs, wants = threading.Event(), threading.Event()

    def first() -> None:
        runs.set()
        wants.wait(LONG)
        while not tracing._wanted:
            pass
        tracing.run(order.append, "run")  # one inside of the other waits for nobody

    def trace() -> None:
        runs.wait(LONG)
        wants.set()
        with tracing as alone, tracing:
            assert alone
            order.append("trace")

    def next_one() -> None:
        wants.wait(LONG)
        while not tracing._wanted and not order:
            pass
        tracing.run(order.append, "next")

    together(lambda: tracing.run(first), trace, next_one)
    assert order == ["run", "trace", "next"]


def test_who_runs_and_wants_to_trace_lets_others_trace() -> None:
    both = threading.Barrier(2)
    tracers: list[int] = []

    def run_and_trace() -> None:
        both.wait(LONG)
        with tracing as alone:
            assert alone
            tracing.run(tracers.append, threading.get_ident())
            assert tracers[-1] == threading.get_ident()

    together(*[lambda: tracing.run(run_and_trace)] * 2)
    assert len({*tracers}) == 2


@pytest.mark.filterwarnings("ignore:ortmodule_c.*Waiting")
def test_a_trace_does_not_wait_for_ever_for_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that leaves its part to another thread: PyTorch runs the part, which is told."""
    monkeypatch.setattr(process, "_PATIENCE", 0.1)
    monkeypatch.setattr(tracing, "_patience", 0.1)

    class Waiting(Inside):
        def forward(self, x: Tensor) -> Tensor:
            results: list[Tensor] = []
            other = threading.Thread(target=lambda: results.append(self.inner(x)), daemon=True)
            other.start()
            other.join(LONG)
            return results[0]

    ours = ORTModule(Waiting())
    with pytest.warns(UserWarning, match="Linear runs in PyTorch: another thread runs a module"):
        close(ours(torch.ones(2, 4)), ours.inner.module(torch.ones(2, 4)))
    begin = time.monotonic()
    for n in range(20):
        ours(torch.ones(*[1] * (n % 3), 2, 4))
    assert time.monotonic() - begin < 20 * LONG / 100  # it is known by then
    ours.inner(torch.ones(2, 4))
    assert ours.inner.stats()["graphs"] == 1


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_what_a_handler_of_a_signal_raises_leaves_nothing_locked() -> None:
    class Late(Exception):
        pass

    def handler(*_: object) -> None:
        raise Late

    ours = ORTModule(Function(lambda s, x: s.l(x) + torch.randn_like(x), l=nn.Linear(4, 4)))
    ours(torch.ones(2, 4))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for n in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + n % 40))
                for _ in range(100):
                    ours(torch.ones(2, 4))
            except Late:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    together(lambda: ORTModule(nn.Linear(4, 4))(torch.ones(3, 4)))


def test_a_handler_that_runs_a_module_while_its_thread_waits_to_trace() -> None:
    handled, ours = ORTModule(nn.Linear(4, 2)), ORTModule(nn.Linear(4, 3))
    runs, came = threading.Event(), threading.Event()

    def handler(*_: object) -> None:
        came.set()
        handled(torch.ones(2, 4))

    def run() -> None:
        runs.set()
        while not tracing._wanted:
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        came.wait(LONG)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread = threading.Thread(target=lambda: tracing.run(run), daemon=True)
        thread.start()
        runs.wait(LONG)
        ours(torch.ones(2, 4))
        thread.join(LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came.is_set() and not thread.is_alive() and not (ours.fallback_report() or handled.fallback_report())


def test_a_backward_runs_while_another_thread_waits_to_trace() -> None:
    class Tracing(Differentiable):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 2 + 0 * traced(grad)

    traced, ours = ORTModule(nn.Linear(4, 4)), ORTModule(nn.Linear(4, 4))
    together(
        *[lambda s=s: Tracing.apply(torch.ones(s, requires_grad=True)).sum().backward() for s in shapes()],
        *[lambda s=s: ours(torch.ones(s)).sum().backward() for s in shapes()],
    )
    assert not traced.fallback_report() and not ours.fallback_report()


@pytest.mark.host
def test_a_child_of_a_process_whose_threads_run_modules_traces() -> None:
    ours, stop, runs = ORTModule(nn.Linear(4, 2)), threading.Event(), threading.Event()

    def run() -> None:
        runs.set()
        stop.wait(LONG)

    thread = threading.Thread(target=lambda: tracing.run(run), daemon=True)
    thread.start()
    runs.wait(LONG)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if ours(torch.ones(2, 4)).shape == (2, 2) and not ours.fallback_report() else 1)
    stop.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


class Regions(nn.Module):
    """A layer without gradients, in autocast, and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            b = self.layer(x)
        return a + b + self.layer(x)


def test_an_export_of_another_thread_makes_of_regions_what_pytorch_makes() -> None:
    module, x = Regions(), torch.randn(2, 3)
    found = []

    def export() -> None:
        found.append(str(torch.export.export(module, (x,)).graph))

    export()
    with left_as_traced():
        together(export)
    assert found[0] == found[1]


def test_a_recurrent_layer_of_another_thread_takes_all_its_steps() -> None:
    """Whichever of two threads is ready with what it takes one step for last."""
    layer, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    arguments = (x, [torch.zeros(1, 2, 4)] * 2, list(layer.parameters()), True, 1, 0.0, False, False, False)

    want = layer(x)[0]

    def run() -> None:
        with enable_python_dispatcher():
            close(aten.lstm.input(*arguments)[0], want)

    first, second = one_step_for_all(), one_step_for_all()
    together(first.__enter__)
    together(second.__enter__)
    together(run)
    together(lambda: first.__exit__(None, None, None))
    together(lambda: second.__exit__(None, None, None))
    run()


def test_another_thread_may_pickle_what_is_traced() -> None:
    ours = ORTModule(nn.Sequential(*[nn.Linear(6, 6) for _ in range(12)], nn.Tanh()))
    traced, errors = threading.Event(), []

    def save() -> None:
        while not traced.is_set():
            try:
                pickle.dumps(ours.module)
            except Exception as error:
                errors.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    try:
        ours(torch.randn(3, 6))
    finally:
        traced.set()
        saving.join()
    assert not errors and not ours.fallback_report()


def test_sizes_of_another_thread_are_its_own() -> None:
    """Symbols of two traces have the same names."""
    methods = dict(vars(SymNode))

    def trace() -> None:
        make_fx(lambda x: x.flatten() * x.shape[0], tracing_mode="symbolic")(torch.ones(3, 4))

    with remembered() as environments:
        together(trace)
        assert not environments
        trace()
        assert environments
    first, second = remembered(), remembered()
    together(first.__enter__)
    together(second.__enter__)
    together(lambda: first.__exit__(None, None, None))
    together(lambda: second.__exit__(None, None, None))
    assert vars(SymNode) == methods


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
        self.scale, self.power = 1.0, 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale**self.power


@pytest.mark.usefixtures("export_only")
def test_numbers_that_a_trace_leaves_open_are_numbers_to_other_threads() -> None:
    ours = ORTModule(module := Annealed())
    one, ended = torch.ones(1), threading.Event()

    def trace() -> None:
        try:
            for step in range(4):
                module.scale, module.power = step + 2.5, step + 2
                with torch.no_grad():
                    close(ours(torch.ones(2, 4)), module(torch.ones(2, 4)))
        finally:
            ended.set()

    def compute() -> None:
        while not ended.is_set():
            scale, power = module.scale, module.power
            assert (one * scale).item() == scale in (1.0, 2.5, 3.5, 4.5, 5.5)
            assert (one * power).item() == power in (1, 2, 3, 4, 5)
            assert isinstance(scale, float) and isinstance(power, int)
            assert type(pickle.loads(pickle.dumps(scale))) is float

    together(trace, compute)
    assert n_graphs(ours) == 2
    assert (type(module.scale), type(module.power)) == (float, int)


@pytest.mark.parametrize("name", ["torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"])
def test_what_pytorch_logs_in_another_thread_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger(name)
    log.addHandler(caplog.handler)
    try:
        with quiet():
            together(lambda: log.warning("theirs"))
            log.warning("ours")
        first, second = quiet(), quiet()
        together(first.__enter__)
        together(second.__enter__)
        together(lambda: first.__exit__(None, None, None))
        together(lambda: second.__exit__(None, None, None))
        log.warning("afterwards")
    finally:
        log.removeHandler(caplog.handler)
    assert list(dict.fromkeys(caplog.messages)) == ["theirs", "afterwards"]


def test_warnings_are_left_to_those_who_filter_them() -> None:
    """Filters are the process's: another thread may be recording."""
    filters = list(warnings.filters)
    with quiet():
        assert warnings.filters == filters


def test_a_thread_is_warned_while_another_waits_for_its_reason() -> None:
    ours = ORTModule(nn.Linear(2, 2))
    report = ours._ort_report
    waits, told = threading.Event(), threading.Event()

    def wait() -> None:
        with report.waiting():
            waits.set()
            told.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert waits.wait(60)
        report.tell("a cause")
        with pytest.warns(UserWarning, match="a cause"):
            report.warn()
    finally:
        told.set()
        thread.join()
