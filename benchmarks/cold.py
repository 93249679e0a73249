"""What the first step of each size costs: eager, torch.compile and ORTModule by both ways, in one run.

Each arm has its own process and meets four sizes in turn, two steps in each. Printed per size: seconds of
the first step, and in brackets how much longer it took than the second, which is what capturing and
compiling cost there.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table

from models import SMALL, WORKLOADS
from run import ARMS as ALL_ARMS
from run import Arm

ARMS = {arm: title for arm, title in ALL_ARMS.items() if arm != "tuned"}


def measure(model: str, arms: list[str], dropout: float, small: bool) -> tuple[list[str], list[list[float]]]:
    """The sizes met, and for each arm the seconds of both steps of each."""
    workers = [Arm(model, arm, dropout, small) for arm in arms]
    titles, seconds = ["first"], [[w.ask("step")["seconds"] for _ in range(2)] for w in workers]
    try:
        for k in range(len((SMALL if small else WORKLOADS)[model].sizes)):
            for w, row in zip(workers, seconds, strict=True):
                shape = w.ask(f"size {k}")["shapes"][0]
                row += [w.ask("step")["seconds"] for _ in range(2)]
            titles.append("x".join(map(str, shape)))
    finally:
        for w in workers:
            w.process.kill()
    return titles, seconds


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--quick", action="store_true", help="small models")
    a = p.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; seconds")
    for model in a.models:
        titles, rows = measure(model, a.arms, a.dropout, a.quick)
        t = Table(title=(SMALL if a.quick else WORKLOADS)[model].title)
        for name in ("", *titles):
            t.add_column(name, justify="left" if not name else "right", no_wrap=True)
        for arm, row in zip(a.arms, rows, strict=True):
            pairs = zip(row[::2], row[1::2], strict=True)
            t.add_row(ARMS[arm], *[f"{first:.2f} ({first - again:+.2f})" for first, again in pairs])
        console.print(t)


if __name__ == "__main__":
    main()
