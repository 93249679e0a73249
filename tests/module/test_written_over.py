"""Buffers that a forward changes in place are written by the graph itself, where they lie, as in PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wrapped import Function, assert_same_state, assert_same_step, close, pair


def counted(s: Any, x: Tensor) -> Tensor:
    s.b.add_(1)
    return s.l(x) * s.b


def averaged(s: Any, x: Tensor) -> Tensor:
    y = s.l(x)
    s.b.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y - s.b


def read_before(s: Any, x: Tensor) -> Tensor:
    old = s.b.clone()
    s.b.add_(x.detach().mean(0))
    return s.l(x) * old


def returned_before(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    old = s.b.clone()
    s.b.mul_(0.5)
    return s.l(x) * s.b, old


def returned(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = s.l(x)
    s.b.copy_(y.detach().amax(0))
    return y, s.b


def exchanged(s: Any, x: Tensor) -> Tensor:
    old = s.b.clone()
    s.b.copy_(s.c)
    s.c.copy_(old)
    return s.l(x) * s.b


def filled(s: Any, x: Tensor) -> Tensor:
    s.b.fill_(2.0)
    s.c.zero_()
    return s.l(x) * s.b + s.c


def as_it_was(s: Any, x: Tensor) -> Tensor:
    s.b.copy_(s.b.clone())
    return s.l(x) * s.b.clone()


def set_to_the_argument(s: Any, x: Tensor) -> Tensor:
    s.b.copy_(x.detach()[0])
    return s.l(x) + s.b.clone()


def twice(s: Any, x: Tensor) -> Tensor:
    y = s.l(x) * s.b.clone()
    s.b.add_(1)
    y = y * s.b.clone()
    s.b.mul_(x.detach().mean())
    return y


UPDATES = {
    f.__name__: f
    for f in (
        *(counted, averaged, read_before, returned_before, returned),
        *(exchanged, filled, as_it_was, set_to_the_argument, twice),
    )
}


def updating(forward: Callable[..., Any]) -> Any:
    return pair(
        Function(forward, l=nn.Linear(4, 4), b=nn.Buffer(torch.linspace(1, 2, 4)), c=nn.Buffer(torch.linspace(3, 4, 4)))
    )


@pytest.mark.parametrize("forward", UPDATES.values(), ids=UPDATES)
def test_updates_are_those_of_eager(forward: Callable[..., Any]) -> None:
    eager, ours = updating(forward)
    places = [b.data_ptr() for b in ours.buffers()]
    for n in (3, 3, 5, 4):
        assert_same_step(eager, ours, torch.randn(n, 4))
    with torch.no_grad():
        assert_same_step(eager, ours, torch.randn(2, 4))
    assert [b.data_ptr() for b in ours.buffers()] == places
    assert not ours.fallback_report()


@pytest.mark.parametrize("forward", [read_before, twice, as_it_was, set_to_the_argument])
def test_a_backward_reads_what_its_own_forward_read(forward: Callable[..., Any]) -> None:
    """Also when another forward has written since, and when it runs twice."""
    eager, ours = updating(forward)
    xs = [torch.randn(3, 4) for _ in range(2)]
    for m in (eager, ours):
        first, second = [m(x).square().sum() for x in xs]
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
    assert_same_state(ours, eager)
    assert not ours.fallback_report()


def test_statistics_move_in_training_and_are_read_in_evaluation() -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)))
    for training in (True, False, True, True, False):
        for m in (eager, ours):
            m.train(training)
        for n in (5, 3):
            assert_same_step(eager, ours, torch.randn(n, 4))
    x = torch.randn(5, 4)
    for m in (eager, ours):
        losses = []
        for training in (True, False):
            m.train(training)
            losses.append(m(x).square().sum())
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
    assert_same_state(ours, eager)
    assert not ours.fallback_report()


@pytest.mark.parametrize("no_gradients", [False, True])
def test_autograd_sees_that_a_buffer_has_changed(no_gradients: bool) -> None:
    for m in updating(counted):
        w = torch.ones(4, requires_grad=True)
        loss = (w * m.b).sum()
        before = m.b._version
        with torch.set_grad_enabled(not no_gradients):
            m(torch.randn(3, 4))
        assert m.b._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Failing(nn.Module):
    """Statistics that move, and a row that may not be there, looked up before or after."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.norm, self.rows, self.first = nn.BatchNorm1d(4), nn.Embedding(3, 4), first

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.first:
            return self.rows(ids) + self.norm(x)
        y = self.norm(x)
        return self.rows(ids) + y


