"""What this machine can do right now: the rates that floors are computed from."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def best(f: Callable[[], object], seconds: float) -> float:
    """Least seconds of one call, tried for that long."""
    f()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        f()
        least = min(least, time.perf_counter() - begin)
    return least


def gemm_flops(dtype: torch.dtype = torch.float32, n: int = 1536, seconds: float = 0.7) -> float:
    """Highest FLOP/s that any product at hand reaches in a dtype: torch.mm, oneDNN's linear, ours."""
    from ortmodule_c import _C

    name = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    out = torch.empty(n, n, dtype=dtype)
    matrix = f"{name}[{n},{n}]"
    session = _C.Session(f"input %a : {matrix}\ninput %b : {matrix}\n%c = MatMul(%a, %b)\nreturn %c\n", {})
    plan = session.plan([a, b], [False, False], [False])
    candidates: list[Callable[[], object]] = [
        lambda: torch.mm(a, b, out=out),
        lambda: torch.nn.functional.linear(a, b),
        lambda: plan.forward([a, b], 0),
    ]
    return max(2 * n**3 / best(f, seconds) for f in candidates)


def copy_bandwidth(nbytes: int = 1 << 28, seconds: float = 0.7) -> float:
    """Bytes read plus bytes written a second, copying an array that no cache holds."""
    source, target = torch.ones(nbytes // 4), torch.empty(nbytes // 4)
    return 2 * nbytes / best(lambda: target.copy_(source), seconds)
