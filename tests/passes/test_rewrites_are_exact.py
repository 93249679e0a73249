"""Rewrites keep what a graph computes: every rule, every stage and the whole chain against the plain graph.

Graphs are drawn at random around each rule's pattern (``graph_patterns.py``), and whole programs
(``graph_programs.py``), with dims that coincide and inputs that hold the special values. Both sides run in the C
executor, one with no rewrite at all. What a rule claims (``csrc/passes/rewrite.h``) is what it is held to.
"""

from __future__ import annotations

import random
import re

import pytest
import torch
from graph_draw import Draw, fill
from graph_patterns import PATTERNS
from graph_programs import PROGRAMS
from torch import Tensor

from ortmodule_c import _C

CLAIMS = _C.rules()
FEWEST = 15  # rewritten graphs that a rule is tried on
MOST = 400  # graphs drawn until there are as many
AFTER_DIFFERENTIATION = {
    "detach",
    "with_gradient_of",
    "placed_gradients",
    "matmul_cast",
    "fused_matmul_cast",
    "cast_norm",
    "cast_sum",
    "layer_norm_grad_cast",
    "rms_norm_grad_cast",
    "cast_matmul",
    "batch_norm_added",
    "batch_norm_relu",
    "batch_norm_relu_grad",
}
# A layer's kernels are within this many ulps of the largest element, see also Draw.condition.
LAYER_ULPS = 8
BF16_ULPS = torch.finfo(torch.bfloat16).eps / 2 / torch.finfo(torch.float32).eps  # one rounding
SUM_ULPS = 16  # of sums of a few products of numbers up to 3


def inputs_of(text: str, seed: int, values: str) -> list[Tensor]:
    rng = random.Random(seed)
    kinds = re.findall(r"^input \S+ : (\w+)\[([\d,]*)\]", text, re.M)
    return [fill(dtype, [int(n) for n in dims.split(",") if n], values, rng) for dtype, dims in kinds]


def run(text: str, inputs: list[Tensor], plain: bool, backward: bool) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and gradients of inputs, those of outputs being 1, -1, 0.5 and 2 in turn."""
    session = _C.Session(text, {})
    backward = backward and not re.search(r" : b?f16\[", text)  # few ops of a gradient sum halves
    wants = [backward and kind == " grad" for kind in re.findall(r"^input \S+ : \S+\]( grad)?", text, re.M)]
    none = [False] * session.n_outputs
    forward = session.plan(inputs, [False] * len(inputs), none, plain=plain)
    outs, _ = forward.forward(inputs, 7)
    if not any(wants):
        return outs, [None] * len(inputs)
    gives = [y.is_floating_point() for y in outs]
    plan = session.plan(inputs, wants, gives, plain=plain)
    outs, token = plan.forward(inputs, 7)
    if token is None:
        return outs, [None] * len(inputs)
    steps = torch.tensor([1.0, -1.0, 0.5, 2.0])
    douts = [
        steps[torch.arange(y.numel()) % 4].reshape(y.shape).to(y.dtype) if give else None
        for y, give in zip(outs, gives, strict=True)
    ]
    return outs, plan.backward(token, inputs, outs, douts)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all elements are the same; any NaN is like another, 0 is not -0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    both_nan = a.isnan() & b.isnan()
    return bool((both_nan | ((a == b) & (a.signbit() == b.signbit()))).all())


def close(a: Tensor, b: Tensor, ulps: float) -> bool:
    """NaN and infinities at the same places; elsewhere within so many ulps of the largest element."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or not a.is_floating_point():
        return same_bits(a, b)
    finite = a.isfinite() & b.isfinite()
    if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
        return False
    eps = torch.finfo(a.dtype).eps
    a, b = a[finite].double(), b[finite].double()
    scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
    return bool(((a - b).abs() <= ulps * eps * scale).all())


