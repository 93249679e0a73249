"""The one `torch.autograd.Function` through which a whole module runs."""

import copy
import functools
import itertools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils.hooks import unserializable_hook

from . import _C
from .capture.aliases import Step
from .errors import NotExportable, NotRunnable, ORTModuleError
from .lowering.fallback import Callbacks
from .lowering.lower import Lowered
from .process import noting_lock, tracing_lock

Mask = tuple[bool, ...]
_GONE = torch.empty(0)  # in the place of a tensor that was given away


_MOST_MET = 4  # backwards for several outputs that a plan is made for
_MOST_DIVIDED = 3  # outputs for each of whose sets there is a backward, where it is no sum


class Habits:
    """The backwards to be ready for: those of which all others are sums, those that are likely, and those met lately.

    So none ever needs what forward has not left behind.

    Parameters
    ----------
    basis
        Backwards of which all others are sums.
    likely
        Backwards for several outputs that may be the first.
    leaves
        Whether PyTorch would let others follow a backward that does not retain its graph.

    Attributes
    ----------
    expected
        The backwards to be ready for, and whether several may follow one forward.
    """

    def __init__(self, basis: Sequence[Mask], likely: Sequence[Mask], leaves: Callable[[Mask], bool]) -> None:
        self._basis, self._likely = tuple(basis), tuple(likely)
        self._leaves = leaves
        self._met: list[Mask] = []  # the latest last
        self._several = False
        self.expected = self._expected()

    def note(self, mask: Mask, several: bool) -> None:
        """A backward was asked for."""
        with noting_lock:
            several = self._several or several or self._leaves(mask)
            if several == self._several and self._met[-1:] == [mask]:
                return
            self._several = several
            self._met = [*[m for m in self._met if m != mask], mask][-_MOST_MET:]
            self.expected = self._expected()

    def _expected(self) -> tuple[tuple[Mask, ...], bool]:
        return tuple(sorted({*self._basis, *(self._met or self._likely)})), self._several


