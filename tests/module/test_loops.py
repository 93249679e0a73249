"""Loops over the steps of a tensor compute what eager does, in graphs without a pass over the tensor for each step."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import DebugOptions, ORTModule
from wrapped import BFLOAT16, Function, assert_same_step, close, n_graphs, pair

STEPS, WIDTH = 6, 4


def steps(s: Function, x: Tensor, read: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    x, h = s.enter(x), torch.zeros(x.shape[0], WIDTH)
    out = []
    for t in range(STEPS):
        h = torch.tanh(read(x, t) + s.step(h))
        out.append(h)
    return out


def written(s: Function, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], STEPS, WIDTH)
    for t, h in enumerate(steps(s, x, lambda x, t: x[:, t])):
        out[:, t] = h
    return out


def written_and_read(s: Function, x: Tensor) -> Tensor:
    x = s.enter(x)
    out = torch.zeros(x.shape[0], STEPS + 1, WIDTH)
    for t in range(STEPS):
        out[:, t + 1] = torch.tanh(x[:, t] + s.step(out[:, t].clone()))
    return out[:, 1:]


def grown(s: Function, x: Tensor) -> Tensor:
    out = torch.ones(x.shape[0], 1, WIDTH)
    for h in steps(s, x, lambda x, t: x[:, -1 - t]):
        out = torch.cat([out, h[:, None]], 1)
    return out


LOOPS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "rows": lambda s, x: torch.stack(steps(s, x, lambda x, t: x[:, t]), 1),
    "slices": lambda s, x: torch.stack(steps(s, x, lambda x, t: x[:, t : t + 1].flatten(1)), 1),
    "rows of what is read as a whole too": lambda s, x: torch.stack(steps(s, x, lambda x, t: x[:, t] + x.mean(1)), 1),
    "places": written,
    "places that are read": written_and_read,
    "a list": grown,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_steps(name: str) -> None:
    eager, ours = pair(Function(LOOPS[name], enter=nn.Linear(3, WIDTH), step=nn.Linear(WIDTH, WIDTH)))
    for batch in (2, 1, WIDTH, 0):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(batch, STEPS, 3))
    assert n_graphs(ours) <= 3


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_steps_under_autocast(name: str) -> None:
    """Gradients are about as near to those of float32 as eager's."""
    eager, ours = pair(Function(LOOPS[name], enter=nn.Linear(3, WIDTH), step=nn.Linear(WIDTH, WIDTH)))
    exact, x = copy.deepcopy(eager), torch.randn(WIDTH, STEPS, 3)
    exact(x).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        for m in (eager, ours):
            m(x).float().sum().backward()
        with torch.no_grad():
            close(ours(x), eager(x), rtol=8 * BFLOAT16)
    for p, q, r in zip(eager.parameters(), ours.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and r.grad is not None
        off, allowed = (q.grad - r.grad).abs().max(), (p.grad - r.grad).abs().max()
        assert off <= 2 * allowed + 2 * BFLOAT16 * r.grad.abs().max()


@pytest.mark.parametrize("name", LOOPS)
def test_all_steps_are_put_together_once_in_each_direction(name: str, tmp_path: Path) -> None:
    module = Function(LOOPS[name], enter=nn.Linear(3, WIDTH), step=nn.Linear(WIDTH, WIDTH))
    options = DebugOptions(save_onnx=True, onnx_prefix="loop", save_path=str(tmp_path))
    ORTModule(module, options)(torch.randn(2, STEPS, 3)).sum().backward()
    ops = Counter(n.op_type for n in onnx.load(tmp_path / "loop_optimized_training.onnx").graph.node)
    assert (ops["Concat"], ops["SliceGrad"], ops["GatherGrad"]) == (2, 0, 0)
