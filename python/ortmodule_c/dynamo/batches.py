"""Takes calls of ``torch.vmap`` out of TorchDynamo's graphs: PyTorch's rules for batches say of which ops they are."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import predispatch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from ..capture import autocast_region
from ..capture.regions import ENTER_AUTOCAST, SET_GRADIENTS
from ..errors import of_the_machine
from ..options import logger
from .fx_capture import acts, on_stand_ins

LOAD = predispatch.lazy_load_decompositions.__name__  # before each call of torch.vmap
_VMAP = "_vmap_increment_nesting"
# How the names end of what begins and ends a transform of functions: a level of it, and a region around that.
BEGINS = ("_increment_nesting", "_saved_tensors_hooks_disable")
_ENDS = ("_decrement_nesting", "_saved_tensors_hooks_enable")


def without_batches(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with ops on whole batches in the place of calls of ``torch.vmap``.

    Parameters
    ----------
    graph
        One of Dynamo's, which knows examples of its values; left as it is.

    Returns
    -------
    torch.fx.GraphModule
        Computes the same, and autograd goes through the same ops. Calls stay that draw random numbers, hold other
        transforms, or cannot be traced; if all do it is `graph` itself. So do those that autocast has a part in: what
        is a number in each sample takes part in dtypes as one, and its ops would be cast only once they are those of
        a batch.
    """
    if graph.graph.find_nodes(op="call_function", target=ENTER_AUTOCAST):
        return graph
    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    taken, left = 0, 0
    for region in _regions(graph.graph):
        ops = _traced(graph, region) if _is_of_vmap(region) else None
        if ops is not None:
            taken += 1
            _insert(ops, made, env, region)
        else:
            left += any(map(change_of_depth, region))
            for node in region:
                env[node] = made.node_copy(node, env.__getitem__)
    if not taken:
        return graph
    for node in [n for n in made.nodes if called(n) == LOAD and not left]:
        made.erase_node(node)
    without = fx.GraphModule(graph, made)
    without.meta = graph.meta
    return without


def called(node: fx.Node) -> str:
    """The name of what a node calls."""
    return getattr(node.target, "__name__", str(node.target))


def change_of_depth(node: fx.Node) -> int:
    """1 where a transform of functions begins, -1 where one ends."""
    name = called(node)
    return name.endswith(BEGINS) - name.endswith(_ENDS)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Its nodes: each that is in no transform of functions, and together those of each outermost transform."""
    region: list[fx.Node] = []
    depth = 0
    for node in graph.nodes:
        region.append(node)
        depth += change_of_depth(node)
        if not depth:
            yield region
            region = []
    yield region


def _is_of_vmap(region: Sequence[fx.Node]) -> bool:
    """Whether it is a call of ``torch.vmap`` that holds nothing but such and what computes.

    A gradient, as in ``torch.func.jacrev``, goes by the history of values, which the trace of a region alone has not.
    """
    begun = [called(n) for n in region if change_of_depth(n) > 0]
    others = [n for n in region if getattr(n.target, "__module__", None) != predispatch.__name__]
    return {*begun} == {_VMAP} and not any(n.target is SET_GRADIENTS or acts(n) for n in others)


def _ends(region: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a region reads of others, and what others read of it."""
    inside = set(region)
    inputs = dict.fromkeys([i for n in region for i in n.all_input_nodes if i not in inside])
    return [*inputs], [n for n in region if any(u not in inside for u in n.users)]


def _traced(graph: fx.GraphModule, region: Sequence[fx.Node]) -> fx.Graph | None:
    """The ops of a region, or None."""
    inputs, outputs = _ends(region)
    part, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        env[node] = part.placeholder(node.name)
    for node in region:
        env[node] = part.node_copy(node, env.__getitem__)
    part.output(tuple([env[n] for n in outputs]))
    values = [n.meta.get("example_value") for n in inputs]
    given = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values]
    run = fx.Interpreter(fx.GraphModule(graph, part)).run
    levels = _levels()
    try:
        predispatch.lazy_load_decompositions()
        with on_stand_ins(given):
            with autocast_region.none() as autocast:
                ops = make_fx(run)(*given).graph
            if autocast and _kinds(make_fx(run)(*given).graph) != _kinds(ops):
                logger.info("a call of torch.vmap runs in PyTorch: autocast has a part in it")
                return None
    except Exception as error:
        if of_the_machine(error) is not None:
            raise
        logger.info("a call of torch.vmap runs in PyTorch: %s", error)
        return None
    finally:
        while _levels() > levels:
            torch._C._functorch._vmap_decrement_nesting()
    plain = all(map(_is_plain, _computing(ops))) and all(isinstance(r, fx.Node) for r in _results(ops))
    return ops if plain else None


def _kinds(ops: fx.Graph) -> list[tuple[Any, Any]]:
    """What is called, in order, and of which dtype that is."""
    return [(n.target, getattr(n.meta.get("val"), "dtype", None)) for n in _computing(ops)]


def _levels() -> int:
    return len(torch._C._functorch.get_interpreter_stack() or ())


def _computing(ops: fx.Graph) -> Iterator[fx.Node]:
    return (n for n in ops.nodes if n.op not in ("placeholder", "output"))


def _results(ops: fx.Graph) -> list[Any]:
    results: Any = ops.output_node().args[0]
    return list(results)


def _is_plain(node: fx.Node) -> bool:
    """Whether it is an op that computes the same whenever it is called, or computes with sizes."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    return node.op == "call_function" and node.target in vars(operator).values()


def _insert(ops: fx.Graph, made: fx.Graph, env: dict[fx.Node, fx.Node], region: Sequence[fx.Node]) -> None:
    """Add the ops of a region, and note the values that others read of it."""
    inputs, outputs = _ends(region)
    placeholders = [n for n in ops.nodes if n.op == "placeholder"]
    known = dict(zip(placeholders, [env[n] for n in inputs], strict=True))
    for node in _computing(ops):
        known[node] = made.node_copy(node, known.__getitem__)
        known[node].meta = {**region[0].meta, "example_value": node.meta.get("val")}
    env.update(zip(outputs, [known[n] for n in _results(ops)], strict=True))
