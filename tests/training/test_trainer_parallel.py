"""The ORTTrainer of ``ortmodule_c.training`` in several processes, beside one that has all the data."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trained import batch

from ortmodule_c.training import ORTTrainer, ORTTrainerOptions, optim
from side_by_side import one_of

WORLD = 2
DESCRIPTION = {
    "inputs": [("input", ["batch", 7]), ("y", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 5])],
}
WAYS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "sgd": (optim.SGDConfig(lr=0.1), {}, 1),
    "adam, later": (optim.AdamConfig(lr=0.01), {"allreduce_post_accumulation": True}, 2),
    "adam, at once": (optim.AdamConfig(lr=0.01, max_norm_clip=0.1), {}, 2),
    "adam, shared": (
        optim.AdamConfig([{"params": ["0.weight"], "lambda_coef": 0.1}], lr=0.01, max_norm_clip=0.1),
        {"deepspeed_zero_optimization": {"stage": 1}},
        1,
    ),
    "lamb, shared": (optim.LambConfig(lr=0.01), {"deepspeed_zero_optimization": {"stage": 1}}, 2),
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 13), nn.LayerNorm(13), nn.Linear(13, 5))
    model.tied = model[2].weight  # of two names
    model.unused = nn.Parameter(torch.ones(3))
    return model


def made(way: str, rank: int = 0, world: int = 1, seed: int = 0) -> tuple[nn.Module, ORTTrainer]:
    config, parallel, accumulate = WAYS[way]
    options = {
        "batch": {"gradient_accumulation_steps": accumulate},
        "distributed": {**parallel, "world_rank": rank, "world_size": world},
    }
    model = net(seed)
    return model, ORTTrainer(model, DESCRIPTION, config, nn.CrossEntropyLoss(), ORTTrainerOptions(options))


def part(step: int, rank: int, world: int) -> tuple[Tensor, ...]:
    return tuple(t[rank::world] for t in batch(step, 8))


def process(rank: int, world: int, meeting: str, folder: str) -> None:
    with one_of(world, rank, meeting):
        for way, (_, parallel, _) in WAYS.items():
            model, trainer = made(way, rank, world, seed=rank)  # the weights of rank 0 are everybody's
            alone, other = made(way)
            for step in range(4):
                trainer.train_step(*part(step, rank, world))
                other.train_step(*part(step, 0, 1))
            for ours, plain in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
            shared = "deepspeed_zero_optimization" in parallel
            path = f"{folder}/{way}.{rank}"
            trainer.save_checkpoint(path, {"rank": rank})
            dist.barrier()
            again, later = made(way, rank, world, seed=5)
            paths = [f"{folder}/{way}.{r}" for r in range(world)] if shared else [path]
            assert later.load_checkpoint(*paths)["rank"] == (0 if shared else rank)
            for t in (trainer, later):
                for step in range(4, 6):
                    t.train_step(*part(step, rank, world))
            for a, b in zip(model.parameters(), again.parameters(), strict=True):
                assert torch.equal(a, b), way
        with pytest.raises(ValueError, match=f"world_rank is {1 - rank}, and this process is rank {rank}"):
            made("sgd", 1 - rank, world)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch is built without gloo")
def test_processes_train_as_one_does(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(process, (WORLD, str(tmp_path / "meeting"), str(tmp_path)), nprocs=WORLD)
