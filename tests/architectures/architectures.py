"""Trains small models of many architectures in PyTorch and by ORTModule, side by side: docs/architectures.md."""

from __future__ import annotations

import argparse
import copy
import fnmatch
import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import transformers
from architecture import Architecture
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from zoo import ARCHITECTURES

from ortmodule_c import DebugOptions, ORTModule
from ortmodule_c.report import FallbackRecord

SIZES = ((2, 12), (2, 12), (3, 9))  # batch and length of each step
# Largest distance of what is equal: of a loss, and of gradients as part of the largest of all.
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
# What allocates, copies, looks at memory in another way or asks PyTorch something, which a call of ours does as well.
_NAMES = """
    _foreach_copy_ _local_scalar_dense _to_copy alias as_strided chunk clone contiguous copy_ detach detach_ empty
    empty_like empty_strided expand expand_as fill_ flatten is_nonzero item lift_fresh narrow new_empty ones
    ones_like permute randint random_ requires_grad_ reshape resolve_conj resolve_neg result_type select set_ slice
    split split_with_sizes squeeze t to transpose unbind unflatten unfold unsqueeze view view_as zero_ zeros
    zeros_like
"""
_NO_WORK = frozenset(_NAMES.split())


@dataclass
class Row:
    """What became of one architecture.

    Attributes
    ----------
    way
        ``"export"`` or ``"dynamo"``.
    graphs, breaks
        How many graphs there are after the last step, and how many statements are broken out.
    in_pytorch
        What runs in PyTorch, and why.
    whole
        Whether that is the module as a whole.
    share
        Of the ops that eager calls in the last step, forward and backward, how many PyTorch does not.
    loss, gradient
        Largest distance from eager of any step: of the loss, as part of it; of a parameter's gradient, as part of the
        largest one of all.
    dtype
        Of the parameters when that was measured.
    error
        What was raised, if anything was.
    """

    way: str = ""
    graphs: int = 0
    breaks: int = 0
    in_pytorch: list[FallbackRecord] = field(default_factory=list)
    whole: bool = False
    share: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    dtype: torch.dtype = torch.float32
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether it trains as eager does."""
        return not self.error and max(self.loss, self.gradient) <= CLOSE[self.dtype]


def measure(architecture: Architecture, capture: Any = "auto") -> Row:
    """As :func:`train`; where rounding grows over the steps, as through batch statistics, in float64 instead."""
    row = train(architecture, capture, torch.float32)
    return row if row.equal else train(architecture, capture, torch.float64)


def train(architecture: Architecture, capture: Any, dtype: torch.dtype) -> Row:
    """Three steps of both, each on parameters of its own."""
    torch._dynamo.reset()
    eager = architecture.build().to(dtype)
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    row, models = Row(dtype=dtype), (eager, ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    for step, size in enumerate(SIZES):
        transformers.set_seed(step)
        batch = {k: _as(v, dtype) for k, v in architecture.batch(*size).items()}
        losses = []
        for model in models:
            transformers.set_seed(step)
            model.zero_grad()
            losses.append(model(**batch).loss)
            losses[-1].backward()
        row.loss = max(row.loss, _distance(*losses))
        row.gradient = max(row.gradient, _gradient_distance(*models))
        for optimizer in optimizers:
            optimizer.step()
    calls = [_ops(m, batch) for m in models]
    row.share = 1 - calls[1] / calls[0]
    stats = ours.stats()
    row.way = "dynamo" if stats["dynamo_graphs"] else "export"
    row.graphs, row.breaks = int(stats["graphs"]), int(stats["graph_breaks"])
    row.in_pytorch = ours.fallback_report()
    row.whole = not row.graphs or any(r.name == type(eager).__name__ for r in row.in_pytorch)
    return row


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs() / a.detach().abs())


def _gradient_distance(eager: nn.Module, ours: nn.Module) -> float:
    pairs = [(p.grad, q.grad) for p, q in zip(eager.parameters(), ours.parameters(), strict=True)]
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    both = [(a, b) for a, b in pairs if a is not None and b is not None and a.numel()]
    largest = max(float(a.abs().max()) for a, _ in both)
    return max(float((a - b).abs().max()) for a, b in both) / largest


def _ops(model: nn.Module, batch: dict[str, Any]) -> int:
    """How many ops PyTorch is called for in a step."""
    transformers.set_seed(0)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(**batch).loss.backward()

    def is_op(event: Any) -> bool:
        return event is not None and (event.name.startswith("aten::") or is_op(event.cpu_parent))

    outermost = [e.name.removeprefix("aten::") for e in found.events() if is_op(e) and not is_op(e.cpu_parent)]
    return sum(name not in _NO_WORK for name in outermost)


def _in_words(row: Row) -> str:
    """What runs in PyTorch."""
    if row.error:
        return row.error
    return "; ".join(f"{_place(r.name)}: {_place(r.cause)}" for r in row.in_pytorch)


def _place(text: str) -> str:
    """Without the folders in which libraries are installed and where objects lie, and as a cell of a table."""
    root = str(Path(transformers.__file__).parents[1])
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text).replace(root + "/", "").replace("|", "\\|")


_TEXT = """# Architectures