class Runner:
    """Runs one graph: picks plans, draws seeds, remembers which output gradients came back.

    Parameters
    ----------
    session
        The C session of the graph.
    lowered
        What the graph's inputs and outputs mean.
    watcher
        Called with each plan before it runs.
    """

    def __init__(self, session: _C.Session, lowered: Lowered, watcher: Callable[[_C.Plan], None] | None = None) -> None:
        self.session = session
        self.watcher = watcher
        self.callbacks: Callbacks = lowered.callbacks
        self.results = lowered.results
        self.updates = lowered.updates
        self.differentiable = lowered.differentiable
        self.ancestry = lowered.ancestry
        self.reaches = lowered.reaches
        # Whether autograd may come to each input.
        reached = self.ancestry.inputs(_either(lowered.reaches, lowered.differentiable), ())
        self.connected = [bool(reached >> i & 1) for i in range(len(lowered.input_savers))]
        self.saved = [self.ancestry.saved(self.ancestry.whole(r)) for r in lowered.reaches]
        self.input_savers, self.output_savers = lowered.input_savers, lowered.output_savers
        # Inputs that backwards read a copy of, as PyTorch does not save them; saved outputs.
        self.to_copy = {i for i, s in enumerate(self.input_savers) if not s}
        self.to_keep = {i for i, s in enumerate(self.output_savers) if s}
        self._unchanging: dict[Mask, tuple[list[int], list[int]]] = {}
        self.watched = [(k, through) for k, through in enumerate(lowered.watched) if through]
        # The results that are outputs as they are.
        self.firsts = [k for k, (source, _, steps) in enumerate(self.results) if source == "output" and not steps]
        self.n_results = len(lowered.differentiable) - len(lowered.updates)
        self.arena_bytes = 0  # of the largest plan used
        self.unprepared = 0  # backwards that came without a plan for them
        custom = [self.ancestry.custom(self.ancestry.whole(r)) for r in lowered.reaches]
        self._apart = _grouped(custom)
        self.habits = Habits(_basis(lowered.differentiable, self._apart), _likely(lowered), self.leaves)
        self.foreseen = self.habits.expected

    def wanted(self, inputs: Sequence[Tensor]) -> Mask:
        """The inputs whose gradients autograd may come for."""
        grad = torch.is_grad_enabled()
        return tuple([grad and c and t.requires_grad for t, c in zip(inputs, self.connected, strict=True)])

    def prepare(self, inputs: Sequence[Tensor], in_grads: Mask | None = None) -> "Call":
        """A call with the graph's inputs, planned; NotExportable if there can be no plan."""
        if self.unprepared > 1:
            raise NotRunnable("other outputs go back together each time through a custom function")
        if self.updates:
            self._check_writable(inputs)
        call = Call(self, inputs, self.wanted(inputs) if in_grads is None else in_grads)
        if call.trains:
            try:
                call.versions = [t._version for t in inputs]
            except RuntimeError as error:  # what of them gradients need, PyTorch knows
                raise NotRunnable("an inference tensor is given to what trains") from error
            # A checkpoint that runs forward again within a backward has to find the tensors of the first time.
            if not _hooked() or torch._C._current_graph_task_id() < 0:
                self.foreseen = self.habits.expected
            call.plan_for(*self.foreseen)
        else:
            call.plan_for(())
        return call

    def run(self, call: "Call") -> list[Tensor]:
        """The module's results, connected to autograd."""
        inputs = call.inputs
        if call.trains:
            outputs = _Run.apply(call, *itertools.compress(inputs, call.in_grads))
        else:
            with torch.no_grad():
                outputs = call.forward()
        results = [
            _aliased(inputs[i] if source == "input" else outputs[i], steps, inputs) for source, i, steps in self.results
        ]
        if call.trains and self.watched:
            call.watching = [
                _Watch(results[k], through, [results[j] for j in self.firsts if through >> self.results[j][1] & 1])
                for k, through in self.watched
                if results[k].requires_grad
            ]
        return results

    def leaves(self, mask: Mask, freed: int = 0) -> bool:
        """Whether PyTorch lets a backward follow one for these outputs that frees what it met, with what is `freed`."""
        freed |= _either(self.saved, mask)
        return any(d and not saved & freed for d, saved in zip(self.differentiable, self.saved, strict=True))

    def parts(self, mask: Mask) -> list[Mask]:
        """Backwards of which that for these outputs is the sum."""
        groups = [[i for i in group if mask[i]] for group in self._apart]
        return [_only(group, len(mask)) for group in groups if group]

    def unchanging(self, mask: Mask) -> tuple[list[int], list[int]]:
        """The inputs and outputs that PyTorch saves for a backward for these outputs."""
        found = self._unchanging.get(mask)
        if found is None:
            met = _either(self.saved, mask)
            inputs, outputs = (
                [i for i, s in enumerate(of) if s & met] for of in (self.input_savers, self.output_savers)
            )
            found = self._unchanging[mask] = inputs, outputs
        return found

    def _check_writable(self, inputs: Sequence[Tensor]) -> None:
        """NotExportable if an input that is written over may not be, or shares memory with another or in itself."""
        memories = Counter(map(_memory, inputs))
        spans = sorted({_memory(t): t.untyped_storage().nbytes() for t in inputs}.items())
        if any(a + n > b for (a, n), (b, _) in itertools.pairwise(spans)):  # as of two views of an array
            raise NotExportable("the forward changes tensors, and some that are given to it share memory")
        inferring = torch.is_inference_mode_enabled()
        for t in (inputs[i] for i in self.updates):
            if t.is_inference() and not inferring:
                raise NotRunnable("the forward changes an inference tensor outside of inference mode")
            if memories[_memory(t)] > 1 or _overlaps(t):
                raise NotExportable(
                    f"the forward changes a tensor of shape {tuple(t.shape)} that shares memory with another"
                )


def _grouped(custom: Sequence[int]) -> list[list[int]]:
    """The outputs, together where a custom function is behind several: its backward of a sum is no sum."""
    groups: list[tuple[int, list[int]]] = []
    for i, bits in enumerate(custom):
        met = [g for g in groups if g[0] & bits]
        groups = [g for g in groups if not g[0] & bits]
        joined = [k for _, places in met for k in places]
        groups.append((functools.reduce(operator.or_, [b for b, _ in met], bits), [*joined, i]))
    return [places for _, places in groups]


def _basis(differentiable: Sequence[bool], apart: Sequence[Sequence[int]]) -> list[Mask]:
    """Backwards of which all others are sums: for each set of outputs of a group, or each alone if they are many."""
    masks = []
    for group in apart:
        places = [i for i in group if differentiable[i]]
        most = len(places) if len(places) <= _MOST_DIVIDED else 1
        masks += [
            _only(of, len(differentiable)) for k in range(1, most + 1) for of in itertools.combinations(places, k)
        ]
    return masks


