"""Training steps under budgets of memory: how large their arenas are, and how long they take.

One model in one process, wrapped once for each budget; the wrappers step in turn (forward and backward, no optimizer),
so that a change of the machine's speed meets all of them alike. Printed are the arena, which is what a step takes
beyond its inputs, results and gradients, and the median step, with ratios to the wrapper without a budget. What the
budgets give is compared with that bit by bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gpu_models import SCALES
from machine import machine
from ortmodule_c import ORTModule

PRECISIONS = ["fp32", "bf16"]


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Seconds of a forward and a backward, of the same dropout each time."""
    model.zero_grad()
    torch.manual_seed(0)
    begin = time.perf_counter()
    model(*inputs).backward()
    return time.perf_counter() - begin


def compare(model: nn.Module, inputs: tuple[Tensor, ...], precision: str, budgets: list[float], steps: int) -> list:
    """Of no budget, and then of each: arena in bytes, seconds of steps."""
    arms = [ORTModule(model, precision=precision, memory_budget=b) for b in (None, *budgets)]
    seconds: list[list[float]] = [[] for _ in arms]
    want: list[Tensor] = []
    for round_number in range(steps + 2):
        for arm, taken in zip(arms, seconds, strict=True):
            taken.append(step(arm, inputs))
            if round_number == 0:
                got = [p.grad for p in model.parameters() if p.grad is not None]
                want = want or got
                if not all(map(torch.equal, got, want)):
                    raise SystemExit("gradients are other bits than without a budget")
    return [(int(arm.stats()["arena_bytes"]), taken[2:]) for arm, taken in zip(arms, seconds, strict=True)]


HEAD = ["memory_budget", "arena, MiB", "of none", "step, ms", "of none"]


def rows_of(arms: list[dict]) -> list[list[str]]:
    """Cells of a table of the arms of one model, the first of which has no budget."""
    none, rows = arms[0], []
    for arm in arms:
        # Ratios of steps that follow each other, so that what slows both down counts for neither.
        ratio = statistics.median(x / y for x, y in zip(arm["seconds"], none["seconds"], strict=True))
        arena = f"{arm['arena'] / 2**20:.0f}", f"{arm['arena'] / none['arena']:.2f}"
        rows.append([arm["budget"], *arena, f"{statistics.median(arm['seconds']) * 1e3:.0f}", f"{ratio:.2f}"])
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scale", choices=SCALES, default="full", help="sizes of the models")
    p.add_argument("--models", nargs="+", default=["gpt2", "bert", "resnet18"], metavar="NAME")
    p.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    p.add_argument("--budgets", nargs="+", type=float, default=[0.75, 0.5, 0.25, 0.0], metavar="SHARE")
    p.add_argument("--steps", type=int, default=7)
    p.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    a = p.parse_args()
    console = Console(width=110)
    console.print(machine())
    budgets: dict[str, list[dict]] = {}
    for name in a.models:
        workload = SCALES[a.scale][name]
        for precision in a.precisions:
            torch.manual_seed(0)
            inputs = workload.data(torch.Generator().manual_seed(1))
            arms = compare(workload.build(0.1).train(), inputs, precision, a.budgets, a.steps)
            names = ["None", *map(str, a.budgets)]
            figures = [{"budget": n, "arena": b, "seconds": s} for n, (b, s) in zip(names, arms, strict=True)]
            title = f"{workload.title}, {precision}"
            budgets[title] = figures
            table = Table(title=title)
            for heading in HEAD:
                table.add_column(heading, justify="right")
            for row in rows_of(figures):
                table.add_row(*row)
            console.print(table)
    if a.json:
        a.json.write_text(json.dumps({"machine": machine(), "budgets": budgets}, indent=1))


if __name__ == "__main__":
    main()
