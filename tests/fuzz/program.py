"""A random program as data: a module, and a scenario of calls and backwards; rendered as Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scene
import torch
from torch import nn
from torch.nn import functional as F

NAME = re.compile(r"\b(?:[xv]\d+|s\.\w+)\b")
ASSIGNED = re.compile(r"(v\d+) = ")


@dataclass(frozen=True)
class Source:
    """An input, parameter or buffer; a dim that is a letter is open, its size chosen by each step."""

    name: str
    dims: tuple[int | str, ...]
    dtype: str = "float64"
    layout: str = "plain"
    grad: bool = False

    def made(self, maker: str, number: int, sizes: dict[str, int]) -> str:
        shape = [sizes[d] if isinstance(d, str) else d for d in self.dims]
        extra = "".join(
            f", {k}={v!r}"
            for k, v, usual in (
                ("dtype", self.dtype, "float64"),
                ("layout", self.layout, "plain"),
                ("grad", self.grad, False),
            )
            if v != usual
        )
        return f"{maker}({number}, {shape}{extra})"


@dataclass(frozen=True)
class Line:
    """A line of the forward and the contexts it stands in; lines with the same follow each other in one block."""

    text: str
    within: str = ""

    @property
    def makes(self) -> str | None:
        found = ASSIGNED.match(self.text)
        return found[1] if found else None

    def uses(self) -> set[str]:
        return set(NAME.findall(self.text)) - {self.makes}


@dataclass(frozen=True)
class Step:
    """One call of the module: sizes of open dims, arguments, what needs no gradient in it, what follows the call."""

    sizes: tuple[tuple[str, int], ...]
    arguments: tuple[str, ...]
    training: bool = True
    grad: bool = True
    frozen: tuple[str, ...] = ()
    acts: tuple[str, ...] = ()
    update: bool = False
    zero: bool = True


@dataclass(frozen=True)
class Program:
    """Inputs, parameters and buffers, the lines of the forward, what it returns, and the steps."""

    inputs: tuple[Source, ...]
    parameters: tuple[Source, ...] = ()
    buffers: tuple[Source, ...] = ()
    lines: tuple[Line, ...] = ()
    results: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def tolerance(self) -> float:
        text = str(self)
        return scene.LOOSE if "float32" in text or "float()" in text else scene.TIGHT

    def module_text(self, returned: str | None = None) -> str:
        init = []
        for i, p in enumerate(self.parameters):
            value = p.made("made", 100 + i, {})
            init.append(f"s.{p.name} = nn.Parameter({value}" + (")" if p.grad else ", False)"))
        for i, b in enumerate(self.buffers):
            value = b.made("made", 200 + i, {}) + (".abs()" if b.layout == "positive" else "")
            init.append(f's.register_buffer("{b.name}", {value})')
        names = ", ".join(["s", *[x.name for x in self.inputs]])
        body, within = [], ""
        for line in self.lines:
            if line.within != within and line.within:
                body.append(f"with {line.within}:")
            within = line.within
            body.append("    " * bool(within) + line.text)
        body.append(f"return {returned or '(' + ''.join(r + ', ' for r in self.results) + ')'}")
        return "\n".join(
            [
                "class Program(nn.Module):",
                "    def __init__(s):",
                *["        " + line for line in ["super().__init__()", *init]],
                "",
                f"    def forward({names}):",
                *["        " + line for line in body],
            ]
        )

    def inputs_of(self, number: int) -> list[Source]:
        """The inputs as a step makes them."""
        frozen = self.steps[number].frozen
        return [replace(x, grad=x.grad and x.name not in frozen) for x in self.inputs]

    def step_lines(self, number: int) -> list[str]:
        step = self.steps[number]
        lines = [f"r.module.train({step.training})"]
        frozen = [p.name for p in self.parameters if p.name in step.frozen and p.grad]
        lines += [f"r.module.{name}.requires_grad_(False)" for name in frozen]
        for i, x in enumerate(self.inputs_of(number)):
            lines.append(f"{x.name} = {x.made('r.input', 10 * number + i, dict(step.sizes))}")
        call = f"r.call({', '.join(step.arguments)})"
        lines += [call] if step.grad else ["with torch.no_grad():", f"    {call}"]
        lines += [f"r.{act}" for act in step.acts]
        lines += [f"r.module.{name}.requires_grad_()" for name in frozen]
        lines.append(f"r.finish(update={step.update}, zero={step.zero})")
        return lines

    def __str__(self) -> str:
        steps = ["    " + line for i in range(len(self.steps)) for line in [f"# step {i}", *self.step_lines(i)]]
        return "\n".join([self.module_text(), "", "", "def scenario(r):", *steps])

    def script(self) -> str:
        """A runnable file that tells the first difference."""
        return "\n".join(
            [
                "import sys",
                f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
                "from scene import *",
                "from torch.nn import functional as F",
                "",
                "",
                str(self),
                "",
                "",
                f"print(*compare(Program, scenario, {self.tolerance}), sep='\\n')",
                "",
            ]
        )

    def load(self) -> tuple[Callable[[], nn.Module], Callable[[Any], None]]:
        """The module's class and the scenario."""
        scope = executed(str(self))
        return scope["Program"], scope["scenario"]

    def check(self) -> tuple[str, str, str]:
        """What differs from eager, how, and where it ran; see :func:`scene.compare`."""
        return scene.compare(*self.load(), self.tolerance)


def executed(text: str) -> dict[str, Any]:
    scope = {
        "torch": torch,
        "nn": nn,
        "F": F,
        **{n: getattr(scene, n) for n in ("made", "Doubled", "Swapped", "Raised")},
    }
    exec(compile(text, "program", "exec"), scope)
    return scope


def renamed(text: str, name: str, other: str) -> str:
    return re.sub(rf"(?<![\w.]){re.escape(name)}\b", other, text)


def without_line(program: Program, i: int, stand_in: str | None) -> Program:
    """The program less a line; what it made is replaced by another value, or goes with all that uses it."""
    line = program.lines[i]
    rest = [*program.lines[:i], *program.lines[i + 1 :]]
    results = list(program.results)
    made = line.makes
    if made and stand_in:
        rest = rest[:i] + [replace(x, text=renamed(x.text, made, stand_in)) for x in rest[i:]]
        results = [renamed(r, made, stand_in) for r in results]
    elif made:
        gone = {made}
        kept = []
        for x in rest:
            if gone & x.uses():
                gone |= {x.makes} - {None}  # type: ignore[arg-type]
            else:
                kept.append(x)
        rest = kept
        results = [r for r in results if not gone & set(NAME.findall(r))]
    return replace(program, lines=tuple(rest), results=tuple(results))
