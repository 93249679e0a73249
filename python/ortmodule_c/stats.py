"""What compiling has cost and what runs hold, summed over graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .function import Runner

OF_A_SESSION = (
    "plans_built",
    "plan_hits",
    "plans_evicted",
    "specialize_seconds",
    "canonicalize_seconds",
    "differentiate_seconds",
    "fuse_seconds",
    "plan_seconds",
    "constant_bytes",
    "replays",
    "plans_cached",
    "runs_live",
)

# Of the largest plan of a graph.
OF_A_PLAN = ("arena_bytes", "lent_bytes", "live_bytes")


def totals(
    exported: Iterable[Runner], by_dynamo: Iterable[Runner], export_seconds: float, graph_breaks: int
) -> dict[str, float]:
    """As :meth:`ORTModule.stats` gives them."""
    first, second = list(exported), list(by_dynamo)
    sums: dict[str, float] = {
        "graphs": len(first) + len(second),
        "dynamo_graphs": len(second),
        "graph_breaks": graph_breaks,
        "export_seconds": export_seconds,
        **{name: max([getattr(r, name) for r in (*first, *second)], default=0) for name in OF_A_PLAN},
        **dict.fromkeys(OF_A_SESSION, 0),
    }
    for runner in (*first, *second):
        for name, value in runner.session.stats().items():
            sums[name] += value
    return sums