Made by `make architectures`: small configurations of {n} architectures of transformers {transformers} (torch {torch}),
trained in float32 for three steps of SGD, the third of another size, in PyTorch and by ORTModule. Dropout is off, as
its random numbers are others in C; whatever else is random is drawn by PyTorch and NumPy on both sides.

{equal} of {n} train as eager does; {whole} run in PyTorch as a whole; {native} run wholly in C.

*Way* is who made the graphs: `torch.export`, or TorchDynamo where that refuses. *Breaks* are the statements between
graphs. *Ops in C* is how many of the ops that eager calls in a step, forward and backward, PyTorch is not called for.
*Loss* and *gradients* are the largest distances from eager, as parts of the loss and of the largest gradient; of f64
where rounding alone is larger in f32.

| architecture | way | graphs | breaks | ops in C | loss | gradients | what runs in PyTorch, and why |
|---|---|---|---|---|---|---|---|
{rows}
"""


def write(rows: dict[str, Row]) -> None:
    """Write the page."""
    PAGE.write_text(
        _TEXT.format(
            n=len(rows),
            transformers=transformers.__version__,
            torch=torch.__version__.split("+")[0],
            equal=sum(r.equal for r in rows.values()),
            whole=sum(r.whole for r in rows.values()),
            native=sum(not r.in_pytorch for r in rows.values()),
            rows="\n".join(_line(name, r) for name, r in rows.items()),
        )
    )


def _line(name: str, r: Row) -> str:
    wide = " (f64)" if r.dtype == torch.float64 else ""
    share, loss, gradient = f"{100 * r.share:.0f} %", f"{r.loss:.0e}{wide}", f"{r.gradient:.0e}{wide}"
    return f"| {name} | {r.way} | {r.graphs} | {r.breaks} | {share} | {loss} | {gradient} | {_in_words(r)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="these alone, such as 'BERT*'; nothing is written then")
    parser.add_argument("--capture", choices=["auto", "export", "dynamo"], default="auto", help="who makes the graphs")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows: dict[str, Row] = {}
    for name, architecture in ARCHITECTURES.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.names):
            continue
        begin = time.perf_counter()
        try:
            rows[name] = row = measure(architecture, options.capture)
        except Exception as error:
            rows[name] = row = Row(error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
        verdict = "equal" if row.equal else "DIFFERS"
        print(
            f"{name:16} {verdict:8} {row.way:6} {row.graphs} graphs {row.breaks} breaks {100 * row.share:3.0f} % "
            f"{row.loss:.0e} {row.gradient:.0e} {time.perf_counter() - begin:5.1f} s  {_in_words(row)}",
            flush=True,
        )
    if options.names == ["*"] and options.capture == "auto":
        write(rows)
    return any(not r.equal or r.whole for r in rows.values())


if __name__ == "__main__":
    sys.exit(main())
