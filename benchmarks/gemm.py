"""Matrix products of the benchmark models, ours against the best that PyTorch has.

Every product of a training step (forward, gradients of both operands) is taken from the models themselves, as PyTorch
calls it, and timed alone by `MatMul` of the C core, ``torch.mm`` and oneDNN's ``linear``, in turn, on one thread, whose
processor time counts, least of some rounds: other programs disturb it little. The peak is the highest rate that any of
them reaches in the run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from models import SMALL, WORKLOADS
from ortmodule_c import _C

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
Shape = tuple[int, int, int, bool, bool]  # m, n, k, whether A and B are stored transposed


class Products(TorchDispatchMode):
    """Collects what is multiplied while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[Shape, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            a, b = args[-2:]
            transposed = (a.stride(-1) != 1 and a.stride(-2) == 1, b.stride(-1) != 1 and b.stride(-2) == 1)
            self.shapes[a.shape[-2], b.shape[-1], a.shape[-1], *transposed] = None
        return func(*args, **(kwargs or {}))


def shapes_of(name: str, small: bool) -> list[Shape]:
    """The different products of one training step of a model, in the order in which they come."""
    workload = (SMALL if small else WORKLOADS)[name]
    with FakeTensorMode(allow_non_fake_inputs=True), Products() as products:
        model = workload.build(0.0)
        inputs = workload.data(None)  # type: ignore[arg-type]
        model(*inputs).backward()
    return list(products.shapes)


def arms(shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The ways to compute one product, as functions of nothing."""
    m, n, k, ta, tb = shape
    a = torch.randn((k, m) if ta else (m, k)).to(dtype)
    b = torch.randn((n, k) if tb else (k, n)).to(dtype)
    text = next(name for name, d in DTYPES.items() if d == dtype)
    session = _C.Session(
        f"input %a : {text}[{a.shape[0]},{a.shape[1]}]\ninput %b : {text}[{b.shape[0]},{b.shape[1]}]\n"
        f"%c = FusedMatMul(%a, %b) {{transA={int(ta)}, transB={int(tb)}}}\nreturn %c\n",
        {},
    )
    plan = session.plan([a, b], [False, False], [False])
    left, right = a.t() if ta else a, b.t() if tb else b
    out = torch.empty(m, n, dtype=dtype)
    return {
        "ours": lambda: plan.forward([a, b], 0),
        "mm": lambda: torch.mm(left, right, out=out),
        "linear": lambda: torch.nn.functional.linear(left, right.t()),
    }


def least_seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least processor seconds of one call of each, all tried in turn."""
    least = dict.fromkeys(calls, math.inf)
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.thread_time()
            call()
            least[name] = min(least[name], time.thread_time() - begin)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(WORKLOADS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="the same models in small")
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes: dict[Shape, str] = {}
    for name in given.models.split(","):
        for shape in shapes_of(name, given.small):
            shapes.setdefault(shape, name)
    rows = []
    for dtype in given.dtypes.split(","):
        here = []
        for shape, model in [((1536, 1536, 1536, False, False), "square"), *shapes.items()]:
            seconds = least_seconds(arms(shape, DTYPES[dtype]), given.rounds)
            rates = {name: 2e-9 * math.prod(shape[:3]) / s for name, s in seconds.items()}
            here.append({"dtype": dtype, "model": model, "shape": shape, "rates": rates})
        peak = max(max(row["rates"].values()) for row in here)  # type: ignore[attr-defined]
        print(f"\n{dtype}: peak {peak:.0f} GFLOP/s\n{'':10}{'m n k':>20}  A  B   ours     mm linear  ratio  of peak")
        for row in here:
            m, n, k, ta, tb = row["shape"]  # type: ignore[misc]
            ours, mm, linear = row["rates"].values()  # type: ignore[attr-defined]
            row |= {"ratio": ours / max(mm, linear), "peak": peak}
            print(
                f"{row['model']:10}{f'{m} {n} {k}':>20}  {'NT'[ta]}  {'NT'[tb]} {ours:6.0f} {mm:6.0f} {linear:6.0f}"
                f" {row['ratio']:6.2f} {100 * ours / peak:7.0f}%"
            )
        rows += here
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
