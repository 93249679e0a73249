"""Random objects that a forward reads, one value in them changed between steps: `stale.py --seeds 0:2000`.

A program is a path: from a root (an attribute, a global, a variable of a closure, an argument ...) through holders
(objects, containers, functions, classes ...) to a leaf, which the forward makes a number of. Between steps one of what
lies on the path is replaced or changed in place. Results have to be those of eager at every step.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import warnings
from typing import Any

import torch
from holders import HOLDERS, put_in_cell
from leaves import IN_PLACE, LEAVES
from seeds import run
from torch import nn

from ortmodule_c import DebugOptions, ORTModule

# What the first way refuses to follow, as docs/behaviour.md says.
NOT_FOLLOWED = frozenset(
    {
        *("identity", "pair", "which", "thread", "ndarray", "fromnumpy", "array", "bytearray", "deque"),
        *("weak", "variable", "computedofmodule", "computedofclass", "reduced"),
        *("namespace", "default", "ownlist", "ownlistattribute", "state"),
    }
)

# Roots: the source of a module around an expression, and where the root lies.
ROOTS = {
    "attribute": ("self.root", lambda scope, m, v: setattr(m, "root", v)),
    "global": ("ROOT", lambda scope, m, v: scope.__setitem__("ROOT", v)),
    "classattribute": ("self.root", lambda scope, m, v: _put_root(type(m), v)),
    "ofclass": ("Net.root", lambda scope, m, v: _put_root(type(m), v)),
    "closure": ("root", lambda scope, m, v: put_in_cell(m.read, v)),
    "helper": ("helper()", lambda scope, m, v: scope.__setitem__("ROOT", v)),
    "submodule": ("self.child.root", lambda scope, m, v: setattr(m.child, "root", v)),
    "argument": ("root", None),
}
SOURCE = """
def helper():
    return ROOT

def are_one(a, b):
    return a is b

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.child = nn.Identity()

    def forward(self, x, root=None):
        if self.breaks and x.sum() > 1e9:
            x = x + 1
        return self.l(x) * self.read(self, x, root) if self.own else self.l(x) * READ

def reader(root=None):
    def read(self, x, given):
        return READ_CLOSED
    return read
"""


def _put_root(cls: Any, value: Any) -> None:
    cls.root = staticmethod(value) if callable(value) and not isinstance(value, type) else value


class Program:
    """One seed's module, and the changes of what it reads.

    Attributes
    ----------
    module
        What is run.
    words
        The path and the change, for people.
    followed
        Whether the first way has to take it.
    """

    def __init__(self, seed: int) -> None:
        self._r = r = random.Random(seed)
        self._n = 2
        self._root = r.choice([*ROOTS])
        self._path = [r.choice([*HOLDERS]) for _ in range(r.choice([0, 1, 1, 2, 2, 3, 4]))]
        self._leaf = r.choice([*LEAVES])
        self._at = r.randrange(-1, len(self._path))  # the holder of which the content changes; -1: the root
        while self._at >= 0 and HOLDERS[self._path[self._at]][2] is None:
            self._at -= 1
        self._in_place = self._leaf in IN_PLACE and r.random() < 0.3
        self.words = f"{self._root} {' '.join(self._path)} {self._leaf}, changed "
        self.words += "in place" if self._in_place else f"at {self._at}"
        breaks = r.random() < 0.15
        self.words += ", two graphs" if breaks else ""
        self.followed = self._root != "argument" and not breaks and not NOT_FOLLOWED & {*self._path, self._leaf}
        self._values = self._build(0)
        self._scope: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "math": math,
            "functools": functools,
            "__name__": "program",
        }
        expression = ROOTS[self._root][0]
        for name in self._path:
            expression = HOLDERS[name][1].format(expression)
        expression = LEAVES[self._leaf][1].format(expression)
        closed = self._root == "closure"
        source = SOURCE.replace("READ_CLOSED", expression if closed else "1.0")
        exec(source.replace("READ", "1.0" if closed else expression), self._scope)
        self.module: Any = self._scope["Net"]()
        self.module.own, self.module.breaks = closed, breaks
        self.module.read = self._scope["reader"](None)
        self._put_root()

    def arguments(self) -> tuple[Any, ...]:
        """What the forward is given besides a tensor."""
        return (self._values[0],) if self._root == "argument" else ()

    def change(self) -> None:
        """Something on the path becomes another."""
        self._n += 1
        if self._in_place:
            IN_PLACE[self._leaf](self._values[-1], self._n)
            return
        self._values[self._at + 1 :] = self._build(self._at + 1)
        if self._at < 0:
            self._put_root()
        else:
            put = HOLDERS[self._path[self._at]][2]
            assert put is not None
            put(self._values[self._at], self._values[self._at + 1])

    def _build(self, first: int) -> list[Any]:
        """The values on the path from a position on."""
        values = [LEAVES[self._leaf][0](self._n)]
        for name in reversed(self._path[first:]):
            values.insert(0, HOLDERS[name][0](values[0]))
        return values

    def _put_root(self) -> None:
        put = ROOTS[self._root][1]
        if put is not None:
            put(self._scope, self.module, self._values[0])


def verdict(seed: int, capture: Any) -> tuple[str, str]:
    """What differed, or nothing; and where it ran."""
    torch.manual_seed(seed)
    ours, eager = Program(seed), Program(seed)
    eager.module.load_state_dict(ours.module.state_dict())
    model = ORTModule(ours.module, DebugOptions(capture=capture))
    x = torch.arange(6.0).view(2, 3)
    what = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            want, got = ([m(x, *p.arguments()), None] for m, p in ((eager.module, eager), (model, ours)))
            if (
                not torch.allclose(want[0], got[0], rtol=1e-4, atol=1e-6, equal_nan=True)
                or want[0].dtype != got[0].dtype
            ):
                what = f"step {step}: {got[0].flatten()[:2].tolist()} is not {want[0].flatten()[:2].tolist()}"
                break
            if step != 1:  # the second step is that of an unchanged module
                ours.change()
                eager.change()
    causes = [r.cause for r in model.fallback_report()]
    return what and f"seed {seed}: {ours.words}: {what}", f"{ours.words}: {causes[0]}" if causes else ""


if __name__ == "__main__":
    sys.exit(run(lambda seed: Program(seed).words, verdict, "0:2000", "export"))
