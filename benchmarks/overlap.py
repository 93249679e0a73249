"""How much of the exchange of gradients goes on beside the backward, under DistributedDataParallel.

One process, whose network is one thread that sleeps for as long as a bucket would take at some speed, one bucket after
the other: so what is measured is who waits for whom, and not this machine's network, and the exchange takes nothing of
the cores. The arms, PyTorch and ORTModule, each by itself and within DistributedDataParallel, step in turn (forward and
backward, no optimizer). Hidden is the share of the exchange that a step does not take longer for; what it takes longer
are the copies into buckets and out of them too.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpu_models import SCALES
from machine import machine
from ortmodule_c import ORTModule


class Network:
    """Takes so many bytes a second, one bucket at a time."""

    def __init__(self, speed: float) -> None:
        self.seconds = 0.0  # of the exchanges since it was last set to 0
        self._speed = speed
        self._line = ThreadPoolExecutor(1)

    def exchange(self, _state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A hook of DistributedDataParallel's for a full bucket."""
        tensor, done = bucket.buffer(), torch.futures.Future()
        self.seconds += tensor.nbytes / self._speed

        def send() -> None:
            time.sleep(tensor.nbytes / self._speed)
            done.set_result(tensor)

        self._line.submit(send)
        return done


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Seconds of a forward and a backward."""
    model.zero_grad()
    begin = time.perf_counter()
    model(*inputs).backward()
    return time.perf_counter() - begin


def measure(model: nn.Module, inputs: tuple[Tensor, ...], speed: float, steps: int) -> list[dict]:
    """Of PyTorch and of ORTModule: seconds of steps alone, within DistributedDataParallel, and of the exchange."""
    found = []
    for name in ("PyTorch", "ORTModule"):
        ours = copy.deepcopy(model)
        alone = ORTModule(ours) if name == "ORTModule" else ours
        within, network = DistributedDataParallel(alone), Network(speed)
        within.register_comm_hook(None, network.exchange)
        found.append({"name": name, "arms": (alone, within), "network": network, "alone": [], "within": []})
    for _ in range(steps + 2):
        for arm in found:
            arm["network"].seconds = 0.0
            for kind, net in zip(("alone", "within"), arm["arms"], strict=True):
                arm[kind].append(step(net, inputs))
    return [
        {"name": a["name"], "alone": a["alone"][2:], "within": a["within"][2:], "exchange": a["network"].seconds}
        for a in found
    ]


HEAD = ["", "alone, ms", "exchange, ms", "within DDP, ms", "hidden"]


def rows_of(arms: list[dict]) -> list[list[str]]:
    """Cells of a table of one model."""
    rows = []
    for arm in arms:
        alone, within = statistics.median(arm["alone"]), statistics.median(arm["within"])
        longer = statistics.median(w - a for a, w in zip(arm["alone"], arm["within"], strict=True))
        hidden = f"{1 - longer / arm['exchange']:.0%}"
        rows.append([arm["name"], *(f"{s * 1e3:.0f}" for s in (alone, arm["exchange"], within)), hidden])
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scale", choices=SCALES, default="full", help="sizes of the models")
    p.add_argument("--models", nargs="+", default=["bert", "resnet18", "mlp"], metavar="NAME")
    p.add_argument("--speed", type=float, default=0.5, help="of the network, in GB/s")
    p.add_argument("--steps", type=int, default=7)
    p.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    a = p.parse_args()
    console = Console(width=110)
    console.print(machine())
    overlap: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        for name in a.models:
            workload = SCALES[a.scale][name]
            torch.manual_seed(0)
            inputs = workload.data(torch.Generator().manual_seed(1))
            arms = measure(workload.build(0.1).train(), inputs, a.speed * 1e9, a.steps)
            title = f"{workload.title}, {a.speed:g} GB/s"
            overlap[title] = arms
            table = Table(title=title)
            for heading in HEAD:
                table.add_column(heading, justify="right")
            for row in rows_of(arms):
                table.add_row(*row)
            console.print(table)
        dist.destroy_process_group()
    if a.json:
        a.json.write_text(json.dumps({"machine": machine(), "overlap": overlap}, indent=1))


if __name__ == "__main__":
    main()
