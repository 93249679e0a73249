"""What the first step of each size costs: eager, torch.compile and ORTModule by both ways.

Each arm trains each model in a fresh process, one after the other, and meets three sizes in turn. Printed is
the first step at each: seconds by the clock / of all processors, compilers that it starts among them. What an
arm imports when it is first called counts. One that takes too long is ended. Last comes a table in Markdown, in
seconds of all processors over those of ORTModule's very first step; `--write` puts it into docs/cold.md too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gpu_models import SCALES
from machine import machine
from models import WORKLOADS
from run import Worker
from worker import ARMS as ALL_ARMS

HERE = Path(__file__).parent
ARMS = ("eager", "compile", "ours", "second")
Step = tuple[float, float]  # seconds by the clock, of all processors
SIZES = ("first size", "second", "third")
HEAD = """# What the first step of each size costs

Written by `benchmarks/cold.py --write`; models with all layers, but narrow ones. Seconds of all processors, compilers
included, over those of ORTModule's very first step of the same model. ORTModule by TorchDynamo is the second way, for
what `torch.export` refuses; these four models take the first.

On {0} the first steps of ORTModule took, by the clock, {1}.

"""


def first_steps(model: str, arm: str, dropout: float, scale: str, limit: float) -> list[Step | str]:
    """The first step of each size; what was not reached in time is said, or not there."""
    steps: list[Step | str] = []
    with tempfile.TemporaryDirectory() as cache:
        worker = Worker(model, arm, dropout, scale, TORCHINDUCTOR_CACHE_DIR=cache)
        timer = threading.Timer(limit, worker.kill)
        timer.start()
        try:
            worker.ready()
            for k in range(len(SIZES)):
                if k:
                    worker.ask(f"size {k - 1}")
                answer = worker.ask("step")
                worker.ask("step")
                steps.append((answer["seconds"], answer["processor"]))
        except (RuntimeError, BrokenPipeError):
            steps.append(f"not in {limit:.0f} s" if worker.process.wait() < 0 else "failed")
        finally:
            timer.cancel()
            worker.kill()
            worker.process.wait()
    return steps


def cells(steps: list[Step | str], text: Callable[[Step], str]) -> list[str]:
    """A row of a table."""
    row = [step if isinstance(step, str) else text(step) for step in steps]
    return row + [""] * (len(SIZES) - len(row))


def markdown(found: dict[str, dict[str, list[Step | str]]], scale: str) -> str:
    """All in multiples of ORTModule's first step."""
    lines = ["| model | | " + " | ".join(SIZES) + " |", "|---|---|" + "---:|" * len(SIZES)]
    for model, arms in found.items():
        first = arms.get("ours", ["failed"])[0]
        unit = None if isinstance(first, str) else max(first[1], 0.01)
        for arm, steps in arms.items():
            row = cells(steps, lambda step, u=unit: f"{step[1]:.2f} s" if u is None else f"{step[1] / u:.2f}")
            lines.append(f"| {SCALES[scale][model].title} | {ALL_ARMS[arm].name} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def seconds(found: dict[str, dict[str, list[Step | str]]], scale: str) -> str:
    """What ORTModule's first steps took by the clock."""
    told = []
    for model, arms in found.items():
        first = arms.get("ours", ["failed"])[0]
        name = SCALES[scale][model].title.split()[0].rstrip(",")
        told.append(f"{first if isinstance(first, str) else f'{first[0]:.1f} s'} ({name})")
    return ", ".join(told)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--scale", choices=SCALES, default="deep", help="deep: all layers, but narrow ones (default)")
    p.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for each model by each arm")
    p.add_argument("--write", action="store_true", help="the table in Markdown into docs/cold.md")
    a = p.parse_args()
    found: dict[str, dict[str, list[Step | str]]] = {}
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; seconds / of all processors")
    for model in a.models:
        t = Table(title=SCALES[a.scale][model].title)
        for name in ("", *SIZES):
            t.add_column(name, justify="left" if not name else "right", no_wrap=True)
        for arm in a.arms:
            steps = first_steps(model, arm, a.dropout, a.scale, a.limit)
            found.setdefault(model, {})[arm] = steps
            t.add_row(ALL_ARMS[arm].name, *cells(steps, lambda step: f"{step[0]:.2f} / {step[1]:.2f}"))
        console.print(t)
    table = markdown(found, a.scale)
    print(table)
    if a.write:
        head = HEAD.format(machine(), seconds(found, a.scale))
        (HERE.parent / "docs" / "cold.md").write_text(head + table)


if __name__ == "__main__":
    main()
