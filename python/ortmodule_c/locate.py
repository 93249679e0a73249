"""Where the C core and PyTorch part: the first node of a module's graph whose value or gradient is out."""

import contextlib
import math
import operator
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from . import _C
from .capture.export import PATH, Captured, capture, quiet
from .distance import NEGLIGIBLE, backward_from, distance, largest, mismatches, rounding
from .dynamo.noted import Run
from .flatten import Spec, leaf_paths
from .function import Runner
from .guards.held import scan
from .lowering.lower import lower
from .lowering.to_text import to_text
from .masks import Masks, random_states, set_random_states
from .process import tracing, tracing_alone
from .stack import users_line_in
from .terms import Terms

aten = torch.ops.aten

_JUMP = 16.0  # a node is at fault where its distance is this many times that of what it was made from
_GROSSNESS = (128.0, 1.0)  # in units of rounding
_GROSS = 0.1  # as part of the largest element: no rounding, whatever the dtype


@dataclass(frozen=True)
class Place:
    """A node of a module's graph.

    Attributes
    ----------
    what
        What is out there while all it is made from is right: "the value of N" or "the gradient of N", for a node, a
        parameter or an input N.
    submodule
        Path of the submodule in whose forward it is computed or used; empty for the module itself.
    op
        The ATen op that computes or uses it.
    line
        The user's line.
    alone
        Whether it is out when every node is computed by itself; else only where the optimizer joins it with others.
    """

    what: str
    submodule: str
    op: str
    line: str
    alone: bool

    def __str__(self) -> str:
        where = f"submodule {self.submodule!r}" if self.submodule else "the module itself"
        joined = "" if self.alone else ", only where it is optimized together with its neighbours"
        return f"they part at {self.what} ({self.op}) in {where}, at {self.line}{joined}"


def locate(module: nn.Module, terms: Terms, spec: Spec, leaves: Sequence[Tensor], seed: int | None) -> Place | None:
    """The first node where ours and PyTorch's run of one graph part; None if none does: the fault lies in the capture.

    Parameters
    ----------
    module
        The module, called with the nest `spec` around `leaves`.
    terms
        On which it runs.
    spec, leaves
        The flattened (args, kwargs).
    seed
        Seed of the masks drawn on both sides, None if there are none; PyTorch's random state is such that the
        core would draw it.
    """
    with tracing_alone(), quiet():
        now = scan(module, None)
        with terms.region(module):
            captured = capture(module, terms, spec, leaves, leaf_paths(spec), now, [()] * len(leaves), lines=True)
        captured.functionalise()
    return _Probe(captured, [*leaves, *now.parameters, *captured.outside, *now.buffers], seed).first_out()


def locate_in(runs: Sequence[Run]) -> Place | None:
    """The same for a module of which TorchDynamo made these graphs, each compared on what our run of it was given."""
    for run in runs:
        torch.set_rng_state(run.state)
        captured = run.capture()
        with tracing, quiet():
            captured.functionalise()
        place = _Probe(captured, run.inputs, run.seed or None).first_out()
        if place is not None:
            return place
    return None