def _likely(lowered: Lowered) -> list[Mask]:
    """Backwards for several outputs that may come first: of all losses, and of all outputs if the first is no loss."""
    n = len(lowered.differentiable)
    places = [i for i in range(n) if lowered.differentiable[i]]
    losses = [i for i in places if lowered.ranks[i] == 0]
    return [_only(losses, n)] * (len(losses) > 1) + [_only(places, n)] * (losses[:1] != places[:1])


def _only(places: Collection[int], n: int) -> Mask:
    return tuple([i in places for i in range(n)])


class _Watch:
    """Sees whether somebody wants the gradient of a result from which autograd goes through that of others.

    All outputs come from one node: what is asked for would be without the part that comes from the other outputs.
    """

    def __init__(self, result: Tensor, through: int, later: Sequence[Tensor]) -> None:
        self._through = through
        self._result = weakref.ref(result)  # it holds the node that holds this
        result.register_hook(lambda grad: grad).remove()
        self._hooks = result._backward_hooks  # they stay when the result goes
        for other in later:
            other.register_hook(_RefuseAsInput(self._result))

    def check(self, mask: Mask) -> None:
        """ORTModuleError if a backward for these outputs would not give what is asked for."""
        result = self._result()
        hooks = (self._hooks or {}).values()
        asked = not all(isinstance(h, _RefuseAsInput) for h in hooks) or (result is not None and result.retains_grad)
        if asked and any(m and self._through >> i & 1 for i, m in enumerate(mask)):
            raise ORTModuleError(_BETWEEN_OUTPUTS)


_BETWEEN_OUTPUTS = (
    "ORTModule cannot give the gradient of an output, to a hook, for retain_grad() or torch.autograd.grad, where other "
    "outputs are computed from it; use .module for that"
)


@unserializable_hook
class _RefuseAsInput:
    """A hook for what is computed from a result, which refuses a backward that was called for the result's gradient.

    A hook runs even where no function does, as nothing but that gradient is wanted.
    """

    def __init__(self, result: weakref.ref[Tensor]) -> None:
        self._result = result

    @torch._disable_dynamo
    def __call__(self, grad: Tensor | None) -> None:
        if grad is None:
            return
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code is not _engine_run_backward.__code__:
            frame = frame.f_back
        _, _, _, asked, *_ = frame.f_locals.get("args", [()] * 4)
        if any(t is self._result() for t in asked):
            raise ORTModuleError(_BETWEEN_OUTPUTS)


