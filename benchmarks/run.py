"""Whole training steps in fp32 and under autocast: eager, eager with tuned malloc, torch.compile, ORTModule.

Each arm has its own process; the parent lets them step in turn, so that a change of the machine's
speed meets all of them alike. Printed per model: median step, its ratio to the first arm and to
eager with the same malloc and optimizer (like for like), loss of the last step, first step, peak
memory over the loaded model, and per cent of the floor that this run's measured GEMM and copy
rates allow. With ``--busy N``, once more beside N processes that compute all the time: how many
times as long a step takes then. With ``--device cuda`` on a GPU, where an arm's turn has several steps
with one wait for the GPU, and it gives memory back for those of the others; peak memory is of tensors
there, and told is how long the host takes for a step, beyond an autograd function that computes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import ops
import wide
from ceilings import copy_bandwidth, gemm_flops
from gpu_models import GPU, SCALES
from machine import machine
from models import MORE, WORKLOADS
from worker import ARMS, DTYPES, allow_tf32, give_back

HERE = Path(__file__).parent
# glibc told never to give memory back, so that eager pays no page faults after its first step.
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
DEFAULT_ARMS = ["eager", "tuned", "compile", "ours", "ours_tuned"]  # more at once do not fit into 24 GiB
GPU_ARMS = ["eager_written", "eager_fused", "compile_fused", "replay_fused", "ours_fused"]
HOST_STEPS = 20  # that the host's time is the median of


@dataclass
class Figures:
    """What one arm did on one model; seconds and bytes, and why it did no more."""

    model: str
    dtype: str
    arm: str
    first: float = 0.0
    steps: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # beside other processes
    loss: float = 0.0
    peak: int = 0
    host: float = 0.0  # of a forward and a backward; 0 on the CPU
    empty: float = 0.0  # of autograd in it
    error: str = ""
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.steps) if self.steps else self.first


class Worker:
    """The process of an arm, in a group of its own with all that it starts."""

    def __init__(
        self,
        model: str,
        arm: str,
        dropout: float,
        scale: str,
        dtype: str = "fp32",
        device: str = "cpu",
        **variables: str,
    ) -> None:
        command = [sys.executable, str(HERE / "worker.py"), "--model", model, "--arm", arm, "--dropout", str(dropout)]
        env = {**os.environ, **(TUNED if ARMS[arm].tuned else {}), **variables}
        self.figures = Figures(model, dtype, arm)
        self.device = device
        self.process = subprocess.Popen(
            [*command, "--scale", scale, "--dtype", dtype, "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if sys.stderr.isatty() else None,  # a log has all of it
            text=True,
            env=env,
            start_new_session=True,
        )

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.figures.arm} on {self.figures.model} ended with code {self.process.wait()}")
        return json.loads(line)

    def ready(self) -> None:
        """Returns once the model is loaded."""
        self.read()

    def ask(self, command: str) -> dict:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()

    def step(self, command: str = "step") -> float:
        """The seconds of one step."""
        answer = self.ask(command)
        self.figures.loss = answer["loss"]
        return answer["seconds"]

    def first(self) -> None:
        self.figures.first = self.step()

    def attempt(self, do: Callable[[], None]) -> None:
        """Do something unless it has failed before; if it fails now, that is noted."""
        if self.figures.error:
            return
        try:
            do()
        except (RuntimeError, BrokenPipeError) as error:
            self.figures.error = str(error)
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.device != "cpu":
            answer = self.ask(f"host {HOST_STEPS}")
            self.figures.host, self.figures.empty = answer["host"], answer["empty"]
        answer = self.ask("stats")
        self.figures.peak, self.figures.extra = answer["peak"], answer["extra"]
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that keep a core busy each."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def started(workers: list[Worker], at_once: int) -> Iterator[None]:
    """They have taken their first step, so many beside each other."""
    try:
        for w in workers:
            w.attempt(w.ready)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda w: w.attempt(w.first), workers))
        yield
    finally:
        for w in workers:
            w.kill()


def measure(workers: list[Worker], steps: int, warmup: int, busy: int, turn: int = 1) -> list[Figures]:
    """The figures of each arm, of which one that fails leaves the others at work."""
    command = "step" if turn == 1 else f"turn {turn}"
    for round_ in range(warmup + steps):
        for w in workers:
            into = w.figures.steps if round_ >= warmup else []
            w.attempt(lambda w=w, into=into: into.append(w.step(command)))
    with neighbours(busy):
        for _ in range(steps if busy else 0):
            for w in workers:
                w.attempt(lambda w=w: w.figures.busy.append(w.step(command)))
    for w in workers:
        w.attempt(w.close)
    return [w.figures for w in workers]


def like_for_like(row: dict[str, Figures], arm: str) -> float | None:
    """Eager's median step over that of `arm`, both with its malloc and optimizer; None if eager was not run so."""
    twins = (name for name in row if ARMS[name].wrap is ARMS["eager"].wrap and ARMS[name].terms == ARMS[arm].terms)
    twin = next(twins, None)
    return None if twin is None else row[twin].median / row[arm].median


def busy_ratio(figures: Figures) -> float | None:
    """How many times as long a step takes beside busy processes; None if it was not run so."""
    return statistics.median(figures.busy) / figures.median if figures.busy else None


