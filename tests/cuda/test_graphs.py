"""Forwards and backwards on the emulated GPU as graphs of CUDA's: the same work, given at once.

The stand-in for the driver runs nothing of what is captured, refuses what CUDA does meanwhile, and counts all there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor

OUT_OF_MEMORY, LAUNCH_FAILED, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 2, 719, 900, 901
MOST_KEPT = 8
DROPPING = """\
input %x : f32[5,37] grad
input %b : f32[37]
%0 = Add(%x, %b)
%1 = Dropout(%0) {p=0.3, subsequence=5}
%y = Mul(%1, %1)
return %y
"""
PRODUCT = "input %x : f32[6,16]\ninput %w : f32[16,16]\n%0 = MatMul(%x, %w)\n%y = Mul(%0, %0)\nreturn %y\n"
ADDING = f"input %x : f32[600]\nconst %c : f32[600] = {[float(i) for i in range(600)]}\n%y = Add(%x, %c)\nreturn %y\n"
DOUBLING = "input %x : f32[4]\n%y = Add(%x, %x)\nreturn %y\n"
PICKING = "input %t : f32[10,4]\ninput %i : i64[3]\n%y = Gather(%t, %i) {axis=0}\nreturn %y\n"
GRAPH_CALLS = (
    b"cuStreamIsCapturing",
    b"cuStreamCreate",
    b"cuStreamBeginCapture_v2",
    b"cuStreamEndCapture",
    b"cuGraphInstantiateWithFlags",
    b"cuMemsetD32Async",
    b"cuGraphLaunch",
)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Trained:
    """Steps of one plan, each with other numbers, and what the CPU makes of them."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.bias, self.done = gpu, numbers(37, seed=1), 0
        self.session = gpu.core.Session(DROPPING, {}, provider="gpu")
        x = numbers(5, 37)
        on_cpu = gpu.core.Session(DROPPING, {}).plan([x, self.bias], [True, False], [True])
        self.there = gpu.put(self.bias)
        self.plan = self.session.plan([gpu.put(x), self.there], [True, False], [True])
        self.on_cpu = on_cpu

    def step(self, x: Any = None, number: int | None = None) -> None:
        """With the bits of the CPU, whatever the seed."""
        number = self.done if number is None else number
        host, dy, seed = numbers(5, 37, seed=number), numbers(5, 37, seed=number + 1000), 7 + (number << 33)
        if x is None:
            x = self.gpu.put(host)
        else:
            self.gpu.write(x, host)
        self.done += 1
        given = self.gpu.put(dy)  # kept: memory that is free is written to at once, whoever still reads it
        outputs, run = self.plan.forward([x, self.there], seed)
        grads = self.plan.backward(run, [x, self.there], outputs, [given])
        found = [self.gpu.get(t) for t in (outputs[0], grads[0])]
        expected, left = self.on_cpu.forward([host, self.bias], seed)
        expected += self.on_cpu.backward(left, [host, self.bias], expected, [dy])[:1]
        assert all(map(torch.equal, found, expected))

    def replays(self) -> int:
        return int(self.session.stats()["replays"])


@contextlib.contextmanager
def leaves_nothing(gpu: Gpu) -> Iterator[None]:
    before = gpu.counted()
    yield
    after = gpu.counted()
    assert (after.graphs, after.streams, after.events) == (before.graphs, before.streams, before.events)


def test_what_comes_again_is_a_graph_of_the_same_bits_and_another_seed(gpu: Gpu) -> None:
    with leaves_nothing(gpu):
        trained = Trained(gpu)
        for _ in range(3):
            trained.step()
        before = gpu.counted()
        for _ in range(5):
            trained.step()
        after = gpu.counted()
        assert trained.replays() >= 10 and after.replays == before.replays + 10
        assert after.launches == before.launches  # none but of graphs
        del trained


def test_a_step_somewhere_else_is_given_as_ever_until_it_comes_again(gpu: Gpu) -> None:
    trained, (*places, other) = Trained(gpu), [gpu.put(numbers(5, 37)) for _ in range(3)]
    for _ in range(6):
        for x in places:
            trained.step(x)
    met = trained.replays()
    assert met >= 16
    trained.step(other)
    assert trained.replays() == met + 1  # the backward, which reads no input


