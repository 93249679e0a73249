"""A step of AdamW over the parameters of BERT-base: FusedAdam beside torch.optim's, and this run's copy bandwidth.

The arms step in turn, so that a change of the machine's speed meets all of them alike. Printed are the median step,
the bytes that the update must move a second (parameter, gradient and two means read, all but the gradient written) as
per cent of the bandwidth of copying, and the ratio to ``torch.optim.AdamW(fused=True)``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import AdamW, Optimizer

from ceilings import copy_bandwidth
from machine import machine
from ortmodule_c.optim import FusedAdam

ARMS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "AdamW(foreach=True)": lambda p: AdamW(p, foreach=True),
    "AdamW(fused=True)": lambda p: AdamW(p, fused=True),
    "FusedAdam": FusedAdam,
}
BASE = "AdamW(fused=True)"


def shapes(scale: float) -> list[torch.Size]:
    """Of BERT-base's parameters; a `scale` below 1 makes the model narrower."""
    from transformers import BertConfig, BertForMaskedLM

    width = max(64, int(768 * scale) // 64 * 64)
    config = BertConfig(hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width)
    with torch.device("meta"):
        return [p.shape for p in BertForMaskedLM(config).parameters()]


def make(build: Callable[[list[Tensor]], Optimizer], of: list[torch.Size], dtype: torch.dtype) -> Optimizer:
    params = [torch.randn(shape).to(dtype).requires_grad_() for shape in of]
    for p in params:
        p.grad = torch.randn_like(p)
    return build(params)


def rows_of(figures: dict) -> list[tuple[str, float, float, float, float]]:
    """By arm: its name, median step, bytes a second, those over the copy bandwidth, and how many times as fast."""
    medians = {arm: statistics.median(seconds) for arm, seconds in figures["seconds"].items()}
    base = medians.get(BASE, math.nan)
    rates = {arm: figures["bytes"] / median for arm, median in medians.items()}
    return [(arm, m, rates[arm], rates[arm] / figures["copy_bandwidth"], base / m) for arm, m in medians.items()]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--steps", type=int, default=15)
    p.add_argument("--quick", action="store_true", help="a narrower model")
    p.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    a = p.parse_args()
    dtype, of = getattr(torch, a.dtype), shapes(0.25 if a.quick else 1.0)
    moved = 7 * dtype.itemsize * sum(map(torch.Size.numel, of))
    optimizers = {arm: make(ARMS[arm], of, dtype) for arm in a.arms}
    seconds: dict[str, list[float]] = {arm: [] for arm in a.arms}
    copies: list[float] = []
    for step in range(a.steps + 1):
        copies.append(copy_bandwidth(seconds=0.1))
        for arm, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            if step:  # the first makes the states
                seconds[arm].append(time.perf_counter() - begin)
    bandwidth = statistics.median(copies)
    figures = {"machine": machine(), "dtype": a.dtype, "bytes": moved, "copy_bandwidth": bandwidth, "seconds": seconds}
    t = Table(title=f"{len(of)} tensors, {moved / 7 / dtype.itemsize / 1e6:.0f} M elements of {a.dtype}")
    for name in ("", "step, ms", "min", "GB/s", "of copying", f"to {BASE}"):
        t.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for arm, median, rate, share, ratio in rows_of(figures):
        least = f"{min(seconds[arm]) * 1e3:.1f}"
        t.add_row(arm, f"{median * 1e3:.1f}", least, f"{rate / 1e9:.1f}", f"{100 * share:.0f} %", f"{ratio:.2f}x")
    console = Console(width=110)
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; copying {bandwidth / 1e9:.1f} GB/s")
    console.print(t)
    if a.json:
        a.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
