"""From a captured ATen graph to an ONNX graph."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..capture import custom_function, recurrent
from ..capture.aliases import Step
from ..capture.autocast import WITHIN
from ..capture.export import PATH, Captured
from ..capture.history import assign_parts
from ..capture.numbers import Inputs, is_number, is_within, unmarked
from ..capture.reach import Reach, Reached, memory
from ..devices import provider_of
from ..dtypes import CARRIERS, decoded, differentiable, held_whole
from ..errors import NeedsFunctional, NeedsStatic, NodeRefused, NotExportable, Unsupported
from ..report import mistake
from ..stack import users_line_in
from ..symbolic import SYMBOLIC
from .ancestry import Ancestry
from .builder import Builder
from .draft import Carried, Draft, Val, check_sizes
from .expansion import expanded, is_of_integers
from .fallback import Callbacks, TorchOp
from .in_place import Memory, fits, functional, refuse_misfits, written
from .torch_call import CHANGES_STATISTICS, torch_call, used_results
from .translations import CARRIED, touches_carried, translation_of
from .translations.registry import aten

_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
_CHECKS_OF_VALUES = {aten._assert_async.default, aten._assert_async.msg}
_WHOLE = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # unrolled over time they would be longer than worthwhile
# Ops that refuse one sample, of four dims, that lies in memory as many of an image's channels do.
_READS_STRIDES = {aten.max_pool3d.default, aten.max_pool3d_with_indices.default}
_MAX_EXPANSIONS = 4


def _decoding(dtype: torch.dtype) -> Step:
    return lambda t, _inputs: decoded(t, dtype)


_DECODED = {dtype: _decoding(dtype) for dtype in CARRIERS}  # what makes a result of an output that carries it


@dataclass
class Lowered:
    """An ONNX graph with what the caller has to do around it.

    Attributes
    ----------
    model
        Inputs are user tensors, parameters, buffers; outputs are `outputs`, then `updates`.
    callbacks
        Its TorchCall nodes.
    results
        For each result of the module: "output" or "input", its position, and what is to be done with it.
    differentiable, ranks
        For each graph output, whether a gradient may come back for it, and its number of dims.
    reaches
        For each graph output, what autograd goes through from it, in bits of `ancestry`.
    input_savers, output_savers
        For each graph input, and each graph output, what saves its memory for a backward, in bits of `ancestry`.
    watched
        For each result of the module, the graph outputs that autograd goes to the inputs from through it: those
        whose gradients a hook on the result would see. One bit each.
    updates
        Inputs that a forward writes over, by position; their values are the last graph outputs.
    fallbacks
        (ATen op, cause) of each node that runs in PyTorch.
    numbers
        The graph's last inputs, computed of numbers of Python's, if any are open.
    gives_numbers
        Whether a node that runs in PyTorch is given such.
    """

    model: ir.Model
    callbacks: Callbacks
    results: list[tuple[str, int, tuple[Step, ...]]]
    differentiable: list[bool]
    ranks: list[int]
    reaches: list[int]
    ancestry: Ancestry
    input_savers: list[int]
    output_savers: list[int]
    watched: list[int]
    updates: list[int]
    fallbacks: list[tuple[str, str]]
    numbers: Inputs | None = None
    provider: str = "cpu"  # of the device that it is for
    gives_numbers: bool = False


def lower(captured: Captured) -> Lowered:
    """Translate every node; what has no translation or no kernel becomes a TorchCall.

    Raises
    ------
    NeedsStatic
        If the graph has symbolic sizes where numbers are needed.
    NotExportable
        If some node cannot run on either side, or if anything goes wrong here.
    """
    try:
        refuse_misfits(captured.program.graph)
        assign_parts(captured.program.graph)
        try:
            return _Lowering(captured).run()
        except NeedsFunctional:
            captured.functionalise()
        return _Lowering(captured).run()
    except NeedsFunctional as error:
        raise NotExportable(f"{error} changes a tensor in place in a way that cannot be followed") from error
    except Unsupported as error:
        raise NotExportable(str(error)) from error
    except (NeedsStatic, NotExportable):
        raise
    except Exception as error:
        raise NotExportable(mistake("the lowering of a graph", error)) from error


class _Lowering:
    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        tensors = [n.meta["val"] for n in captured.placeholders()[0]]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._draft = Draft(provider_of(self._device))
        self._callbacks = Callbacks(self._device)
        self._reach = Reach()
        self._ancestry = Ancestry(len(captured.names))
        self._results: dict[fx.Node, int] = {}  # bits that stand for results of the module
        self._savers: dict[int | None, int] = {}  # by memory, the bits of what saves tensors there
        self._in_pytorch: dict[fx.Node, int] = {}  # numbers of the ops that run there
        self._draws: list[tuple[fx.Node, Val]] = []  # random numbers that PyTorch draws
        self._fallbacks: list[tuple[str, str]] = []
        self._gives_numbers = False
        self._env: dict[fx.Node, Any] = {}

    def run(self) -> Lowered:
        inputs, constants = self._captured.placeholders()
        graph_inputs = [self._add_input(node, name) for node, name in zip(inputs, self._captured.names, strict=True)]
        self._env = dict(zip(inputs, graph_inputs, strict=True))
        for node, tensor in constants.items():
            self._env[node] = self._draft.tensor(tensor.detach().cpu().clone(), node.name)
        results, _ = self._captured.results()
        self._results = {r: self._ancestry.bit() for r in results if isinstance(r, fx.Node) and r.op != "placeholder"}
        module = self._captured.program.graph_module
        memory = Memory(module.graph)
        for node in module.graph.nodes:
            if node.op != "output":
                try:
                    self._check_device(node)
                    self._node(node, module, memory)
                except NotExportable as error:
                    raise _placed(error, node) from error
        return self._finish(inputs, graph_inputs)

    def _add_input(self, node: fx.Node, name: str) -> Val:
        val = node.meta["val"]
        if held_whole(val) and val.requires_grad:
            raise NotExportable(f"a gradient would go through {val.dtype}")
        grad = val.requires_grad and differentiable(val) and torch.is_grad_enabled()  # as in the calls that it serves
        return self._draft.input(name, val.dtype, tuple(val.shape), grad)

    def _finish(self, inputs: list[fx.Node], graph_inputs: list[Val]) -> Lowered:
        results, mutated = self._captured.results()
        values = [self._value(r) for r in results]
        n_buffers = self._captured.n_buffers
        user, buffers = values[: len(values) - n_buffers], values[len(values) - n_buffers :]
        first_buffer = len(graph_inputs) - n_buffers
        final = {i: self._env[n] for i, n in enumerate(inputs) if self._env[n] is not graph_inputs[i]}
        final.update({i: self._env[mutated[n.name]] for i, n in enumerate(inputs) if n.name in mutated})
        final.update(
            {first_buffer + i: v for i, v in enumerate(buffers) if v.ir is not graph_inputs[first_buffer + i].ir}
        )
        for i, val in final.items():
            given, name = graph_inputs[i], self._captured.names[i]
            if given.grad or val.grad:
                raise NotExportable(f"the module changes {name} in place, and gradients would reach it")
        hidden = self._captured.hidden
        if any(n not in self._env for n in hidden):
            raise NotExportable(
                "results of the forward are views of one tensor in a graph that had to be made functional"
            )
        nodes = [*results[: len(user)], *hidden]
        user += [self._env[n] for n in hidden]
        needed = _ancestors([v.ir for v in (*user, *final.values()) if isinstance(v, Val)]) if self._draws else ()
        for node, drawn in self._draws:
            if drawn.ir.producer() not in needed:  # as a result it is drawn, and what is drawn next is as in eager
                nodes.append(node)
                user.append(drawn)
        aliases = [*self._captured.aliases, *[None] * (len(nodes) - len(self._captured.aliases))]
        outputs = [v for v, alias in zip(user, aliases, strict=True) if alias is None]
        outputs = [self._number_out(v) if not isinstance(v, Val) else v for v in outputs]
        position = list(itertools.accumulate([alias is None for alias in aliases], initial=0))
        first = [(_DECODED[v.dtype],) if isinstance(v, Carried) else () for v in outputs]
        places: list[tuple[str, int, tuple[Step, ...]]] = [
            ("output", position[k], first[position[k]])
            if alias is None
            else ("input", alias.position, alias.steps)
            if alias.source == "input"
            else ("output", position[alias.position], (*first[position[alias.position]], *alias.steps))
            for k, alias in enumerate(self._captured.aliases)
        ]
        reaches = [v.grad for v in outputs] + [0] * len(final)
        whole = [self._ancestry.whole(r) for r in reaches]
        watched = [
            self._others_through(r, whole, i if source == "output" else None)
            for r, (source, i, _) in zip(results, places, strict=False)
        ]
        # A buffer is written over in a copy.
        copies = [None] * first_buffer + list(results[len(results) - n_buffers :])
        input_savers = [self._saved_by(n) | self._saved_by(copy) for n, copy in zip(inputs, copies, strict=True)]
        input_savers += [0] * len(self._draft.numbers)
        self._draft.graph.outputs.extend([v.ir for v in outputs])
        for i, val in final.items():
            Builder(self._draft).output_over(val, graph_inputs[i])
        model = ir.Model(self._draft.graph, ir_version=10, producer_name="ortmodule_c")
        numbers = self._captured.numbers
        return Lowered(
            model,
            self._callbacks,
            places,
            [reached != 0 for reached in reaches],
            [v.rank for v in [*outputs, *final.values()]],
            reaches,
            self._ancestry,
            input_savers,
            [self._saved_by(n) for n, alias in zip(nodes, aliases, strict=True) if alias is None] + [0] * len(final),
            watched,
            list(final),
            self._fallbacks,
            None if numbers is None else numbers.inputs([*self._draft.numbers], self._device),
            self._draft.provider,
            self._gives_numbers,
        )

    def _number_out(self, value: Any) -> Val:
        """A size or a number as an output."""
        b = Builder(self._draft)
        return b.emit("Identity", self._draft.number(value.node.term)) if is_number(value) else b.size(value)

    def _saved_by(self, value: Any) -> int:
        return self._savers.get(memory(value.meta.get("val")), 0) if isinstance(value, fx.Node) else 0

    def _others_through(self, result: Any, whole: Sequence[int], own: int | None) -> int:
        """The outputs, but for its own, whose ancestry has this result of the module in it, one bit each."""
        bit = self._results.get(result, 0)
        return sum(1 << i for i, ancestry in enumerate(whole) if i != own and ancestry & bit)

    # One node

    def _check_device(self, node: fx.Node) -> None:
        """Refuse tensors that are elsewhere; PyTorch takes numbers along that are nobody's result."""
        for t in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(t, Tensor) and t.device != self._device and (t.dim() > 0 or node in self._results):
                raise NotExportable(f"{node.name} is on {t.device}, the module's tensors are on {self._device}")

    def _node(self, node: fx.Node, module: fx.GraphModule, memory: Memory | None) -> None:
        if memory is not None:
            memory.add(node)
        if node in self._env:  # an input
            return
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            self._env[node] = (
                self._draft.tensor(value.detach().cpu().clone(), node.name) if isinstance(value, Tensor) else value
            )
            return
        val = node.meta.get("val")
        if isinstance(val, (*SYMBOLIC, int, float)) or node.op == "placeholder":
            self._env[node] = val
        elif node.target is operator.getitem:
            source, i = node.args
            self._set(node, self._env[source][i])  # type: ignore[index]
        elif node.target in _CHECKS:
            return
        elif node.target in _CHECKS_OF_VALUES:
            raise NotExportable(f"{node.target} raises an error that depends on the values of a tensor")
        elif isinstance(node.target, OpOverload):
            self._aten(node, node.target, memory)
        else:
            raise NotExportable(f"{node.target} has no translation")

    def _aten(self, node: fx.Node, op: OpOverload, memory: Memory | None) -> None:
        changed = written(op)
        if changed:
            op = _functional(node, op)
        if op in _READS_STRIDES and node.args[0].meta["val"].dim() == 4:  # type: ignore[union-attr]
            raise NotExportable(f"{op} depends on how its operand lies in memory")
        b = Builder(self._draft, _source(node), op, node.meta.get("val"), node.meta.get(WITHIN, ()))
        self._set(node, self._differentiated(b, node, self._translate))
        if changed:
            target = node.args[0]
            assert isinstance(target, fx.Node)
            self._store(target, self._env[node], node, memory)
        for val, new in b.overwritten:
            target = next(n for n in node.all_input_nodes if self._env[n] is val)
            self._store(target, new, node, memory)

    def _differentiated(self, b: Builder, node: fx.Node, translate: Callable[..., Any]) -> Any:
        """The results of `translate`, through which gradients flow as they do through the op in PyTorch."""
        op = b.op
        _check_numbers(node, op)
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        where = [i for i, v in enumerate(leaves) if isinstance(v, fx.Node) and isinstance(v.meta.get("val"), Tensor)]
        given = [self._value(v) for v in leaves]
        grads = [given[i].grad for i in where]
        reached = None
        is_custom = op is custom_function.op()
        if is_custom:
            call = custom_function.python_call(leaves[-1])
            all_of_them = frozenset(range(len(where)))
            reached = [Reached(all_of_them if d else frozenset(), call.saves, call.saved) for d in call.differentiable]
        elif any(grads):
            fakes = [v.meta["val"] if isinstance(v, fx.Node) else v for v in leaves]
            reached = self._reach(op, pytree.tree_unflatten(fakes, spec), [g != 0 for g in grads])
        anywhere = frozenset[int]().union(*[r.operands for r in reached]) if reached is not None else range(len(where))
        flows = any(grads[k] for k in anywhere)
        if flows and _has_sparse_gradient(op, *pytree.tree_unflatten(given, spec)):
            raise NotExportable(f"{op} has a sparse gradient")
        if op is aten.as_strided_scatter.default and grads[0]:
            # PyTorch's formula for what is written over gives the gradient of the elements that are written.
            raise NotExportable("it changes what gradients reach in place through as_strided, as fill_diagonal_ does")
        for k, i in enumerate(where):
            if flows and k not in anywhere:
                given[i] = b.detached(given[i])
        args, kwargs = pytree.tree_unflatten(given, spec)
        result = _typed(b, translate(b, node, args, kwargs), b.result)
        if reached is None:
            return result
        number = self._in_pytorch.get(node)
        if number is not None:
            grads = [g and self._ancestry.way((number, k), g, is_custom) for k, g in enumerate(grads)]
        saving = self._ancestry.saving() if any(r.saves for r in reached) else 0
        made = [t for t in pytree.tree_leaves(b.result) if isinstance(t, Tensor)]
        for t, r in zip(made, reached, strict=True):
            if held_whole(t) and any(grads[k] for k in r.operands):
                raise NotExportable(f"a gradient would go through {t.dtype}")
        self._note_saved(op, node, [*[leaves[i].meta["val"] for i in where], *made], reached, saving)
        return _carrying(b, result, b.result, iter([self._from(r, grads, saving) for r in reached]))

    def _note_saved(
        self, op: OpOverload, node: fx.Node, tensors: Sequence[Tensor], reached: Sequence[Reached], saving: int
    ) -> None:
        """Remember which of an op's operands and results it saves; those that its kernel changes it does not read."""
        statistics = node.args[3:5] if op in CHANGES_STATISTICS and node.args[5] else ()
        unseen = {memory(n.meta["val"]) for n in statistics if isinstance(n, fx.Node)}
        for k in frozenset[int]().union(*[r.saved for r in reached]):
            where = memory(tensors[k])
            if where not in unseen:
                self._savers[where] = self._savers.get(where, 0) | saving

    def _from(self, reached: Reached, grads: Sequence[int], saving: int) -> int:
        """The ancestry of a result of an op whose operands have the given ones."""
        operands = [grads[k] for k in reached.operands if grads[k]]
        own = self._ancestry.somewhere | saving * reached.saves
        return functools.reduce(operator.or_, operands, own) if operands else 0

    def _set(self, node: fx.Node, value: Any) -> None:
        """Let `value` stand for a node from here on."""
        if node in self._results and isinstance(value, Val) and value.grad:
            value = value.with_grad(value.grad | self._results[node])
        self._env[node] = value

    def _value(self, arg: Any) -> Any:
        return self._env[arg] if isinstance(arg, fx.Node) else unmarked(arg)

    def _store(self, target: fx.Node, value: Val, at: fx.Node, memory: Memory | None) -> None:
        """Let `value` stand for a tensor changed in place."""
        if memory is None:
            raise NeedsFunctional(str(at.target))
        value.shape = tuple(target.meta["val"].shape)
        for node in memory.same_elements(target, at):
            self._set(node, value)

    def _translate(self, b: Builder, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        mark = self._draft.mark()
        try:
            if b.region and b.op not in recurrent.OPS:
                raise Unsupported("autocast reaches the ops that it is composed of")
            result = self._native(b, node, args, kwargs)
            if isinstance(result, (list, tuple)) and any(result[i] is None for i in used_results(node, len(result))):
                raise Unsupported("its translation leaves out a result that is read")
            return result
        except Unsupported as error:
            self._draft.rollback(mark)
            b.overwritten.clear()
            return self._torch_call(b, node, args, kwargs, str(error))

    def _native(self, b: Builder, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], depth: int = 0) -> Any:
        """The op by its translation, else by those of the ops it is composed of."""
        op = b.op
        translation = CARRIED.get(op) if touches_carried(args, kwargs, b.result) else translation_of(op)
        if translation is None:
            return self._composed(b, node, args, kwargs, depth)
        _check_scalars(b, args, kwargs)
        mark = self._draft.mark()
        try:
            result = translation(b, *args, **kwargs)
            check_sizes(result, b.result)
            return result
        except Unsupported as refusal:
            if not is_of_integers(node):
                raise
            self._draft.rollback(mark)
            try:
                return self._composed(b, node, args, kwargs, depth)
            except Unsupported:
                raise refusal from None
        except NeedsStatic:
            raise
        except Exception as error:
            raise Unsupported(mistake(f"the translation of {op}", error)) from error

    def _composed(self, b: Builder, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], depth: int) -> Any:
        """The op by those that PyTorch composes it of."""
        op = b.op
        if depth == _MAX_EXPANSIONS or op.namespace != "aten" or b.aten_name in _WHOLE or _is_random(op):
            raise Unsupported("no translation")
        if not node.all_input_nodes:
            return _constant(b, args, kwargs)
        return self._expand(b, node, args, kwargs, depth)

    def _expand(self, b: Builder, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], depth: int) -> Any:
        """Translate the graph of the ops that PyTorch composes the op of."""
        inner, where = expanded(node, b.op)
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda v: isinstance(v, Val))
        given = [leaves[i] for i in where]
        outer = self._env
        self._env = dict(zip([n for n in inner.graph.nodes if n.op == "placeholder"], given, strict=True))
        try:
            for n in inner.graph.nodes:
                if n.op == "output":
                    return pytree.tree_map(self._value, n.args[0])
                self._inner_node(b, n, inner, depth + 1)
        finally:
            self._env = outer

    def _inner_node(self, b: Builder, node: fx.Node, module: fx.GraphModule, depth: int) -> None:
        if not isinstance(node.target, OpOverload) or isinstance(node.meta.get("val"), SYMBOLIC):
            self._node(node, module, None)
            return
        if written(node.target):
            raise Unsupported("no translation")
        part = b.of_part(node.target, node.meta.get("val"))
        self._env[node] = self._differentiated(part, node, functools.partial(self._native, depth=depth))

    def _torch_call(self, b: Builder, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], cause: str) -> Any:
        call = torch_call(b, node, args, kwargs)
        index = len(self._callbacks.ops)
        self._in_pytorch[node] = index
        self._gives_numbers |= any(v in self._draft.numbers.values() for v in call.given)
        grads = tuple([v.grad != 0 for v in call.given])
        is_pytorchs = b.op.namespace == "aten"
        self._callbacks.ops.append(TorchOp(call.name, call.run, grads, call.written, call.traced, is_pytorchs))
        self._fallbacks.append((call.name, cause if b.op is not custom_function.op() else "a custom autograd.Function"))
        made = b.call_torch(index, call.given, call.types)
        if isinstance(b.op, OpOverload) and _is_random(b.op):
            self._draws.append((node, made[0]))
        return call.results(b, made)


