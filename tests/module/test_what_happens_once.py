"""What a graph would do once, or ask once, is refused by name and left as it was."""

import contextlib
import datetime
import gc
import importlib
import io
import logging
import os
import pathlib
import pprint
import random
import secrets
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from held import Plain, Read, both, with_scale
from ortmodule_c import ORTModuleError
from wrapped import assert_same_step, close, n_graphs

SCALE = 2.0


class Schedule:
    def __init__(self) -> None:
        self.now = [0]

    def step(self) -> int:
        self.now[0] += 1
        return self.now[0]


SEEN: list[int] = []


def append_to_a_global(s: Any, y: Tensor) -> Tensor:
    SEEN.append(1)
    return y


def appending() -> Callable[[Any, Tensor], Tensor]:
    seen: list[int] = []

    def forward(_s: Any, y: Tensor) -> Tensor:
        seen.append(1)
        return y * len(seen)

    return forward


def count(_s: Any, y: Tensor) -> Tensor:
    global SCALE  # noqa: PLW0603  # as users do
    SCALE += 1
    return y


def counting() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0)


def kept(s: Any, y: Tensor) -> Tensor:
    s.kept = y.sum().item()
    return y


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Filling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        buffer.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def hooked(_s: Any, y: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad * 10)
    return y * 2


def set_new_global(_s: Any, y: Tensor) -> Tensor:
    global NEW_GLOBAL  # noqa: PLW0603  # as users do
    NEW_GLOBAL = y.shape[0]
    return y


def counting_calls(_s: Any, y: Tensor) -> Tensor:
    counting_calls.n = 1  # type: ignore[attr-defined]
    return y


def guessing(_s: Any, y: Tensor) -> Tensor:
    try:
        return y * float(y.sum())
    except Exception:
        return y


def set_dtype(_s: Any, y: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)
    return y


class Rule(type):
    scale = 2.0


class Ruled(metaclass=Rule):
    pass


def caught(make_number: Callable[[Tensor], Any]) -> Read:
    """A forward that goes on after whatever making a number of a tensor raises."""

    def forward(_s: Any, y: Tensor) -> Tensor:
        try:
            return y * make_number(y)
        except Exception:
            return y * 7

    return forward