def test_the_graphs_kept_are_few(gpu: Gpu) -> None:
    """Of forwards, that is; the backward reads no input, and comes again each time."""
    before, trained = gpu.counted().graphs + 1, Trained(gpu)
    places = [gpu.put(numbers(5, 37)) for _ in range(MOST_KEPT + 2)]
    for _ in range(3):
        for x in places:  # each is gone when it comes again
            trained.step(x)
    assert gpu.counted().graphs == before
    for count in (3, 5, MOST_KEPT):
        for x in places[:count] * 3:
            trained.step(x)
        assert gpu.counted().graphs <= before + MOST_KEPT
    assert gpu.counted().graphs == before + MOST_KEPT


def test_each_stream_has_its_own(gpu: Gpu) -> None:
    """And memory goes from one to the other as ever."""
    trained, x = Trained(gpu), gpu.put(numbers(5, 37))
    streams = [gpu.stream(), gpu.stream()]
    for number in range(4):
        for stream in streams:
            host = numbers(5, 37, seed=number)
            gpu.write(x, host)
            gpu.use(stream)
            outputs, _ = trained.plan.forward([x, trained.there], number)
            gpu.wait(stream)
            gpu.use(0)
            assert torch.equal(gpu.get(outputs[0]), trained.on_cpu.forward([host, trained.bias], number)[0][0])
    assert trained.replays() >= 4


def test_two_threads_have_their_own(gpu: Gpu) -> None:
    done = []

    def work(trained: Trained, x: Tensor, seed: int) -> None:
        for k in range(8):
            trained.step(x, number=seed + k)
        done.append(seed)

    def run() -> None:
        trained = Trained(gpu)
        threads = [threading.Thread(target=work, args=(trained, gpu.put(numbers(5, 37)), 100 * i)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    with leaves_nothing(gpu):
        run()
    assert sorted(done) == [0, 100, 200]


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, LAUNCH_FAILED])
@pytest.mark.parametrize("name", GRAPH_CALLS, ids=bytes.decode)
def test_where_there_can_be_no_graph_all_is_given_as_ever(gpu: Gpu, name: bytes, error: int) -> None:
    with leaves_nothing(gpu):
        for n in range(4):
            trained = Trained(gpu)
            x = gpu.put(numbers(5, 37))
            gpu.fail(n, name, error)
            for _ in range(5):
                trained.step(x)
            gpu.fail(-1, None, 0)
            del trained


def test_whichever_call_fails_the_next_step_is_right_and_nothing_leaks(gpu: Gpu) -> None:
    """Calls of a step that is recorded, and of one that is replayed, in turn."""
    told = 0
    with leaves_nothing(gpu):
        for steps_before in (1, 2):
            for n in range(60):
                trained, x = Trained(gpu), gpu.put(numbers(5, 37))
                for _ in range(steps_before):
                    trained.step(x)
                gpu.fail(n, None, LAUNCH_FAILED)
                try:
                    trained.step(x)
                except RuntimeError as failure:
                    assert "unspecified launch failure" in str(failure)
                    told += 1
                gpu.fail(-1, None, 0)
                for _ in range(2):
                    trained.step(x)
                del trained
    assert told


@pytest.mark.parametrize(("lost", "replayed"), [(1, 2), (2, 2), (3, 1)])
def test_a_capture_that_is_lost_is_tried_again_at_most_twice(gpu: Gpu, lost: int, replayed: int) -> None:
    """As those are while another thread waits for the whole device; the backward's is not."""
    trained, x = Trained(gpu), gpu.put(numbers(5, 37))
    trained.step(x)
    for _ in range(lost):
        gpu.fail(0, b"cuStreamEndCapture", CAPTURE_INVALIDATED)
        trained.step(x)
    before = trained.replays()
    for _ in range(2):
        trained.step(x)
    assert trained.replays() == before + 2 * replayed


def test_memory_that_moves_while_nothing_is_free_is_no_graphs(gpu: Gpu) -> None:
    """A graph is never launched for tensors that it was not made for: here all are new each time."""
    trained, kept = Trained(gpu), []
    for number in range(4):
        host = numbers(5, 37, seed=number)
        kept.append(trained.plan.forward([gpu.put(host), trained.there], number)[0][0])
        assert torch.equal(gpu.get(kept[-1]), trained.on_cpu.forward([host, trained.bias], number)[0][0])
    assert trained.replays() == 0


