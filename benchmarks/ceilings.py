"""What this machine can do right now: the rates that floors are computed from."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


def best(f: Callable[[], object], seconds: float) -> float:
    """Least seconds of one call, tried for that long."""
    f()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        f()
        least = min(least, time.perf_counter() - begin)
    return least


def waited_for(f: Callable[[], object], device: str) -> Callable[[], object]:
    """The same, returning once the device has done it."""

    def call() -> None:
        f()
        torch.cuda.synchronize(device)

    return f if device == "cpu" else call


def our_product(a: Tensor, b: Tensor) -> Callable[[], object]:
    """What multiplies two square matrices of one dtype by the core's kernel."""
    from ortmodule_c import _C

    name = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[a.dtype]
    matrix = f"{name}[{len(a)},{len(a)}]"
    session = _C.Session(f"input %a : {matrix}\ninput %b : {matrix}\n%c = MatMul(%a, %b)\nreturn %c\n", {})
    plan = session.plan([a, b], [False, False], [False])
    return lambda: plan.forward([a, b], 0)


def gemm_flops(dtype: torch.dtype = torch.float32, device: str = "cpu", seconds: float = 0.7) -> float:
    """Highest FLOP/s that any product at hand reaches in a dtype: torch.mm, a linear layer, on the CPU ours."""
    n = 1536 if device == "cpu" else 8192
    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))
    out = torch.empty_like(a)
    candidates: list[Callable[[], object]] = [
        lambda: torch.mm(a, b, out=out),
        lambda: torch.nn.functional.linear(a, b),
    ]
    if device == "cpu":
        candidates.append(our_product(a, b))
    return max(2 * n**3 / best(waited_for(f, device), seconds) for f in candidates)


def copy_bandwidth(device: str = "cpu", seconds: float = 0.7) -> float:
    """Bytes read plus bytes written a second, copying an array that no cache holds."""
    nbytes = 1 << 28 if device == "cpu" else 1 << 31
    source, target = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    return 2 * nbytes / best(waited_for(lambda: target.copy_(source), device), seconds)