@dataclass(eq=False)
class Call:
    """One forward, and what its backwards take."""

    runner: Runner
    inputs: Sequence[Tensor]
    in_grads: Mask
    trains: bool = field(init=False)  # autograd may come back for gradients
    dense: list[Tensor] = field(init=False)  # as the graph read them
    plan: _C.Plan = field(init=False)
    run: _C.Run | None = None
    forwarded: bool = False  # forward has run; what is raised later is not the graph's
    outputs: dict[int, Tensor] = field(init=False)  # that backwards read
    versions: list[int] = field(init=False)  # of the inputs
    copied: set[int] = field(default_factory=set)  # inputs that backwards read a copy of, as PyTorch does
    output_versions: dict[int, int] = field(init=False)
    seed: int = 0
    stowed: list[int] | None = None  # the inputs that went through saved-tensor hooks, if any are active
    stowage: Any = None  # holds what went through them
    packed: Tensor | None = None  # what the run holds, back from them
    begun: bool = False  # there was a backward
    freed: int = 0  # what saved tensors for backwards that did not retain them
    watching: list[_Watch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trains = True in self.in_grads and True in self.runner.differentiable
        self.dense = [t if t.is_contiguous() and not t.is_neg() else _dense(t) for t in self.inputs]

    def plan_for(self, out_grads: Sequence[Mask], retain_graph: bool = False) -> None:
        """Choose the plan and draw the seed; NotExportable if there can be none."""
        try:
            with tracing_lock:
                self.plan = self.runner.session.plan(self.dense, self.in_grads, *out_grads, retain_graph=retain_graph)
        except (NotImplementedError, ValueError) as error:
            raise NotExportable(str(error)) from error
        if self.runner.watcher is not None:
            self.runner.watcher(self.plan)
        if self.plan.random:
            self.seed = int(torch.randint(1, 2**63 - 1, ()))

    def forward(self) -> list[Tensor]:
        """Run forward, which brings the module's buffers up to date; all outputs of the graph."""
        runner = self.runner
        outputs, self.run = self.plan.forward(self.dense, self.seed)
        self.forwarded = True
        self._note_updates()
        runner.arena_bytes = max(runner.arena_bytes, self.plan.arena_bytes)
        self.copied = runner.to_copy.intersection(set().union(*self.plan.reads_inputs))
        for i in self.copied:
            self.dense[i] = self.dense[i].clone()
        # Aliases: the outputs themselves will hold the node that holds this call.
        kept = (runner.to_keep if self.trains else set()).union(*self.plan.reads_outputs)
        self.outputs = {i: outputs[i].detach() for i in kept}
        self.output_versions = {i: t._version for i, t in self.outputs.items()}
        return outputs

    def _note_updates(self) -> None:
        """Let autograd know of what was written over."""
        for i in self.runner.updates:
            given, dense = self.inputs[i], self.dense[i]
            if dense is given:
                torch.autograd.graph.increment_version(given)
            else:
                given.copy_(dense)
            if self.trains:
                self.versions[i] = given._version

    def stow(self) -> None:
        """Give what backward needs to saved-tensor hooks, which may keep, move or drop it."""
        assert self.run is not None
        read = {i for of in self.plan.reads_inputs for i in of}
        self.stowed = [i for i, t in enumerate(self.inputs) if i in read or not t.is_leaf]
        tensors = [(self.dense if i in self.copied else self.inputs)[i] for i in self.stowed]
        with torch.enable_grad():
            self.stowage = _Stow.apply(
                torch.empty(0, requires_grad=True), self.run.pack(), *tensors, *self.outputs.values()
            )
        gone = set(self.stowed)
        self.inputs = [_GONE if i in gone else t for i, t in enumerate(self.inputs)]
        self.dense = [_GONE if i in gone else t for i, t in enumerate(self.dense)]
        self.outputs = dict.fromkeys(self.outputs, _GONE)

    def unstowed(self) -> "Call":
        """With what the hooks give back."""
        assert self.stowed is not None
        packed, *saved = self.stowage.grad_fn.saved_tensors
        call = copy.copy(self)
        call.packed, call.inputs, call.dense = packed, list(self.inputs), list(self.dense)
        call.versions = list(self.versions)
        for i, t in zip(self.stowed, saved, strict=False):
            call.inputs[i], call.dense[i], call.versions[i] = t, _dense(t), t._version
        call.outputs = dict(zip(self.outputs, saved[len(self.stowed) :], strict=True))
        call.output_versions = {i: t._version for i, t in call.outputs.items()}
        return call

    def release(self, mask: Mask) -> "Call | None":
        """Let go of what a backward that did not retain it has read; what serves other backwards, or None."""
        more = self.runner.leaves(mask, self.freed)
        self.freed |= _either(self.runner.saved, mask)
        return self if more else None

    def backward(self, mask: Mask, grads: Sequence[Tensor | None], keep: bool) -> list[Tensor | None]:
        """Gradients of the graph's inputs for those of these outputs, None where autograd reaches none."""
        runner = self.runner
        parts = [mask] if mask in self.plan.out_grads else runner.parts(mask)
        if any(part not in self.plan.out_grads for part in parts):
            runner.unprepared += 1
            raise ORTModuleError(
                "ORTModule was not prepared to go back from these outputs together through a custom function; "
                "call the module again, which then is, or runs in PyTorch"
            )
        total: list[Tensor | None] = [None] * len(self.inputs)
        for part in parts:
            given = [g if p else None for g, p in zip(grads, part, strict=True)]
            with runner.callbacks.noting() as none:
                results = self._backward(part, given, keep or part is not parts[-1])
            _fill(self, runner.ancestry.inputs(_either(runner.reaches, part), none), results)
            total = [*map(_sum, total, results)] if part is not parts[0] else results
        return total

    def _backward(self, mask: Mask, grads: Sequence[Tensor | None], keep: bool) -> list[Tensor | None]:
        plan, number = self.plan, self.plan.out_grads.index(mask)
        assert self.run is not None
        saved, saved_results = self.runner.unchanging(mask)
        self._check(plan.reads_inputs[number], plan.reads_outputs[number], copied=self.copied)
        self._check(saved, saved_results)
        outputs = [self.outputs.get(i) for i in range(len(grads))]
        return plan.backward(self.run, self.dense, outputs, grads, keep, self.packed)

    def _check(self, inputs: Iterable[int], outputs: Iterable[int], copied: Collection[int] = ()) -> None:
        """Raise as PyTorch does if any of these was changed in place since, but for inputs that a copy is read of."""
        for i in inputs:
            if self.inputs[i]._version != self.versions[i] and i not in copied:
                raise _changed(self.inputs[i], self.versions[i])
        for i in outputs:
            if self.outputs[i]._version != self.output_versions[i]:
                raise _changed(self.outputs[i], self.output_versions[i])


def _changed(t: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead."
    )


class _Run(torch.autograd.Function):
    """Forward and backward of a whole graph.

    What backward needs is held by the call, and let go of as autograd lets go of saved tensors. Only where
    saved-tensor hooks are active it goes through them as tensors.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *_tensors: Tensor) -> tuple[Tensor, ...]:
        runner = call.runner
        outputs = call.forward()
        results = outputs[: runner.n_results]
        if _hooked():
            call.stow()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, d in zip(results, runner.differentiable, strict=False) if not d])
        return tuple(results)

    @staticmethod
    @torch._disable_dynamo  # which would trace what autograd calls within a forward that asks for gradients
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        functorch = torch._C._functorch
        if torch._C._are_functorch_transforms_active() or any(
            functorch.is_legacy_batchedtensor(g) for g in grads if g is not None
        ):
            raise ORTModuleError("ORTModule cannot run backward for a batch of gradients (vmap, is_grads_batched)")
        create_graph = torch.is_grad_enabled()
        with torch.no_grad():
            inputs, results = _Run._backward(ctx, grads)
        if create_graph:
            origins = [*inputs, *[g for g in grads if g is not None]]
            results = _Final.apply(len(origins), *origins, *results)
        return (None, *results)

    @staticmethod
    def _backward(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The inputs that want a gradient, and their gradients."""
        held: Call | None = ctx.call
        given: list[Tensor | None] = [None if g is None else _dense(g) for g in grads]
        if held is None or held.freed & _either(held.runner.saved, _given(given)):
            _ = ctx.saved_tensors  # raises, as they are freed
        assert held is not None
        call = held if held.stowed is None else held.unstowed()
        runner = held.runner
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        wanted = [*itertools.compress(call.inputs, call.in_grads)]
        given += [None] * len(runner.updates)
        mask = _given(given)
        results: list[Tensor | None] = [None] * len(call.inputs)
        if any(mask):
            for watch in held.watching:
                watch.check(mask)
            runner.habits.note(mask, keep or held.begun)
            results = call.backward(mask, given, keep or runner.leaves(mask, held.freed))
            held.begun = True
            if not keep:
                ctx.call = held.release(mask)
        return wanted, [*itertools.compress(results, call.in_grads)]


def _given(grads: Sequence[Tensor | None]) -> Mask:
    return tuple([g is not None for g in grads])


def _either(bits: Sequence[int], chosen: Sequence[bool]) -> int:
    """The bits of the chosen ones together."""
    return functools.reduce(operator.or_, itertools.compress(bits, chosen), 0)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _fill(call: Call, reached: int, results: list[Tensor | None]) -> None:
    """Give every input that autograd reaches a gradient, and no other one."""
    for i in [i for i, is_wanted in enumerate(call.in_grads) if is_wanted]:
        if not reached >> i & 1:
            results[i] = None
        elif results[i] is None:  # what led there was found to be 0
            results[i] = torch.zeros_like(call.inputs[i])


class _Stow(torch.autograd.Function):
    """Holds tensors as autograd holds what it saves, but until it is dropped.

    What a node saves itself is gone after the first of the backwards through it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()


class _Final(torch.autograd.Function):
    """Gradients made of inputs and of gradients of outputs, which cannot be differentiated again."""

    @staticmethod
    def forward(_ctx: Any, n_origins: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[n_origins:]

    @staticmethod
    @torch._disable_dynamo
    def backward(_ctx: Any, *_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise ORTModuleError("ORTModule cannot differentiate its gradients again; use .module for double backward")


def _hooked() -> bool:
    """Whether saved-tensor hooks are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _memory(t: Tensor) -> int:
    """Where a tensor lies; of one without memory, what changes in place are counted with."""
    storage = t.untyped_storage()
    return storage.data_ptr() or storage._cdata


def _overlaps(t: Tensor) -> bool:
    """Whether some elements may be repeated in memory."""
    extent = 1
    for stride, size in sorted((d, n) for n, d in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def _aliased(t: Any, steps: Sequence[Step], inputs: Sequence[Tensor]) -> Any:
    for step in steps:
        t = step(t, inputs)
    return t


def _dense(t: Tensor) -> Tensor:
    """The elements in row-major order, as they are and not as views with a pending sign would have them."""
    return t if t.is_contiguous() and not t.is_neg() else t.resolve_neg().contiguous()