def repeat(gpu: Gpu, plan: Any, given: Sequence[Tensor]) -> Tensor:
    outputs, _ = plan.forward(given, 0)
    return gpu.get(outputs[0])


def test_a_product_has_the_precision_of_the_moment(gpu: Gpu) -> None:
    x, w = numbers(6, 16), numbers(16, 16, seed=1)
    (exact,) = gpu.on_the_cpu(PRODUCT, [x, w])
    plan, given = gpu.plan(PRODUCT, [x, w])
    matmul = torch.backends.cuda.matmul
    before = gpu.counted().replays
    try:
        for precision in ("ieee", "tf32", "ieee", "tf32"):
            matmul.fp32_precision = precision
            found = [repeat(gpu, plan, given) for _ in range(3)]
            assert all(torch.equal(found[0], f) for f in found)
            assert torch.allclose(found[0], exact, rtol=1e-5, atol=1e-5) == (precision == "ieee")
    finally:
        matmul.fp32_precision = "none"
    assert gpu.counted().replays - before == 2 + 2 + 3 + 3


def test_a_letter_comes_from_a_graph_too(gpu: Gpu) -> None:
    table, good, bad = numbers(10, 4), torch.tensor([1, 0, 9]), torch.tensor([1, 10, 2])
    plan, given = gpu.plan(PICKING, [table, good])
    for _ in range(3):
        assert torch.equal(repeat(gpu, plan, given), table[good])
    before = gpu.counted().replays
    gpu.write(given[1], bad)
    with pytest.raises(IndexError, match="index 10 is out of range, there are 10"):
        repeat(gpu, plan, given)
    gpu.write(given[1], good)
    assert torch.equal(repeat(gpu, plan, given), table[good])
    assert gpu.counted().replays == before + 2


class Forking:
    """Whoever asks PyTorch for memory waits until another thread has forked and run work: locks held there show."""

    def __init__(self, gpu: Gpu, work: Callable[[], object]) -> None:
        self.gpu, self.work = gpu, work
        self.asking, self.asked, self.stuck = threading.Lock(), 0, 0

    def run(self) -> None:
        self.gpu.fork()
        self.work()

    def __call__(self) -> None:
        if not self.asking.acquire(blocking=False):
            return  # it is that thread that asks
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        thread.join(5)
        self.asked += 1
        self.stuck += thread.is_alive()
        self.asking.release()


def test_no_lock_is_held_where_pytorch_is_asked_for_memory(gpu: Gpu) -> None:
    """It may wait for Python there, in which another thread forks, runs the same work or drops a plan."""

    def run() -> None:
        trained, x = Trained(gpu), gpu.put(numbers(5, 37))
        forking = Forking(gpu, lambda: trained.plan.forward([x, trained.there], 7))
        plan, given = gpu.plan("input %x : f32[7001,37]\n%y = Neg(%x)\nreturn %y\n", [torch.ones(7001, 37)])
        with gpu.watched_memory(forking):
            for _ in range(3):
                trained.step(x)
            kept = gpu.counted().graphs
            gpu.fail(0, b"cuMemAlloc_v2", OUT_OF_MEMORY)
            plan.forward(given, 0)
        assert gpu.counted().graphs < kept and trained.replays() and forking.asked and not forking.stuck

    with leaves_nothing(gpu):
        run()


def test_nor_where_it_is_asked_for_that_of_constants(gpu: Gpu) -> None:
    with leaves_nothing(gpu):
        forking = Forking(gpu, lambda: gpu.plan(ADDING, [torch.ones(600)]))
        with gpu.watched_memory(forking):
            plan, given = gpu.plan(ADDING, [torch.ones(600)])
            repeat(gpu, plan, given)
        assert forking.asked and not forking.stuck


