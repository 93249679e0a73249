"""One arm of a benchmark in its own process: reads commands, answers with JSON lines.

``step`` runs one training step and answers with its seconds, those of all processors and the loss;
``size K`` gives the next steps inputs of the model's K-th other size; ``stats`` answers with peak
memory over the loaded model and what the arm says of itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from models import SCALES

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)


def wrapped(model: nn.Module) -> nn.Module:
    from ortmodule_c import ORTModule

    return ORTModule(model)


def second_way(model: nn.Module) -> nn.Module:
    from ortmodule_c import DebugOptions, ORTModule

    return ORTModule(model, DebugOptions(capture="dynamo"))


def through_dynamo(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="ortmodule_c")


def plain(model: nn.Module) -> nn.Module:
    return model


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def torch_fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from ortmodule_c.optim import FusedAdam

    return FusedAdam(parameters, lr=1e-4, weight_decay=1e-2)


@dataclass(frozen=True)
class Arm:
    """What is made of the model, its optimizer, and whether glibc is told never to give memory back."""

    name: str
    wrap: Callable[[nn.Module], nn.Module] = plain
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    tuned: bool = False

    @property
    def terms(self) -> tuple[object, bool]:
        """What two arms have to share for their ratio to be of the models alone."""
        return self.optimizer, self.tuned


ARMS = {
    "eager": Arm("eager"),
    "tuned": Arm("eager, tuned malloc", tuned=True),
    "tuned_fused": Arm("eager, tuned malloc, AdamW(fused=True)", plain, torch_fused, tuned=True),
    "compile": Arm("torch.compile", compiled),
    "ours": Arm("ORTModule", wrapped),
    "ours_tuned": Arm("ORTModule, tuned malloc", wrapped, tuned=True),
    "ours_tuned_fused": Arm("ORTModule, tuned malloc, AdamW(fused=True)", wrapped, torch_fused, tuned=True),
    "ours_fused": Arm("ORTModule, FusedAdam", wrapped, fused),
    "second": Arm("ORTModule, the Dynamo way", second_way),
    "dynamo": Arm("torch.compile, our backend", through_dynamo),
}


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def processor_seconds() -> float:
    """Of this process and of all it started, such as compilers: they are of its group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == os.getpgrp():
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--arm", choices=ARMS, required=True)
    p.add_argument("--dtype", choices=DTYPES, default="fp32", help="other than fp32: autocast")
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--scale", choices=SCALES, default="full")
    a = p.parse_args()
    answer, sys.stdout = sys.stdout, sys.stderr  # nothing but answers may reach the parent

    def reply(**values: object) -> None:
        print(json.dumps(values), file=answer, flush=True)

    work = SCALES[a.scale][a.model]
    torch.manual_seed(0)
    model = work.build(a.dropout).train()
    arm = ARMS[a.arm]
    optimizer = arm.optimizer(list(model.parameters()))
    generator = torch.Generator().manual_seed(1)
    inputs = work.data(generator)
    loaded = memory("VmRSS")
    net = arm.wrap(model)
    dtype = DTYPES[a.dtype]
    reply(ready=True)
    for line in sys.stdin:
        if line.strip() == "step":
            begin, worked = time.perf_counter(), processor_seconds()
            with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = net(*inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item()
            seconds = time.perf_counter() - begin
            reply(seconds=seconds, processor=processor_seconds() - worked, loss=value)
        elif line.startswith("size "):
            inputs = work.sizes[int(line.split()[1])](generator)
            reply(shapes=[list(t.shape) for t in inputs])
        elif line.strip() == "stats":
            extra = net.stats() if arm.wrap is wrapped else {}
            reply(peak=memory("VmHWM") - loaded, extra=extra)


if __name__ == "__main__":
    main()
