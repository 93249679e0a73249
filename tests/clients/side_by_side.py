"""A small model and its data, and how one that was trained by a library is compared with one trained without us."""

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ortmodule_c import ORTModule


def library(name: str) -> ModuleType:
    """The library, or the reason to skip the tests that need it: what it raises may be any exception."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)


def classifier() -> nn.Module:
    """The same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def batches() -> DataLoader[Any]:
    """Six of four, the same at each call."""
    g = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(24, 6, generator=g), torch.randint(3, (24,), generator=g)), batch_size=4
    )


def gpt2() -> nn.Module:
    """A language model of two layers without dropout, with the same weights at each call."""
    transformers = library("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **ends, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def close(ours: Any, plain: Any, dtype: torch.dtype = torch.float32) -> None:
    """Losses, weights or state dicts after some steps of an optimizer; `dtype` is that of the products in between."""
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]
    if isinstance(plain, Mapping):
        assert list(ours) == list(plain)
        ours, plain = list(ours.values()), list(plain.values())
    if not isinstance(plain, Sequence):
        ours, plain = [ours], [plain]
    for got, want in zip(map(torch.as_tensor, ours), map(torch.as_tensor, plain), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


@contextlib.contextmanager
def one_of(world: int, rank: int, meeting: str) -> Iterator[None]:
    """A process of `world` that talk by gloo, which ends with what is done within, unless that raises."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    yield
    dist.barrier()
    dist.destroy_process_group()
    # fully_shard keeps gloo's threads. One that lets go of a tensor while the interpreter ends aborts the process.
    os._exit(0)


def assert_ran_in_core(model: nn.Module, *, ops_in_pytorch: Sequence[str] = ()) -> None:
    """It has graphs, and nothing ran in PyTorch but these ops."""
    assert isinstance(model, ORTModule) and model.stats()["graphs"] >= 1
    assert {r.name for r in model.fallback_report()} <= set(ops_in_pytorch), model.fallback_report()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)
