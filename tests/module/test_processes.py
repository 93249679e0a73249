"""Forks, threads and interrupts: work, or are refused; nothing hangs and nothing is left behind."""

import gc
import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c import _C, ORTModule
from wrapped import Function, assert_same_state, assert_same_step, close, mlp, pair


def in_child(function: Any) -> str:
    """What the function gives in a child made by fork, or its exception."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os.write(writer, str(function()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        return answer.read()


@pytest.mark.host
def test_after_fork() -> None:
    """A child has no threads but its own: it runs on that one, training, sizes and graphs new to it included.

    A PyTorch built for devices lets no child train whose parent did.
    """
    eager, ours = pair(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    x = torch.randn(300, 64) / 300

    def step(n: int) -> str:
        for m in (eager, ours):
            m.zero_grad()
        return str(tuple(assert_same_step(eager, ours, x[:n]).shape))

    def step_alone(n: int) -> str:
        torch.set_num_threads(1)  # PyTorch by itself would wait for its threads
        return step(n)

    step(300)
    assert in_child(lambda: ours(x).shape) == "torch.Size([300, 64])"
    trains = "Autograd-and-Fork" not in in_child(lambda: (torch.set_num_threads(1), eager(x).sum().backward()))
    assert trains or torch.backends.cuda.is_built()
    for n in (300, 200) if trains else ():
        assert in_child(lambda n=n: step_alone(n)) == f"({n}, 64)"
    for m in (eager, ours):
        m.eval()
    with torch.set_grad_enabled(trains):
        assert in_child(lambda: step_alone(300)) == "(300, 64)"
    step(300)


@pytest.mark.host
def test_fork_while_other_threads_run() -> None:
    ours = ORTModule(mlp())
    ours(torch.randn(2, 6))
    ours(torch.randn(3, 6))
    x = torch.randn(50, 6)  # not in the child: a thread may hold the lock of PyTorch's generator when it is made
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            ours(torch.randn(int(torch.randint(2, 40, ())), 6)).sum().backward()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for t in threads:
        t.start()
    answers = {in_child(lambda: ours(x).shape) for _ in range(20)}
    stop.set()
    for t in threads:
        t.join()
    assert answers == {"torch.Size([50, 3])"}


class Predictions(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x

    def __len__(self) -> int:
        return 4

    @torch.no_grad()
    def __getitem__(self, i: int) -> torch.Tensor:
        return self.model(self.x[i : i + 1])


@pytest.mark.host
def test_workers_of_a_data_loader() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(4, 6)
    assert_same_step(eager, ours, x)
    loader = torch.utils.data.DataLoader(
        Predictions(ours, x), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    close(torch.cat(list(loader)), eager(x).detach())


def test_two_threads() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(4, 6)
    expected = eager(x)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(5):
                out = ours(x)
                close(out, expected)
                out.sum().backward()
        except BaseException as error:  # reported below
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    (10 * eager(x).sum()).backward()
    assert_same_state(ours, eager)


def test_threads_with_new_sizes_while_another_traces() -> None:
    eager, ours = pair(mlp())
    failures: list[BaseException] = []

    def run(first: int) -> None:
        try:
            for i in range(12):
                x = torch.randn(2 + (first + i) % 7, 6)
                out = ours(x)
                with torch.no_grad():
                    close(out, eager(x))
                out.sum().backward()
        except BaseException as error:  # reported below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and not ours.fallback_report()


def test_two_threads_train_two_modules() -> None:
    modules = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3)) for _ in range(2)]
    pairs = [pair(m) for m in modules]
    batches = [torch.randn(3 + i % 4, 6) for i in range(8)]
    losses: dict[nn.Module, list[float]] = {m: [] for p in pairs for m in p}

    def train(m: nn.Module) -> None:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
        for x in batches:
            loss = m(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[m].append(loss.item())

    for eager, _ in pairs:
        train(eager)
    threads = [threading.Thread(target=train, args=(ours,)) for _, ours in pairs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for eager, ours in pairs:
        assert losses[ours] == pytest.approx(losses[eager], rel=1e-3)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["capture", "forward", "backward"])
@pytest.mark.filterwarnings("ignore")
def test_an_exception_midway_leaves_nothing_behind(error: type[BaseException], where: str) -> None:
    at = [where]

    class Breaking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if at[0] in ("capture", "forward"):
                raise error
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if at[0] == "backward":
                raise error
            return grad * 2

    eager, ours = pair(Function(lambda s, x: s.b(Breaking.apply(s.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 2)))
    gc.collect()
    base = _C.pool_stats()["used_bytes"]
    x = torch.randn(3, 6)
    if where == "forward":
        at[0] = ""
        ours(x).sum().backward()
        at[0] = where
    apply, state = torch.autograd.Function.apply, torch.get_rng_state()
    with pytest.raises(error):
        ours(x).sum().backward()
    assert torch.autograd.Function.apply == apply and torch.equal(torch.get_rng_state(), state)
    at[0] = ""
    for m in (eager, ours):
        m.zero_grad()
    assert_same_step(eager, ours, x)
    assert not any(r.name == "Function" for r in ours.fallback_report())
    del ours, m
    gc.collect()
    assert _C.pool_stats()["used_bytes"] == base
