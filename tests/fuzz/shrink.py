"""Makes a failing program smaller while it fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from program import NAME, Program, Source, Step, renamed, without_line


def kind(what: str) -> str:
    """A failure without the numbers of its step, outputs and leaves."""
    return re.sub(r"\d+|\(.*?\)", "#", what).split(": ", 1)[-1]


def smaller(p: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest cuts first."""
    for i in reversed(range(len(p.steps))):
        if len(p.steps) > 1:
            yield replace(p, steps=(*p.steps[:i], *p.steps[i + 1 :]))
    for i in reversed(range(len(p.lines))):
        if p.lines[i].makes:
            yield without_line(p, i, None)
            for name in sorted(p.lines[i].uses(), reverse=True):
                yield without_line(p, i, name)
        else:
            yield without_line(p, i, None)
    for i in range(len(p.results)):
        if len(p.results) > 1:
            yield without_result(p, i)
    yield without_unused(p)
    for i, line in enumerate(p.lines):
        if line.within:
            yield with_line(p, i, replace(line, within=""))
    for i, step in enumerate(p.steps):
        for simple in simpler_steps(step, p):
            yield replace(p, steps=(*p.steps[:i], simple, *p.steps[i + 1 :]))
    for group in ("inputs", "parameters", "buffers"):
        sources = getattr(p, group)
        for i, source in enumerate(sources):
            for simple_source in simpler_sources(source, group):
                yield replace(p, **{group: (*sources[:i], simple_source, *sources[i + 1 :])})


def with_line(p: Program, i: int, line: object) -> Program:
    return replace(p, lines=(*p.lines[:i], line, *p.lines[i + 1 :]))


def without_result(p: Program, i: int) -> Program:
    """The results less one; what the steps do with it goes too."""

    def kept(act: str) -> str | None:
        if act == "again()":
            return act
        name, given, tail = re.match(r"(\w+)\(([\d, ]*)(.*)", act).groups()  # type: ignore[union-attr]
        left = [k - (k > i) for k in map(int, re.findall(r"\d+", given)) if k != i]
        joint = ", " if tail.startswith("retain") else ""
        return f"{name}({', '.join(map(str, left))}{joint}{tail}" if left else None

    steps = tuple(replace(s, acts=tuple(a for a in map(kept, s.acts) if a)) for s in p.steps)
    return replace(p, results=(*p.results[:i], *p.results[i + 1 :]), steps=steps)


def without_unused(p: Program) -> Program:
    """The program without inputs, parameters and buffers that nothing names."""
    used = set(
        NAME.findall(" ".join([*[x.text for x in p.lines], *p.results, *[a for s in p.steps for a in s.arguments]]))
    )
    inner = set(NAME.findall(" ".join([*[x.text for x in p.lines], *p.results])))
    keep = [i for i, x in enumerate(p.inputs) if x.name in inner] or [0]
    # The inputs that are left are renumbered: an argument may name another input.
    if len(keep) < len(p.inputs) and all(
        set(NAME.findall(s.arguments[i])) <= {p.inputs[k].name for k in keep} for s in p.steps for i in keep
    ):
        names = {p.inputs[k].name: f"x{n}" for n, k in enumerate(keep)}
        p = replace(
            p,
            inputs=tuple(replace(p.inputs[k], name=names[p.inputs[k].name]) for k in keep),
            lines=tuple(replace(x, text=all_renamed(x.text, names)) for x in p.lines),
            results=tuple(all_renamed(r, names) for r in p.results),
            steps=tuple(replace(s, arguments=tuple(all_renamed(s.arguments[k], names) for k in keep)) for s in p.steps),
        )
    return replace(
        p,
        parameters=tuple(x for x in p.parameters if f"s.{x.name}" in used),
        buffers=tuple(x for x in p.buffers if f"s.{x.name}" in used),
    )


def all_renamed(text: str, names: dict[str, str]) -> str:
    for name, other in names.items():  # in rising order, so that no new name is renamed again
        text = renamed(text, name, other)
    return text


def simpler_steps(step: Step, p: Program) -> Iterator[Step]:
    for i in range(len(step.acts)):
        yield replace(step, acts=(*step.acts[:i], *step.acts[i + 1 :]))
    for i, act in enumerate(step.acts):
        shorter = (
            re.sub(r"\d+, (?=\d)", "", act, count=1),
            re.sub(r", \d+", "", act, count=1),
            act.replace(", retain=True", ""),
        )
        for other in {*shorter} - {act}:
            yield replace(step, acts=(*step.acts[:i], other, *step.acts[i + 1 :]))
    usual = Step(step.sizes, tuple(x.name for x in p.inputs), acts=step.acts)
    for field in ("arguments", "training", "grad", "frozen", "update", "zero"):
        if getattr(step, field) != getattr(usual, field):
            yield replace(step, **{field: getattr(usual, field)})
    for k, (name, size) in enumerate(step.sizes):
        for less in range(1, size):
            yield replace(step, sizes=(*step.sizes[:k], (name, less), *step.sizes[k + 1 :]))


def simpler_sources(source: Source, group: str) -> Iterator[Source]:
    if source.layout != "plain":
        yield replace(source, layout="plain")
    if source.grad and group == "inputs":
        yield replace(source, grad=False)
    if source.dtype != "float64":
        yield replace(source, dtype="float64")
    for i, d in enumerate(source.dims):
        yield replace(source, dims=(*source.dims[:i], *source.dims[i + 1 :]))
        for less in [2] if isinstance(d, str) else range(1, d):
            yield replace(source, dims=(*source.dims[:i], less, *source.dims[i + 1 :]))


def shrunk(program: Program, what: str, seconds: float, check: Callable[[Program], str]) -> Program:
    """The smallest program found in the time that fails as `what`.

    Parameters
    ----------
    check
        What differs for a program; empty if nothing does.
    """
    end, seen = time.monotonic() + seconds, {str(program)}
    found = True
    while found:
        found = False
        for candidate in smaller(program):
            if time.monotonic() > end:
                return program
            if not candidate.results or str(candidate) in seen:
                continue
            seen.add(str(candidate))
            try:
                fails = kind(check(candidate)) == kind(what)
            except Exception:  # PyTorch cannot make its sources
                fails = False
            if fails:
                program, found = candidate, True
                break
    return program
