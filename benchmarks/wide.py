"""Ordinary models, wrapped and plain in turn in one process: how long eager takes over how long ORTModule does.

For each dtype a step of training (forward, backward, AdamW on both sides) and one of evaluation
(``eval()``, ``no_grad``). bf16 is autocast. What runs in PyTorch is named.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from machine import machine
from ortmodule_c import ORTModule
from wide_models import EXAMPLES, Example

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
MODES = ("train", "eval")


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def stepper(net: nn.Module, inputs: dict[str, Tensor], mode: str, dtype: torch.dtype | None) -> Callable[[], float]:
    """One step of `net`, a function that returns its loss."""
    net.train(mode == "train")
    if mode == "eval":

        def evaluate() -> float:
            with torch.no_grad(), autocast(dtype):
                return float(net(**inputs))

        return evaluate
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def train() -> float:
        with autocast(dtype):
            loss = net(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return train


def in_turn(steps: list[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Seconds of each call of each step, called in turn for that long altogether after two rounds."""
    for step in steps * 2:
        step()
    taken: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[0]) < 3:
        for step, times in zip(steps, taken, strict=True):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
    return taken


def compare(example: Example, mode: str, dtype: torch.dtype | None, seconds: float) -> dict[str, object] | None:
    """Median seconds of eager and of ours, and what of ours runs in PyTorch; None if eager raises."""
    torch.manual_seed(0)
    plain = example.build()
    wrapped = ORTModule(copy.deepcopy(plain))
    inputs = example.inputs(torch.Generator().manual_seed(1))
    try:
        stepper(plain, inputs, mode, dtype)()
    except RuntimeError:
        return None
    eager, ours = in_turn([stepper(net, inputs, mode, dtype) for net in (plain, wrapped)], seconds)
    fallen = sorted({record.name.rpartition("site-packages/")[2] for record in wrapped.fallback_report()})
    return {"eager": statistics.median(eager), "ours": statistics.median(ours), "in_pytorch": fallen}


def ratio_of(cell: dict[str, float] | None) -> float | None:
    return None if cell is None else cell["eager"] / cell["ours"]


def geometric_mean(ratios: Iterable[float | None]) -> float:
    return math.exp(statistics.fmean(math.log(r) for r in ratios if r is not None))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=EXAMPLES, default=list(EXAMPLES), metavar="NAME")
    p.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    p.add_argument("--seconds", type=float, default=2.0, help="of each cell of the table")
    p.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    a = p.parse_args()
    warnings.simplefilter("ignore")
    console = Console()
    cells = [(dtype, mode) for dtype in a.dtypes for mode in a.modes]
    table = Table(title="eager / ORTModule, seconds of a step")
    for column in ("", "kind", *(f"{dtype} {mode}" for dtype, mode in cells), "in PyTorch"):
        table.add_column(column, justify="right" if column.startswith(tuple(DTYPES)) else "left")
    figures: dict[str, dict[str, dict | None]] = {}
    for name in a.models:
        row = figures[name] = {}
        for dtype, mode in cells:
            row[f"{dtype} {mode}"] = compare(EXAMPLES[name], mode, DTYPES[dtype], a.seconds)
            gc.collect()
        fallen = sorted({op for cell in row.values() if cell for op in cell["in_pytorch"]})
        ratios = ["eager raises" if ratio is None else f"{ratio:.2f}" for ratio in map(ratio_of, row.values())]
        print(f"{name}: {' '.join(ratios)} {' '.join(fallen)}", flush=True)
        table.add_row(name, EXAMPLES[name].kind, *ratios, ", ".join(fallen))
        if a.json:  # of all models so far: a run that is stopped leaves them
            result = {"machine": machine(), "kinds": {of: EXAMPLES[of].kind for of in figures}, "figures": figures}
            a.json.write_text(json.dumps(result, indent=1) + "\n")
    keys = [f"{dtype} {mode}" for dtype, mode in cells]
    means = [geometric_mean([ratio_of(row[key]) for row in figures.values()]) for key in keys]
    table.add_section()
    table.add_row("geometric mean", "", *(f"{mean:.2f}" for mean in means), "")
    console.print(table)


if __name__ == "__main__":
    main()
