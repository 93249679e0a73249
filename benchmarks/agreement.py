"""Ten AdamW steps of the benchmark models, dropout 0: how far ORTModule is from eager, in fp32 or under autocast.

Rounding grows where a ReLU decides between two nearly equal numbers and where Adam divides by a
small gradient, so PyTorch is measured against itself too: eager in fp64, and eager in fp32 with
other convolution kernels (oneDNN off, on the CPU). A distance is meaningful beside those two. The exit status tells
whether losses are as near as `BOUNDS` says.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gpu_models import SCALES
from models import WORKLOADS
from ortmodule_c import ORTModule
from worker import DTYPES, allow_tf32

# Largest relative difference of a loss from eager's, by dtype.
BOUNDS = {"fp32": 1e-3, "tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}


@dataclass
class Trace:
    """What a training run leaves to compare: losses, gradients of the first step, buffers after it."""

    losses: list[float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def exact(t: Tensor) -> Tensor:
    return t.detach().to(torch.float64, copy=True)


def train(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    steps: int = 10,
    lr: float = 1e-4,
    dtype: torch.dtype | None = None,
) -> Trace:
    """Train `model` on the same `inputs` for `steps` steps of AdamW, under autocast to a `dtype` if there is one."""
    device = inputs[0].device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    trace = Trace([], {}, {})
    for step in range(steps):
        with contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype):
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


def traces(
    model: nn.Module, inputs: tuple[Tensor, ...], steps: int, lr: float, dtype: torch.dtype | None
) -> Iterator[tuple[str, Trace]]:
    """Train copies of `model` one way after the other, eager first."""
    yield "eager", train(copy.deepcopy(model), inputs, steps, lr, dtype)
    yield "ORTModule", train(ORTModule(copy.deepcopy(model)), inputs, steps, lr, dtype)
    if inputs[0].device.type == "cpu":
        with torch.backends.mkldnn.flags(enabled=False):
            other = train(copy.deepcopy(model), inputs, steps, lr, dtype)
        yield "eager, oneDNN off", other
    yield "eager, fp64", train(copy.deepcopy(model).double(), fp64(inputs), steps, lr)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    p.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cpu", help="cuda, cuda:1: on a GPU")
    p.add_argument("--scale", choices=SCALES, default="full", help="sizes of the models")
    p.add_argument("--quick", action="store_true", help="small models")
    p.add_argument("--json", type=Path, metavar="PATH", help="write the distances of losses there")
    a = p.parse_args()
    warnings.filterwarnings("ignore", message="TF32")
    console = Console()
    found: dict[str, dict[str, float]] = {}
    far = []
    for name, dtype in ((name, dtype) for name in a.models for dtype in a.dtypes):
        work = SCALES["small" if a.quick else a.scale][name]
        allow_tf32(dtype == "tf32")
        torch.manual_seed(a.seed)
        model = work.build(0.0).train().to(a.device)
        inputs = tuple(t.to(a.device) for t in work.data(torch.Generator().manual_seed(a.seed + 1)))
        title = f"{work.title}, {dtype}, {a.steps} steps, lr {a.lr:g}, seed {a.seed}"
        table = Table(title=f"{title}: distance from eager")
        for column in ("", "loss", "gradients of step one", "of them over 1e-3", "buffers"):
            table.add_column(column, justify="left" if not column else "right")
        runs = traces(model, inputs, a.steps, a.lr, DTYPES[dtype])
        _, eager = next(runs)
        losses = found[f"{name} {dtype}"] = {}
        for arm, trace in runs:
            distances = gradient_distances(trace, eager)
            losses[arm] = loss_distance(trace, eager)
            table.add_row(
                arm,
                f"{losses[arm]:.1e}",
                f"{max(distances.values()):.1e}",
                f"{sum(d > 1e-3 for d in distances.values())} / {len(distances)}",
                f"{buffer_distance(trace, eager):.1e}",
            )
        console.print(table)
        if not losses["ORTModule"] <= BOUNDS[dtype]:  # nor is NaN
            far.append(title)
    if a.json:
        a.json.write_text(json.dumps({"losses": found, "bounds": BOUNDS}, indent=1) + "\n")
    if far:
        raise SystemExit(f"losses are too far from eager's: {'; '.join(far)}")


if __name__ == "__main__":
    main()
