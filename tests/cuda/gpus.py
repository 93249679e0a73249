"""Modules of PyTorch on two emulated GPUs: ``pytest --gpus tests/cuda/gpus.py``, which test_devices.py calls."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import emulated_cuda
import pytest
import torch
from emulated_cuda import current, gpus
from modules import Block, Mixer, Residual
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError, verify
from ortmodule_c._C import DeviceError
from ortmodule_c.lowering.translations.registry import TABLE, aten
from ortmodule_c.optim import FusedAdam

OUT_OF_MEMORY = 2
on_each = pytest.mark.parametrize("number", [0, 1])


class Shifted(Mixer):
    """With a constant, which lies on its GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.arange(3, device=x.device).sin()


class Words(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(5, 3)


class Split(nn.Module):
    """Half of it on each GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7, device="cuda:0"), nn.Linear(7, 3, device="cuda:1")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().to("cuda:1"))


class Midway(nn.Module):
    """With a result that is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x).tanh()
        return self.b(hidden).sum(), hidden


class Dropping(nn.Module):
    """By PyTorch's kernel for GPUs, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.first(x), 0.4).tanh()
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.2)


def numbers(n: int) -> list[int]:
    counts = gpus[n].counted_here()
    return [getattr(counts, name) for name, _ in counts._fields_]


@contextlib.contextmanager
def alone(number: int) -> Iterator[None]:
    """The other GPU is asked for nothing, and has no memory given to it."""
    other = 1 - number
    before, launches, used = numbers(other), gpus[number].counted_here().launches, gpus[other].used_bytes()
    yield
    assert numbers(other) == before and gpus[other].used_bytes() == used
    assert gpus[number].counted_here().launches > launches


@pytest.fixture(autouse=True)
def no_mistakes() -> Iterator[None]:
    before = gpus[0].counted().mistakes
    yield
    gc.collect()
    assert gpus[0].counted().mistakes == before


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return [y.detach().cpu(), *[p.grad.cpu() for p in module.parameters()]]


def on(number: int, module: nn.Module) -> ORTModule:
    return ORTModule(copy.deepcopy(module).to(f"cuda:{number}"))


def assert_steps_are_pytorchs(module: nn.Module, wrapped: nn.Module, number: int, *shape: int, steps: int = 4) -> None:
    for _ in range(steps):
        x = torch.randn(shape)
        torch.testing.assert_close(step(wrapped, x.to(f"cuda:{number}")), step(module, x))


@on_each
@pytest.mark.parametrize(
    ("kind", "shape", "replays"), [(Mixer, (4, 5), True), (Block, (2, 9, 12), True), (Residual, (3, 3, 21, 19), False)]
)
def test_a_module_runs_on_the_gpu_of_its_tensors_alone(
    kind: type[nn.Module], shape: tuple[int, ...], replays: bool, number: int
) -> None:
    """Its kernels, products, convolutions, memory, events and graphs."""
    module = kind()
    with alone(number):
        wrapped = on(number, module)
        assert_steps_are_pytorchs(module, wrapped, number, *shape)
        assert not wrapped.fallback_report()
        assert (gpus[number].counted_here().graphs > 0) == (wrapped.stats()["replays"] > 0) == replays
        del wrapped
        gc.collect()
        assert gpus[number].counted_here().graphs == 0


@on_each
@pytest.mark.parametrize("known", [True, False], ids=["", "that nobody has worked with"])
@pytest.mark.parametrize(("kind", "shape"), [(Mixer, (4, 5)), (Residual, (3, 3, 21, 19))])
def test_another_gpu_may_be_current(kind: type[nn.Module], shape: tuple[int, ...], number: int, known: bool) -> None:
    """PyTorch keeps the number of one that has no context to itself, and the context that there was stays current."""
    module, other = kind(), 1 - number
    if not known:
        gpus[0].driver.emulated_forget(other)
    with current(other) if known else contextlib.nullcontext(), alone(number):
        wrapped = on(number, module)
        if not known:
            gpus[0].torch.emulated_restore_device(other)
        assert_steps_are_pytorchs(module, wrapped, number, *shape)
        assert not wrapped.fallback_report()
    with current(other):  # it has a context again
        pass


def test_a_module_that_moves_has_a_new_graph_and_leaves_nothing_behind() -> None:
    module = Shifted()
    before, graphs = gpus[0].used_bytes(), gpus[0].counted_here().graphs
    wrapped = on(0, module)
    assert_steps_are_pytorchs(module, wrapped, 0, 4, 5)
    assert gpus[0].used_bytes() > before and wrapped.stats()["graphs"] == 1
    wrapped.to("cuda:1")
    with alone(1):
        assert_steps_are_pytorchs(module, wrapped, 1, 4, 5)
    assert wrapped.stats()["graphs"] == 2 and not wrapped.fallback_report()
    del wrapped
    gc.collect()
    assert (gpus[0].used_bytes(), gpus[0].counted_here().graphs) == (before, graphs)


def test_a_module_on_both_runs_in_pytorch_which_is_told_once() -> None:
    wrapped = ORTModule(Split())
    plain = nn.Sequential(copy.deepcopy(wrapped.first).cpu(), nn.ReLU(), copy.deepcopy(wrapped.second).cpu())
    launches = gpus[0].counted().launches
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_steps_are_pytorchs(plain, wrapped, 0, 4, 5)
    assert gpus[0].counted().launches == launches
    (warning,) = told
    assert "Split runs in PyTorch: the module's tensors are on cuda:0 and cuda:1" in str(warning.message)
    assert len(wrapped.fallback_report()) == 1


def test_an_argument_on_the_other_gpu_is_pytorchs_error() -> None:
    wrapped = on(0, Mixer())
    with pytest.raises(RuntimeError, match="to be on the same device"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped(torch.randn(4, 5).to("cuda:1"))
    wrapped(torch.randn(4, 5).to("cuda:0"))


def test_an_index_out_of_range_is_told_by_what_comes_next_on_its_gpu() -> None:
    first, second = (on(number, Words()) for number in (0, 1))
    known = [torch.tensor([1]).to(f"cuda:{number}") for number in (0, 1)]
    second(torch.tensor([7]).to("cuda:1"))
    gpus[1].wait(0)
    first(known[0])
    with pytest.raises(DeviceError, match=r"work given before: .*index 7 is out of range, there are 5"):
        second(known[1])
    second(known[1])


def test_where_memory_runs_out_the_graphs_of_that_gpu_alone_make_room() -> None:
    modules = [on(number, Mixer()) for number in (0, 1)]
    for number, module in enumerate(modules):
        assert_steps_are_pytorchs(copy.deepcopy(module.module).cpu(), module, number, 4, 5)
    graphs = [gpus[number].counted_here().graphs for number in (0, 1)]
    x = torch.randn(7001, 5).to("cuda:1")
    gpus[0].fail(0, b"cuMemAlloc_v2", OUT_OF_MEMORY)
    modules[1](x)
    assert gpus[0].counted_here().graphs == graphs[0] > 0 and gpus[1].counted_here().graphs < graphs[1]


@on_each
def test_results_and_gradients_are_tensors_of_pytorchs_own(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its allocator knows their memory, and keeps it for the streams that `record_stream` names."""
    made: dict[int, torch.dtype | None] = {}
    make = emulated_cuda.new

    def noting(size: list[int], stride: Any, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        t = make(size, stride, dtype, device)
        made[t.data_ptr()] = t.dtype
        assert device == torch.device("cuda", number)
        return t

    wrapped, x = on(number, Mixer()), torch.randn(4, 5).to(f"cuda:{number}")
    wrapped(x)
    monkeypatch.setattr(emulated_cuda, "new", noting)
    y = wrapped(x)
    (y * 2).sum().backward()
    assert {made[t.data_ptr()] for t in (y, *(p.grad for p in wrapped.parameters()))} == {torch.float32}


def test_a_result_may_be_written_over() -> None:
    """As Trainer does with the loss."""
    found, module = [], Midway()
    for device in ("cpu", "cuda:0"):
        model, x = ORTModule(copy.deepcopy(module).to(device)), torch.ones(3, 5).to(device)
        loss, hidden = model(x)
        loss *= 3
        (loss + hidden.sum()).backward()
        found.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())])
    torch.testing.assert_close(*found)