def table(title: str, floor: float, rows: list[Figures]) -> Table:
    t = Table(title=f"{title}, {rows[0].dtype}   floor {floor * 1e3:.0f} ms")
    columns = (
        "step, ms",
        "min",
        "to the first",
        "like for like",
        "of floor",
        "busy",
        "loss",
        "first step, s",
        "peak, MiB",
        *(["host, us"] if any(r.host for r in rows) else []),
    )
    for name in ("", *columns):
        t.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for r in rows:
        ratio, slower = like_for_like({row.arm: row for row in rows}, r.arm), busy_ratio(r)
        t.add_row(
            ARMS[r.arm].name,
            f"{r.median * 1e3:.1f}",
            f"{min(r.steps) * 1e3:.1f}",
            f"{rows[0].median / r.median:.2f}x",
            "" if ratio is None else f"{ratio:.2f}x",
            f"{100 * floor / r.median:.0f} %",
            "" if slower is None else f"{slower:.2f}x",
            f"{r.loss:.4f}",
            f"{r.first:.2f}",
            f"{r.peak / 2**20:,.0f}",
            *([f"{(r.host - r.empty) * 1e6:.0f}"] if r.host else []),
        )
    return t


def planning(row: Figures) -> str:
    """One line on what came before the first step, per plan built."""
    stats = row.extra
    stages = ("specialize", "canonicalize", "differentiate", "fuse", "plan")
    plans = stats["plans_built"] or 1
    each = {s: stats[f"{s}_seconds"] / plans * 1e3 for s in stages}
    parts = ", ".join(f"{s} {ms:.1f}" for s, ms in each.items())
    held = stats["arena_bytes"] + stats["lent_bytes"]
    return (
        f"{ARMS[row.arm].name}: export {stats['export_seconds']:.2f} s; each of {plans:.0f} plans "
        f"{sum(each.values()):.1f} ms ({parts}); a run holds {held / 2**20:,.0f} MiB\n"
    )


def main() -> None:
    for other, run in {"--wide": wide.main, "--ops": ops.main}.items():
        if other in sys.argv:
            sys.argv.remove(other)
            run()
            return
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=WORKLOADS | MORE | GPU, default=list(WORKLOADS))
    p.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    p.add_argument("--arms", nargs="+", choices=ARMS, help="by default those that are usual on the device")
    p.add_argument("--steps", type=int, default=7, help="turns of an arm")
    p.add_argument("--warmup", type=int, default=2, help="and before those")
    p.add_argument("--turn", type=int, metavar="N", help="steps of a turn, by default 1, on a GPU 5")
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--device", default="cpu", help="cuda, cuda:1: on a GPU")
    p.add_argument("--scale", choices=SCALES, help="sizes of the models, by default full, on a GPU gpu")
    p.add_argument("--together", action="store_true", help="first steps of all models are taken before any is timed")
    p.add_argument(
        "--apart", action="store_true", help="first steps on a GPU, the host's work, are not beside each other"
    )
    p.add_argument("--quick", action="store_true", help="the first four models, small")
    p.add_argument("--wide", action="store_true", help="ordinary models of all kinds; its own options: --wide --help")
    p.add_argument("--ops", action="store_true", help="single layers; its own options: --ops --help")
    p.add_argument("--busy", type=int, default=0, metavar="N", help="and beside N busy processes")
    p.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    a = p.parse_args()
    on_cpu = a.device == "cpu"
    scale = a.scale or ("small" if a.quick else "full" if on_cpu else "gpu")
    if missing := {*a.models} - {*SCALES[scale]}:
        p.error(f"there are no {', '.join(sorted(missing))} of scale {scale}")
    arms, turn = a.arms or (DEFAULT_ARMS if on_cpu else GPU_ARMS), a.turn or (1 if on_cpu else 5)
    console = Console(width=None if sys.stdout.isatty() else 140)
    flops = {}
    for dtype in a.dtypes:
        allow_tf32(dtype == "tf32")
        flops[dtype] = gemm_flops(DTYPES[dtype] or torch.float32, a.device)
    bandwidth = copy_bandwidth(a.device)
    give_back(torch.device(a.device))
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {dtype}" for dtype, rate in flops.items())
    console.print(f"{machine(a.device)}; this run's ceilings: GEMM {rates}, copy {bandwidth / 1e9:.1f} GB/s")
    figures: list[Figures] = []
    floors: dict[str, float] = {}
    wanted = [(model, dtype) for model in a.models for dtype in a.dtypes]

    def workers_of(model: str, dtype: str) -> list[Worker]:
        return [Worker(model, arm, a.dropout, scale, dtype, a.device) for arm in arms]

    for batch in [wanted] if a.together else [[one] for one in wanted]:
        workers = {one: workers_of(*one) for one in batch}
        every = [w for those in workers.values() for w in those]
        with started(every, 1 if a.apart or a.device == "cpu" else len(every)):
            for (model, dtype), those in workers.items():
                work, size = SCALES[scale][model], 4 if DTYPES[dtype] is None else 2
                floor = floors[f"{model} {dtype}"] = work.floor(flops[dtype], bandwidth, size)
                rows = measure(those, a.steps, a.warmup, a.busy, turn)
                figures += rows
                for r in rows:
                    if r.error:
                        console.print(f"{ARMS[r.arm].name}: {r.error}")
                measured = [r for r in rows if not r.error]
                if measured:
                    console.print(table(work.title, floor, measured))
                for r in measured:
                    if r.extra:
                        console.print(planning(r))
                if a.json:  # of all models so far: a run that is stopped leaves them
                    titles = {name: SCALES[scale][name].title for name in a.models}
                    result = {"machine": machine(a.device), "gemm_flops": flops, "copy_bandwidth": bandwidth}
                    result |= {"titles": titles, "floors": floors, "figures": [asdict(f) for f in figures]}
                    a.json.write_text(json.dumps(result, indent=1) + "\n")
    if any(r.error for r in figures):
        raise SystemExit("an arm has failed")


if __name__ == "__main__":
    main()
