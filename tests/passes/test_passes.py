"""Golden texts of the rewrite rules and passes.

``rules/RULE.txt`` holds a graph before and after the rule, then graphs it must leave alone;
``stages/STAGE-NAME.txt`` a graph before and after a whole stage. ``pytest tests/passes --update``
rewrites the ``after:`` sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
import torch
from torch import Tensor

from ortmodule_c import _C

pytestmark = pytest.mark.whole

HERE = Path(__file__).parent
RULES = sorted((HERE / "rules").glob("*.txt"))
STAGES = sorted((HERE / "stages").glob("*.txt"))
SOURCES = sorted((HERE.parents[1] / "csrc" / "passes").glob("*_rules.c"))


def sections(path: Path) -> list[tuple[str, str]]:
    parts = re.split(r"^(before|after|unchanged):\n", path.read_text(), flags=re.M)
    return [(kind, text.strip() + "\n") for kind, text in zip(parts[1::2], parts[2::2], strict=True)]


def section(path: Path, kind: str) -> str:
    return next(text for k, text in sections(path) if k == kind)


def check_golden(path: Path, got: str, update: bool) -> None:
    if update:
        parts = [(kind, got if kind == "after" else text) for kind, text in sections(path)]
        path.write_text("\n".join(f"{kind}:\n{text}" for kind, text in parts))
    assert got == section(path, "after")


def session_run(text: str, inputs: list[Tensor]) -> list[Tensor]:
    session = _C.Session(text, {})
    plan = session.plan(inputs, [False] * session.n_inputs, [False] * session.n_outputs)
    return plan.forward(inputs, 0)[0]


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.stem)
def test_rule_rewrites(path: Path, update: bool) -> None:
    after = _C.transform(section(path, "before"), f"rule:{path.stem}")
    check_golden(path, after, update)
    assert _C.transform(after, f"rule:{path.stem}") == after


@pytest.mark.parametrize(
    ("rule", "mask", "said"), [("causal", "[1, 0, 1, 1]", "is_causal=1"), ("no_mask", "[1, 1, 1, 1]", "")]
)
def test_masks_of_attention_that_reads_one_tensor(rule: str, mask: str, said: str) -> None:
    text = f"input %x : f32[1,2,4,3]\nconst %m : bool[2,2] = {mask}\n"
    text += "%y, %l = Attention(%x, _, _, %m) {kv_heads=1}\nreturn %y\n"
    after = _C.transform(text, f"rule:attention_{rule}")
    assert "Attention(%x, _, _, _)" in after and said in after


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.stem)
def test_rule_changes_something(path: Path) -> None:
    assert _C.transform(section(path, "before"), "specialize") != section(path, "after")


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.stem)
def test_rule_leaves_others_alone(path: Path) -> None:
    texts = [text for kind, text in sections(path) if kind == "unchanged"]
    assert texts, "a rule needs a graph that it must not match"
    for text in texts:
        assert _C.transform(text, f"rule:{path.stem}") == _C.transform(text, "specialize")


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.stem)
def test_rule_keeps_the_numbers(path: Path) -> None:
    before, after = section(path, "before"), section(path, "after")
    inputs = reference.random_inputs(before)
    want = reference.run(before, inputs)
    tolerance = torch.finfo(torch.bfloat16).eps if " : bf16[" in before else 1e-5
    assert_same(reference.run(after, inputs), want, tolerance)
    assert_same(session_run(before, inputs), want, tolerance)


def test_every_rule_has_a_text() -> None:
    names = {name for path in SOURCES for name in re.findall(r'^    \{"(\w+)",', path.read_text(), re.M)}
    assert names == {path.stem for path in RULES}


@pytest.fixture
def two_threads() -> Iterator[None]:
    """What a stage weighs are workspaces too, and threads have their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("path", STAGES, ids=lambda p: p.stem)
def test_stage(path: Path, update: bool) -> None:
    check_golden(path, _C.transform(section(path, "before"), path.stem.split("-")[0]), update)