def test_a_result_that_others_are_computed_from_is_given_back_to() -> None:
    """Autograd calls hooks in a thread of its own there, which does not show what a backward was called for."""
    torch.manual_seed(0)
    module, x = Midway().to("cuda:0"), torch.randn(3, 5).to("cuda:0").requires_grad_()
    wrapped = ORTModule(copy.deepcopy(module))
    for model in (module, wrapped):
        loss, hidden = model(x)
        (loss + hidden.square().sum()).backward()
    for mine, theirs in zip(wrapped.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad.cpu())
    loss, hidden = wrapped(x)
    with pytest.raises(ORTModuleError, match="cannot give the gradient of an output"):
        torch.autograd.grad(loss, hidden)
    assert not wrapped.fallback_report()


def test_a_result_of_another_type_than_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mode of the user's may give; it would be written past its end."""
    session = gpus[0].core.Session("input %x : f32[3]\n%y = Neg(%x)\nreturn %y\n", {}, provider="cuda:0")
    given, make = [torch.ones(3).to("cuda:0")], emulated_cuda.new
    plan = session.plan(given, [False], [False])
    monkeypatch.setattr(emulated_cuda, "new", lambda size, stride, _, device: make(size, stride, torch.int8, device))
    with pytest.raises(RuntimeError, match=r"torch\.empty_strided gave i8\[3\] for f32\[3\]"):
        plan.forward(given, 0)
    monkeypatch.undo()
    plan.forward(given, 0)


