"""What PyTorch runs within a step has threads of its own: the core lets go of the team that it holds."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from wrapped import Function, close

pytestmark = pytest.mark.host

LONG = 60.0  # seconds after which something hangs
THREADS = (1, 2, 3, 5)
_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_library = torch.library.Library("held_team", "DEF")
_library.define("probe(Tensor x) -> Tensor")
_library.define("probe_grad(Tensor dy) -> Tensor")


class Seen:
    """What is done each time that PyTorch is called: an entry for each in `teams`.

    Attributes
    ----------
    teams
        The numbers of the threads that a parallel region of torch's own runtime got.
    then
        Is called besides.
    """

    def __init__(self) -> None:
        path = next(iter(re.findall(r"(/\S*libgomp\S*)", Path("/proc/self/maps").read_text())))
        self._openmp = ctypes.CDLL(path)
        self.teams: list[set[int]] = []
        self.then: Any = lambda: None

    def __call__(self) -> None:
        self.teams.append(self.team())
        self.then()

    def team(self) -> set[int]:
        """The numbers of threads that a region here has."""
        numbers: set[int] = set()
        body = _REGION(lambda _: numbers.add(self._openmp.omp_get_thread_num()))
        self._openmp.GOMP_parallel(body, None, 0, 0)
        return numbers


_seen = Seen()


def _doubled(x: Tensor) -> Tensor:
    _seen()
    return x * 2


for _name in ("probe", "probe_grad"):
    _library.impl(_name, _doubled, "CPU")
    torch.library.register_fake(f"held_team::{_name}", torch.empty_like, lib=_library)
torch.library.register_autograd("held_team::probe", lambda _ctx, dy: torch.ops.held_team.probe_grad(dy), lib=_library)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    _seen.then = lambda: None


def layers(s: Function, x: Tensor) -> Tensor:
    """Jobs for several threads before and after the call."""
    h = s.first(s.first(x).tanh()).tanh()
    h = torch.ops.held_team.probe(h)
    return s.second(s.second(h).tanh()).tanh()


def model() -> Function:
    return Function(layers, first=nn.Linear(256, 256), second=nn.Linear(256, 256))


def step(module: nn.Module, x: Tensor, threads: int) -> list[Tensor]:
    """The output and the gradients, by so many threads at first; that it ends is part of the test."""
    found: list[Tensor] = []

    def run() -> None:
        torch.set_num_threads(threads)
        out = module(x)
        found.extend([out.detach(), *torch.autograd.grad(out.square().sum(), list(module.parameters()))])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive(), "it hangs"
    return found


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("n", THREADS)
def test_a_region_of_pytorchs_own_has_all_its_threads(n: int) -> None:
    """From the second step on the core knows that a team is worth holding."""
    ours, x = ORTModule(model()), torch.randn(128, 256)
    want = step(ours.module, x, n)
    for _ in range(4):
        _seen.teams.clear()
        close(step(ours, x, n), want)
        assert _seen.teams == [{*range(n)}] * 2  # forward and backward


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("n", THREADS)
@pytest.mark.parametrize("then", THREADS)
def test_a_number_of_threads_that_is_set_within_a_step_is_heard(n: int, then: int) -> None:
    """At once by PyTorch, and by the steps that follow; the results have the same bits."""
    ours, x = ORTModule(model()), torch.randn(128, 256)
    want = [step(ours, x, n) for _ in range(2)][-1]
    inside: list[int] = []

    def set_number() -> None:
        torch.set_num_threads(then)
        inside.append(len(_seen.team()))

    _seen.then = set_number
    for _ in range(3):
        assert all(map(torch.equal, step(ours, x, n), want))
        assert {*inside} == {then}