def check(text: str, other: str, inputs: list[Tensor], ulps: float, sums: float, backward: bool, plain: bool) -> None:
    """`other`, with all passes unless `plain`, gives the plain `text`'s outputs, and its gradients within `sums`."""
    try:
        want, want_grads = run(text, inputs, True, backward)
    except RuntimeError as error:  # of what nobody reads a rewrite may leave out
        assert "ZeroDivisionError" in str(error)
        return
    got, grads = run(other, inputs, plain, backward)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        good = same_bits(a, b) if ulps == 0 else close(a, b, ulps)
        assert good, report(text, other, inputs, f"output {k}", a, b)
    for k, (x, a, b) in enumerate(zip(inputs, grads, want_grads, strict=True)):
        pair = [torch.zeros_like(x) if g is None else g for g in (a, b)]
        assert close(*pair, sums), report(text, other, inputs, f"gradient of input {k}", *pair)


def report(text: str, other: str, inputs: list[Tensor], what: str, got: Tensor, want: Tensor) -> str:
    values = "\n".join(f"  {x.flatten().tolist()}" for x in inputs)
    both = f"got  {got.flatten().tolist()}\nwant {want.flatten().tolist()}"
    return f"{what}\n{text}\nbecomes\n{other}\ninputs\n{values}\n{both}"


def held_to(rule: str, d: Draw) -> tuple[float, str]:
    """The ulps of the largest element that a rule's claim allows, and the kind of values it is tried on."""
    sums, layer = SUM_ULPS * d.condition, LAYER_ULPS * d.condition
    ulps = {"sums": sums, "finite sums": sums, "layer": layer, "unrounded": BF16_ULPS}.get(CLAIMS[rule], 0.0)
    finite = CLAIMS[rule].startswith("finite")
    values = "finite" if finite else "most" if CLAIMS[rule] == "exact" and d.chance(0.5) else "special"
    return ulps, values


@pytest.mark.parametrize("rule", sorted(CLAIMS))
def test_rule(rule: str) -> None:
    fired = 0
    for seed in range(MOST):
        d = Draw(seed)
        text = d.text(PATTERNS[rule](d))
        bound = _C.transform(text, "specialize")
        after = _C.transform(text, f"rule:{rule}")
        if after == bound:
            continue
        fired += 1
        ulps, values = held_to(rule, d)
        check(bound, after, inputs_of(bound, seed, values), ulps, max(SUM_ULPS, ulps), False, True)
        if rule not in AFTER_DIFFERENTIATION:
            check(
                bound,
                after,
                inputs_of(bound, seed, "finite" if values == "finite" else "special"),
                ulps,
                max(SUM_ULPS, ulps),
                True,
                True,
            )
        if fired == FEWEST * 4:
            break
    assert fired >= FEWEST, f"only {fired} of the graphs drawn are rewritten"


@pytest.mark.parametrize("rule", sorted(PATTERNS))
def test_the_whole_chain_around_a_pattern(rule: str) -> None:
    for seed in range(30):
        d = Draw(1000 + seed)
        text = d.text(PATTERNS[rule](d))
        bound = _C.transform(text, "specialize")
        ulps, values = held_to(rule, d)
        check(bound, bound, inputs_of(bound, seed, values), ulps, max(SUM_ULPS, ulps), False, False)
        check(
            bound,
            bound,
            inputs_of(bound, seed, "finite" if values == "finite" else "special"),
            ulps,
            max(SUM_ULPS, ulps),
            True,
            False,
        )


@pytest.mark.parametrize("first", range(0, 400, 50))
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, first: int) -> None:
    for seed in range(first, first + 50):
        d = Draw(seed)
        text = _C.transform(d.text(*PROGRAMS[program](d)), "specialize")
        check(text, text, inputs_of(text, seed, "most"), 0.0, SUM_ULPS, False, False)
        check(text, text, inputs_of(text, seed, "special"), 0.0, SUM_ULPS, True, False)


@pytest.mark.parametrize("stage", ["canonicalize", "cse", "fuse", "fold"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_stage(program: str, stage: str) -> None:
    for seed in range(100):
        d = Draw(seed)
        text = _C.transform(d.text(*PROGRAMS[program](d)), "specialize")
        check(text, _C.transform(text, stage), inputs_of(text, seed, "most"), 0.0, SUM_ULPS, False, True)