@contextlib.contextmanager
def captured(gpu: Gpu, at: int | None = None) -> Iterator[ctypes.c_void_p]:
    """A stream that its user captures, as torch.cuda.graph does, and then the graph to be launched."""
    stream, graph = ctypes.c_void_p(at or gpu.stream()), ctypes.c_void_p()
    with gpu.entered():
        assert gpu.driver.cuStreamBeginCapture_v2(stream, 0) == 0
        gpu.use(stream.value or 0)
        try:
            yield graph
        finally:
            gpu.use(0)
            made = ctypes.c_void_p()
            assert gpu.driver.cuStreamEndCapture(stream, ctypes.byref(made)) == 0
            assert gpu.driver.cuGraphInstantiateWithFlags(ctypes.byref(graph), made, ctypes.c_ulonglong(0)) == 0
            gpu.driver.cuGraphDestroy(made)


def test_a_capture_of_the_users_has_the_launches(gpu: Gpu) -> None:
    x, w = numbers(6, 16), numbers(16, 16, seed=1)
    plan, given = gpu.plan(PRODUCT, [x, w])
    for _ in range(3):  # those of ours are left alone
        repeat(gpu, plan, given)
    with captured(gpu) as graph:
        (y,), _ = plan.forward(given, 0)
    for seed in range(3):
        x = numbers(6, 16, seed=seed)
        gpu.write(given[0], x)
        with gpu.entered():
            assert gpu.driver.cuGraphLaunch(graph, None) == 0
        torch.testing.assert_close(gpu.get(y), gpu.on_the_cpu(PRODUCT, [x, w])[0])
    with gpu.entered():
        gpu.driver.cuGraphExecDestroy(graph)


def test_a_capture_of_the_users_goes_on_where_plans_are_dropped(gpu: Gpu) -> None:
    """With graphs, seeds and constants; and a run that another stream has used, which is captured."""
    with leaves_nothing(gpu):
        trained, (adding, given), side = Trained(gpu), gpu.plan(ADDING, [torch.ones(600)]), gpu.stream()
        for _ in range(3):
            trained.step()
            repeat(gpu, adding, given)
        x, dy = gpu.put(numbers(5, 37)), gpu.put(numbers(5, 37, seed=1))
        outputs, run = trained.plan.forward([x, trained.there], 7)
        gpu.use(side)
        trained.plan.backward(run, [x, trained.there], outputs, [dy])
        gpu.use(0)
        with captured(gpu, side) as graph:
            del trained, adding, run
            gpu.use(0)
            again, given = gpu.plan(DOUBLING, [torch.ones(4)])
            (y,), _ = again.forward(given, 0)
        assert gpu.get(y).eq(2).all()  # and not of what was captured
        with gpu.entered():
            gpu.driver.cuGraphExecDestroy(graph)
        del again


def test_a_capture_of_the_users_goes_on_where_another_stream_is_given_constants(gpu: Gpu) -> None:
    """Also while memory is kept that streams may still read."""
    (plan, given), side = gpu.plan(ADDING, [torch.ones(600)]), gpu.stream()
    repeat(gpu, plan, given)
    gpu.use(side)
    plan.forward(given, 0)
    gpu.use(0)
    with captured(gpu) as graph:
        del plan
        gpu.use(0)
        (y,) = gpu.forward(ADDING, [torch.ones(600)])
    assert torch.equal(y, torch.arange(600.0) + 1)
    with gpu.entered():
        gpu.driver.cuGraphExecDestroy(graph)


def test_a_capture_of_the_users_goes_on_where_another_stream_is_given_what_is_new(gpu: Gpu) -> None:
    """Constants that take fresh memory, kernels that are loaded, a graph that is made."""
    n, x = 1 << 20, gpu.put(torch.full((3,), 0.5))
    text = (
        f"input %x : f32[3]\nconst %c : f32[{n}] = @\n%m = ReduceSum(%c)\n%y = Acosh(%m)\n%z = Mul(%x, %y)\nreturn %z\n"
    )
    with captured(gpu, gpu.stream()) as graph:
        gpu.use(0)
        session = gpu.core.Session(text, {"c": torch.full((n,), 2.0**-19)}, provider="gpu")
        plan = session.plan([x], [False], [False])
        results = [gpu.get(plan.forward([x], 0)[0][0]) for _ in range(4)]
    assert all(torch.allclose(z, torch.full((1, 3), 0.5 * torch.tensor(2.0).acosh().item())) for z in results)
    with gpu.entered():
        gpu.driver.cuGraphExecDestroy(graph)


