"""What is not traced while another thread runs a module; and the graphs of a thread, which no other takes away."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import ortmodule_c
from ortmodule_c import DebugOptions, NotExportable, ORTModule, locate, process
from ortmodule_c.flatten import flatten
from ortmodule_c.process import tracing
from ortmodule_c.terms import Terms
from wrapped import Branching, assert_same_step, close, pair

LONG = 60.0  # seconds after which something hangs


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PATIENCE", 0.1)
    monkeypatch.setattr(tracing, "_patience", 0.1)


@pytest.fixture
def busy(impatient: None) -> Iterator[None]:
    """Another thread runs a module, and does not end."""
    runs, ends = threading.Event(), threading.Event()

    def run() -> None:
        runs.set()
        ends.wait(LONG)

    thread = threading.Thread(target=lambda: tracing.run(run), daemon=True)
    thread.start()
    runs.wait(LONG)
    yield
    ends.set()
    thread.join(LONG)


def to_onnx(module: nn.Module, path: Path) -> None:
    ortmodule_c.onnx.save(path, module, (torch.ones(2, 4),))


def to_artifacts(module: nn.Module, path: Path) -> None:
    pytest.importorskip("safetensors")
    from ortmodule_c import artifacts

    artifacts.save(path, module, (torch.ones(2, 4),))


class Moded(nn.Module):
    """Notes the modes that it is put in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.modes: list[bool] = []

    def train(self, mode: bool = True) -> "Moded":
        self.modes.append(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("save", [to_onnx, to_artifacts])
def test_no_file_is_made_of_a_module_while_others_run(save: Callable[[nn.Module, Path], None], tmp_path: Path) -> None:
    """... and it is not put in another mode, in which they would meet it."""
    module = Moded()
    with pytest.raises(NotExportable, match="another thread runs a module"):
        save(module, tmp_path / "file")
    assert module.modes == [] and not [*tmp_path.iterdir()]


def test_what_a_handler_raises_while_a_file_is_made_is_raised(tmp_path: Path) -> None:
    class Late(Exception):
        pass

    class Signalling(nn.Linear):
        def train(self, mode: bool = True) -> "Signalling":
            signal.raise_signal(signal.SIGALRM)
            return super().train(mode)

    def handler(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Late):
            to_onnx(Signalling(4, 4), tmp_path / "file")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("busy")
def test_where_two_sides_part_is_not_looked_for_while_others_run() -> None:
    leaves, spec = flatten(((torch.ones(2, 4),), {}))
    with pytest.raises(NotExportable, match="another thread runs a module"):
        locate.locate(nn.Linear(4, 4), Terms(), spec, leaves, None)


@pytest.mark.usefixtures("busy")
def test_a_trace_within_another_knows_whether_that_is_alone() -> None:
    with tracing as alone, tracing as within:
        assert (alone, within) == (False, False)
    assert tracing._patience == process._IMPATIENCE  # it has waited in vain


@pytest.mark.usefixtures("fresh_dynamo", "busy")
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_dynamo_compiles_while_others_run() -> None:
    """It exchanges nothing of theirs."""
    eager, ours = pair(Branching())
    ours._ort_options.capture = "dynamo"
    for n in (2, 3):
        assert_same_step(eager, ours, torch.rand(n, 4))
    assert ours.stats()["dynamo_graphs"] and len(ours.fallback_report()) == 1


_here = threading.local()


@torch._dynamo.disable
def meet() -> None:
    _here.meet()


class Meeting(nn.Module):
    """A part that is compiled, and a loop around it that is left to Python, in which threads meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def part(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()

    def forward(self, x: Tensor, _which: slice) -> Tensor:
        for _ in range(2):
            x = self.part(x)
            meet()
        return x


@pytest.mark.usefixtures("fresh_dynamo", "impatient")
@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("other", [slice(1), slice(2)], ids=["the same", "another"])
def test_a_call_that_raises_takes_no_graph_from_one_of_another_thread(other: slice) -> None:
    ours = ORTModule(Meeting(), DebugOptions(capture="dynamo"))
    x = torch.randn(3, 4)
    expected = ours.module.part(ours.module.part(x))
    raising, running, raised = threading.Event(), threading.Event(), threading.Event()
    results: list[Tensor] = []

    def fail() -> None:
        raising.set()
        running.wait(LONG)
        raise KeyError("mine")

    def first() -> None:
        _here.meet = fail
        with pytest.raises(KeyError, match="mine"):
            ours(x, slice(1))
        raised.set()

    def wait() -> None:
        running.set()
        raised.wait(LONG)
        gc.collect()

    def second() -> None:
        _here.meet = wait
        raising.wait(LONG)
        results.append(ours(x, other))

    threads = [threading.Thread(target=function, daemon=True) for function in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    _here.meet = lambda: None
    for _ in range(2):
        results += [ours(x, slice(1)), ours(x, other)]
    assert raised.is_set() and len(results) == 5
    for result in results:
        close(result, expected)
