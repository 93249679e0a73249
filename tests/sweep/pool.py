"""Runs groups of samples in processes of their own: one that dies or hangs costs its sample, not the sweep."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext

import torch

from compare import DIED, Outcome, check
from samples import Group, cases, chosen

TIMEOUT = 120.0  # seconds of one sample


@dataclass
class Result:
    """One sample of a group and how it fared."""

    group: Group
    index: int
    text: str
    outcome: Outcome
    seconds: float

    @property
    def command(self) -> str:
        """What runs this sample alone."""
        name = "".join("\\" + c if c in ".()" else c for c in self.group.name)
        return f"python tests/sweep/sweep.py --ops '^{name}$' --dtype {self.group.dtype} --sample {self.index}"

    def __str__(self) -> str:
        return f"{self.outcome.kind} {self.group}: {self.text}\n    {self.outcome.detail}\n    {self.command}"


@dataclass
class _Task:
    """Samples of a group: at most `most`, or `only` one; those before `start` are done."""

    group: Group
    most: int | None
    only: int | None
    start: int = 0


class _Worker:
    """A process that runs tasks: an end of its pipe, its task, and the sample it said it would run."""

    def __init__(self, context: SpawnContext) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.task: _Task | None = None
        self.current: tuple[int, str] | None = None
        self.since = 0.0
        self.end = ""  # how it ended

    def give(self, task: _Task) -> None:
        """Send a task."""
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    def hear(self) -> Iterator[Result | Group]:
        """What it has to say; no task is left when its task is done, and `end` is set when it has died or hung."""
        assert self.task is not None
        try:
            while self.pipe.poll():
                told = self.pipe.recv()
                self.since = time.monotonic()
                self.current = told if isinstance(told, tuple) else None
                if isinstance(told, Result):
                    yield told
                elif told is None:
                    yield self.task.group
                    self.task = None
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.end = f"the process ended with {self.process.exitcode}"
        if not self.end and time.monotonic() - self.since > TIMEOUT:
            self.process.kill()
            self.end = f"took longer than {TIMEOUT:.0f} s"

    def rest(self) -> Iterator[Result | Group | _Task]:
        """What becomes of the task of a worker that has ended: a failure, and what comes after it."""
        assert self.task is not None
        index, text = self.current or (self.task.start, "(its samples)")
        yield Result(self.task.group, index, text, Outcome(DIED, self.end), time.monotonic() - self.since)
        yield replace(self.task, start=index + 1) if self.current is not None else self.task.group


def run(
    groups: Sequence[Group], most: int | None = None, only: int | None = None, jobs: int = 2
) -> Iterator[Result | Group]:
    """Results as they come, and each group when all of its results have come.

    Parameters
    ----------
    groups
        What to run, begun in this order.
    most
        How many samples of each group, by default all.
    only
        Index of the one sample to run of each group.
    jobs
        Number of processes.
    """
    context = multiprocessing.get_context("spawn")
    waiting = [_Task(g, most, only) for g in reversed(groups)]
    workers: list[_Worker] = []
    try:
        while waiting or any(w.task for w in workers):
            while waiting and len(workers) < jobs:
                workers.append(_Worker(context))
                workers[-1].give(waiting.pop())
            wait([w.pipe for w in workers], timeout=1.0)
            for worker in [w for w in workers if w.task]:
                yield from worker.hear()
                if worker.end:
                    workers.remove(worker)
                    for told in worker.rest():
                        if isinstance(told, _Task):
                            waiting.append(told)
                        else:
                            yield told
                elif worker.task is None and waiting:
                    worker.give(waiting.pop())
    finally:
        for worker in workers:
            worker.pipe.close()  # which ends it, if it is not busy
            worker.process.join(timeout=1.0)
            worker.process.kill()


def _serve(pipe: Connection) -> None:
    """A worker's life: tasks come; for each sample its index and text go, then its result; None ends the task."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while True:
        try:
            task: _Task = pipe.recv()
        except EOFError:
            return
        every = list(cases(task.group))
        for i in range(len(every)) if task.most is None else chosen(every, task.most):
            if i >= task.start and task.only in (None, i):
                pipe.send((i, every[i].text))
                begin = time.perf_counter()
                outcome = check(every[i])
                pipe.send(Result(task.group, i, every[i].text, outcome, time.perf_counter() - begin))
        pipe.send(None)
