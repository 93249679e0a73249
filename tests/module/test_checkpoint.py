"""Checkpoints and saved-tensor hooks around a wrapped module: same gradients, and the memory is given up."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ortmodule_c import _C, DebugOptions, ORTModule
from wrapped import Function, assert_same_state, assert_same_step, close, mlp, pair

WIDTH, ROWS, BLOCKS = 64, 512, 6


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def plain(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def checkpointed(blocks: list[nn.Module], x: Tensor, reentrant: bool, **more: Any) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant, **more)
    return x


def nested(blocks: list[nn.Module], x: Tensor) -> Tensor:
    def pairs(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)

    for i in range(0, len(blocks), 2):
        x = checkpoint(pairs, blocks[i], blocks[i + 1], x, use_reentrant=False)
    return x


def sequential(blocks: list[nn.Module], x: Tensor) -> Tensor:
    return checkpoint_sequential(blocks, 3, x, use_reentrant=False)


def through_hooks(blocks: list[nn.Module], x: Tensor, pack: Callable[[Tensor], Any]) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved() if callable(saved) else saved):
        return plain(blocks, x)


def on_cpu(blocks: list[nn.Module], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return plain(blocks, x)


def without_early_stop(blocks: list[nn.Module], x: Tensor) -> Tensor:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpointed(blocks, x, False)


WAYS = {
    "non-reentrant": partial(checkpointed, reentrant=False),
    "reentrant": partial(checkpointed, reentrant=True),
    "without early stop": without_early_stop,
    "nested": nested,
    "sequential": sequential,
    "on cpu": on_cpu,
    "cloned": partial(through_hooks, pack=torch.clone),
    "kept as bytes": partial(through_hooks, pack=lambda t: partial(torch.clone, t.clone())),
}


def build(p: float = 0.0) -> list[ORTModule]:
    torch.manual_seed(0)
    return [ORTModule(Block(p)) for _ in range(BLOCKS)]


def gradients(way: Callable[[list[nn.Module], Tensor], Tensor], blocks: list[nn.Module]) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    way(blocks, x).square().mean().backward()
    return [x.grad, *[p.grad for b in blocks for p in b.parameters()]]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_without(way: str) -> None:
    """Bit for bit, with dropout: the generator's state is that of the first time."""
    for p in (0.0, 0.3):
        expected = gradients(plain, build(p))
        blocks = build(p)
        assert all(torch.equal(a, b) for a, b in zip(gradients(WAYS[way], blocks), expected, strict=True))
        assert all(b.stats()["runs_live"] == 0 for b in blocks)


def between(way: Callable[[list[nn.Module], Tensor], Tensor]) -> int:
    """Bytes of the core that are held from forward to backward, beyond the output."""
    blocks, x = build(), torch.randn(ROWS, WIDTH, requires_grad=True)
    way(blocks, x).sum().backward()
    gc.collect()
    base = _C.pool_stats()["used_bytes"]
    out = way(blocks, x)
    held = _C.pool_stats()["used_bytes"] - base - out.nbytes
    out.sum().backward()
    return held


@pytest.mark.host
def test_a_checkpoint_holds_the_inputs_of_its_blocks_alone() -> None:
    without = between(plain)
    activation = ROWS * WIDTH * 4
    assert without > 10 * BLOCKS * activation
    for reentrant in (False, True):
        assert between(partial(checkpointed, reentrant=reentrant)) <= BLOCKS * activation


@pytest.mark.host
def test_what_hooks_take_away_is_not_kept() -> None:
    activation = ROWS * WIDTH * 4

    def to_numpy(t: Tensor) -> Callable[[], Tensor]:
        array = t.detach().numpy().copy()
        return lambda: torch.from_numpy(array)

    assert between(partial(through_hooks, pack=to_numpy)) <= BLOCKS * activation


def test_a_checkpoint_around_several_losses_of_changing_use() -> None:
    """The forward that runs again within a backward saves what it saved the first time."""
    eager, ours = pair(
        Function(lambda s, x: (s.a(x).square().mean(), s.b(x.tanh())), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    )
    for step in range(6):
        x = torch.randn(3, 4)
        for m in (eager, ours):
            outs = [checkpoint(m, x, use_reentrant=False) for _ in range(3)]
            sum(out[(step + i) % 2].sum() for i, out in enumerate(outs)).backward()
        assert_same_state(ours, eager)


def test_buffers_under_a_checkpoint_are_as_in_eager() -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        x = torch.randn(5, 6)
        for m in (eager, ours):
            checkpoint(m, x, use_reentrant=False).exp().sum().backward()
        assert_same_state(ours, eager)


def test_statistics_of_a_block_under_a_checkpoint_inside() -> None:
    """They are moved in the forward and where the block runs again, as in eager."""
    block = nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.ReLU())
    eager, ours = pair(Function(lambda s, x: checkpoint(s.block, x, use_reentrant=False).square().mean(), block=block))
    for rows in (2, 5, 2):
        x = torch.randn(rows, 3, 7)
        for m in (eager, ours):
            (m(x) + m(2 * x)).backward()
        assert_same_state(ours, eager)
    assert int(eager.block[1].num_batches_tracked) == 12


