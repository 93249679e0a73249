"""docs/coverage.md: which of PyTorch's samples run in C, written after a sweep and read back by the test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from compare import NATIVE, PER_OP, WHOLE
from pool import Result
from samples import DTYPES, Group

MOST = 3  # samples of an operator and dtype, on the page and in the tests
_PATH = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
_KINDS = (NATIVE, PER_OP, WHOLE)
_VERSION = torch.__version__.split("+")[0]
_TEXT = """# Coverage

Made by `make coverage` from PyTorch's own samples of its operators and modules (`op_db` and `module_db` of
torch {version}), at most {most} of each operator and dtype; `make sweep` runs all of them. Outputs, gradients, buffers
and arguments are compared with PyTorch's; samples that PyTorch refuses are left out. *Native* samples run wholly in C,
in *per op* samples some operator runs in PyTorch, *whole* ones run there altogether. A test holds that *native* only
grows.

| dtype | samples | native | per op | whole |
|---|---|---|---|---|
{totals}

Per operator and dtype, native/per op/whole:

| operator or module | {dtypes} |
|---|---|---|---|---|---|
{rows}
"""

Counts = dict[Group, Counter[str]]


def counted(results: Iterable[Result]) -> Counts:
    """How many samples of each group had which outcome."""
    counts: Counts = {}
    for r in results:
        counts.setdefault(r.group, Counter())[r.outcome.kind] += 1
    return counts


def write(counts: Counts) -> None:
    """Write the page."""
    totals, rows = [], []
    for dtype in DTYPES:
        sums = [sum(c[kind] for g, c in counts.items() if g.dtype == dtype) for kind in _KINDS]
        totals.append(_row(dtype, sum(sums), *sums))
    for name in dict.fromkeys(g.name for g in counts):
        cells = [[counts.get(Group(name, dtype), Counter())[kind] for kind in _KINDS] for dtype in DTYPES]
        if any(map(any, cells)):
            rows.append(_row(name, *("/".join(map(str, cell)) if any(cell) else "" for cell in cells)))
    text = {"totals": "\n".join(totals), "rows": "\n".join(rows), "dtypes": " | ".join(DTYPES)}
    _PATH.write_text(_TEXT.format(version=_VERSION, most=MOST, **text))


def read() -> Counts:
    """What the page says, nothing if it speaks of another PyTorch than the one that is loaded."""
    text = _PATH.read_text()
    counts: Counts = {}
    if f"torch {_VERSION})" in text:
        for name, *cells in re.findall(r"^\| (.+?) " + r"\| ?([\d/]*) ?" * len(DTYPES) + r"\|$", text, re.M):
            for dtype, cell in zip(DTYPES, cells, strict=True):
                if cell:
                    counts[Group(name, dtype)] = Counter(dict(zip(_KINDS, map(int, cell.split("/")), strict=True)))
    return counts


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