def test_where_pytorch_has_no_memory_for_a_result_graphs_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Mixer()
    wrapped = on(0, module)
    assert_steps_are_pytorchs(module, wrapped, 0, 4, 5)
    x, make = torch.randn(4, 5), emulated_cuda.new
    given, left = x.to("cuda:0"), 1

    def failing(*args: Any) -> Tensor:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return make(*args)

    monkeypatch.setattr(emulated_cuda, "new", failing)
    graphs = gpus[0].counted_here().graphs
    y = wrapped(given)
    assert left < 0 and gpus[0].counted_here().graphs < graphs
    left = 2
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        wrapped(given)
    again = wrapped(given)
    monkeypatch.undo()
    torch.testing.assert_close([y.cpu(), again.cpu()], [module(x)] * 2)


@pytest.mark.parametrize("how", ["end", "take"])
def test_a_backward_is_left_alone_while_pytorch_makes_a_gradient(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode of the user's, or another thread, may come to it meanwhile."""
    text = "input %x : f32[3] grad\ninput %w : f32[3] grad\n%h = Mul(%x, %w)\n%y = Exp(%h)\nreturn %y\n"
    session, make = gpus[0].core.Session(text, {}, provider="cuda:0"), emulated_cuda.new
    given, grads = [torch.full((3,), 2.0).to("cuda:0") for _ in range(2)], [torch.ones(3).to("cuda:0")]
    plan = session.plan(given, [True, True], [True])
    outputs, run = plan.forward(given, 0)
    expected = [grad.cpu() for grad in plan.backward(run, given, outputs, grads)]
    outputs, run = plan.forward(given, 0)
    backward, refused = plan.begin(run, given, outputs, grads), 0

    def meddling(*args: Any) -> Tensor:
        nonlocal refused
        with pytest.raises(ValueError, match="another thread takes gradients"):
            backward.end() if how == "end" else backward.take([1])
        refused += 1
        return make(*args)

    monkeypatch.setattr(emulated_cuda, "new", meddling)
    taken = backward.take([0, 1])
    monkeypatch.undo()
    assert refused and [grad.cpu().tolist() for grad in taken] == [grad.tolist() for grad in expected]
    backward.end()


def test_a_stream_that_waits_holds_its_gpu_alone() -> None:
    module = Mixer()
    modules, stream = [on(number, module) for number in (0, 1)], gpus[1].stream()
    x = torch.randn(4, 5)
    given = [x.to(f"cuda:{number}") for number in (0, 1)]
    for m, t in zip(modules, given, strict=True):
        m(t)  # planned: constants wait for their GPU
    gpus[1].use(stream)
    gpus[1].pause(stream)
    late = modules[1](given[1])
    torch.testing.assert_close(modules[0](given[0]).cpu(), module(x))
    gpus[1].resume(stream)
    torch.testing.assert_close(late.cpu(), module(x))
    gpus[1].use(0)


def test_states_that_lie_elsewhere_than_a_module_that_has_moved_are_told() -> None:
    module = Mixer()
    optimizer, x = FusedAdam(module.parameters()), torch.randn(4, 5)
    for device in ("cpu", "cuda:0"):
        step(module.to(device), x.to(device))
        if device == "cpu":
            optimizer.step()
    before = [p.cpu() for p in module.parameters()]
    with pytest.raises(ValueError, match="step: expected a tensor on cuda:0, got one on cpu"):
        optimizer.step()
    assert all(torch.equal(p.cpu(), b) for p, b in zip(module.parameters(), before, strict=True))
    optimizer.load_state_dict(optimizer.state_dict())  # which moves them
    optimizer.step()


@on_each
def test_a_step_of_an_optimizer_is_taken_where_its_parameters_are(number: int) -> None:
    module = Mixer()
    with alone(number):
        wrapped = on(number, module)
        ours, theirs = FusedAdam(wrapped.parameters(), max_grad_norm=0.5), torch.optim.AdamW(module.parameters())
        x = torch.randn(4, 5)
        step(wrapped, x.to(f"cuda:{number}"))
        ours.step()
        step(module, x)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        theirs.step()
    torch.testing.assert_close([p.cpu() for p in wrapped.parameters()], [*module.parameters()])


def test_an_optimizer_may_have_parameters_of_both() -> None:
    modules = [on(number, Mixer()) for number in (0, 1)]
    plain = [copy.deepcopy(m.module).cpu() for m in modules]
    ours = FusedAdam([p for m in modules for p in m.parameters()])
    theirs = torch.optim.AdamW([p for m in plain for p in m.parameters()])
    for number, (m, p) in enumerate(zip(modules, plain, strict=True)):
        assert_steps_are_pytorchs(p, m, number, 4, 5, steps=1)
    launches = [gpus[number].counted_here().launches for number in (0, 1)]
    ours.step()
    theirs.step()
    assert all(gpus[number].counted_here().launches > launches[number] for number in (0, 1))
    for m, p in zip(modules, plain, strict=True):
        torch.testing.assert_close([q.cpu() for q in m.parameters()], [*p.parameters()])


def test_two_threads_work_on_a_gpu_each() -> None:
    """Graphs are captured meanwhile, and memory is given back and forth."""
    failures: list[BaseException] = []

    def work(number: int, plain: nn.Module, wrapped: nn.Module) -> None:
        try:
            gpus[number].use(gpus[number].stream())
            assert_steps_are_pytorchs(plain, wrapped, number, 4, 5, steps=12)
        except BaseException as failure:
            failures.append(failure)
        finally:
            gpus[number].use(0)

    modules = [Mixer() for _ in gpus]
    wrapped = [on(number, module) for number, module in enumerate(modules)]
    threads = [threading.Thread(target=work, args=(n, modules[n], wrapped[n])) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(m.stats()["replays"] > 0 for m in wrapped)


def test_a_session_takes_tensors_of_its_gpu_alone() -> None:
    session = gpus[1].core.Session("input %x : f32[3]\n%y = Neg(%x)\nreturn %y\n", {}, provider="cuda:1")
    with pytest.raises(ValueError, match="expected a tensor on cuda:1, got one on cuda:0"):
        session.plan([torch.ones(3).to("cuda:0")], [False], [False])


class Gram(nn.Module):
    """Without tensors of its own, so that its arguments alone tell where it runs."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


@on_each
def test_the_precision_of_a_module_without_tensors_is_that_of_where_it_runs(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    x, ours = torch.randn(4, 5), ORTModule(Gram(), precision="fp16")
    want = (x.half() @ x.half().mT).float()
    for device in (f"cuda:{number}", "cpu"):
        for run in (ours, lambda x: ours._ort_terms.call(ours.module, x)):
            got = run(x.to(device)).cpu()
            torch.testing.assert_close(got, want, rtol=0, atol=2e-2)
            assert torch.equal(got, got.half().float()) and not torch.is_autocast_enabled("cuda")


@on_each
def test_a_step_is_verified_there_with_its_dropout(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Dropping().to(f"cuda:{number}"), torch.randn(4, 3, 5).to(f"cuda:{number}")
    with alone(number):
        assert verify(nn.Sequential(module, nn.Dropout1d(0.3)), x).ok
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ORTModule(module, DebugOptions(verify=1))(x).sum().backward()
        monkeypatch.setitem(TABLE, aten.tanh.default, lambda b, x: b.emit("Sigmoid", x))
        found = verify(module, x)
    assert not found.ok and found.place is not None and found.place.what.startswith("the value of tanh")
