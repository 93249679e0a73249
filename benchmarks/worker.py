"""One arm of a benchmark in its own process: reads commands, answers with JSON lines.

``step`` runs one training step and answers with its seconds, those of all processors and the loss;
``size K`` gives the next steps inputs of the model's K-th other size; ``stats`` answers with peak
memory over the loaded model and what the arm says of itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from models import SCALES


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
    p.add_argument("--arm", choices=["eager", "tuned", "compile", "ours", "dynamo", "second"], required=True)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--scale", choices=SCALES, default="full")
    a = p.parse_args()
    answer, sys.stdout = sys.stdout, sys.stderr  # nothing but answers may reach the parent

    def reply(**values: object) -> None:
        print(json.dumps(values), file=answer, flush=True)

    work = SCALES[a.scale][a.model]
    torch.manual_seed(0)
    model = work.build(a.dropout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    inputs = work.data(generator)
    loaded = memory("VmRSS")
    net = model
    if a.arm == "compile":
        net = torch.compile(model)
    elif a.arm == "ours":
        from ortmodule_c import ORTModule

        net = ORTModule(model)
    elif a.arm == "second":
        from ortmodule_c import DebugOptions, ORTModule

        net = ORTModule(model, DebugOptions(capture="dynamo"))
    elif a.arm == "dynamo":
        net = torch.compile(model, backend="ortmodule_c")
    reply(ready=True)
    for line in sys.stdin:
        if line.strip() == "step":
            begin, worked = time.perf_counter(), processor_seconds()
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
            extra = net.stats() if a.arm == "ours" else {}
            reply(peak=memory("VmHWM") - loaded, extra=extra)


if __name__ == "__main__":
    main()