def test_much_that_is_kept_is_given_back_once_the_device_may_be_waited_for(gpu: Gpu) -> None:
    n, side = 1 << 24, gpu.stream()
    ids = [gpu.put(torch.tensor([1, n - 1, 0]))]
    text = f"input %i : i64[3]\nconst %c : f32[{n}] = @\n%y = Gather(%c, %i) {{axis=0}}\nreturn %y\n"
    plan = gpu.core.Session(text, {"c": torch.arange(float(n))}, provider="gpu").plan(ids, [False], [False])
    for stream in (side, 0):
        gpu.use(stream)
        (y,), _ = plan.forward(ids, 0)
        gpu.wait(stream)
    assert gpu.get(y).tolist() == [1, n - 1, 0]
    del plan
    waited = []
    for _ in range(2):
        gpu.fail(0, b"cuCtxSynchronize", CAPTURE_UNSUPPORTED)
        (y,) = gpu.forward(ADDING, [torch.ones(600)])
        waited.append(not gpu.fail(-1, None, 0))
        assert torch.equal(y, torch.arange(600.0) + 1)
        gpu.forward(ADDING, [torch.ones(600)])  # as much as is kept by now is given back
    assert waited == [True, False]


def test_a_constant_is_not_uploaded_into_a_capture_of_the_users(gpu: Gpu) -> None:
    """Which goes on; its launches would copy what the host has there by then."""
    with captured(gpu) as graph, pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        gpu.plan(ADDING, [torch.ones(600)])
    with gpu.entered():
        assert gpu.driver.cuGraphLaunch(graph, None) == 0
        gpu.driver.cuGraphExecDestroy(graph)
    (y,) = gpu.forward(ADDING, [torch.ones(600)])
    assert torch.equal(y, torch.arange(600.0) + 1)


def test_a_constant_waits_for_no_other_stream(gpu: Gpu) -> None:
    (plan, given), side = gpu.plan(DOUBLING, [torch.ones(4)]), gpu.stream()
    gpu.pause(side)
    gpu.use(side)
    (y,), _ = plan.forward(given, 0)
    gpu.use(0)
    gpu.fail(0, b"cuCtxSynchronize", LAUNCH_FAILED)  # which would wait forever
    (x,) = gpu.forward(ADDING, [torch.ones(600)])
    gpu.resume(side)
    gpu.wait(side)
    assert torch.equal(x, torch.arange(600.0) + 1) and gpu.get(y).eq(2).all()


def test_a_constant_is_written_after_what_its_memory_was_used_for(gpu: Gpu) -> None:
    """In the stream that it was freed for, which has yet to do that."""
    given, there, plans = [gpu.put(torch.ones(600))], gpu.put(torch.zeros(600)), []
    session = gpu.core.Session(ADDING, {}, provider="gpu")
    planning = threading.Thread(target=lambda: plans.append(session.plan(given, [False], [False])))
    gpu.pause(0)
    del there
    planning.start()
    planning.join(0.2)
    gpu.resume(0)
    planning.join()
    assert torch.equal(repeat(gpu, plans[0], given), torch.arange(600.0) + 1)


def test_constants_of_a_plan_that_is_dropped_stay_until_all_streams_have_read_them(gpu: Gpu) -> None:
    (plan, given), side = gpu.plan(ADDING, [torch.ones(600)]), gpu.stream()
    repeat(gpu, plan, given)
    gpu.pause(side)
    gpu.use(side)
    (y,), _ = plan.forward(given, 0)
    gpu.use(0)
    del plan
    others = [gpu.put(torch.zeros(600)) for _ in range(4)]
    gpu.resume(side)
    gpu.wait(side)
    assert torch.equal(gpu.get(y), torch.arange(600.0) + 1)
    del others


def test_a_capture_of_the_users_must_not_repeat_random_numbers(gpu: Gpu) -> None:
    trained = Trained(gpu)
    x = gpu.put(numbers(5, 37))
    trained.step(x)
    with captured(gpu) as graph, pytest.raises(NotImplementedError, match="the same random numbers at each launch"):
        trained.plan.forward([x, trained.there], 7)
    with gpu.entered():
        gpu.driver.cuGraphExecDestroy(graph)
    trained.step(x)