def test_what_a_checkpoint_inside_reads_must_stay() -> None:
    pairs = pair(Function(lambda s, x: checkpoint(s.l, x, use_reentrant=False).square().sum(), l=nn.Linear(4, 4)))
    for m in pairs:
        x = torch.randn(3, 4)
        loss = m(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_retained_graph_under_a_checkpoint() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(5, 6)
    for m in (eager, ours):
        loss = checkpoint(m, x, use_reentrant=False).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()
    assert_same_state(ours, eager)


def test_ops_that_run_in_pytorch_under_a_checkpoint() -> None:
    eager, ours = pair(Function(lambda s, x: torch.special.i0e(s.l(x)), l=nn.Linear(6, 4)))
    x = torch.randn(5, 6)
    for way in (partial(checkpointed, reentrant=False), on_cpu):
        for m in (eager, ours):
            way([m], x).square().sum().backward()
        assert_same_state(ours, eager)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_custom_functions_under_a_checkpoint(reentrant: bool) -> None:
    eager, ours = pair(Function(lambda s, x: s.o(Squared.apply(s.l(x))), l=nn.Linear(6, 4), o=nn.Linear(4, 2)))
    x = torch.randn(5, 6, requires_grad=True)
    for _ in range(2):
        for m in (eager, ours):
            checkpointed([m], x, reentrant=reentrant).square().sum().backward()
        assert_same_state(ours, eager)
    assert {r.cause for r in ours.fallback_report()} == {"a custom autograd.Function"}


def test_checkpoint_around_and_inside() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(2, 6)
    for m in (eager, ours):
        checkpoint(m, x, use_reentrant=False).sum().backward()
    assert_same_state(ours, eager)
    assert_same_step(
        *pair(Function(lambda s, x: checkpoint(s.l, x, use_reentrant=False), l=nn.Linear(4, 4))), torch.randn(2, 4)
    )


def with_a_hook(s: Function, x: Tensor) -> Tensor:
    y = s.l(x)
    y.register_hook(lambda grad: 2 * grad)
    return s.o(y.exp())


HELD: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "in place": lambda s, x: s.o(s.l(x).relu_()),
    "checkpoint": lambda s, x: checkpoint(lambda y: s.o(y.exp()), s.l(x), use_reentrant=False),
    "hook": with_a_hook,
    "custom function": lambda s, x: s.o(Squared.apply(s.l(x))),
    "vmap": lambda s, x: s.o(torch.vmap(lambda row: row.exp() * row.sum())(s.l(x))),
}


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("name", HELD)
def test_hooks_see_the_first_call_as_they_see_the_next(name: str, capture: Any) -> None:
    """Whatever else is asked while the graph is made; and a checkpoint, which counts what they see, can begin there."""
    eager = Function(HELD[name], l=nn.Linear(4, 8), o=nn.Linear(8, 3))
    ours, again = [ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture)) for _ in range(2)]
    x = torch.randn(5, 4, requires_grad=True)
    seen: list[list[tuple[int, ...]]] = []
    for _ in range(2):
        seen.append([])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen[-1].append(tuple(t.shape)) or t, lambda t: t):  # type: ignore[func-returns-value]
            ours(x).sum().backward()
    assert seen[0] == seen[1]
    for m in (eager, again):
        checkpoint(m, x, use_reentrant=False).square().sum().backward()
    assert_same_state(again, eager)


def test_saved_tensor_hooks() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(2, 6)
    for m in (eager, ours):
        with torch.autograd.graph.save_on_cpu():
            m(x).pow(2).sum().backward()
    assert_same_state(ours, eager)


@pytest.mark.parametrize("way", [on_cpu, partial(checkpointed, reentrant=False)], ids=["on cpu", "checkpoint"])
def test_losses_that_share_nothing_go_back_one_by_one(way: Callable[..., Any]) -> None:
    eager, ours = pair(Function(lambda s, x: (s.a(x).exp(), s.b(x).tanh()), a=nn.Linear(6, 4), b=nn.Linear(6, 4)))
    x = torch.randn(5, 6)
    for m in (eager, ours):
        first, second = way([m], x)
        first.sum().backward()
        second.sum().backward()
        with pytest.raises(RuntimeError):
            first.sum().backward()
    assert_same_state(ours, eager)


def test_hooked_state_is_freed_by_backward() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    x = torch.randn(512, 64)
    ours(x).sum().backward()
    gc.collect()
    base = _C.pool_stats()["used_bytes"]
    with torch.autograd.graph.save_on_cpu():
        out = ours(x)
    out.sum().backward()
    assert _C.pool_stats()["used_bytes"] - base == out.nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_draws_the_same_mask_again(reentrant: bool) -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5)))
    x = torch.randn(4, 6, requires_grad=True)
    out = checkpoint(ours, x, use_reentrant=reentrant)
    out.sum().backward()
    close(ours[0].weight.grad, ((out != 0).float() * 2).T @ x)
