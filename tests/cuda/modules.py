"""Modules of PyTorch on the emulated GPU: ``pytest --gpu tests/cuda/modules.py``, which test_devices.py calls.

Their tensors are the host's, copied at a session's border as those of calls back to PyTorch are.
"""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import ORTModule


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.first(x)), 0.0)).tanh()


class HighestSoFar(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cummax(-1).values)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Block(nn.Module):
    """What a transformer has of every kind of kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 6)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(12, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(x + y).log_softmax(-1)


class Residual(nn.Module):
    """What a ResNet has of every kind of kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(6)
        self.body, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.down, self.head = nn.Conv2d(6, 8, 1, stride=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(self.stem(x)).relu(), 3, stride=2, padding=1)
        x = self.down((x + self.second(self.body(x))).relu())
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class PartlyCast(nn.Module):
    """Under autocast, but for one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exact = nn.Conv1d(2, 3, 3), nn.Conv1d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.exact(x.float())


def assert_step_is_pytorchs(module: nn.Module, wrapped: ORTModule, x: Tensor) -> None:
    for _ in range(2):
        steps = []
        for m in (wrapped, module):
            module.zero_grad()
            y = m(x)
            y.square().sum().backward()
            steps.append([y.detach(), *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(*steps)


def test_a_step_runs_wholly_there(gpu: Gpu) -> None:
    module = Mixer()
    wrapped, before = ORTModule(module), gpu.counted().launches
    assert_step_is_pytorchs(module, wrapped, torch.randn(4, 5))
    assert not wrapped.fallback_report() and gpu.counted().launches > before


def test_steps_that_come_again_are_graphs_unless_pytorch_is_called(gpu: Gpu) -> None:
    for module, forward_repeats in ((Mixer(), True), (HighestSoFar(), False)):
        wrapped = ORTModule(module)
        for _ in range(4):
            assert_step_is_pytorchs(module, wrapped, torch.randn(4, 5))  # two steps
        assert (wrapped.stats()["replays"] > 8) == forward_repeats


def test_a_block_of_a_transformer_runs_wholly_there(gpu: Gpu) -> None:
    module = Block()
    wrapped = ORTModule(module)
    assert_step_is_pytorchs(module, wrapped, torch.randn(2, 9, 12))
    assert not wrapped.fallback_report()


def test_an_op_without_a_kernel_runs_in_pytorch_and_the_report_says_so(gpu: Gpu) -> None:
    module = HighestSoFar()
    wrapped, before = ORTModule(module), gpu.counted().launches
    assert_step_is_pytorchs(module, wrapped, torch.randn(4, 5))
    (record,) = wrapped.fallback_report()
    assert "cummax" in record.name and gpu.counted().launches > before


def test_a_recurrent_layer_whose_cells_have_no_kernel_runs_in_pytorch_as_a_whole(gpu: Gpu) -> None:
    module = Recurrent(5, 4)
    wrapped = ORTModule(module)
    assert_step_is_pytorchs(module, wrapped, torch.randn(4, 2, 5))
    (record,) = wrapped.fallback_report()
    assert record.name == "aten.lstm.input" and "LstmCells: cuda has no kernel" in record.cause


def test_a_residual_network_runs_wholly_there(gpu: Gpu) -> None:
    module = Residual()
    wrapped, before = ORTModule(module), gpu.counted().launches
    assert_step_is_pytorchs(module, wrapped, torch.randn(3, 3, 21, 19))
    assert not wrapped.fallback_report() and gpu.counted().launches > before


def test_autocast_casts_nothing_of_what_kernels_that_are_pytorchs_are_given(gpu: Gpu) -> None:
    module = PartlyCast()
    wrapped = ORTModule(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want = wrapped(torch.ones(2, 2, 9)), module(torch.ones(2, 2, 9))
        y.sum().backward()
    assert y.dtype == torch.float32 and not wrapped.fallback_report()
    torch.testing.assert_close(y, want, rtol=2**-7, atol=2**-7)


def test_memory_that_runs_out_is_the_users_error_and_no_reason_to_run_in_pytorch(gpu: Gpu) -> None:
    module = Mixer()
    wrapped = ORTModule(module)
    assert_step_is_pytorchs(module, wrapped, torch.randn(4, 5))
    gpu.fail(0, b"cuMemAlloc_v2", 2)
    wrapped(torch.randn(7001, 5))  # the graphs of the steps before have made room
    gpu.fail(0, b"cuMemAlloc_v2", 2)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        wrapped(torch.randn(9001, 5))
    gpu.fail(-1, None, 0)
    for rows in (4, 9001):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(wrapped(x), module(x))
    assert not wrapped.fallback_report()
