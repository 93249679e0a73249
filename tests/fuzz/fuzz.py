"""Random programs against PyTorch: `fuzz.py --seeds 0:2000`; a failing seed prints its shrunk program."""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from grow import grown
from shrink import shrunk

from ortmodule_c.errors import Mistake

sys.path.append(str(Path(__file__).parents[1] / "device"))

import on_device

SHRINKING = 60.0  # seconds for one failure
PATIENCE = 300.0  # seconds after which a seed counts as hung


def verdict(seed: int, shrinking: float) -> dict[str, Any]:
    """What became of a seed: where it ran, and if it failed what differed and the smallest program found."""
    begin = time.monotonic()
    try:
        program = grown(seed)
        what, how, ran = program.check()
        script = ""
        if what:
            small = shrunk(program, what, shrinking, lambda p: p.check()[0])
            what, how, _ = small.check()
            script = small.script()
    except on_device.Different as error:
        what, how, ran, script = "bits of the device", str(error), "", program.script()
    except (Exception, Mistake):  # of the fuzzer itself, or of ortmodule_c
        what, how, ran, script = "fuzzer", traceback.format_exc(), "", ""
    return {"seed": seed, "what": what, "how": how, "ran": ran, "script": script, "seconds": time.monotonic() - begin}


def work(pipe: Connection, shrinking: float, device: str) -> None:
    torch.set_num_threads(1)
    if device:
        on_device.install(device)
    while True:
        seed = pipe.recv()
        if seed is None:
            return
        pipe.send(verdict(seed, shrinking))


class Worker:
    """A process that works through seeds; one that dies or hangs costs its seed alone."""

    def __init__(self, shrinking: float, device: str) -> None:
        self.pipe, other = multiprocessing.Pipe()
        given = (other, shrinking, device)
        self.process = multiprocessing.get_context("spawn").Process(target=work, args=given, daemon=True)
        self.process.start()
        other.close()
        self.seed: int | None = None
        self.since = 0.0

    def give(self, seed: int | None) -> None:
        self.seed, self.since = seed, time.monotonic()
        self.pipe.send(seed)

    def answer(self) -> dict[str, Any] | None:
        """The verdict, if there is one by now."""
        try:
            if self.pipe.poll():
                found: dict[str, Any] = self.pipe.recv()
                return found
        except EOFError:
            return self._failed("the process died")
        return self._failed("the process hung") if time.monotonic() - self.since > PATIENCE else None

    def _failed(self, how: str) -> dict[str, Any]:
        self.process.kill()
        self.process.join()
        assert self.seed is not None
        script = grown(self.seed).script()
        return {"seed": self.seed, "what": how, "how": "", "ran": "", "script": script, "seconds": 0.0}


def verdicts(
    seeds: Iterable[int], processes: int, shrinking: float = SHRINKING, device: str = ""
) -> Iterable[dict[str, Any]]:
    """The verdict of each seed, as they come; of sessions on a device of `on_device.install`, if one is named."""
    todo = collections.deque(seeds)
    if device in on_device.BUILT:
        on_device.build()
    workers = [Worker(shrinking, device) for _ in range(min(processes, len(todo)))]
    for worker in workers:
        worker.give(todo.popleft())
    while workers:
        wait([w.pipe for w in workers], timeout=1)
        for i, worker in reversed([*enumerate(workers)]):
            found = worker.answer()
            if found is None:
                continue
            yield found
            if not worker.process.is_alive():
                workers[i] = Worker(shrinking, device)
            if todo:
                workers[i].give(todo.popleft())
            else:
                workers.pop(i).give(None)


def told(v: dict[str, Any]) -> str:
    """A failure, for people."""
    return f"seed {v['seed']}: {v['what']}\n{v['how']}\n\n{v['script']}"


def summary(found: list[dict[str, Any]]) -> str:
    """How many were equal, and where they ran."""
    failed = [v["seed"] for v in found if v["what"]]
    kinds = collections.Counter(v["ran"] if v["ran"] in ("native", "per op") else "whole" for v in found)
    lines = [
        f"{len(found)} programs: {len(found) - len(failed)} equal to eager, {len(failed)} not {failed or ''}",
        f"{kinds['native']} ran natively, {kinds['per op']} with some ops in PyTorch, {kinds['whole']} wholly",
        f"{sum(v['seconds'] for v in found):.0f} s of processes",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="first:last+1")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shrinking", type=float, default=SHRINKING, help="seconds for one failure")
    parser.add_argument("--log", type=Path, help="append verdicts to this file, and skip the seeds that are in it")
    parser.add_argument("--on", default="", metavar="DEVICE", help="sessions run there: device (of tests/c), gpu, cuda")
    parser.add_argument("--causes", action="store_true", help="tell why programs ran wholly in PyTorch")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMC_VERIFY", "1")
    found = []
    if options.log and options.log.exists():
        found = [json.loads(line) for line in options.log.read_text().splitlines()]
    seeds = sorted({*range(*map(int, options.seeds.split(":")))} - {v["seed"] for v in found})
    for v in verdicts(seeds, options.processes, options.shrinking, options.on):
        found.append(v)
        if options.log:
            with options.log.open("a") as log:
                log.write(json.dumps(v) + "\n")
        if v["what"]:
            print(told(v), flush=True)
    if options.causes:
        causes = collections.Counter(v["ran"][:100] for v in found)
        print(*[f"{n:6} {cause}" for cause, n in causes.most_common()], sep="\n")
    print(summary(found))
    return any(v["what"] for v in found)


if __name__ == "__main__":
    sys.exit(main())