def _check_numbers(node: fx.Node, op: OpOverload) -> None:
    """A number that is open is one to compute with, and no size, axis or index, nor does a size follow from it."""
    given = [*zip([a.name for a in op._schema.arguments], node.args, strict=False), *node.kwargs.items()]
    fixed = {a.name for a in op._schema.arguments if "int" in str(a.type) or "float" in str(a.type)}
    for v in pytree.tree_leaves([value for name, value in given if name in fixed]):
        if is_number(unmarked(v)):
            unmarked(v).node.ask()
    for t in pytree.tree_leaves(node.meta.get("val")):
        sizes: list[Any] = [s for s in (t.shape if isinstance(t, Tensor) else ()) if is_number(s)]
        for size in sizes:
            size.node.ask()


def _check_scalars(b: Builder, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Leave to PyTorch, which may refuse it, a number that is no number of the dtype computed in."""
    schema = b.op._schema.arguments
    named = {**dict(zip([a.name for a in schema], args, strict=False)), **kwargs}
    dtypes = {v.dtype for v in [*named.values(), *pytree.tree_leaves(b.result)] if isinstance(v, (Val, Tensor))}
    for a in schema:
        value = named.get(a.name)
        if "number" not in str(a.type) and "float" not in str(a.type):
            continue
        if type(value) is bool and a.name in ("alpha", "beta") and torch.bool not in dtypes:
            raise Unsupported(f"{a.name}={value}, a bool in the place of a number")
        if type(value) in (int, float) or is_number(value):
            for dtype in dtypes:
                if dtype.is_floating_point and not is_within(value, dtype):
                    raise Unsupported(f"{a.name}={value}, which {dtype} does not hold")


def _has_sparse_gradient(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    named = {**dict(zip([a.name for a in op._schema.arguments], args, strict=False)), **kwargs}
    return named.get("sparse") is True or named.get("sparse_grad") is True


def _placed(error: NotExportable, node: fx.Node) -> NotExportable:
    """A refusal of a node, with the user's line that made it where that is known."""
    trace = node.meta.get("stack_trace")
    return type(error)(f"{error}, at {users_line_in(trace)}") if trace else NodeRefused(str(error))


def _typed(b: Builder, result: Any, expected: Any) -> Any:
    """Give results the shape and dtype that PyTorch says they have."""
    if isinstance(result, Val) and isinstance(expected, Tensor):
        if isinstance(result, Carried) or expected.dtype in CARRIERS:
            assert result.dtype == expected.dtype, f"it gives {result.dtype}, and PyTorch {expected.dtype}"
        elif result.dtype != expected.dtype:
            result = b.cast(result, expected.dtype)
        if result.shape is None:
            result.shape = tuple(expected.shape)
        return result
    if isinstance(result, (list, tuple)) and isinstance(expected, (list, tuple)):
        return type(result)(_typed(b, r, e) for r, e in zip(result, expected, strict=False))
    return result


def _constant(b: Builder, args: Sequence[Any], kwargs: dict[str, Any]) -> Val:
    """What an op without operands gives, such as torch.eye."""
    value = b.op(*args, **kwargs)
    if not isinstance(value, Tensor) or b.op._schema.is_mutable:
        raise Unsupported("no translation")
    return b.tensor(value, b.aten_name)


def _carrying(b: Builder, result: Any, expected: Any, grads: Iterator[int]) -> Any:
    """`result`, its values with the given reach of gradients."""
    if isinstance(expected, Tensor):
        grad = next(grads, 0)
        if not isinstance(result, Val) or result.grad == grad:
            return result
        return result.with_grad(grad) if grad else b.detached(result)
    if isinstance(result, (list, tuple)) and isinstance(expected, (list, tuple)):
        return type(result)(_carrying(b, r, e, grads) for r, e in zip(result, expected, strict=False))
    return result


def _source(node: fx.Node) -> str:
    """Path of the submodule and name of the node."""
    path = (node.meta.get("custom") or {}).get(PATH)
    return f"{path}/{node.name}" if path else node.name


def _ancestors(values: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that these are computed by."""
    pending, found = [v.producer() for v in values], set[ir.Node]()
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [v.producer() for v in node.inputs if v is not None]
    return found


def _is_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _functional(node: fx.Node, op: OpOverload) -> OpOverload:
    """The op that returns what `op` writes over its first argument."""
    found = functional(op)
    of_list = not isinstance(node.args[0], fx.Node)
    if found is None or of_list or written(op) != [op._schema.arguments[0].name] or not fits(node, found):
        raise NeedsFunctional(str(op))
    optional = {a.name for a in found._schema.arguments if a.has_default_value()}
    for a in op._schema.arguments[len(node.args) :]:
        if a.has_default_value() and a.name not in optional and a.name not in node.kwargs:
            node.update_kwarg(a.name, a.default_value)
    return found
