"""Plans made from text graphs: results, memory as predicted, states of several runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortmodule_c import _C

MLP = """
input %x : f32[?,64]
input %w1 : f32[64,256] grad
input %b1 : f32[256] grad
input %w2 : f32[256,10] grad
input %target : i64[?]
%0 = FusedMatMul(%x, %w1, %b1)
%1 = Gelu(%0) {approximate="none"}
%2 = MatMul(%1, %w2)
%3, %4, %s, %5 = CrossEntropy(%2, %target) {reduction="mean"}
return %3, %2
"""
GRADS = [False, True, True, True, False]


def mlp_inputs(batch: int) -> list[torch.Tensor]:
    x, target = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
    return [x, torch.randn(64, 256) / 8, torch.randn(256), torch.randn(256, 10) / 16, target]


def mlp_expected(inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    x, w1, b1, w2 = (t.clone().requires_grad_() for t in inputs[:4])
    logits = torch.nn.functional.gelu(x @ w1 + b1) @ w2
    loss = torch.nn.functional.cross_entropy(logits, inputs[4])
    return [loss.detach(), logits.detach()], list(torch.autograd.grad(loss, [w1, b1, w2]))


def backward(plan: _C.Plan, state: _C.Run, inputs: list, outputs: list) -> list[torch.Tensor | None]:
    grads = [torch.ones_like(t) if given else None for t, given in zip(outputs, plan.out_grads[0], strict=True)]
    return plan.backward(state, inputs, outputs, grads)


def transformer(layers: int, batch: int, seq: int, width: int, heads: int) -> str:
    """Encoder layers as they come from lowering."""
    head = [f"input %x : f32[{batch},{seq},{width}] grad"]
    head += [f"const %split : i64[4] = [{batch}, {seq}, {heads}, {width // heads}]"]
    head += [f"const %join : i64[3] = [{batch}, {seq}, {width}]"]
    body: list[str] = []
    x = "x"
    for n in range(layers):
        p = f"h{n}."
        sizes = {m: (width, width) for m in "qkvo"} | {"up": (width, 4 * width), "down": (4 * width, width)}
        for m, (a, b) in sizes.items():
            head += [f"input %{p}{m}.w : f32[{a},{b}] grad", f"input %{p}{m}.b : f32[{b}] grad"]
        head += [f"input %{p}{m} : f32[{width}] grad" for m in ("g1", "b1", "g2", "b2")]
        for m in "qkv":
            body += [f"%{p}{m}0 = FusedMatMul(%{x}, %{p}{m}.w, %{p}{m}.b)", f"%{p}{m}1 = Reshape(%{p}{m}0, %split)"]
            body += [f"%{p}{m}2 = Transpose(%{p}{m}1) {{perm=[0, 2, 1, 3]}}"]
        body += [
            f"%{p}a, %{p}lse = Attention(%{p}q2, %{p}k2, %{p}v2) {{scale=0.125}}",
            f"%{p}t = Transpose(%{p}a) {{perm=[0, 2, 1, 3]}}",
            f"%{p}j = Reshape(%{p}t, %join)",
            f"%{p}o0 = FusedMatMul(%{p}j, %{p}o.w, %{p}o.b)",
            f"%{p}o1 = Dropout(%{p}o0) {{p=0.1, subsequence={2 * n}}}",
            f"%{p}r1 = Add(%{p}o1, %{x})",
            f"%{p}n1, %{p}m1, %{p}s1 = LayerNormalization(%{p}r1, %{p}g1, %{p}b1) {{axis=-1, epsilon=1e-5}}",
            f"%{p}u = FusedMatMul(%{p}n1, %{p}up.w, %{p}up.b)",
            f'%{p}g = Gelu(%{p}u) {{approximate="none"}}',
            f"%{p}d0 = FusedMatMul(%{p}g, %{p}down.w, %{p}down.b)",
            f"%{p}d1 = Dropout(%{p}d0) {{p=0.1, subsequence={2 * n + 1}}}",
            f"%{p}r2 = Add(%{p}d1, %{p}n1)",
            f"%{p}n2, %{p}m2, %{p}s2 = LayerNormalization(%{p}r2, %{p}g2, %{p}b2) {{axis=-1, epsilon=1e-5}}",
        ]
        x = f"{p}n2"
    return "\n".join([*head, *body, f"return %{x}"])


@pytest.mark.parametrize("batch", [1, 7, 32, 0])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_results_and_gradients(batch: int, retain_graph: bool) -> None:
    session = _C.Session(MLP, {})
    inputs = mlp_inputs(batch)
    plan = session.plan(inputs, GRADS, [True, False], retain_graph=retain_graph)
    outputs, state = plan.forward(inputs, 0)
    expected, expected_grads = mlp_expected(inputs)
    torch.testing.assert_close(outputs, expected, equal_nan=True)
    grads = backward(plan, state, inputs, outputs)
    assert grads[0] is None and grads[4] is None
    torch.testing.assert_close(grads[1:4], expected_grads)


def test_backward_again_needs_retain() -> None:
    session = _C.Session(MLP, {})
    inputs = mlp_inputs(16)
    plan = session.plan(inputs, GRADS, [True, False], retain_graph=True)
    outputs, state = plan.forward(inputs, 0)
    first = backward(plan, state, inputs, outputs)
    for _ in range(3):
        torch.testing.assert_close(backward(plan, state, inputs, outputs), first, rtol=0, atol=0)
    plan = session.plan(inputs, GRADS, [True, False])
    outputs, state = plan.forward(inputs, 0)
    backward(plan, state, inputs, outputs)
    assert issubclass(_C.ConsumedError, RuntimeError)
    with pytest.raises(_C.ConsumedError):
        backward(plan, state, inputs, outputs)


def test_inference_has_no_state_and_less_memory() -> None:
    session = _C.Session(MLP, {})
    inputs = mlp_inputs(512)
    training = session.plan(inputs, GRADS, [True, False])
    inference = session.plan(inputs, [False] * 5, [False, False])
    outputs, state = inference.forward(inputs, 0)
    assert state is None
    torch.testing.assert_close(outputs, mlp_expected(inputs)[0])
    assert inference.arena_bytes < training.arena_bytes
    assert inference.n_steps < training.n_steps


def test_interleaved_runs_keep_their_own_state() -> None:
    session = _C.Session(MLP, {})
    batches = [mlp_inputs(8) for _ in range(4)]
    plan = session.plan(batches[0], GRADS, [True, False])
    runs = [plan.forward(inputs, 0) for inputs in batches]
    for n in (2, 0, 3, 1):
        outputs, state = runs[n]
        grads = backward(plan, state, batches[n], outputs)
        torch.testing.assert_close(grads[1:4], mlp_expected(batches[n])[1])


def test_index_error_leaves_no_memory_behind() -> None:
    session = _C.Session(MLP, {})
    inputs = mlp_inputs(256)
    plan = session.plan(inputs, GRADS, [True, False])
    used = _C.pool_stats()["used_bytes"]
    bad = [*inputs[:4], torch.full((256,), 10)]
    for _ in range(5):
        with pytest.raises(IndexError, match="10"):
            plan.forward(bad, 0)
    assert _C.pool_stats()["used_bytes"] == used
    outputs, _ = plan.forward(inputs, 0)
    torch.testing.assert_close(outputs, mlp_expected(inputs)[0])


def test_errors_name_a_node_without_a_name_by_its_op() -> None:
    session = _C.Session("input %x : f32[3, 2]\ninput %at : i64[2]\n%y = Gather(%x, %at) {axis=0}\nreturn %y\n", {})
    inputs = [torch.ones(3, 2), torch.tensor([1, 7])]
    plan = session.plan(inputs, [False, False], [False])
    with pytest.raises(IndexError, match=r"index 7 is out of bounds for dimension 0 with size 3 .*'Gather'"):
        plan.forward(inputs, 0)


@pytest.mark.host
@pytest.mark.parametrize("rows", [1 << 62, (1 << 63) - 1])
def test_a_table_of_nothing_may_have_as_many_rows_as_there_are_numbers(rows: int) -> None:
    session = _C.Session("input %x : f32[?, 0]\ninput %at : i64[3]\n%y = Gather(%x, %at) {axis=0}\nreturn %y\n", {})
    inputs = [torch.empty(rows, 0), torch.tensor([-5, rows - 1, -rows])]
    plan = session.plan(inputs, [False, False], [False])
    assert plan.forward(inputs, 0)[0][0].shape == (3, 0)
    inputs[1][1] = -rows - 1
    with pytest.raises(IndexError, match=f"index {-rows - 1} is out of bounds for dimension 0 with size {rows}"):
        plan.forward(inputs, 0)


@pytest.mark.host
def test_a_convolution_of_more_rows_than_a_table_has_is_pytorchs() -> None:
    """It is refused as one without a kernel, not for want of memory, which would be the end of the call."""
    text = "input %x : f32[1,1,?,1]\ninput %w : f32[1,1,3,1]\n%y = Conv(%x, %w)\nreturn %y\n"
    session = _C.Session(text, {})
    with pytest.raises(NotImplementedError, match=r"Conv: .* too many"):
        session.plan([torch.empty(1, 1, 17_000_000, 1), torch.ones(1, 1, 3, 1)], [False, False], [False])


@pytest.mark.host
def test_run_takes_what_was_predicted_and_gives_it_back() -> None:
    text = transformer(2, 4, 64, 128, 4)
    session = _C.Session(text, {})
    inputs = [torch.randn(d) / 8 for d in shapes_of(text)]
    plan = session.plan(inputs, [True] * len(inputs), [True])
    used = _C.pool_stats()["used_bytes"]
    outputs, state = plan.forward(inputs, 3)
    # The pool rounds sizes up to one of eight per power of two; the output comes from it too.
    least = plan.arena_bytes + plan.lent_bytes + outputs[0].numel() * 4
    assert least <= _C.pool_stats()["used_bytes"] - used <= least * 9 / 8 + 4096
    del state, outputs
    assert _C.pool_stats()["used_bytes"] == used


def shapes_of(text: str) -> list[list[int]]:
    lines = [line for line in text.splitlines() if line.startswith("input")]
    return [[int(d) for d in line.split("[")[1].split("]")[0].split(",")] for line in lines]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_layout_reaches_the_bound(joint: bool, retain_graph: bool, threads: int) -> None:
    """Products have scratch memory for each thread."""
    text = transformer(12, 8, 128, 768, 12)
    inputs = [torch.empty(d) for d in shapes_of(text)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plan = _C.Session(text, {}).plan(inputs, [joint] * len(inputs), [joint], retain_graph=retain_graph)
    finally:
        torch.set_num_threads(before)
    assert plan.bound_bytes <= plan.arena_bytes <= 1.02 * plan.bound_bytes
    assert plan.random


def test_cache_is_bounded() -> None:
    session = _C.Session(MLP, {}, None, 3)
    for batch in (*range(1, 9), 8, 7):
        session.plan(mlp_inputs(batch), GRADS, [True, False])
    stats = session.stats()
    assert (stats["plans_built"], stats["plans_cached"], stats["plans_evicted"], stats["plan_hits"]) == (8, 3, 5, 2)


def constants(n: int) -> str:
    """`n` constants of 4000 bytes that all plans have, and as many that depend on the number of rows."""
    lines = ["input %x : i64[?,1]", *(f"const %{k} : i64[] = [{v}]" for k, v in (("from", 0), ("to", 500), ("by", 1)))]
    lines += [f"const %c{i} : i64[] = [{i + 2}]" for i in range(n)]
    lines += ["%r = Range(%from, %to, %by)", "%size = Size(%x)", "%of_rows = Mul(%r, %size)"]
    for i in range(n):
        lines += [f"%a{i} = Mul(%r, %c{i})", f"%b{i} = Mul(%of_rows, %c{i})"]
        lines += [f"%y{i} = Add(%x, %a{i})", f"%z{i} = Sub(%x, %b{i})"]
    return "\n".join([*lines, "return " + ", ".join(f"%{o}{i}" for o in "yz" for i in range(n))])


def plan_of_rows(session: _C.Session, rows: int) -> _C.Plan:
    return session.plan([torch.zeros(rows, 1, dtype=torch.int64)], [False])


def test_constants_that_plans_have_in_common_are_held_once() -> None:
    session = _C.Session(constants(3), {})
    for rows in (1001, 1009, 1013):
        plan_of_rows(session, rows)
    assert session.stats()["constant_bytes"] == (3 + 3 * 3) * 4000
    again = _C.Session(constants(3), {})
    x = torch.arange(7).view(7, 1)
    plan_of_rows(again, 1001)
    outputs, _ = plan_of_rows(again, 7).forward([x], 0)
    for i in range(3):
        assert torch.equal(outputs[i], x + torch.arange(500) * (i + 2))
        assert torch.equal(outputs[3 + i], x - torch.arange(500) * (i + 2) * 7)


def test_constants_of_all_plans_are_bounded() -> None:
    session = _C.Session(constants(120), {}, None, 64)
    for rows in range(1001, 1051):
        plan = plan_of_rows(session, rows)
        assert session.stats()["constant_bytes"] <= 16 << 20
    stats = session.stats()
    assert stats["plans_evicted"] > 0 and 16 <= stats["plans_cached"] < 50
    assert plan_of_rows(session, 1050).text() == plan.text()
    assert session.stats()["plan_hits"] == 1


def test_dump_and_profile(tmp_path: Path) -> None:
    script = f"""
import torch
from ortmodule_c import _C
session = _C.Session({MLP!r}, {{}})
inputs = [torch.randn(2, 64), torch.randn(64, 256), torch.randn(256), torch.randn(256, 10), torch.zeros(2).long()]
plan = session.plan(inputs, {GRADS}, [True, False])
outputs, state = plan.forward(inputs, 0)
plan.backward(state, inputs, outputs, [torch.ones(()), None])
rows = plan.profile()
assert len(rows) == plan.n_steps and all(runs == 1 and min(seconds, moved) > 0 for *_, runs, seconds, _, moved in rows)
assert ("forward", "FusedMatMul", 2 * 2 * 64 * 256 + 2 * 256) in [(row[0], row[1], row[5]) for row in rows], rows
"""
    env = os.environ | {"OMC_DUMP": str(tmp_path), "OMC_PROFILE": "1", "OMC_VERIFY": "1"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True)
    stages = [path.stem.split("-", 2)[2] for path in sorted(tmp_path.iterdir())]
    assert stages[0] == "specialize" and stages[-1] == "plan" and "differentiate" in stages
    assert "arena" in sorted(tmp_path.iterdir())[-1].read_text()
