"""Grows random programs line by line; a line is kept if PyTorch can run it, forward and backward, in every step."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import rows
import scene
import torch
from program import Line, Program, Source, Step, executed
from torch import Tensor

WORD = re.compile(r"<(\w+)>")
DIMS = [1, 2, 2, 3, 3, 4]
LARGEST, STEEPEST = 30.0, 1e4  # values and gradients beyond would be compared more loosely
MOST_DIMS, MOST_ELEMENTS = 5, 4000
TRIALS = 6  # for every line wanted
# Buffers of a name of their own: dims, dtype, layout.
STATE: dict[str, Callable[[int], tuple[tuple[int, ...], str, str]]] = {
    "count": lambda _: ((), "int64", "plain"),
    "mean": lambda channels: ((channels,), "float64", "plain"),
    "var": lambda channels: ((channels,), "float64", "positive"),
}
RAISING = 0.04  # share of programs whose last line may raise


class Grower:
    """One seed's program."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.weights = [most * rng.random() for _, most in rows.KINDS]
        within = rng.random() < 0.5
        self.contexts = [rng.random() * w * (within or not name) for name, w in rows.WITHIN.items()]
        self.open = [self.opened() for _ in range(rng.choice([1, 2, 2, 3]))]
        inputs = tuple(self.input(i) for i in range(rng.randint(1, 3)))
        self.program = Program(inputs, steps=tuple(self.step(inputs, sizes) for sizes in self.open))
        try:
            self.scopes = self.run(self.program)
        except IndexError:  # an argument is the first row of nothing
            names = tuple(x.name for x in inputs)
            self.program = replace(self.program, steps=tuple(replace(s, arguments=names) for s in self.program.steps))
            self.scopes = self.run(self.program)
        self.n_made = 0
        self.within, n_lines = "", rng.randint(3, 14)
        for _ in range(TRIALS * n_lines):
            if len(self.program.lines) == n_lines:
                break
            self.line(may_raise=rng.random() < RAISING / n_lines)
        self.finish()

    # Inputs and steps

    def opened(self) -> tuple[tuple[str, int], ...]:
        dims = [*DIMS, *DIMS, 0]
        return (("N", self.rng.choice(dims)), ("T", self.rng.choice(dims)))

    def input(self, i: int) -> Source:
        rng = self.rng
        dims: list[int | str] = [rng.choice(DIMS) for _ in range(rng.choice([0, 1, 2, 2, 2, 3, 3, 4]))]
        if dims and rng.random() < 0.6:
            dims[0] = "N"
        if len(dims) > 1 and rng.random() < 0.3:
            dims[1] = "T"
        dtype = rng.choice(["float64"] * 9 + ["float32", "int64", "bool"]) if i else "float64"
        layout = rng.choice(["plain"] * 4 + ["branch", "branch", "transposed", "strided", "expanded", "halves"])
        return Source(f"x{i}", tuple(dims), dtype, layout, dtype.startswith("float") and rng.random() < 0.6)

    def step(self, inputs: tuple[Source, ...], sizes: tuple[tuple[str, int], ...]) -> Step:
        rng = self.rng
        arguments = [x.name for x in inputs]
        for i, x in enumerate(inputs[1:], 1):
            if rng.random() < 0.15:
                same = [y.name for y in inputs[:i] if y.dims == x.dims and y.dtype == x.dtype]
                arguments[i] = rng.choice(same) if same else arguments[i]
            elif rng.random() < 0.1:
                same = [y.name for y in inputs[:i] if len(y.dims) > 1]
                arguments[i] = rng.choice(same) + rng.choice([".mT", "[0]", ".detach()"]) if same else arguments[i]
        return Step(
            sizes,
            tuple(arguments),
            training=rng.random() < 0.75,
            grad=rng.random() < 0.9,
            frozen=tuple(name for name in ("x0", "x1", "x2", "p0", "p1") if rng.random() < 0.05),
            update=rng.random() < 0.6,
            zero=rng.random() < 0.8,
        )

    # Lines

    def run(self, program: Program) -> list[dict[str, Any]]:
        """The values of every name at every step; an exception where eager raises or something is too large."""
        text = program.module_text("locals()")
        scopes = []
        for number, step in enumerate(program.steps):
            scope = executed(text)
            module = scope["Program"]().train(step.training)
            made = [
                eval(x.made("made", 10 * number + i, dict(step.sizes)), scope)
                for i, x in enumerate(program.inputs_of(number))
            ]
            leaves = [*[t for t in made if t.requires_grad], *module.parameters()]
            own = {
                x.name: t * 1 if x.layout == "branch" and x.grad else t
                for x, t in zip(program.inputs_of(number), made, strict=True)
            }
            with warnings.catch_warnings(), torch.set_grad_enabled(step.grad):
                warnings.simplefilter("ignore")
                values = module(*[eval(a, dict(own)) for a in step.arguments])
                check_size(values, leaves)
            scopes.append({**values, "s": module})
        return scopes

    def line(self, may_raise: bool) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            self.within = rng.choices(list(rows.WITHIN), self.contexts)[0]
        kind = rng.choices([k for k, _ in rows.KINDS], self.weights)[0]
        row, before = rng.choice(kind), self.program
        words = {"new": f"v{self.n_made}"}
        try:
            for word in WORD.findall(row):
                words[word] = words.get(word) or self.word(word, words)
        except (LookupError, ValueError, TypeError):  # nothing fits
            self.program = before
            return
        line = Line(WORD.sub(lambda m: words[m[1]], row), self.within)
        self.program = replace(self.program, lines=(*self.program.lines, line))
        try:
            self.scopes = self.run(self.program)
            self.n_made += "<new>" in row
        except TooLarge:
            self.program = before
        except Exception:
            if not may_raise or "<new>" in row:
                self.program = before

    def value(self, name: str) -> Tensor:
        return eval(name, dict(self.scopes[0]))

    def names(self) -> list[str]:
        names = []
        for name, v in self.scopes[0].items():
            if isinstance(v, Tensor):
                names.append(name)
            elif isinstance(v, (list, tuple)):
                names += [f"{name}[{k}]" for k in range(len(v))]
        return names

    def word(self, word: str, words: dict[str, str]) -> str:
        if word in rows.WORDS:
            return self.rng.choice(rows.WORDS[word])
        if word[0] in "xyzabi" and word[1:] in ("", "2", "3", "4"):
            return self.pick(word)
        x = next((self.value(words[w]) for w in ("x", "x2", "x3", "x4", "a", "i") if w in words), torch.empty(1))
        rank, channels = x.dim(), x.shape[1] if x.dim() > 1 else 1
        if word in ("axis", "axis2"):
            return str(self.rng.randrange(-rank, rank))
        if word == "axes":
            return str(tuple(self.rng.sample(range(rank), self.rng.randint(1, rank))))
        if word == "order":
            return str(tuple(self.rng.sample(range(rank), rank)))
        if word == "buffer":
            return self.buffer(x)
        if word in STATE:
            return self.named_buffer(word, *STATE[word](channels))
        shapes = {
            "last": x.shape[-1:],
            "square": (*x.shape[-1:], *x.shape[-1:]),
            "channels": (channels,),
            "filter": (channels, channels, *self.rng.choices([1, 2, 3], k=2)),
            "table": (5, 4),
            "p": x.shape[self.rng.randint(0, rank) :],
        }
        return "s." + self.parameter(tuple(shapes[word]))

    def pick(self, word: str) -> str:
        """The name of a value; late ones and those with many dims are picked more often."""
        fits = [n for n in self.names() if self.suits(self.value(n), word)]
        two = [fits[max(self.rng.choices(range(len(fits)), k=2))] for _ in range(2)]
        return max(two, key=lambda name: self.value(name).dim())

    @staticmethod
    def suits(t: Any, word: str) -> bool:
        kinds = {"i": t.dtype == torch.int64, "b": t.dtype == torch.bool, "a": True}
        return kinds.get(word[0], t.is_floating_point()) and word[1:] in ("", str(t.dim()))

    def parameter(self, shape: tuple[int, ...]) -> str:
        same = [p.name for p in self.program.parameters if p.dims == shape]
        if same and self.rng.random() < 0.7:
            return self.rng.choice(same)
        parameters = self.program.parameters
        new = Source(f"p{len(parameters)}", shape, grad=self.rng.random() < 0.8)
        self.program = replace(self.program, parameters=(*parameters, new))
        return new.name

    def buffer(self, x: Tensor) -> str:
        buffers = self.program.buffers
        if buffers and self.rng.random() < 0.5:
            return self.rng.choice(buffers).name
        shape = tuple(x.shape[self.rng.choice([0, 0, x.dim()]) :])
        new = Source(f"b{len(buffers)}", shape, self.rng.choice(["float64"] * 4 + ["int64", "float32"]))
        self.program = replace(self.program, buffers=(*buffers, new))
        return new.name

    def named_buffer(self, name: str, *made: Any) -> str:
        if all(b.name != name for b in self.program.buffers):
            self.program = replace(self.program, buffers=(*self.program.buffers, Source(name, *made)))
        return name

    # The end

    def finish(self) -> None:
        """Choose what is returned, and what is done with it in each step."""
        rng = self.rng
        state = [f"s.{t.name}" for t in (*self.program.parameters, *self.program.buffers)]
        names = self.names()
        made = [n for n in names if n.startswith("v")] or names
        results = [*made[-rng.randint(1, 3) :], *rng.choices([*names, *state], k=rng.choice([0, 0, 1, 2]))]
        rng.shuffle(results)
        steps = tuple(
            replace(step, acts=self.acts(len(results)), arguments=self.with_state(step.arguments))
            for step in self.program.steps
        )
        self.program = replace(self.program, results=tuple(results), steps=steps)

    def with_state(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """The arguments of a step, now and then a parameter or buffer among them."""
        for i, x in enumerate(self.program.inputs):
            for t in (*self.program.parameters, *self.program.buffers):
                if (t.dims, t.dtype) == (x.dims, x.dtype) and self.rng.random() < 0.1:
                    arguments = (*arguments[:i], f"r.module.{t.name}", *arguments[i + 1 :])
        return arguments

    def acts(self, n: int) -> tuple[str, ...]:
        rng = self.rng
        acts = ["again()"] if rng.random() < 0.1 else []
        if rng.random() < 0.1:
            acts.append(f"scribble({rng.randrange(n)})")
        some = ", ".join(map(str, sorted(rng.sample(range(n), rng.randint(1, n)))))
        manner = rng.randrange(6)
        if manner < 2:
            acts.append(f"backward({some})")
        elif manner == 2:
            acts += [f"backward({i}, retain=True)" for i in rng.sample(range(n), n)]
        elif manner == 3:
            acts += [f"backward({some}, retain=True)", f"backward({rng.randrange(n)})"]
        elif manner == 4:
            acts += [f"grad({some})", f"backward({rng.randrange(n)})"]
        if rng.random() < 0.35:
            acts.append(f"scribble({rng.randrange(n)})")
        return tuple(acts)


class TooLarge(ValueError):
    """A value or gradient that can only be compared loosely."""


def check_size(values: dict[str, Any], leaves: list[Tensor]) -> None:
    tensors = [
        t for v in values.values() for t in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, Tensor)
    ]
    for t in tensors:
        if t.dim() > MOST_DIMS or t.numel() > MOST_ELEMENTS:
            raise TooLarge(f"shape {tuple(t.shape)}")
        if t.dtype != torch.bool and not (t.detach().abs() <= LARGEST).all():
            raise TooLarge("values")
    reached = [scene.weighted(t) for t in tensors if t.requires_grad and not t.is_leaf]
    if not reached or not leaves or not torch.is_grad_enabled():
        return
    wanted = [t for t in leaves if t.requires_grad]
    for g in torch.autograd.grad(sum(reached), wanted, allow_unused=True) if wanted else ():  # type: ignore[arg-type]
        if g is not None and not (g.abs() <= STEEPEST).all():
            raise TooLarge("gradients")


def grown(seed: int) -> Program:
    """The program of a seed."""
    with scene.double():
        return Grower(seed).program