class _Probe:
    """Runs of one graph on both sides, with some of its nodes observed."""

    def __init__(self, captured: Captured, inputs: Sequence[Tensor], seed: int | None) -> None:
        self._captured = captured
        self._inputs = inputs
        self._seed = seed
        self._states = random_states()
        graph_inputs, _ = captured.placeholders()
        self.inputs = {
            n: name for n, name in zip(graph_inputs, captured.names, strict=True) if n.meta["val"].requires_grad
        }

        noting = _Noting(captured.program.graph_module)
        with torch.enable_grad():
            noting.run(*self._arguments(captured, self._given([])[1]))
        self.nodes = noting.differentiated

    def first_out(self) -> Place | None:
        """The gross before the fine: what should be 0 is made of rounding alone."""
        for grossness in _GROSSNESS:
            self._grossness = grossness
            place = self._first_of_all() or self._first_alone("value", self.nodes)
            place = place or self._first_alone("gradient", self.nodes[::-1]) or self._input()
            if place is not None:
                return place
        return None

    def _is_out(self, n: fx.Node, found: dict[str, float], sources: list[fx.Node] | None = None) -> bool:
        before = max((found.get(s.name, 0.0) for s in sources or []), default=0.0)
        limit = min(self._grossness * rounding(n.meta["val"].dtype), _GROSS)
        return found.get(n.name, 0.0) > max(_JUMP * before, limit)

    def _first_of_all(self) -> Place | None:
        """Of all nodes observed at once, which keeps the optimizer from joining them."""
        values, gradients = self._distances(self.nodes)
        for n in self.nodes:
            if self._is_out(n, values, n.all_input_nodes):
                return self._place("value", n, alone=True)
        for n in (*self.nodes[::-1], *self.inputs):
            if self._is_out(n, gradients, list(n.users)):
                return self._place("gradient", n, alone=True)
        return None

    def _first_alone(self, what: str, order: list[fx.Node]) -> Place | None:
        """Of nodes observed one by one, by halves: whoever comes after a node that is out is taken to be out too."""

        def out(n: fx.Node) -> bool:
            return self._is_out(n, self._distances([n])[what == "gradient"])

        if not order or not out(order[-1]):
            return None
        low, high = 0, len(order) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if out(order[middle]) else (middle + 1, high)
        return self._place(what, order[low], alone=False)

    def _input(self) -> Place | None:
        """An input whose gradient is out though those of all nodes are right."""
        _, gradients = self._distances([])
        wrong = next((n for n in self.inputs if self._is_out(n, gradients)), None)
        return None if wrong is None else self._place("gradient", wrong, alone=False)

    def _place(self, what: str, node: fx.Node, alone: bool) -> Place:
        name = self.inputs.get(node, node.name)
        at = next(iter(node.users)) if node in self.inputs else node
        path = (at.meta.get("custom") or {}).get(PATH, "")
        line = users_line_in(at.meta.get("stack_trace") or "")
        op = at.args[0].target if at.target is operator.getitem else at.target  # type: ignore[union-attr]
        return Place(f"the {what} of {name}", path, str(op), line, alone)

    def _distances(self, nodes: list[fx.Node]) -> tuple[dict[str, float], dict[str, float]]:
        """How far values and gradients of these nodes are apart, by name."""
        observed = _observed(self._captured, nodes)
        with torch.enable_grad():
            return tuple(  # type: ignore[return-value]
                _apart(ours, eager)
                for ours, eager in zip(self._ours(observed, nodes), self._eager(observed, nodes), strict=True)
            )

    def _ours(self, captured: Captured, nodes: list[fx.Node]) -> Any:
        set_random_states(self._states)
        probes, inputs = self._given(nodes)
        runner = _runner(captured)
        return self._split(nodes, probes, inputs, runner.run(runner.prepare([*probes, *inputs])))

    def _eager(self, captured: Captured, nodes: list[fx.Node]) -> Any:
        set_random_states(self._states)
        probes, inputs = self._given(nodes)
        with Masks([(self._seed, 0)]) if self._seed is not None else contextlib.nullcontext():
            results = fx.Interpreter(captured.program.graph_module).run(*self._arguments(captured, [*probes, *inputs]))
        kinds = [spec.kind for spec in captured.program.graph_signature.output_specs]
        outputs = [r for r, kind in zip(results, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
        return self._split(nodes, probes, inputs, outputs)

    @staticmethod
    def _arguments(captured: Captured, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Inputs, constants and numbers in the order in which the graph takes them."""
        placeholders, constants = captured.placeholders()
        given = {**dict(zip(placeholders, inputs, strict=True)), **constants}
        return [
            given[n] if n in given else n.meta["val"] for n in captured.program.graph.nodes if n.op == "placeholder"
        ]

    def _split(
        self, nodes: list[fx.Node], probes: list[Tensor], inputs: list[Tensor], results: Sequence[Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Values of the observed nodes, gradients of these and of the inputs, by name."""
        values = dict(zip([n.name for n in nodes], results, strict=False))
        roots, directions = backward_from([r for r in results[len(nodes) :] if isinstance(r, Tensor)])
        names = [n.name for n in (*nodes, *self.inputs)]
        wanted = [*probes, *[t for t in inputs if t.requires_grad]]
        if not roots:
            return values, {}
        directions = [d.to(root.device) for d, root in zip(directions, roots, strict=True)]
        gradients = torch.autograd.grad(roots, wanted, directions, allow_unused=True)
        return values, {n: g for n, g in zip(names, gradients, strict=True) if g is not None}

    def _given(self, nodes: list[fx.Node]) -> tuple[list[Tensor], list[Tensor]]:
        """Zeros for the probes, and the graph's inputs."""
        vals = [n.meta["val"] for n in nodes]
        probes = [torch.zeros(v.shape, dtype=v.dtype, device=v.device, requires_grad=True) for v in vals]
        return probes, [t.detach().clone().requires_grad_(t.requires_grad) for t in self._inputs]


def _observed(captured: Captured, nodes: list[fx.Node]) -> Captured:
    """The same graph with the values of `nodes` as its first outputs, and something added to each as its first inputs.

    What is added is 0: its gradient is the node's.
    """
    program = captured.program
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(program.graph, copied)
    first = next(iter(graph.nodes))
    ins = []
    replaced: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        with graph.inserting_before(first):
            probe = graph.placeholder(f"probe_{node.name}")
        val = node.meta["val"]
        with val.fake_mode, torch.enable_grad():
            probe.meta["val"] = torch.empty_like(val).requires_grad_()
        ins.append(InputSpec(InputKind.USER_INPUT, TensorArgument(probe.name), None))
        inner = copied[node]
        with graph.inserting_after(inner):
            outer = graph.call_function(aten.add.Tensor, (inner, probe))
        outer.meta = dict(inner.meta)
        for user in [u for u in inner.users if u is not outer]:
            user.replace_input_with(inner, outer)
        replaced[inner] = outer
    graph.output((*replaced.values(), *fx.node.map_arg(results, lambda n: replaced.get(n, n))))  # type: ignore[misc]
    outs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in replaced.values()]
    signature = program.graph_signature
    observed = types.SimpleNamespace(
        graph=graph,
        graph_module=fx.GraphModule(program.graph_module, graph),
        graph_signature=types.SimpleNamespace(
            input_specs=[*ins, *signature.input_specs], output_specs=[*outs, *signature.output_specs]
        ),
        constants=program.constants,
        range_constraints=program.range_constraints,
    )
    return replace(
        captured,
        program=observed,  # type: ignore[arg-type]
        names=[*[f"probe_{n.name}" for n in nodes], *captured.names],
        aliases=[None] * (len(nodes) + len(captured.aliases)),
        hidden=[],
    )


def _runner(captured: Captured) -> Runner:
    with tracing, quiet():
        lowered = lower(captured)
    text, constants = to_text(lowered.model)
    return Runner(_C.Session(text, constants, lowered.callbacks, provider=lowered.provider), lowered)


def _apart(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> dict[str, float]:
    """The distance of each tensor that both have, by name."""
    floor = NEGLIGIBLE * max(map(largest, eager.values()), default=0.0)

    def apart(a: Tensor, b: Tensor) -> float:
        same = a.shape == b.shape and a.dtype == b.dtype and not mismatches(a, b)
        return distance(a, b, floor) if same else math.inf

    return {n: apart(ours[n], eager[n]) for n in eager.keys() & ours.keys()}


class _Noting(fx.Interpreter):
    """Notes the nodes whose values PyTorch differentiates."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.differentiated: list[fx.Node] = []

    def run_node(self, n: fx.Node) -> Any:
        """Run it, and note it if its value requires grad."""
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor) and value.requires_grad:
            self.differentiated.append(n)
        return value
