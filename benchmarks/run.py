"""Whole training steps: eager, eager with tuned malloc, torch.compile, ORTModule, and our backend of torch.compile.

Each arm has its own process; the parent lets them step in turn, so that a change of the machine's
speed meets all of them alike. Printed per model: median step and its ratio to eager, loss of the
last step, first step, peak memory over the loaded model, and per cent of the floor that this
run's measured GEMM and copy rates allow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ceilings import copy_bandwidth, gemm_flops
from models import SCALES, WORKLOADS

HERE = Path(__file__).parent
# glibc told never to give memory back, so that eager pays no page faults after its first step.
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
ARMS = {
    "eager": "eager",
    "tuned": "eager, tuned malloc",
    "compile": "torch.compile",
    "ours": "ORTModule",
    "dynamo": "torch.compile, our backend",
}


@dataclass
class Figures:
    """What one arm did on one model; seconds and bytes."""

    model: str
    arm: str
    first: float = 0.0
    steps: list[float] = field(default_factory=list)
    loss: float = 0.0
    peak: int = 0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.steps) if self.steps else self.first


class Arm:
    """A worker process, in a group of its own with all that it starts."""

    def __init__(self, model: str, arm: str, dropout: float, scale: str, **variables: str) -> None:
        command = [sys.executable, str(HERE / "worker.py"), "--model", model, "--arm", arm, "--dropout", str(dropout)]
        env = {**os.environ, **(TUNED if arm == "tuned" else {}), **variables}
        self.figures = Figures(model, arm)
        self.process = subprocess.Popen(
            [*command, "--scale", scale],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.figures.arm} on {self.figures.model} ended with code {self.process.wait()}")
        return json.loads(line)

    def ask(self, command: str) -> dict:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()

    def step(self, first: bool = False) -> None:
        answer = self.ask("step")
        self.figures.loss = answer["loss"]
        if first:
            self.figures.first = answer["seconds"]
        else:
            self.figures.steps.append(answer["seconds"])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> Figures:
        answer = self.ask("stats")
        self.figures.peak, self.figures.extra = answer["peak"], answer["extra"]
        self.process.stdin.close()
        self.process.wait()
        return self.figures


def measure(model: str, arms: list[str], steps: int, warmup: int, dropout: float, scale: str) -> list[Figures]:
    workers = [Arm(model, arm, dropout, scale) for arm in arms]
    try:
        for w in workers:
            w.step(first=True)
        for round_ in range(warmup + steps):
            for w in workers:
                w.step()
                if round_ < warmup:
                    w.figures.steps.clear()
        return [w.close() for w in workers]
    finally:
        for w in workers:
            w.kill()


def table(model: str, scale: str, rows: list[Figures], flops: float, bandwidth: float) -> Table:
    work = SCALES[scale][model]
    floor = work.floor(flops, bandwidth)
    t = Table(title=f"{work.title}   floor {floor * 1e3:.0f} ms")
    for name in ("", "step, ms", "min", "to eager", "of floor", "loss", "first step, s", "peak, MiB"):
        t.add_column(name, justify="left" if not name else "right", no_wrap=True)
    eager = next((r.median for r in rows if r.arm == "eager"), rows[0].median)
    for r in rows:
        t.add_row(
            ARMS[r.arm],
            f"{r.median * 1e3:.1f}",
            f"{min(r.steps) * 1e3:.1f}",
            f"{eager / r.median:.2f}x",
            f"{100 * floor / r.median:.0f} %",
            f"{r.loss:.4f}",
            f"{r.first:.2f}",
            f"{r.peak / 2**20:,.0f}",
        )
    return t


def planning(stats: dict[str, float]) -> str:
    """One line on what came before the first step, per plan built."""
    stages = ("specialize", "canonicalize", "differentiate", "fuse", "plan")
    plans = stats["plans_built"] or 1
    each = {s: stats[f"{s}_seconds"] / plans * 1e3 for s in stages}
    parts = ", ".join(f"{s} {ms:.1f}" for s, ms in each.items())
    return (
        f"ORTModule: export {stats['export_seconds']:.2f} s; each of {plans:.0f} plans {sum(each.values()):.1f} ms "
        f"({parts}); arena {stats['arena_bytes'] / 2**20:,.0f} MiB\n"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--steps", type=int, default=7)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--quick", action="store_true", help="small models")
    p.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    a = p.parse_args()
    scale = "small" if a.quick else "full"
    console = Console(width=None if sys.stdout.isatty() else 110)
    flops, bandwidth = gemm_flops(), copy_bandwidth()
    console.print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"this run's ceilings: GEMM {flops / 1e9:.0f} GFLOP/s fp32, copy {bandwidth / 1e9:.1f} GB/s"
    )
    figures: list[Figures] = []
    for model in a.models:
        rows = measure(model, a.arms, a.steps, a.warmup, a.dropout, scale)
        console.print(table(model, scale, rows, flops, bandwidth))
        for r in rows:
            if r.extra:
                console.print(planning(r.extra))
        figures += rows
    if a.json:
        a.json.write_text(
            json.dumps(
                {"gemm_flops": flops, "copy_bandwidth": bandwidth, "figures": [asdict(f) for f in figures]}, indent=1
            )
        )


if __name__ == "__main__":
    main()
