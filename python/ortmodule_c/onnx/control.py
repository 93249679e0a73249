"""If, Loop, Scan and SequenceMap, by what is known when a graph is made: the branch taken, the steps one by one."""

from typing import Any

import torch
from onnx import GraphProto

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results, Value
from .sequences import stacked

_MOST_STEPS = 10_000


def condition(t: Importer, node: Given, wanted: Val) -> Results:
    chosen = "then_branch" if t.known(wanted, "the condition") else "else_branch"
    return tuple(t.body(node.attributes[chosen], []))


def loop(
    t: Importer, node: Given, most: Val | None = None, goes_on: Val | None = None, *carried: Val | None
) -> Results:
    body: GraphProto = node.attributes["body"]
    steps = None if most is None else int(t.known(most, "the number of steps"))
    going, values, step = goes_on, list(carried), 0
    gathered: list[list[Val]] = [[] for _ in body.output[1 + len(values) :]]
    while (steps is None or step < steps) and (going is None or bool(t.known(going, "the condition"))):
        if step == _MOST_STEPS:
            raise Unsupported(f"more than {_MOST_STEPS} steps")
        begun = going if going is not None else t.const(True, torch.bool)
        following, *results = t.body(body, [t.const(step), begun, *values])
        going = None if goes_on is None else following
        values = list(results[: len(values)])
        for each, v in zip(gathered, results[len(values) :], strict=True):
            each.append(v)
        step += 1
    return (*values, *[stacked(t, each, 0) for each in gathered])


def mapped(t: Importer, node: Given, items: list[Val], *others: Value) -> Results:
    """Item by item; a tensor is the same for all."""
    body: GraphProto = node.attributes["body"]
    each = [t.body(body, [item, *[v[i] if isinstance(v, list) else v for v in others]]) for i, item in enumerate(items)]
    return tuple([results[k] for results in each] for k in range(len(body.output)))


def scan_8(t: Importer, node: Given, lengths: Val | None, *inputs: Val) -> Results:
    """Of a batch, sample by sample; axes are those of a sample, and only inputs may be turned round."""
    if lengths is not None:
        raise Unsupported("lengths of the samples")
    said = {k: v for k, v in node.attributes.items() if k != "directions"}
    said |= {"scan_input_directions": node.attributes.get("directions")}
    given = Given(node.op, 9, said, node.outputs)
    samples: list[Any] = [
        scan(t, given, *[t.emit("Gather", v, t.const(i), axis=0) for v in inputs])
        for i in range(int(inputs[0].dims[0]))
    ]
    return tuple(stacked(t, each, 0) for each in zip(*samples, strict=True))


def scan(t: Importer, node: Given, *inputs: Val) -> Results:
    body, n = node.attributes["body"], node.attributes["num_scan_inputs"]
    states, given = list(inputs[: len(inputs) - n]), inputs[len(inputs) - n :]
    n_out = len(body.output) - len(states)

    def said(name: str, count: int) -> list[int]:
        return node.attributes.get(name) or [0] * count

    axes, turned = said("scan_input_axes", n), said("scan_input_directions", n)
    gathered: list[list[Val]] = [[] for _ in range(n_out)]
    steps = int(given[0].dims[axes[0]])
    for step in range(steps):
        now = [
            t.emit("Gather", v, t.const(steps - 1 - step if back else step), axis=axis)
            for v, axis, back in zip(given, axes, turned, strict=True)
        ]
        results = t.body(body, [*states, *now])
        states = results[: len(states)]
        for each, v in zip(gathered, results[len(states) :], strict=True):
            each.append(v)
    out_axes, out_turned = said("scan_output_axes", n_out), said("scan_output_directions", n_out)
    lists = [each[::-1] if back else each for each, back in zip(gathered, out_turned, strict=True)]
    return (*states, *[stacked(t, each, axis) for each, axis in zip(lists, out_axes, strict=True)])