def seeded(_s: Any, y: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        torch.manual_seed(3)
    return y * torch.rand(4)


def suppressed_hook(_s: Any, y: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        y.register_hook(lambda grad: grad * 10)
    return y


def inference(_s: Any, y: Tensor) -> Tensor:
    try:
        with torch.inference_mode():
            return y * 2
    except Exception:
        return y


def doing(act: Callable[[Any, Tensor], Any]) -> Read:
    """A forward that does something besides."""

    def forward(s: Any, y: Tensor) -> Tensor:
        act(s, y)
        return y

    return forward


def swap(s: Any, y: Tensor) -> Tensor:
    s.held[0], s.held[1] = s.held[1], s.held[0]
    return s.held[0](y)


def set_on(owner: Callable[[Any, Tensor], Any]) -> Read:
    """A forward that sets an attribute of something."""
    return doing(lambda s, y: setattr(owner(s, y), "seen", 1))


LOGGER = logging.getLogger("a_logger")
CAUGHT = "catches what is raised"
SETS = "sets attribute seen of a tensor"

REFUSED: dict[str, tuple[Callable[[], Any], Read, str]] = {
    "Python's random numbers": (lambda: None, lambda s, y: y * random.random(), "Python's random numbers"),
    "NumPy's random numbers": (lambda: None, lambda s, y: y * float(np.random.rand()), "NumPy's random numbers"),
    "random numbers of its own": (
        lambda: random.Random(0),
        lambda s, y: y * s.held.random(),
        "generator of random numbers",
    ),
    "an iterator": (lambda: iter([2.0, 3.0]), lambda s, y: y * next(s.held), "list_iterator"),
    "a generator": (counting, lambda s, y: y * next(s.held), "generator"),
    "a schedule": (Schedule, lambda s, y: y * s.held.step(), "attribute now of Schedule"),
    "a list of the globals": (lambda: None, append_to_a_global, "global SEEN"),
    "a list of a closure": (appending, lambda s, y: s.held(s, y), "variable seen of forward"),
    "a global": (lambda: None, count, "global SCALE"),
    "print": (lambda: None, lambda s, y: (print("seen"), y)[1], r"print\(\)"),
    "a file": (lambda: None, lambda s, y: (open(os.devnull).close(), y)[1], r"open\(\)"),
    "a stream": (io.StringIO, lambda s, y: (s.held.write("seen"), y)[1], "StringIO"),
    "the time": (lambda: None, lambda s, y: y * (time.time() > 0), r"time\(\)"),
    "the date": (lambda: None, lambda s, y: y * datetime.datetime.now().year, r"now\(\)"),
    "all globals": (lambda: None, lambda s, y: y * globals()["SCALE"], r"globals\(\)"),
    "a number that is kept": (lambda: None, kept, "depends on the elements of a tensor"),
    "a hook on a tensor": (lambda: None, hooked, "registers a hook"),
    "a function that changes its argument": (
        lambda: None,
        lambda s, y: Dirty.apply(y * 1),
        "Dirty changes an argument",
    ),
    "a function that changes a buffer": (
        lambda: None,
        lambda s, y: Filling.apply(y, s.buffer),
        "Filling changes an argument",
    ),
    "a metaclass": (lambda: Ruled, lambda s, y: y * s.held.scale, "Ruled has a metaclass of its own, Rule"),
    "a module of Python by a string": (
        lambda: None,
        lambda s, y: y * (2 if importlib.import_module("math").pi else 3),
        "import_module",
    ),
    "all modules of Python": (lambda: None, lambda s, y: y * (2 if "math" in sys.modules else 3), "sys.modules"),
    "an attribute past its lookup": (
        lambda: with_scale(Plain),
        lambda s, y: y * object.__getattribute__(s.held, "scale"),
        "__getattribute__",
    ),
    "a number that is drawn in Python's library": (lambda: None, lambda s, y: y * uuid.uuid4().int, "uuid4"),
    "a file that may be there": (lambda: None, lambda s, y: y * os.path.exists("nowhere"), "exists"),
    "a global that is new": (lambda: None, set_new_global, "global NEW_GLOBAL"),
    "an attribute of a function": (lambda: None, counting_calls, "function counting_calls"),
    "a tensor that is no buffer, in place": (
        lambda: torch.ones(4),
        lambda s, y: y * s.held.add_(1),
        r"no buffer, in place",
    ),
    "a gradient": (lambda: None, lambda s, y: y * (2 if s.l.weight.grad is None else 3), "asks for grad of a tensor"),
    "whether a tensor is a leaf": (lambda: None, lambda s, y: y * (2 if y.is_leaf else 3), "asks for is_leaf"),
    "a failure of the tracer that is caught": (lambda: None, guessing, CAUGHT),
    "how many threads there are": (lambda: None, lambda s, y: y * torch.get_num_threads(), "get_num_threads"),
    "PyTorch's own state": (lambda: None, set_dtype, "set_default_dtype"),
    "a result that was there before": (lambda: [1.0], lambda s, y: (y, s.held), "returns a list"),  # type: ignore[return-value]
    "the mode of a submodule": (lambda: None, lambda s, y: (s.l.eval(), y)[1], "the mode of Linear"),
    "a generator of PyTorch": (
        torch.Generator,
        lambda s, y: y * s.held.initial_seed(),
        "Generator, which cannot be compared",
    ),
    "a caught number": (lambda: None, caught(lambda y: float(y.sum())), CAUGHT),
    "a caught branch": (lambda: None, caught(lambda y: 2 if y.sum() > -100 else 3), CAUGHT),
    "a caught array": (lambda: None, caught(lambda y: float(y.detach().numpy().sum())), CAUGHT),
    "a caught pointer": (lambda: None, caught(lambda y: 2 if y.data_ptr() else 3), CAUGHT),
    "a caught hook": (lambda: None, suppressed_hook, "registers a hook"),
    "a caught seed": (lambda: None, seeded, "seeds PyTorch's random numbers"),
    "caught inference mode": (lambda: None, inference, "enters inference mode"),
    "a file that is read": (
        lambda: pathlib.Path(os.devnull),
        lambda s, y: y * len(s.held.read_text()),
        "Path.read_text",
    ),
    "a file that is asked for": (lambda: None, lambda s, y: y * os.path.exists(os.devnull), "exists"),
    "a saved array": (lambda: None, doing(lambda s, y: np.save(os.devnull, np.ones(1))), "save"),
    "a saved tensor": (lambda: None, doing(lambda s, y: torch.save(1.0, os.devnull)), "torch.serialization.save"),
    "a directory": (lambda: None, doing(lambda s, y: os.makedirs(os.curdir, exist_ok=True)), "makedirs"),
    "a unique number": (lambda: None, lambda s, y: y * (uuid.uuid4().int % 7), "uuid4"),
    "a secret number": (lambda: None, lambda s, y: y * secrets.randbelow(7), "randbelow"),
    "a generator that is made": (lambda: None, lambda s, y: y * random.Random().random(), "Random"),
    "a generator of NumPy that is made": (
        lambda: None,
        lambda s, y: y * np.random.default_rng().random(),
        "default_rng",
    ),
    "the level of a log": (lambda: None, lambda s, y: y * (2 if LOGGER.isEnabledFor(20) else 1), "isEnabledFor"),
    "a log": (lambda: None, doing(lambda s, y: LOGGER.info("seen")), "Logger.info"),
    "a warning": (lambda: None, doing(lambda s, y: warnings.warn("seen", stacklevel=1)), "warn"),
    "pprint": (lambda: None, doing(lambda s, y: pprint.pprint("seen")), "pprint"),
    "the name of a thread": (lambda: None, lambda s, y: y * len(threading.current_thread().name), "current_thread"),
    "a thread": (lambda: None, doing(lambda s, y: threading.Thread(target=print).start()), "Thread"),
    "collection of garbage": (lambda: None, doing(lambda s, y: gc.collect()), r"gc.collect\(\)"),
    "the number of threads": (lambda: None, lambda s, y: y * torch.get_num_threads(), "get_num_threads"),
    "setting the number of threads": (lambda: None, doing(lambda s, y: torch.set_num_threads(1)), "set_num_threads"),
    "setting the default dtype": (
        lambda: None,
        doing(lambda s, y: torch.set_default_dtype(torch.float32)),
        "set_default_dtype",
    ),
    "the precision of products": (
        lambda: None,
        lambda s, y: y * len(torch.get_float32_matmul_precision()),
        "get_float32_matmul_precision",
    ),
    "leaving grad off": (lambda: None, doing(lambda s, y: torch.set_grad_enabled(False)), "PyTorch's own state"),
    "the mode": (lambda: None, doing(lambda s, y: s.train(not s.training)), "the mode of"),
    "exchanged submodules": (
        lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        swap,
        "attribute 0 of submodules of ModuleList",
    ),
    "asking for a tracer of graphs": (
        lambda: None,
        lambda s, y: y * (2 if torch.fx._symbolic_trace.is_fx_tracing() else 3),
        "is_fx_tracing",
    ),
    "asking for a compiler": (
        lambda: None,
        lambda s, y: y * (2 if torch.compiler.is_compiling() else 1),
        "is_compiling",
    ),
    "asking for an export": (
        lambda: None,
        lambda s, y: y * (2 if torch.compiler.is_exporting() else 1),
        "is_exporting",
    ),
    "the type of a tensor": (lambda: None, lambda s, y: y * (2 if type(y) is Tensor else 1), "by type"),
    "the class of a parameter": (
        lambda: None,
        lambda s, y: y * (2 if s.l.weight.__class__ == nn.Parameter else 1),
        "by type",
    ),
    "an attribute of a parameter": (lambda: None, set_on(lambda s, y: s.l.weight), SETS),
    "an attribute of a result": (lambda: None, set_on(lambda s, y: y), SETS),
    "the gradient of a parameter": (lambda: None, doing(lambda s, y: setattr(s.l.weight, "grad", None)), "grad"),
    "a gradient that is kept": (lambda: None, doing(lambda s, y: y.retain_grad()), "retains the gradient"),
    "a generator's seed": (
        lambda: torch.Generator().manual_seed(3),
        lambda s, y: y * s.held.initial_seed(),
        "torch._C.Generator",
    ),
    "a list that is given away": (lambda: [1, 2], lambda s, y: (y, s.held), "returns a list that was there"),
    "the seed": (lambda: None, lambda s, y: y * (torch.initial_seed() % 7), "asks for their seed"),
}


@pytest.mark.parametrize(("make", "read", "cause"), REFUSED.values(), ids=REFUSED)
def test_what_would_happen_once_is_refused_and_left_as_it_was(
    make: Callable[[], Any], read: Read, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    eager, ours = both(read, make)
    for m in (eager, ours.module):
        m.register_buffer("buffer", torch.ones(4))
    dtype = torch.get_default_dtype()
    state = SCALE, list(SEEN), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    with pytest.raises(ORTModuleError, match=cause):
        try:
            ours(torch.randn(3, 4))
        finally:
            torch.set_default_dtype(dtype)
    assert (SCALE, SEEN, random.getstate(), np.random.get_state()[1].tolist()) == state  # type: ignore[union-attr]
    assert capsys.readouterr().out == ""
    if eager.held is None:
        return
    x = torch.randn(3, 4)
    for _ in range(2):
        close(ours.module(x), eager(x))
        close(ours.module.buffer, eager.buffer)


def test_a_state_of_python_that_only_others_change_is_no_reason_to_refuse() -> None:
    eager, ours = both(lambda s, y: y * 2 if s.training or random.random() < 2 or SEEN else y, lambda: None)
    assert_same_step(eager, ours, torch.randn(3, 4))
    random.random()
    for m in (eager, ours):
        m.zero_grad()
    assert_same_step(eager, ours, torch.randn(3, 4))
    assert n_graphs(ours) == 1


def test_the_name_of_a_type_and_the_type_of_the_module_are_no_reason_to_refuse() -> None:
    eager, ours = both(lambda self, y: y * len(type(self.l).__name__) * isinstance(self, type(self)), lambda: None)
    assert_same_step(eager, ours, torch.randn(3, 4))


def test_the_class_of_the_module_is_no_class_of_a_tensor() -> None:
    def forward(self: Any, y: Tensor) -> Tensor:
        assert isinstance(y, Tensor), self.__class__.__name__
        return y * len(self.__class__.__name__) * len(type(self).__name__) + y.type(torch.float64)

    eager, ours = both(forward, lambda: None)
    assert_same_step(eager, ours, torch.randn(3, 4))
