"""DistributedDataParallel and fully_shard over processes that talk by gloo."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ortmodule_c import DebugOptions, ORTModule
from side_by_side import assert_ran_in_core, classifier, close, loss_of, one_of
from wrapped import Noting


class WithLoss(nn.Module):
    """Gives a loss, and what it is computed from, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.net(x)
        return {"loss": nn.functional.cross_entropy(scores, y), "logits": scores}


Made = tuple[nn.Module, list[ORTModule]]  # the model, and the wrappers in it


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def parallel(wrapped: bool) -> Made:
    model = ORTModule(classifier()) if wrapped else classifier()
    return DistributedDataParallel(model), [model] if wrapped else []


def sharded_whole(wrapped: bool) -> Made:
    model = ORTModule(classifier()) if wrapped else classifier()
    assert sharded(model) is model and isinstance(model, FSDPModule)
    return model, [model] if wrapped else []


def sharded_around(wrapped: bool) -> Made:
    model = ORTModule(classifier()) if wrapped else classifier()
    return sharded(nn.Sequential(model)), [model] if wrapped else []


def sharded_by_layer(wrapped: bool) -> Made:
    model = classifier()
    for i in (0, 2, 3):
        layer = model.get_submodule(str(i))
        model[i] = sharded(ORTModule(layer) if wrapped else layer)
    return sharded(model), [model[i] for i in (0, 2, 3)] if wrapped else []


def sharded_with_loss(wrapped: bool) -> Made:
    model = ORTModule(WithLoss()) if wrapped else WithLoss()
    return sharded(model), [model] if wrapped else []


def train(model: nn.Module, rank: int) -> list[float]:
    """Four steps on this process's share of the data, the second of accumulated gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        g = torch.Generator().manual_seed(10 * step + rank)
        last = step != 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        else:
            model.require_backward_grad_sync = last
        x, y = torch.randn(4, 6, generator=g), torch.randint(3, (4,), generator=g)
        loss = model(x, y)["loss"] if isinstance(model, WithLoss) else loss_of(model, x, y)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def process(rank: int, world: int, meeting: str) -> None:
    with one_of(world, rank, meeting):
        for way in (parallel, sharded_whole, sharded_around, sharded_by_layer, sharded_with_loss):
            (plain, _), (ours, wrappers) = way(False), way(True)
            close(train(ours, rank), train(plain, rank))
            close(whole(ours.state_dict()), whole(plain.state_dict()))
            for wrapper in wrappers:
                assert_ran_in_core(wrapper)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Noting.apply(self.first(x)))


def exchange(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    Noting.seen.append("exchange")
    return allreduce_hook(group, bucket)


class Checkpointed(nn.Module):
    """Goes through TorchDynamo, which cuts graphs for buckets unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(600, 600) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False).tanh()
        return x


def by_dynamo(rank: int, world: int, meeting: str) -> None:
    with one_of(world, rank, meeting):
        torch.manual_seed(0)
        net, x = Checkpointed(), torch.randn(6, 600)
        grads = []
        for cap in (0.5, 25):
            ours = ORTModule(copy.deepcopy(net), DebugOptions(fallback="error"))
            for model in (copy.deepcopy(net), ours):
                parallel = DistributedDataParallel(model, bucket_cap_mb=cap)
                for _ in range(2):
                    parallel.zero_grad()
                    parallel(x).square().sum().backward()
                grads.append([p.grad for p in parallel.parameters()])
            assert ours.stats()["dynamo_graphs"] and not ours.fallback_report()
        for found in grads[1:]:
            close(found, grads[0])


def overlapping(rank: int, world: int, meeting: str) -> None:
    with one_of(world, rank, meeting):
        torch.manual_seed(0)
        net, x = TwoLayers(), torch.randn(6, 6)
        grads = []
        for model in (net, ORTModule(copy.deepcopy(net))):
            parallel = DistributedDataParallel(model, bucket_cap_mb=1e-5)
            parallel.register_comm_hook(dist.group.WORLD, exchange)
            for _ in range(3):
                Noting.seen.clear()
                parallel.zero_grad()
                parallel(x + rank).square().sum().backward()
            assert Noting.seen == ["exchange", "exchange", "between", "exchange", "exchange"]
            with parallel.no_sync():
                parallel(x - rank).sum().backward()
            grads.append([p.grad for p in parallel.parameters()])
        close(*reversed(grads))


NEEDS_GLOO = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch is built without gloo")


@NEEDS_GLOO
def test_gradients_are_exchanged_beside_the_backward(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(overlapping, (2, str(tmp_path / "meeting")), nprocs=2)


@NEEDS_GLOO
@pytest.mark.filterwarnings("ignore:.*goes through TorchDynamo")
def test_graphs_by_dynamo_are_not_cut_for_buckets(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(by_dynamo, (1, str(tmp_path / "meeting")), nprocs=1)


@NEEDS_GLOO
@pytest.mark.parametrize("world", [1, 2])
def test_training(world: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(process, (world, str(tmp_path / "meeting")), nprocs=world)
