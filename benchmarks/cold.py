"""What the first step of each size costs: eager, torch.compile and ORTModule by both ways.

Each arm trains each model in a fresh process, one after the other, and meets three sizes in turn. Printed is
the first step at each: seconds by the clock / of all processors, compilers that it starts among them. What an
arm imports when it is first called counts. One that takes too long is ended.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading

import torch
from rich.console import Console
from rich.table import Table

from models import SCALES, WORKLOADS
from run import ARMS as ALL_ARMS
from run import Arm

ARMS = {arm: title for arm, title in ALL_ARMS.items() if arm != "tuned"}
SIZES = ("first size", "second", "third")


def first_steps(model: str, arm: str, dropout: float, scale: str, limit: float) -> list[str]:
    """The first step of each size; what was not reached in time is not there."""
    cells: list[str] = []
    with tempfile.TemporaryDirectory() as cache:
        worker = Arm(model, arm, dropout, scale, TORCHINDUCTOR_CACHE_DIR=cache)
        timer = threading.Timer(limit, worker.kill)
        timer.start()
        try:
            for k in range(len(SIZES)):
                if k:
                    worker.ask(f"size {k - 1}")
                answer = worker.ask("step")
                worker.ask("step")
                cells.append(f"{answer['seconds']:.2f} / {answer['processor']:.2f}")
        except (RuntimeError, BrokenPipeError):
            cells.append(f"not in {limit:.0f} s" if worker.process.wait() < 0 else "failed")
        finally:
            timer.cancel()
            worker.kill()
            worker.process.wait()
    return cells + [""] * (len(SIZES) - len(cells))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--scale", choices=SCALES, default="deep", help="deep: all layers, but narrow ones (default)")
    p.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for each model by each arm")
    a = p.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; seconds / of all processors")
    for model in a.models:
        t = Table(title=SCALES[a.scale][model].title)
        for name in ("", *SIZES):
            t.add_column(name, justify="left" if not name else "right", no_wrap=True)
        for arm in a.arms:
            t.add_row(ARMS[arm], *first_steps(model, arm, a.dropout, a.scale, a.limit))
        console.print(t)


if __name__ == "__main__":
    main()
