"""Processes in which nothing of the emulated GPU is open yet, each forked from one that has imported what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple


class Ran(NamedTuple):
    """What a process has printed, and how it has ended."""

    out: str
    err: str
    code: int


class Cold:
    """Runs sources of Python, in which `gpu` is the emulated GPU, `torch` PyTorch.

    Parameters
    ----------
    modules
        More that is imported beforehand and is there by its name.
    command
        What to start them with.
    environment
        More in their environment.
    """

    def __init__(self, *modules: str, command: Sequence[str] = (), **environment: str) -> None:
        self._server = subprocess.Popen(
            [*command, sys.executable, __file__, *modules],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, source: str, **environment: str) -> Ran:
        """Run one in a process of its own, with more in its environment."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([source, environment]).encode() + b"\n")
        self._server.stdin.flush()
        return Ran(*json.loads(self._server.stdout.readline()))

    def end(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def main() -> None:
    """Serve requests; a child leaves here too, to end as processes do."""
    import ctypes
    import importlib

    import on_device
    import torch
    from emulated_gpu import Gpu

    on_device.load_stand_ins()
    gpu = Gpu(*on_device.loaded(), ctypes.CDLL("libcuda.so.1"))
    modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
    requests, answers = os.dup(0), os.dup(1)
    for line in os.fdopen(requests):
        source, environment = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.environ.update(environment)
                exec(source, {"gpu": gpu, "torch": torch, **modules})
                return
            _, status = os.waitpid(child, 0)
            texts = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)]
        os.write(answers, json.dumps([*texts, os.waitstatus_to_exitcode(status)]).encode() + b"\n")


if __name__ == "__main__":
    main()
