"""One arm of a benchmark in its own process: reads commands, answers with JSON lines.

``step`` runs one training step and answers with its seconds, those of all processors and the loss;
``turn N`` runs one that is not timed and then N with one wait for the device at their end, answers
with the seconds of one of these, and gives back what memory of a GPU it does not hold;
``size K`` gives the next steps inputs of the model's K-th other size; ``host N`` answers with the
median seconds in which a forward and a backward are given to an idle device, and those of an autograd
function that computes nothing; ``stats`` answers with peak memory over the loaded model and what the
arm says of itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gpu_models import SCALES
from models import Data, Workload

# What autocast casts to; tf32 is what a GPU may round float32 to in products.
DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)


def compiled_for_replay(model: nn.Module) -> nn.Module:
    return torch.compile(model, mode="reduce-overhead")


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
    """What is made of the model, its optimizer, whether glibc is told never to give memory back, and whose attention
    a model of transformers takes, if not that by default.
    """

    name: str
    wrap: Callable[[nn.Module], nn.Module] = plain
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    tuned: bool = False
    attention: str = ""

    @property
    def terms(self) -> tuple[object, bool, str]:
        """What two arms have to share for their ratio to be of the models alone."""
        return self.optimizer, self.tuned, self.attention


ARMS = {
    "eager": Arm("eager"),
    "tuned": Arm("eager, tuned malloc", tuned=True),
    "tuned_fused": Arm("eager, tuned malloc, AdamW(fused=True)", plain, torch_fused, tuned=True),
    "compile": Arm("torch.compile", compiled),
    "ours": Arm("ORTModule", wrapped),
    "ours_tuned": Arm("ORTModule, tuned malloc", wrapped, tuned=True),
    "ours_tuned_fused": Arm("ORTModule, tuned malloc, AdamW(fused=True)", wrapped, torch_fused, tuned=True),
    "ours_fused": Arm("ORTModule, FusedAdam", wrapped, fused),
    "second": Arm("ORTModule, by TorchDynamo", second_way),
    "dynamo": Arm("torch.compile, our backend", through_dynamo),
    "eager_written": Arm("eager, attention written out", attention="eager"),
    "eager_fused": Arm("eager, AdamW(fused=True)", plain, torch_fused),
    "compile_fused": Arm("torch.compile, AdamW(fused=True)", compiled, torch_fused),
    "replay_fused": Arm('torch.compile(mode="reduce-overhead"), AdamW(fused=True)', compiled_for_replay, torch_fused),
}


def allow_tf32(allow: bool) -> None:
    """Whether a GPU may round operands of float32 in products and convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow


def choose_attention(model: nn.Module, name: str) -> None:
    """The implementation of attention that models of transformers within are to take."""
    for m in model.modules():
        if hasattr(m, "set_attn_implementation"):
            m.set_attn_implementation(name)


class Empty(torch.autograd.Function):
    """Takes tensors, computes nothing, and has no gradients: what autograd itself costs the host."""

    @staticmethod
    def forward(ctx: object, like: Tensor, *tensors: Tensor) -> Tensor:
        return like.new_empty(())

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)  # type: ignore[attr-defined]


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def held_bytes(device: torch.device) -> int:
    """Memory of the device in use now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else memory("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most there has been of it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory("VmHWM")


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Memory of a GPU that is kept for later, so that other processes find it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


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


class Training:
    """A model in training the way of an arm.

    Parameters
    ----------
    work
        The model and its data.
    arm
        What is made of them.
    dtype
        One of `DTYPES`.
    dropout
        Probability of it.
    device
        Where all tensors are.
    """

    def __init__(self, work: Workload, arm: Arm, dtype: str, dropout: float, device: torch.device) -> None:
        torch.manual_seed(0)
        allow_tf32(dtype == "tf32")
        self.dtype, self.device = DTYPES[dtype], device
        model = work.build(dropout).train().to(device)
        if arm.attention:
            choose_attention(model, arm.attention)
        self.parameters = list(model.parameters())
        self.optimizer = arm.optimizer(self.parameters)
        self.generator = torch.Generator().manual_seed(1)
        self.take(work.data)
        self.loaded = held_bytes(device)
        self.net = arm.wrap(model)

    def take(self, data: Data) -> None:
        """Inputs of the next steps."""
        self.inputs = tuple(t.to(self.device) for t in data(self.generator))

    def forward_and_backward(self) -> Tensor:
        with contextlib.nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype):
            loss = self.net(*self.inputs)
        loss.backward()
        return loss

    def step(self) -> Tensor:
        """The loss of one training step, which the device may not have computed yet."""
        loss = self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def empty(self) -> None:
        """Autograd's part in `forward_and_backward`."""
        Empty.apply(self.parameters[0], *self.parameters).backward()

    def host_seconds(self, call: Callable[[], object], times: int) -> float:
        """Median seconds until a call returns whose work an idle device does."""
        seconds = []
        for _ in range(times):
            self.optimizer.zero_grad()
            wait_for(self.device)
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        self.optimizer.zero_grad()
        return statistics.median(seconds)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--arm", choices=ARMS, required=True)
    p.add_argument("--dtype", choices=DTYPES, default="fp32", help="of 16 bits: autocast")
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--scale", choices=SCALES, default="full")
    p.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    a = p.parse_args()
    answer, sys.stdout = sys.stdout, sys.stderr  # nothing but answers may reach the parent

    def reply(**values: object) -> None:
        print(json.dumps(values), file=answer, flush=True)

    work, arm = SCALES[a.scale][a.model], ARMS[a.arm]
    training = Training(work, arm, a.dtype, a.dropout, a.device)
    reply(ready=True)
    for line in sys.stdin:
        command, _, n = line.strip().partition(" ")
        if command == "step":
            begin, worked = time.perf_counter(), processor_seconds()
            value = training.step().item()
            seconds = time.perf_counter() - begin
            reply(seconds=seconds, processor=processor_seconds() - worked, loss=value)
        elif command == "turn":
            training.step().item()
            begin = time.perf_counter()
            for _ in range(int(n)):
                loss = training.step()
            value = loss.item()
            seconds = time.perf_counter() - begin
            give_back(a.device)
            reply(seconds=seconds / int(n), loss=value)
        elif command == "size":
            training.take(work.sizes[int(n)])
            reply(shapes=[list(t.shape) for t in training.inputs])
        elif command == "host":
            call, empty = training.forward_and_backward, training.empty
            reply(host=training.host_seconds(call, int(n)), empty=training.host_seconds(empty, int(n)))
        elif command == "stats":
            extra = training.net.stats() if arm.wrap is wrapped else {}
            reply(peak=peak_bytes(a.device) - training.loaded, extra=extra)


if __name__ == "__main__":
    main()
