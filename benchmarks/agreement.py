"""Ten AdamW steps of the benchmark models, dropout 0: how far ORTModule is from eager in fp32.

Rounding grows where a ReLU decides between two nearly equal numbers and where Adam divides by a
small gradient, so PyTorch is measured against itself too: eager in fp64, and eager in fp32 with
other convolution kernels (oneDNN off). A distance is meaningful beside those two.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from models import SMALL, WORKLOADS
from ortmodule_c import ORTModule


@dataclass
class Trace:
    """What a training run leaves to compare: losses, gradients of the first step, buffers after it."""

    losses: list[float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def exact(t: Tensor) -> Tensor:
    return t.detach().to(torch.float64, copy=True)


def train(model: nn.Module, inputs: tuple[Tensor, ...], steps: int = 10, lr: float = 1e-4) -> Trace:
    """Train `model` on the same `inputs` for `steps` steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    trace = Trace([], {}, {})
    for step in range(steps):
        loss = model(*inputs)
        loss.backward()
        if step == 0:
            trace.gradients = {n: exact(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            trace.buffers = {n: exact(b) for n, b in model.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(loss.item())
    return trace


def loss_distance(a: Trace, reference: Trace) -> float:
    """Largest relative difference of a step's loss."""
    return max(abs(x - y) / abs(y) for x, y in zip(a.losses, reference.losses, strict=True))


def gradient_distances(a: Trace, reference: Trace) -> dict[str, float]:
    """Per parameter, the largest difference over the largest element.

    A gradient that is zero in exact arithmetic (the bias of attention keys, a bias before a batch
    norm) is rounding noise, so no element counts as less than a thousandth of the largest of all.
    """
    assert a.gradients.keys() == reference.gradients.keys()
    floor = 1e-3 * max(float(g.abs().max()) for g in reference.gradients.values())
    return {
        name: float((a.gradients[name] - g).abs().max()) / max(float(g.abs().max()), floor)
        for name, g in reference.gradients.items()
    }


def buffer_distance(a: Trace, reference: Trace) -> float:
    """Largest difference of a buffer's element over its buffer's largest; 0 without buffers."""
    assert a.buffers.keys() == reference.buffers.keys()
    return max(
        (
            float((a.buffers[name] - b).abs().max()) / max(float(b.abs().max()), 1e-30)
            for name, b in reference.buffers.items()
            if b.numel()
        ),
        default=0.0,
    )


def fp64(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def traces(model: nn.Module, inputs: tuple[Tensor, ...], steps: int, lr: float) -> Iterator[tuple[str, Trace]]:
    """Train copies of `model` one way after the other, eager first."""
    yield "eager", train(copy.deepcopy(model), inputs, steps, lr)
    yield "ORTModule", train(ORTModule(copy.deepcopy(model)), inputs, steps, lr)
    with torch.backends.mkldnn.flags(enabled=False):
        other = train(copy.deepcopy(model), inputs, steps, lr)
    yield "eager, oneDNN off", other
    yield "eager, fp64", train(copy.deepcopy(model).double(), fp64(inputs), steps, lr)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--quick", action="store_true", help="small models")
    a = p.parse_args()
    warnings.filterwarnings("ignore", message="TF32")
    console = Console()
    for name in a.models:
        work = (SMALL if a.quick else WORKLOADS)[name]
        torch.manual_seed(a.seed)
        model = work.build(0.0).train()
        inputs = work.data(torch.Generator().manual_seed(a.seed + 1))
        table = Table(title=f"{work.title}, {a.steps} steps, lr {a.lr:g}, seed {a.seed}: distance from eager")
        for column in ("", "loss", "gradients of step one", "of them over 1e-3", "buffers"):
            table.add_column(column, justify="left" if not column else "right")
        runs = traces(model, inputs, a.steps, a.lr)
        _, eager = next(runs)
        for arm, trace in runs:
            distances = gradient_distances(trace, eager)
            table.add_row(
                arm,
                f"{loss_distance(trace, eager):.1e}",
                f"{max(distances.values()):.1e}",
                f"{sum(d > 1e-3 for d in distances.values())} / {len(distances)}",
                f"{buffer_distance(trace, eager):.1e}",
            )
        console.print(table)


if __name__ == "__main__":
    main()
