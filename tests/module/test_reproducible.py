"""The same bits from run to run, from process to process and for any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import ORTModule


class Everything(nn.Module):
    """Convolution, batch norm, embedding, attention, dropout and products large enough for several threads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.words = nn.Embedding(100, 32)
        self.qkv = nn.Linear(32, 96)
        self.wide = nn.Sequential(
            nn.LayerNorm(32), nn.Linear(32, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 32)
        )
        self.head = nn.Linear(32, 1000)

    def forward(self, images: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.down(self.conv(images)).flatten(2).transpose(1, 2) + self.words(ids)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).transpose(1, 2).flatten(2)
        x = (x + self.wide(x)).softmax(-1).cumsum(1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + x.var() + x.logsumexp((0, 1)).sum()


def trained() -> list[Tensor]:
    """Parameters, buffers and losses after three steps."""
    torch.manual_seed(0)
    module = Everything()
    model = ORTModule(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, ids = torch.randn(8, 3, 32, 32), torch.randint(0, 100, (8, 64))
    losses = []
    for _ in range(3):
        loss = model(images, ids, torch.randint(0, 1000, (8, 64)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert not model.fallback_report()
    return [*losses, *module.state_dict().values()]


def test_the_number_of_threads_changes_no_bit() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = trained()
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, trained(), first)), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


PROCESS = """
import hashlib, sys
sys.path.insert(0, {folder!r})
from test_reproducible import trained
print(hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in trained())).hexdigest())
"""


@pytest.mark.long
def test_processes_agree_bit_for_bit() -> None:
    script = PROCESS.format(folder=os.path.dirname(__file__))
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"OMP_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
        for threads in ("1", "2", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("inner", [1, 3, 8])
@pytest.mark.parametrize("outer", [1, 2, 8])
def test_a_backward_of_fewer_threads_than_forward(outer: int, inner: int) -> None:
    """Memory for sums is that of the plan, whose threads are those of forward."""

    class Picked(nn.Module):
        def forward(self, table: Tensor, ids: Tensor) -> Tensor:
            return table.index_select(1, ids)

    torch.manual_seed(0)
    table = torch.randn(outer, 3001, inner, dtype=torch.bfloat16, requires_grad=True)
    ids, wrapped = torch.randint(3001, (40,)), ORTModule(Picked())
    before, found = torch.get_num_threads(), []
    try:
        for threads in ((2, 2), (2, 1), (1, 2), (3, 1)):
            table.grad = None
            torch.set_num_threads(threads[0])
            y = wrapped(table, ids)
            torch.set_num_threads(threads[1])
            y.backward(torch.ones_like(y))
            found.append(table.grad)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    table.grad = None
    table.index_select(1, ids).backward(torch.ones_like(y))
    assert torch.equal(found[0], table.grad)
