"""Random changes that a forward makes of what it holds: `inside.py --seeds 0:1000`.

A program is a path as in stale.py, from a root through holders to a container or an object. At each call the forward
changes that, by itself or by a function, reads it, and perhaps changes or reads it once more. Results, errors, and what
is there afterwards have to be those of eager at every step.
"""

from __future__ import annotations

import collections
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from holders import HOLDERS
from seeds import run
from stale import ROOTS
from torch import nn

from ortmodule_c import DebugOptions, ORTModule


class Plain:
    """An object with attributes."""

    def __init__(self) -> None:
        self.v = 1.0


class Slots:
    """An object with slots."""

    __slots__ = ("v", "w")

    def __init__(self) -> None:
        self.v = 1.0


def _module() -> nn.Module:
    module = nn.Identity()
    module.v = 1.0  # type: ignore[assignment]
    return module


_OF_DICTS = [
    *("o['k'] = o['k'] + 1", "o.update(j=o['k'] + 2)", "o[f'n{len(o)}'] = 1.0", "o.pop('j', 0)", "o['k'] += 2"),
    *("o.setdefault(f'n{len(o)}', 2.0)", "a = next(iter(o)); b = o.pop(a); o[a] = b", "o.popitem(); o['k'] = 3.0"),
    *("o |= {'z': float(len(o))}", "del o['k']; o['k'] = 5.0", "b = o['k']; o.clear(); o['k'] = b + 1"),
]
_OF_DICTS_READ = [
    "o['k']",
    "len(o)",
    "sum(o.values())",
    "('j' in o) + 1",
    "[*o.values()][-1]",
    "(3.0 in o.values()) + 1",
]
_OF_OBJECTS = ["o.v = o.v + 1", "o.w = getattr(o, 'w', 0.0) + 1", "setattr(o, 'v', o.v * 1.5)", "o.v += 1", "del o.v"]
_OF_OBJECTS_READ = ["o.v", "getattr(o, 'w', 0.5)", "hasattr(o, 'w') + 1"]

# Name -> how it is made, what changes it, what is read of it.
KINDS: dict[str, tuple[Callable[[], Any], list[str], list[str]]] = {
    "list": (
        lambda: [1.0, 2.0],
        [
            *("o.append(1.5)", "o.insert(0, o[0] + 1)", "o[0] = o[0] + 1", "o.extend([1.0])", "o.reverse()", "o *= 2"),
            *(
                "o.append(o.pop(0))",
                "o += [2.0]",
                "o.__iadd__([2.0])",
                "o[0:1] = [5.0, 6.0]",
                "o.sort(key=lambda v: -v)",
            ),
            *("o[0], o[-1] = o[-1], o[0] + 1", "del o[0]; o.append(4.0)"),
            "o.remove(max(o)); o.append(0.5)",
        ],
        ["sum(o)", "len(o)", "o[0]", "o[-1]", "(3.0 in o) + 1", "o.count(2.0) + 1", "o.index(max(o)) + 1", "max(o)"],
    ),
    "dict": (lambda: {"k": 1.0, "j": 2.0}, _OF_DICTS, _OF_DICTS_READ),
    "ordered dict": (
        lambda: collections.OrderedDict(k=1.0, j=2.0),
        [*_OF_DICTS, "o.move_to_end(next(iter(o)))", "o.move_to_end(next(reversed(o)), last=False)"],
        _OF_DICTS_READ,
    ),
    "default dict": (
        lambda: collections.defaultdict(float, {"k": 1.0, "j": 2.0}),
        [*_OF_DICTS, "o[f'm{len(o)}']", "o[f'm{len(o)}'] += 1"],
        _OF_DICTS_READ,
    ),
    "counter": (lambda: collections.Counter(k=1), ["o.update(['k'])", "o['k'] += 1", "o.subtract(['j'])"], ["o['k']"]),
    "set": (
        lambda: {1.0, 2.0},
        [
            *(
                "o.add(float(len(o) + 5))",
                "o.discard(1.0)",
                "o.update({10.0 + len(o)})",
                "o ^= {1.0, 5.0}",
                "o -= {1.0}",
            ),
            *(
                "o |= {float(len(o))}",
                "o.remove(max(o)); o.add(0.5)",
                "o &= {1.0, 2.0}",
                "o.symmetric_difference_update({1.0})",
            ),
        ],
        ["len(o)", "sum(sorted(o))", "(1.0 in o) + 1"],
    ),
    "deque": (
        lambda: collections.deque([1.0, 2.0]),
        ["o.append(1.0)", "o.appendleft(o[0] + 1)", "o.rotate(1)", "o.append(o.popleft())", "o.extendleft([4.0])"],
        ["sum(o)", "o[0]", "len(o)", "(2.0 in o) + 1"],
    ),
    "object": (Plain, [*_OF_OBJECTS, "o.__dict__.update(v=o.v * 1.5)", "vars(o)['w'] = 2.0"], _OF_OBJECTS_READ),
    "slots": (Slots, _OF_OBJECTS, _OF_OBJECTS_READ),
    "module": (_module, _OF_OBJECTS, _OF_OBJECTS_READ),
}
SOURCE = """
def helper():
    return ROOT

def change(o):
    CHANGE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.child = nn.Identity()

    def forward(self, x, root=None):
        o, k = PATH, 0.0
        BODY
        return self.l(x) * k
"""
_BREAKS = ["if x.sum() > 1e9: x = x + 1", "torch._dynamo.graph_break()"]