class Same:
    """Calls back to PyTorch that give what they are given."""

    def infer(self, index: int, inputs: Sequence[Any]) -> Sequence[Any]:
        return inputs

    def forward(self, index: int, inputs: list[Tensor]) -> tuple[list[Tensor], object]:
        return inputs, None


def test_nor_where_pytorch_is_called_in_between(gpu: Gpu) -> None:
    """Which is never a graph of ours."""
    text = "input %x : f32[5,37]\n%0 = TorchCall(%x) {index=0}\n%y = Dropout(%0) {p=0.3, subsequence=5}\nreturn %y\n"
    x = gpu.put(numbers(5, 37))
    session = gpu.core.Session(text, {}, Same(), provider="gpu")
    plan = session.plan([x], [False], [False])
    plan.forward([x], 7)
    with captured(gpu) as graph, pytest.raises(NotImplementedError, match="the same random numbers at each launch"):
        plan.forward([x], 7)
    with gpu.entered():
        gpu.driver.cuGraphExecDestroy(graph)
    assert session.stats()["replays"] == 0


@pytest.mark.parametrize("rule", ["adam", "sgd", "lamb"])
def test_a_capture_of_the_users_must_not_repeat_the_numbers_of_a_step(gpu: Gpu, rule: str) -> None:
    param, before = gpu.put(numbers(9)), gpu.counted()
    counter, states = gpu.put(torch.ones(())), tuple(gpu.put(torch.zeros(9)) for _ in range(2))
    row = (0, param, gpu.put(numbers(9, seed=1)), None, counter, True, states)
    with captured(gpu) as graph, pytest.raises(RuntimeError, match="the numbers of now, such as the learning rate"):
        gpu.core.optim_step(rule, [row], [{"lr": 0.1, "momentum": 0.9}], provider="gpu")
    assert gpu.counted().launches == before.launches
    with gpu.entered():
        assert gpu.driver.cuGraphLaunch(graph, None) == 0
    assert torch.equal(gpu.get(param), numbers(9)) and gpu.get(counter) == 1
    with gpu.entered():
        gpu.driver.cuGraphExecDestroy(graph)


def test_a_capture_of_the_users_clips_at_each_launch(gpu: Gpu) -> None:
    grad, norm = gpu.put(numbers(9)), gpu.put(torch.zeros((), dtype=torch.float64))
    row = (0, None, grad, None, None, False, ())
    gpu.core.optim_step("scale", [row], [{}], max_norm=0.5, norm=norm, provider="gpu")  # device code is loaded
    with captured(gpu) as graph:
        gpu.core.optim_step("scale", [row], [{}], max_norm=0.5, norm=norm, provider="gpu")
    for seed in range(3):
        given = numbers(9, seed=seed)
        gpu.write(grad, given)
        with gpu.entered():
            assert gpu.driver.cuGraphLaunch(graph, None) == 0
        torch.testing.assert_close(gpu.get(norm), given.double().norm())
        torch.testing.assert_close(gpu.get(grad), given * (0.5 / (given.norm() + 1e-6)).clamp(max=1))
    with gpu.entered():
        gpu.driver.cuGraphExecDestroy(graph)


def test_it_can_be_turned_off(stand_ins: None) -> None:
    source = f"""
import sys
sys.path.insert(0, {str(Path(on_device.__file__).parent)!r})
import on_device, torch
on_device.load_stand_ins()
core, device = on_device.loaded()
given = [device.put(torch.ones(6, 16), "gpu"), device.put(torch.ones(16, 16), "gpu")]
session = core.Session({PRODUCT!r}, {{}}, provider="gpu")
plan = session.plan(given, [False, False], [False])
for _ in range(4):
    device.get(plan.forward(given, 0)[0][0], "gpu")
print(session.stats()["replays"])
"""
    for switch, replays in (("0", "0"), ("1", "3")):
        environment = {**os.environ, "OMC_GRAPHS": switch}
        ran = subprocess.run(
            [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False
        )
        assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, replays, "")
