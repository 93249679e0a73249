"""The C extension as Python sees it: what it refuses and how it says so, who keeps what alive, threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from heap import allocated
from torch import Tensor

from ortmodule_c import _C

TEXT = """\
input %x : f32[?,3]
input %w : f32[3,4] grad
input %b : f32[4] grad
const %c : f32[4] = @
%0 = MatMul(%x, %w)
%1 = Add(%0, %b)
%2 = Mul(%1, %c)
%y = Tanh(%2)
return %y, %x
"""
CALLED = """\
input %x : f32[4] grad
%0 = Sin(%x)
%1 = TorchCall(%0) {index=7}
%y = Exp(%1)
return %y
"""
C = {"c": torch.tensor([1.0, 2.0, 3.0, 4.0])}


def inputs(rows: int = 5) -> list[Tensor]:
    return [torch.randn(rows, 3), torch.randn(3, 4), torch.randn(4)]


def session(**options: object) -> _C.Session:
    return _C.Session(TEXT, C, **options)


def plan_of(s: _C.Session, given: list[Tensor], retain_graph: bool = False) -> _C.Plan:
    return s.plan(given, [False, True, True], [True, False], retain_graph=retain_graph)


def backward(plan: _C.Plan, state: _C.Run, given: list[Tensor], outputs: list[Tensor]) -> list[Tensor | None]:
    return plan.backward(state, given, outputs, [torch.ones(given[0].shape[0], 4), None])


def check_step(plan: _C.Plan, given: list[Tensor]) -> None:
    x, w, b = given[0], given[1].clone().requires_grad_(), given[2].clone().requires_grad_()
    y = torch.tanh((x @ w + b) * C["c"])
    y.sum().backward()
    outputs, state = plan.forward(given, 0)
    grads = backward(plan, state, given, outputs)
    torch.testing.assert_close(outputs, [y.detach(), x])
    assert grads[0] is None
    torch.testing.assert_close(grads[1:], [w.grad, b.grad])


def settle() -> int:
    gc.collect()
    return _C.pool_stats()["used_bytes"]


class Double:
    """Callbacks whose op doubles its input; `fault` replaces what one of its methods gives."""

    def __init__(self, **fault: object) -> None:
        self.fault = fault

    def answer(self, what: str, otherwise: object) -> object:
        found = self.fault.get(what, otherwise)
        if isinstance(found, BaseException):
            raise type(found)(*found.args)  # one of its own, that keeps no frame alive
        return found

    def infer(self, index: int, types: list) -> object:
        assert index == 7
        return self.answer("infer", types)

    def forward(self, index: int, given: list[Tensor]) -> object:
        assert index == 7
        return self.answer("forward", ([2 * given[0]], "state"))

    def backward(self, index: int, state: object, grads: list[Tensor | None]) -> object:
        assert (index, state) == (7, "state")
        return self.answer("backward", [None if g is None else 2 * g for g in grads])


def called_plan(callbacks: Double) -> _C.Plan:
    return _C.Session(CALLED, {}, callbacks).plan([torch.ones(4)], [True], [True])


def called_step(plan: _C.Plan) -> Tensor | None:
    given = [torch.arange(4.0)]
    outputs, state = plan.forward(given, 0)
    return plan.backward(state, given, outputs, [torch.ones(4)])[0]


def test_a_tensor_of_the_pool() -> None:
    plan, before = called_plan(Double()), settle()
    for like in (torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(0, 2), torch.tensor(True), torch.ones(1 << 20)):
        room = plan.empty_like(like)
        assert (room.dtype, room.shape) == (like.dtype, like.shape) and room.is_contiguous()
        assert torch.equal(room.copy_(like), like)
        assert settle() >= before + like.nbytes
        del room
        assert settle() == before
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        plan.empty_like(3)
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        plan.empty_like(torch.ones(3, 5).t())


# ---- what is refused ----


def test_step() -> None:
    s = session()
    assert (s.n_inputs, s.n_outputs) == (3, 2)
    plan = plan_of(s, inputs())
    assert (plan.in_grads, plan.out_grads) == ((False, True, True), ((True, False),))
    assert plan.n_steps > 0 and not plan.random and plan.arena_bytes >= plan.bound_bytes
    assert "MatMul" in plan.text() and plan.profile() == []
    check_step(plan, inputs())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda g: g[:2], ValueError, "expected 3 tensors, got 2"),
        (lambda g: [*g, g[0]], ValueError, "expected 3 tensors, got 4"),
        (lambda g: [g[0].double(), *g[1:]], (TypeError, ValueError), r"x.* is f64\[5,3\]"),
        (lambda g: [g[0][0], *g[1:]], ValueError, r"x.* is f32\[3\]"),
        (lambda g: [g[0], g[1].T.contiguous(), g[2]], ValueError, r"w.* is f32\[4,3\]"),
        (lambda g: [g[0], g[1].T.contiguous().T, g[2]], ValueError, "w.*: expected a contiguous tensor"),
        (lambda g: [*g[:2], g[2].tolist()], TypeError, r"b.*: expected a torch.Tensor, got <class 'list'>"),
        (lambda g: [*g[:2], None], TypeError, "b.*: expected a torch.Tensor, got <class 'NoneType'>"),
        (lambda g: [g[0].to(torch.complex64), *g[1:]], TypeError, "x.*: dtype"),
        (lambda g: [g[0].to(torch.float8_e4m3fn), *g[1:]], TypeError, "x.*: dtype"),
        (lambda g: [torch.ones([1] * 9), *g[1:]], ValueError, "x.*: rank 9 is above"),
        (lambda g: [g[0].to("meta"), *g[1:]], Exception, "meta"),
        (lambda g: [g[0].to_sparse(), *g[1:]], Exception, None),
        (lambda g: [torch._efficientzerotensor((5, 3)), *g[1:]], ValueError, "x.*: the tensor has .* no memory"),
        (lambda g: 5, TypeError, "not iterable"),
    ],
)  # fmt: skip
def test_bad_inputs(change, error, message) -> None:
    s = session()
    given = inputs()
    plan = plan_of(s, given)
    bad = change(given)
    with pytest.raises(error, match=message):
        s.plan(bad, [False, True, True], [True, False])
    with pytest.raises(error, match=message):
        plan.forward(bad, 0)
    check_step(plan, given)
    check_step(plan_of(s, given), given)


def test_tensors_that_pass() -> None:
    class Mine(Tensor): ...

    given = inputs()
    plan = plan_of(session(), given)

    def offset(t: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1), t.flatten()])[1:].view_as(t)

    for kind in (torch.nn.Parameter, lambda t: t.as_subclass(Mine), offset):
        outputs, _ = plan.forward([kind(t) for t in given], 0)
        torch.testing.assert_close(outputs, plan.forward(given, 0)[0])
    one_row = [given[0][:1].T.contiguous().T, *given[1:]]  # strides of a dim of size 1 mean nothing
    check_step(plan_of(session(), one_row), one_row)
    no_rows = [torch.empty_strided((0, given[0].shape[1]), (1, 5)), *given[1:]]  # nor do those of no elements
    check_step(plan_of(session(), no_rows), no_rows)


def test_flags_of_gradients() -> None:
    s, given = session(), inputs()
    with pytest.raises(ValueError, match="in_grads: expected 3 entries, got 1"):
        s.plan(given, [True], [True, False])
    with pytest.raises(ValueError, match="out_grads: expected 2 entries, got 3"):
        s.plan(given, [False, True, True], [True] * 3)
    with pytest.raises(TypeError):
        s.plan(given, None, [True, False])


@pytest.mark.parametrize(
    ("constants", "error", "message"),
    [
        ({}, ValueError, "no constant named 'c'"),
        ({"c": torch.ones(5)}, ValueError, "'?%?c'?.*(20|16)"),
        ({"c": torch.ones(4).double()}, ValueError, "'?%?c'?.*(32|16)"),
        ({"c": [1.0]}, TypeError, "c: expected a torch.Tensor"),
        ({"c": torch.ones(8)[::2]}, ValueError, "c: expected a contiguous tensor"),
        (None, (TypeError, AttributeError), None),
    ],
)
def test_bad_constants(constants, error, message) -> None:
    with pytest.raises(error, match=message):
        _C.Session(TEXT, constants)


def test_constants_are_kept() -> None:
    constants = {"c": C["c"].clone()}
    s = _C.Session(TEXT, constants)
    constants.clear()
    gc.collect()
    check_step(plan_of(s, inputs()), inputs())


def test_text_cut_short() -> None:
    """Anywhere but after a `return` there is a malformed line, and it is named."""
    for n in range(0, len(TEXT) - 2, 50):
        with pytest.raises(ValueError, match=r"malformed text: line \d+"):
            _C.Session(TEXT[:n], C)
        with pytest.raises(ValueError, match=r"line \d+"):
            _C.transform(TEXT[:n], "parse")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("Nonsense(%x)", "line 2.*Nonsense"),
        ("Exp(%z)", "line 2.*z"),
        ("Exp(%x) {a=}", "line 2"),
        ("Exp(%x, %x)", "Exp"),
    ],
)
def test_bad_nodes(node: str, message: str) -> None:
    text = f"input %x : f32[2]\n%y = {node}\nreturn %y\n"
    with pytest.raises(ValueError, match=message):
        _C.transform(text, "specialize")


def test_unknown_names() -> None:
    text = "input %x : f32[2]\n%y = Exp(%x)\nreturn %y\n"
    for stage in ("nonsense", "rule:nonsense"):
        with pytest.raises(ValueError, match=stage.removeprefix("rule:")):
            _C.transform(text, stage)
    with pytest.raises(ValueError, match="avx9"):
        _C.set_isa("avx9")
    with pytest.raises(ValueError, match="max_plans"):
        session(max_plans=0)
    with pytest.raises(TypeError):
        _C.Plan()
    assert _C.isas()[0] == "base"


def test_a_session_is_opened_on_a_provider() -> None:
    x = inputs()
    for provider in (None, "cpu"):
        s = _C.Session(TEXT, C) if provider is None else _C.Session(TEXT, C, provider=provider)
        check_step(plan_of(s, x), x)
    with pytest.raises(ValueError, match="no provider is named 'abacus'"):
        _C.Session(TEXT, C, provider="abacus")


def test_a_session_has_a_budget() -> None:
    x = inputs()
    for budget in ({"memory_share": 0.0}, {"memory_bytes": 0}, {"memory_share": 0.5, "memory_bytes": 2**40}):
        s = _C.Session(TEXT, C, **budget)
        check_step(plan_of(s, x), x)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="which is not from 0 to 1"):
            _C.Session(TEXT, C, memory_share=share)
    for size, error in ((-1, OverflowError), (2**64, OverflowError), ("1", TypeError)):
        with pytest.raises(error):
            _C.Session(TEXT, C, memory_bytes=size)


def test_transform_arguments() -> None:
    text = "input %x : f32[?]\n%y = Exp(%x)\nreturn %y\n"
    assert "%x : f32[7]" in _C.transform(text, "specialize", ["f32[7]"])
    with pytest.raises(ValueError, match=r"f32\[7,1\]"):
        _C.transform(text, "specialize", ["f32[7,1]"])
    with pytest.raises(TypeError):
        _C.transform(text, "specialize", [7])
    with pytest.raises(ValueError, match="q32"):
        _C.transform(text, "specialize", ["q32[7]"])
    with pytest.raises(ValueError, match="out_grads: expected 1 entries, got 2"):
        _C.transform(text, "differentiate", ["f32[7]"], out_grads=[True, True])


# ---- runs ----


def test_run_of_another_plan() -> None:
    s = session()
    few, many = inputs(2), inputs(5)
    a, b = plan_of(s, few), plan_of(s, many)
    outputs, state = a.forward(few, 0)
    with pytest.raises(ValueError, match="run: it belongs to another plan"):
        backward(b, state, many, outputs)
    assert backward(a, state, few, outputs)[1].shape == (3, 4)


def test_no_run() -> None:
    given = inputs()
    plan = plan_of(session(), given)
    outputs, _ = plan.forward(given, 0)
    for wrong in (None, torch.tensor(1), plan):
        with pytest.raises(TypeError, match="run: expected what forward gave"):
            backward(plan, wrong, given, outputs)


def test_retained() -> None:
    given = inputs()
    keeps = plan_of(session(), given, retain_graph=True)
    outputs, state = keeps.forward(given, 0)
    first, second = (backward(keeps, state, given, outputs) for _ in range(2))
    assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])


def test_missing_in_backward() -> None:
    given = inputs()
    plan = plan_of(session(), given, retain_graph=True)
    outputs, state = plan.forward(given, 0)
    assert 0 in plan.reads_inputs[0]
    for bad_inputs, bad_grads, error, message in [
        ([None, *given[1:]], [torch.ones(5, 4), None], TypeError, r"input 0 \(x\)"),
        (given, [None, None], ValueError, "no backward for just these"),
        (given, [torch.ones(5, 4), torch.ones(5)], ValueError, "no backward for just these"),
        (given, [torch.ones(4, 5), None], ValueError, r"gradient of output 0.*f32\[4,5\].*f32\[5,4\]"),
        (given, [torch.ones(5, 4)], ValueError, "expected 2 tensors, got 1"),
        (given[:1], [torch.ones(5, 4), None], ValueError, "input: expected 3 tensors, got 1"),
    ]:
        with pytest.raises(error, match=message):
            plan.backward(state, bad_inputs, outputs, bad_grads)
    only_needed = [t if i in plan.reads_inputs[0] else None for i, t in enumerate(given)]
    grads = plan.backward(state, only_needed, outputs, [torch.ones(5, 4), None])
    assert grads[1].shape == (3, 4)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_backwards_of_one_forward(retain_graph: bool) -> None:
    """In any order, as often as wanted, from the run or from packed bytes and copies of them."""
    x, w = torch.randn(3, 4), torch.randn(3, 4)
    text = "input %x : f32[3,4] grad\ninput %w : f32[3,4] grad\n%a = Tanh(%x)\n%b = Mul(%a, %w)\n%c = Exp(%b)\n"
    text += "return %b, %c\n"
    plan = _C.Session(text, {}).plan(
        [x, w], [True, True], [True, False], [False, True], [True, True], retain_graph=retain_graph
    )
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    b = leaves[0].tanh() * leaves[1]
    ones = torch.ones(3, 4)
    for packed in (False, True):
        outputs, run = plan.forward([x, w], 0)
        state = run.pack() if packed else None
        assert state is None or state.nbytes == plan.forward_bytes
        for which in [(1,), (0, 1), (0,), (1,), (0,)]:
            expected = torch.autograd.grad(
                [(b, b.exp())[k] for k in which], leaves, [ones] * len(which), retain_graph=True
            )
            douts = [ones if k in which else None for k in (0, 1)]
            copy = None if state is None else state.clone()
            grads = plan.backward(run, [x, w], outputs, douts, keep=True, packed=copy)
            torch.testing.assert_close(grads, list(expected))
        with pytest.raises(ValueError, match=r"packed is f32.* where this plan saves u8\[.*hook of saved tensors"):
            plan.backward(run, [x, w], outputs, douts, packed=ones)
    with pytest.raises(ValueError, match="bytes packed after forward"):
        plan.backward(run, [x, w], outputs, douts)


def test_backwards_of_one_forward_on_several_threads() -> None:
    given = inputs(64)
    plan = plan_of(session(), given)
    outputs, run = plan.forward(given, 0)
    expected = plan.backward(run, given, outputs, [torch.ones(64, 4), None], keep=True)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                grads = plan.backward(run, given, outputs, [torch.ones(64, 4), None], keep=True)
                assert torch.equal(grads[1], expected[1]) and torch.equal(grads[2], expected[2])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


# ---- callbacks ----


def test_host() -> None:
    x = torch.arange(4.0)
    torch.testing.assert_close(called_step(called_plan(Double())), 2 * x.cos() * (2 * x.sin()).exp())


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"infer": KeyError("here")}, KeyError, "here"),
        ({"infer": None}, TypeError, "expected a list of 1 types"),
        ({"infer": []}, TypeError, "expected a list of 1 types"),
        ({"infer": [("f32", [4])]}, TypeError, None),
        ({"infer": [("q32", (4,))]}, ValueError, "not a type"),
        ({"infer": [("f32", (-4,))]}, ValueError, "negative dim"),
        ({"infer": [("f32", (2**62, 2**62))]}, ValueError, None),
        ({"forward": KeyError("here")}, KeyError, "here"),
        ({"forward": KeyboardInterrupt()}, KeyboardInterrupt, None),
        ({"forward": None}, TypeError, r"expected \(outputs, state\)"),
        ({"forward": ([], 0)}, TypeError, "expected a list of 1 tensors"),
        ({"forward": ([None, None], 0)}, TypeError, "expected a list of 1 tensors"),
        ({"forward": ([torch.ones(5)], 0)}, ValueError, r"f32\[5\].*f32\[4\]"),
        ({"forward": ([torch.ones(4).double()], 0)}, ValueError, r"f64\[4\].*f32\[4\]"),
        ({"forward": ([torch.ones(8)[::2]], 0)}, ValueError, "contiguous"),
        ({"forward": (["no tensor"], 0)}, TypeError, "torch.Tensor"),
        ({"backward": KeyError("here")}, KeyError, "here"),
        ({"backward": ()}, TypeError, "expected a list of 1 tensors"),
        ({"backward": [torch.ones(3)]}, ValueError, r"f32\[3\].*f32\[4\]"),
    ],
)
def test_host_faults(fault: dict[str, object], error: type[BaseException], message: str) -> None:
    """The exception reaches the caller; what was there before it works on."""
    callbacks = Double(**fault)
    s = _C.Session(CALLED, {}, callbacks)

    def step() -> Tensor | None:
        return called_step(s.plan([torch.ones(4)], [True], [True]))

    with pytest.raises(error, match=message):
        step()
    callbacks.fault = {}
    torch.testing.assert_close(step(), called_step(called_plan(Double())))
    gc.collect()
    assert s.stats()["runs_live"] == 0


def test_no_host() -> None:
    with pytest.raises(NotImplementedError, match="TorchCall"):
        _C.Session(CALLED, {}).plan([torch.ones(4)], [True], [True])


# ---- lives ----


@pytest.mark.parametrize("order", ["sptg", "gtps", "psgt", "tspg", "gspt"])
def test_freed_in_any_order(order: str) -> None:
    """session, plan, state, gradients."""
    before = settle()
    given = inputs()
    objects: dict[str, object] = {"s": session()}
    objects["p"] = plan_of(objects["s"], given)
    outputs, objects["t"] = objects["p"].forward(given, 0)
    objects["g"] = backward(objects["p"], objects["t"], given, outputs)
    kept = [g.clone() for g in objects["g"] if g is not None]
    for name in order:
        if name == "g":
            torch.testing.assert_close([g for g in objects["g"] if g is not None], kept, atol=0, rtol=0)
        del objects[name]
        gc.collect()
    del outputs
    assert settle() == before


def test_plan_after_its_session() -> None:
    s = session(max_plans=1)
    plan, given = plan_of(s, inputs()), inputs()
    plan_of(s, inputs(2))  # evicts it
    assert s.stats()["plans_evicted"] == 1
    check_step(plan, given)
    del s
    gc.collect()
    check_step(plan, given)


def test_cycle_through_the_host_is_collected() -> None:
    callbacks = Double()
    callbacks.plan = called_plan(callbacks)  # type: ignore[attr-defined]
    called_step(callbacks.plan)  # type: ignore[attr-defined]
    gone = weakref.ref(callbacks)
    del callbacks
    gc.collect()
    assert gone() is None


def test_session_initialised_again() -> None:
    s = session()
    with pytest.raises(RuntimeError, match="once"):
        s.__init__(TEXT, C)
    raw = _C.Session.__new__(_C.Session)
    assert (raw.n_inputs, raw.stats()) == (0, {})
    with pytest.raises(RuntimeError, match="not initialised"):
        raw.plan([], [], [])
    for _ in range(2):
        with pytest.raises(ValueError, match="line 1"):
            raw.__init__("nonsense", {}, Double())
    with pytest.raises(ValueError, match="which is not from 0 to 1"):
        raw.__init__(TEXT, C, memory_share=2.0)
    raw.__init__(TEXT, C)
    check_step(plan_of(raw, inputs()), inputs())


def test_nothing_is_leaked() -> None:
    s, given = session(max_plans=2), [inputs(rows) for rows in (256, 257, 258)]
    callbacks = called_plan(Double())

    def cycle(i: int) -> None:
        mine = given[i % 3]
        plan = plan_of(s, mine, retain_graph=i % 2 == 0)  # often built anew: more signatures than places
        outputs, state = plan.forward(mine, i)
        backward(plan, state, mine, outputs)
        called_step(callbacks)
        with pytest.raises(ValueError, match="tensors"):
            plan.forward(mine[:1], 0)
        with pytest.raises(ValueError, match="line"):
            _C.Session("nonsense", C)

    for i in range(200):
        cycle(i)
    blocks, memory, objects = settle(), allocated(), len(gc.get_objects())
    for i in range(1000):
        cycle(i)
    assert settle() == blocks
    assert len(gc.get_objects()) < objects + 100
    assert allocated() < memory + 2**20
    assert s.stats()["runs_live"] == 0


# ---- threads ----


def test_forward_lets_other_threads_run() -> None:
    n = 400
    text = f"input %x : f32[{n},{n}]\n" + "%0 = MatMul(%x, %x)\n"
    text += "".join(f"%{i} = MatMul(%{i - 1}, %x)\n" for i in range(1, 40)) + "return %39\n"
    x = torch.eye(n)
    plan = _C.Session(text, {}).plan([x], [False], [False])
    plan.forward([x], 0)
    moments: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            moments.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    for _ in range(3):
        plan.forward([x], 0)
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert sum(start < t < end for t in moments) >= 3


def test_session_shared_by_threads() -> None:
    s = session(max_plans=1)
    failures: list[BaseException] = []

    def train(rows: int) -> None:
        try:
            for _ in range(100):
                given = inputs(rows)
                check_step(plan_of(s, given), given)
                s.stats()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=train, args=(rows,)) for rows in (1, 2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and s.stats()["runs_live"] == 0


def test_stats_while_a_plan_asks_the_host() -> None:
    """The builder holds the session's lock and wants the GIL; stats must not hold the GIL and wait for the lock."""
    inside, seen = threading.Event(), threading.Event()

    class Slow(Double):
        def infer(self, index: int, types: list) -> object:
            inside.set()
            assert not seen.wait(0.2)  # lets the other thread run into the lock
            return super().infer(index, types)

    s = _C.Session(CALLED, {}, Slow())
    builder = threading.Thread(target=lambda: s.plan([torch.ones(4)], [True], [True]), daemon=True)
    builder.start()
    assert inside.wait(10)
    assert s.stats()["plans_built"] == 1
    seen.set()
    builder.join(10)
    assert not builder.is_alive()