class Program:
    """One seed's module, which changes what it holds.

    Attributes
    ----------
    module
        What is run.
    held
        What it changes.
    words
        The path and the change, for people.
    """

    def __init__(self, seed: int) -> None:
        r = random.Random(seed)
        root = r.choice([name for name in ROOTS if name != "closure"])
        path = [r.choice([*HOLDERS]) for _ in range(r.choice([0, 1, 1, 1, 2, 2]))]
        kind = r.choice([*KINDS])
        make, changes, reads = KINDS[kind]
        change = r.choice(changes)
        steps = {"c": r.choice([change, "change(o)"])}
        body = [steps.get(step) or f"k = k + float({r.choice(reads)})" for step in r.choice(["cr", "rc", "crc", "rcr"])]
        if "rc" in body or not body[-1].startswith("k"):
            body.append(f"k = k + float({r.choice(reads)})")
        if r.random() < 0.6:
            body.insert(r.randrange(len(body) + 1), r.choice(_BREAKS))
        self.words = f"{root} {' '.join(path)} {kind}: {' / '.join(body)} ({change})"
        self.held = value = make()
        expression = ROOTS[root][0]
        for name in path:
            expression = HOLDERS[name][1].format(expression)
        for name in reversed(path):
            value = HOLDERS[name][0](value)
        scope: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "program"}
        source = SOURCE.replace("CHANGE", change).replace("PATH", expression)
        exec(source.replace("BODY", "\n        ".join(body)), scope)
        self.module: Any = scope["Net"]()
        self.arguments = (value,) if root == "argument" else ()
        put = ROOTS[root][1]
        if put is not None:
            put(scope, self.module, value)


def shown(value: Any) -> Any:
    """What is in it, in its order."""
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, (list, collections.deque)):
        return [*value]
    return [(name, getattr(value, name, None)) for name in ("v", "w")]


def _result(model: Any, x: torch.Tensor, arguments: tuple[Any, ...]) -> Any:
    try:
        return model(x, *arguments)
    except Exception as error:
        return type(error)


def verdict(seed: int, capture: Any) -> tuple[str, str]:
    """What differed, or nothing; and where it ran."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    ours, eager = Program(seed), Program(seed)
    eager.module.load_state_dict(ours.module.state_dict())
    model = ORTModule(ours.module, DebugOptions(capture=capture))
    x = torch.arange(6.0).view(2, 3)
    what = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            want, got = _result(eager.module, x, eager.arguments), _result(model, x, ours.arguments)
            if isinstance(want, type) or isinstance(got, type):
                what = "" if want is got else f"step {step}: {got} is not {want}"
                break
            if not torch.allclose(want, got, rtol=1e-4, atol=1e-5, equal_nan=True):
                what = f"step {step}: {got.flatten()[:2].tolist()} is not {want.flatten()[:2].tolist()}"
                break
            if shown(ours.held) != shown(eager.held):
                what = f"step {step}: {shown(ours.held)} is not {shown(eager.held)}"
                break
    causes = [r.cause for r in model.fallback_report()]
    return what and f"seed {seed}: {ours.words}: {what}", f"{ours.words}: {causes[0]}" if causes else ""


if __name__ == "__main__":
    sys.exit(run(lambda seed: Program(seed).words, verdict, "0:1000", "auto"))