@pytest.mark.parametrize("first", [True, False])
def test_buffers_after_a_forward_that_fails_are_those_of_eager(first: bool) -> None:
    """PyTorch runs it again for its own error, and changes what comes before that: once."""
    eager, ours = pair(Failing(first))
    x, ids = torch.randn(3, 4), torch.tensor([0, 1, 2])
    assert_same_step(eager, ours, x, ids)
    for m in (eager, ours):
        with pytest.raises(IndexError):
            m(x, torch.tensor([0, 1, 3]))
    assert_same_state(ours, eager)
    assert_same_step(eager, ours, x, ids)
    assert not ours.fallback_report()


def every_second(m: Any) -> None:
    m.b = torch.linspace(1, 2, 8)[::2]


def transposed(m: Any) -> None:
    m.b = torch.linspace(1, 2, 16).view(4, 4).t()


def without_elements(m: Any) -> None:
    m.b = torch.zeros(0, 4)


def apart_in_one_memory(m: Any) -> None:
    m.b, m.c = torch.linspace(1, 2, 8).chunk(2)


def overlapping(m: Any) -> None:
    both = torch.linspace(1, 2, 6)
    m.b, m.c = both[:4], both[2:]


def the_same(m: Any) -> None:
    m.b = m.c


def in_one_array(m: Any) -> None:
    array = np.arange(24, dtype=np.float32)
    m.b, m.c = torch.from_numpy(array[:8]).view(2, 4), torch.from_numpy(array[6:10])


def in_one_array_by_steps(m: Any) -> None:
    array = np.arange(24, dtype=np.float32)
    m.b, m.c = torch.from_numpy(array[0:16:2]).view(2, 4), torch.from_numpy(array[4:12:2])


def unfolded(m: Any) -> None:
    m.b = torch.arange(5.0).unfold(0, 4, 1)


LAID_OUT = {f.__name__: f for f in (every_second, transposed, without_elements)}
SHARED = {
    f.__name__: f for f in (apart_in_one_memory, overlapping, the_same, in_one_array, in_one_array_by_steps, unfolded)
}


def both(s: Any, x: Tensor) -> Tensor:
    s.b.add_(1)
    return s.l(x) * s.b.sum(0) * s.c


@pytest.mark.parametrize("lay_out", LAID_OUT.values(), ids=LAID_OUT)
def test_a_buffer_is_written_however_it_lies(lay_out: Callable[[Any], None]) -> None:
    eager, ours = updating(both)
    for m in (eager, ours):
        lay_out(m)
    places = ours.b.data_ptr(), ours.b.stride()
    for n in (3, 5):
        before = ours.b._version
        assert_same_step(eager, ours, torch.randn(n, 4))
        assert (ours.b.data_ptr(), ours.b.stride()) == places and ours.b._version > before
    assert not ours.fallback_report()


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_a_buffer_that_shares_memory_is_changed_as_in_eager(share: Callable[[Any], None]) -> None:
    eager, ours = updating(both)
    for m in (eager, ours):
        share(m)
    for n in (3, 5):
        x = torch.randn(n, 4)
        for m in (eager, ours):
            with torch.no_grad():
                m.got = m(x)
        close(ours.got, eager.got)
        assert_same_state(ours, eager)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_buffer_that_is_also_an_argument_is_changed_as_in_eager() -> None:
    eager, ours = updating(lambda s, x: (s.b.add_(1), s.l(x) * 2)[1])
    for m in (eager, ours):
        m.got = [m(m.b.view(1, 4)), m(m.b)]
    close(ours.got, eager.got)
    assert_same_state(ours, eager)


def test_tensors_given_in_the_place_of_buffers_are_written() -> None:
    given = [torch.zeros(4), torch.zeros(4)]
    x = torch.randn(3, 4)
    for m, b in zip(updating(counted), given, strict=True):
        for _ in range(2):
            torch.func.functional_call(m, {"b": b}, (x,))
        close(m.b, torch.linspace(1, 2, 4))
    close(given[1], given[0])


def of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize(
    "value",
    [of_inference(), torch.ones(4, requires_grad=True), torch.ones(1).expand(4)],
    ids=["inference", "gradient", "repeated"],
)
def test_what_pytorch_refuses_to_write_over_is_refused(value: Tensor) -> None:
    told = []
    for m in updating(counted):
        m.b = value
        with pytest.raises(RuntimeError) as error:
            m(torch.randn(3, 4))
        told.append(str(error.value).splitlines()[0])
    assert told[1] == told[0]


def test_inference_tensors_are_written_in_inference_mode() -> None:
    eager, ours = updating(counted)
    for m in (eager, ours):
        m.b = of_inference()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        close(ours(x), eager(x))
    close(ours.b, eager.b)
    assert not ours.fallback_report()
