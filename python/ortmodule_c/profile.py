"""What the steps of the graphs took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

_TICK = 1e-9  # a clock may not have moved


class ProfiledStep(NamedTuple):
    """One step of a planned graph.

    Attributes
    ----------
    phase
        ``"forward"`` or ``"backward"``.
    op
        What it computes, named as in the graphs that ``OMC_DUMP`` writes.
    origin
        Where it comes from in the module; may be empty.
    runs
        How often it has run; a backward asked for some of its gradients leaves out what they do not need.
    seconds
        What all these runs took together.
    operations, bytes
        The arithmetic operations of one run, and the bytes that it reads and writes.
    """

    phase: str
    op: str
    origin: str
    runs: int
    seconds: float
    operations: float
    bytes: float


class Profile(list[ProfiledStep]):
    """The steps of each graph as it was planned for its last call; as text a table of the ops, the slowest first."""

    def __str__(self) -> str:
        ran = [step for step in self if step.runs]
        if not ran:
            return "no steps were timed: OMC_PROFILE=1 in the environment, before the import, times them"
        ops: defaultdict[tuple[str, str], list[ProfiledStep]] = defaultdict(list)
        for step in ran:
            ops[step.op, step.phase].append(step)
        total = _seconds(ran)
        lines = [f"{'op':<24} {'phase':<8} {'steps':>5} {'ms':>9} {'part':>6} {'GFLOP/s':>8} {'GB/s':>6}"]
        for (op, phase), steps in sorted(ops.items(), key=lambda item: -_seconds(item[1])):
            seconds = _seconds(steps)
            flops, moved = sum(s.operations for s in steps), sum(s.bytes for s in steps)
            lines.append(
                f"{op:<24} {phase:<8} {len(steps):>5} {1e3 * seconds:>9.3f} {seconds / total:>6.1%} "
                f"{flops / seconds / 1e9:>8.1f} {moved / seconds / 1e9:>6.1f}"
            )
        lines.append(f"{'all':<24} {'':<8} {len(ran):>5} {1e3 * total:>9.3f}")
        return "\n".join(lines)


def _seconds(steps: Iterable[ProfiledStep]) -> float:
    """What one run of each takes."""
    return max(sum(step.seconds / step.runs for step in steps), _TICK)
