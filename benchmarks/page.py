"""Draws what `run.py --json` and its kin leave in `benchmarks/results`: docs/benchmarks.md and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt

import budget
import optimizer
import overlap
from ops import LAYERS
from run import Figures, busy_ratio, like_for_like
from wide import geometric_mean, ratio_of
from worker import ARMS

plt.rcParams["svg.hashsalt"] = "ortmodule_c"  # the same picture for the same figures
HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
PAGE = DOCS / "benchmarks.md"

HEAD = """# Benchmarks

Made by `benchmarks/page.py` of the files in `benchmarks/results`, which `make bench ARGS='--json FILE'`, with `--wide`
and with `--ops` too, and `benchmarks/optimizer.py`, `benchmarks/budget.py` and `benchmarks/overlap.py`, with `--json
FILE`, write. Ratios are of medians of one run, arms stepping in turn: the same model on both sides, PyTorch's AdamW as
optimizer unless a column says otherwise. bf16 is `torch.autocast`. "Tuned malloc" is glibc told never to give memory
back. In brackets: the ratio to eager with the same malloc and optimizer, where that is not the first column. "Busy" is
how many times as long a step takes beside a process that computes all the time.
"""


def rows_of(result: dict) -> dict[str, dict[str, Figures]]:
    """Figures by model and dtype, then by arm."""
    rows: dict[str, dict[str, Figures]] = {}
    for f in result["figures"]:
        rows.setdefault(f"{f['model']} {f['dtype']}", {})[f["arm"]] = Figures(**f)
    return rows


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def draw_bars(path: Path, groups: list[str], series: dict[str, list[float]], label: str) -> None:
    """Bars side by side, those of a group together, beside a line at 1."""
    height = 0.8 / len(series)
    fig, ax = plt.subplots(figsize=(8, 0.6 + 0.22 * len(groups) * max(2, len(series))), layout="constrained")
    for k, (name, values) in enumerate(series.items()):
        ax.barh([i + k * height for i in range(len(groups))], values, height, label=name)
    ax.set_yticks([i + 0.4 - height / 2 for i in range(len(groups))], groups)
    ax.invert_yaxis()
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xlabel(label)
    ax.legend(fontsize="small")
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def steps_section(name: str, result: dict) -> list[str]:
    rows = rows_of(result)
    first, *others = dict.fromkeys(f["arm"] for f in result["figures"])
    best = [arm for arm in others if ARMS[arm].wrap is ARMS["ours"].wrap]
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in result["gemm_flops"].items())
    lines = [f"## Whole steps: {name}", "", f"{result['machine']}."]
    lines += [f"Ceilings of that run: {rates}, copies {result['copy_bandwidth'] / 1e9:.1f} GB/s.", ""]
    lines += [f"![ratios]({PAGE.stem}-{name}.svg)", ""]
    head = ["", f"{ARMS[first].name}, ms", *(ARMS[arm].name for arm in others), "of floor", "MiB", "MiB, ORTModule"]
    busy = any(f.get("busy") for f in result["figures"])
    head += [f"{ARMS[arm].name}, busy" for arm in (first, best[0])] if busy else []
    body = []
    for key, row in rows.items():
        model, dtype = key.split()
        ratios = []
        for arm in others:
            ratio, alike = row[first].median / row[arm].median, like_for_like(row, arm)
            own = arm in best and alike is not None and ARMS[arm].terms != ARMS[first].terms
            ratios.append(f"{ratio:.2f}x ({alike:.2f}x)" if own else f"{ratio:.2f}x")
        floor = f"{100 * result['floors'][key] / min(row[arm].median for arm in best):.0f} %"
        peaks = [f"{row[arm].peak / 2**20:,.0f}" for arm in (first, best[0])]
        slower = [f"{busy_ratio(row[arm]) or math.nan:.2f}x" for arm in (first, best[0])] if busy else []
        start = [f"{result['titles'][model]}, {dtype}", f"{1e3 * row[first].median:.0f}"]
        body.append([*start, *ratios, floor, *peaks, *slower])
    series = {ARMS[arm].name: [row[first].median / row[arm].median for row in rows.values()] for arm in others}
    draw_bars(DOCS / f"{PAGE.stem}-{name}.svg", list(rows), series, f"times as fast as {ARMS[first].name}")
    return lines + table(head, body)


def wide_section(name: str, result: dict) -> list[str]:
    figures = result["figures"]
    columns = list(next(iter(figures.values())))
    ratios = {model: [ratio_of(row[c]) for c in columns] for model, row in figures.items()}
    lines = [f"## Ordinary models: {name}", "", f"{result['machine']}. Eager's seconds over ORTModule's.", ""]
    lines += [f"![ratios]({PAGE.stem}-{name}.svg)", ""]
    body = [
        [m, result["kinds"][m], *("eager raises" if r is None else f"{r:.2f}" for r in row)]
        for m, row in ratios.items()
    ]
    means = [f"{geometric_mean(column):.2f}" for column in zip(*ratios.values(), strict=True)]
    body.append(["geometric mean", "", *means])
    series = {c: [ratios[m][i] or 0.0 for m in ratios] for i, c in enumerate(columns)}
    draw_bars(DOCS / f"{PAGE.stem}-{name}.svg", list(ratios), series, "times as fast as eager")
    return lines + table(["", "kind", *columns], body)


def layers_section(name: str, result: dict) -> list[str]:
    lines = [
        f"## Single layers: {name}",
        "",
        f"{result['machine']}.",
        "Forward and backward; rates as `benchmarks/ops.py`",
    ]
    lines += ["counts them, beside the highest GEMM rate and the copy bandwidth of the run.", ""]
    body = []
    for row in result["layers"]:
        unit = "GFLOP/s" if LAYERS[row["layer"]].flops else "GB/s"
        times = (f"{1e3 * row['eager']:.2f}", f"{1e3 * row['ours']:.2f}", f"{ratio_of(row):.2f}x")
        share = f"{100 * row['rate'] / row['ceiling']:.0f} %"
        body.append([row["layer"], row["dtype"], *times, f"{row['rate'] / 1e9:.1f} {unit}", share])
    return lines + table(["", "", "eager, ms", "ORTModule, ms", "ratio", "rate", "of ceiling"], body)


def optimizer_section(name: str, result: dict) -> list[str]:
    lines = [f"## A step of AdamW over BERT-base's parameters: {name}", "", f"{result['machine']}."]
    lines += [f"{result['dtype']}; copies {result['copy_bandwidth'] / 1e9:.1f} GB/s.", ""]
    body = [
        [arm, f"{1e3 * median:.1f}", f"{rate / 1e9:.1f}", f"{100 * share:.0f} %", f"{ratio:.2f}x"]
        for arm, median, rate, share, ratio in optimizer.rows_of(result)
    ]
    return lines + table(["", "ms", "GB/s", "of copying", f"to {optimizer.BASE}"], body)


def budget_section(name: str, result: dict) -> list[str]:
    lines = [
        f"## Under budgets of memory: {name}",
        "",
        f"{result['machine']}. Forward and backward, with the same bits.",
    ]
    lines += ["The arena is what a step takes beyond its inputs, results and gradients.", ""]
    body = [[model, *row] for model, arms in result["budgets"].items() for row in budget.rows_of(arms)]
    return lines + table(["", *budget.HEAD], body)


def overlap_section(name: str, result: dict) -> list[str]:
    lines = [
        f"## Exchanging gradients: {name}",
        "",
        f"{result['machine']}. Forward and backward, in fp32; the network is a thread that sleeps for as long as each",
        "bucket of DistributedDataParallel would take.",
        "",
    ]
    body = [[model, *row] for model, arms in result["overlap"].items() for row in overlap.rows_of(arms)]
    return lines + table(["", *overlap.HEAD], body)


def main() -> None:
    lines = [HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        kinds = {"floors": steps_section, "kinds": wide_section, "layers": layers_section, "seconds": optimizer_section}
        kinds |= {"budgets": budget_section, "overlap": overlap_section}
        section = next(section for key, section in kinds.items() if key in result)
        lines += section(path.stem, result)
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
