"""Runs a graph forward and backward: plans, seeds, what backwards need and what they may not find changed."""

import copy
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _C
from .asked import Asked, Watch
from .backwards import Habits, Mask, basis, grouped, likely, only
from .budget import Budget
from .coming import NOTHING, Coming, Computed, Given, Gradients, Uses, as_it_is
from .dtypes import CARRIERS, decoded, row_major
from .errors import NotExportable, NotRunnable, ORTModuleError
from .lowering.ancestry import Operand
from .lowering.fallback import Callbacks
from .lowering.lower import Lowered
from .lowering.to_text import to_text
from .nodes import Nodes, Set, connected
from .process import tracing_lock
from .profile import ProfiledStep
from .report import FallbackReport
from .results import Results

if TYPE_CHECKING:
    from .onnx.files import Files

_MOST_BACKWARDS = 64  # that are remembered with a plan
_GONE = torch.empty(0)  # in the place of a tensor that was given away


@dataclass(frozen=True, slots=True)
class _Backward:
    """What is the same whenever a plan goes back from the same outputs.

    Attributes
    ----------
    inputs, outputs
        What must not have changed since forward: what it reads but for copies and, unless only some gradients are
        asked for, what PyTorch saves for it.
    reached
        The inputs that get a gradient, where each op in PyTorch finds one.
    needed
        What it computes, as `Plan.needed` says it; None stands for all.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    reached: Collection[int]
    needed: bytes | None


class _Planned:
    """A plan, and what is the same at each call of it.

    Attributes
    ----------
    plan
        The plan itself.
    wanted
        The inputs whose gradients it computes.
    copied
        Inputs that backwards read a copy of, as PyTorch does not save them.
    kept
        Outputs that backwards read or PyTorch saves.
    backwards
        By outputs, and by inputs where not all of their gradients are asked for, those met so far.
    nodes
        By how many bytes of gradients go on together, of calls whose gradients do so as they are there.
    """

    def __init__(self, runner: "Runner", plan: _C.Plan) -> None:
        self.plan = plan
        self.wanted = [i for i, is_wanted in enumerate(plan.in_grads) if is_wanted]
        self.copied = frozenset(runner.to_copy.intersection(itertools.chain(*plan.reads_inputs)))
        kept = runner.to_keep if plan.out_grads else ()
        self.kept = sorted({*kept, *itertools.chain(*plan.reads_outputs)})
        self.backwards: dict[tuple[Mask, Asked], _Backward] = {}
        self.nodes: dict[int, Nodes] = {}
        self._uses: dict[Mask, Uses] = {}

    def uses(self, mask: Mask) -> Uses:
        """When the backward for these outputs uses what it is given, and gives."""
        found = self._uses.get(mask)
        if found is None:
            found = self._uses[mask] = Uses(*self.plan.uses(self.plan.out_grads.index(mask)))
        return found


class Runner:
    """Runs one graph: picks plans, draws seeds, remembers which output gradients came back.

    Parameters
    ----------
    session
        The C session of the graph.
    lowered
        What the graph's inputs and outputs mean.
    watchers
        Called with each plan before it runs.
    """

    def __init__(
        self, session: _C.Session, lowered: Lowered, watchers: Sequence[Callable[[_C.Plan], None]] = ()
    ) -> None:
        self.session = session
        self.watchers = watchers
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
        self._planned: _Planned | None = None  # the last one
        self._freed: dict[Mask, int] = {}
        self._left: dict[int, bool] = {}  # by what is freed
        self.watched = [(k, through) for k, through in enumerate(lowered.watched) if through]
        # The results that are outputs as they are.
        self.firsts = [k for k, (source, _, steps) in enumerate(self.results) if source == "output" and not steps]
        self.n_results = len(lowered.differentiable) - len(lowered.updates)
        self.undifferentiable = [k for k in range(self.n_results) if not lowered.differentiable[k]]
        # The inputs that autograd reaches from each result.
        self._reached = [
            self.ancestry.inputs(lowered.reaches[k], ()) if lowered.differentiable[k] else 0
            for k in range(self.n_results)
        ]
        self._nodes: dict[Mask, Nodes] = {}
        # The results that each output is made of, and the outputs in an order in which those come before it.
        self._made_of = [self._results_of(k, lowered.watched) for k in range(self.n_results)]
        before = {
            k: [self.results[j][1] for j in of if self.results[j][0] == "output"] for k, of in enumerate(self._made_of)
        }
        self._order = [*TopologicalSorter(before).static_order()]
        self.is_one = sum(lowered.differentiable[: self.n_results]) == 1 and not any(self._made_of)  # node
        self.arena_bytes = self.lent_bytes = self.live_bytes = 0  # of the largest plan used
        self.unprepared = 0  # backwards that came without a plan for them
        custom = [self.ancestry.custom(self.ancestry.whole(r)) for r in lowered.reaches]
        self._apart = grouped(custom)
        self.habits = Habits(
            basis(lowered.differentiable, self._apart), likely(lowered), lambda mask: self.leaves(self.freed(mask))
        )
        self.foreseen = self.habits.expected

    @classmethod
    def of(
        cls, lowered: Lowered, budget: Budget, files: "Files", report: FallbackReport, numbered: bool = False
    ) -> "Runner":
        """That of a graph, which takes as much memory as it may; files are written, `numbered` if there are several."""
        text, constants = to_text(lowered.model)
        session = _C.Session(
            text,
            constants,
            lowered.callbacks,
            provider=lowered.provider,
            memory_share=budget.share,
            memory_bytes=budget.bytes,
        )
        watchers = [*files.watchers(lowered, text, constants, numbered), *budget.watchers(report)]
        return cls(session, lowered, watchers)

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
        elif self.differentiable:
            call.plan_for(())
        return call

    def _results_of(self, k: int, watched: Sequence[int]) -> list[int]:
        """The results that autograd goes through from an output, but those that are as much made of it: the same."""
        through = next((watched[j] for j in self.firsts if self.results[j][1] == k), 0)
        same = {j for j, (source, i, _) in enumerate(self.results) if source == "output" and through >> i & 1}
        return [j for j, later in self.watched if later >> k & 1 and j not in same]

    def nodes(self, in_grads: Mask) -> Nodes:
        """The nodes of calls that want gradients of these inputs."""
        found = self._nodes.get(in_grads)
        if found is None:
            of: dict[int, list[int]] = {}
            for i in itertools.compress(range(len(in_grads)), in_grads):
                outputs = sum(1 << k for k, reached in enumerate(self._reached) if reached >> i & 1)
                of.setdefault(outputs, []).append(i)
            sets = [Set(tuple(inputs), outputs) for outputs, inputs in of.items() if outputs]
            leads_to = {k: [n for n, s in enumerate(sets) if s.outputs >> k & 1] for k in self._order}
            nodes = [(k, leads_to[k], self._made_of[k]) for k in self._order if leads_to[k]]
            found = self._nodes[in_grads] = Nodes(sets, nodes)
        return found

    def nodes_of(self, call: "Call", inputs: Sequence[Tensor]) -> Nodes:
        """The nodes of a call of these inputs whose forward has run."""
        nodes, together = self.nodes(call.in_grads), call.together
        if together is None:
            return nodes
        found = call.planned.nodes.get(together)
        if found is None:
            order = call.planned.uses(call.plan.out_grads[-1]).gradients
            found = call.planned.nodes[together] = nodes.divided(order, [t.nbytes for t in inputs], together)
        return found

    def run(self, call: "Call") -> list[Tensor]:
        """The module's results, connected to autograd."""
        inputs = call.inputs
        if call.trains:
            found = connected(call, Results(self.results, inputs))
        elif not self.differentiable:  # all results are inputs, or views of them
            found = Results(self.results, inputs)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                found = Results(self.results, inputs, call.forward())
        else:
            found = Results(self.results, inputs, call.forward())
        results = [found[k] for k in range(len(self.results))]
        if call.trains and self.watched:
            call.watching = [
                Watch(results[k], through, [results[j] for j in self.firsts if through >> self.results[j][1] & 1])
                for k, through in self.watched
                if results[k].requires_grad
            ]
        return results

    def freed(self, mask: Mask) -> int:
        """What saves tensors that a backward for these outputs frees, as PyTorch does it."""
        found = self._freed.get(mask)
        if found is None:
            found = self._freed[mask] = _either(self.saved, mask)
        return found

    def leaves(self, freed: int) -> bool:
        """Whether PyTorch lets a backward follow where so much is freed."""
        found = self._left.get(freed)
        if found is None:
            found = any(d and not saved & freed for d, saved in zip(self.differentiable, self.saved, strict=True))
            self._left[freed] = found
        return found

    def parts(self, mask: Mask) -> list[Mask]:
        """Backwards of which that for these outputs is the sum."""
        groups = [[i for i in group if mask[i]] for group in self._apart]
        return [only(group, len(mask)) for group in groups if group]

    def profile(self) -> list[ProfiledStep]:
        """That of the plan that ran last."""
        return [] if self._planned is None else [ProfiledStep(*row) for row in self._planned.plan.profile()]

    def planned(self, plan: _C.Plan) -> _Planned:
        """What is the same at each call of a plan."""
        found = self._planned
        if found is None or found.plan is not plan:
            found = self._planned = _Planned(self, plan)
            if plan.live_bytes >= self.live_bytes:
                self.live_bytes, self.arena_bytes, self.lent_bytes = plan.live_bytes, plan.arena_bytes, plan.lent_bytes
        return found

    def backward(self, planned: _Planned, mask: Mask, asked: Asked) -> _Backward:
        """What is the same whenever it goes back from these outputs, for which it has a backward, to these inputs."""
        found = planned.backwards.get((mask, asked))
        if found is None:
            plan = planned.plan
            number = plan.out_grads.index(mask)
            if asked is None:
                needed, reads, reads_outputs = None, plan.reads_inputs[number], plan.reads_outputs[number]
                saved = self.freed(mask)
            else:
                needed, reads, reads_outputs = plan.needed(number, asked)
                saved = 0
            inputs, outputs = (
                {i for i, s in enumerate(savers) if s & saved} for savers in (self.input_savers, self.output_savers)
            )
            if len(planned.backwards) > _MOST_BACKWARDS:
                planned.backwards.clear()
            found = planned.backwards[mask, asked] = _Backward(
                sorted(inputs.union(reads) - planned.copied),
                sorted(outputs.union(reads_outputs)),
                self.reached(mask, (), asked),
                needed,
            )
        return found

    def reached(self, mask: Mask, none: Collection[Operand], asked: Asked) -> Collection[int]:
        """Those asked for of the inputs that autograd reaches from these outputs.

        The operands `none` of ops in PyTorch get no gradient.
        """
        bits = self.ancestry.inputs(_either(self.reaches, mask), none)
        return frozenset([i for i in (range(len(self.input_savers)) if asked is None else asked) if bits >> i & 1])

    def _check_writable(self, inputs: Sequence[Tensor]) -> None:
        """NotExportable if an input that is written over may not be, or shares memory with another or in itself."""
        storages = [t.untyped_storage() for t in inputs]
        places = [s.data_ptr() or s._cdata for s in storages]  # of one without memory, what changes are counted with
        memories = Counter(places)
        spans = sorted({p: s.nbytes() for p, s in zip(places, storages, strict=True)}.items())
        if any(a + n > b for (a, n), (b, _) in itertools.pairwise(spans)):  # as of two views of an array
            raise NotExportable("the forward changes tensors, and some that are given to it share memory")
        inferring = torch.is_inference_mode_enabled()
        for i in self.updates:
            t = inputs[i]
            if t.is_inference() and not inferring:
                raise NotRunnable("the forward changes an inference tensor outside of inference mode")
            if memories[places[i]] > 1 or _overlaps(t):
                raise NotExportable(
                    f"the forward changes a tensor of shape {tuple(t.shape)} that shares memory with another"
                )


@dataclass(eq=False, slots=True)
class Call:
    """One forward, and what its backwards take."""

    runner: Runner
    inputs: Sequence[Tensor]
    in_grads: Mask
    trains: bool = field(init=False)  # autograd may come back for gradients
    dense: list[Tensor] = field(init=False)  # as the graph read them
    plan: _C.Plan = field(init=False)
    planned: _Planned = field(init=False)  # for the plan, once forward has run
    run: _C.Run | None = None
    forwarded: bool = False  # forward has run; what is raised later is not the graph's
    outputs: dict[int, Tensor] = field(init=False)  # that backwards read
    versions: list[int] = field(init=False)  # of the inputs
    output_versions: dict[int, int] = field(init=False)
    seed: int = 0
    stowed: list[int] | None = None  # the inputs that went through saved-tensor hooks, if any are active
    stowage: Any = None  # holds what went through them
    packed: Tensor | None = None  # what the run holds, back from them
    begun: bool = False  # there was a backward
    freed: int = 0  # what saved tensors for backwards that did not retain them
    watching: Sequence[Watch] = ()
    together: int | None = None  # bytes of gradients that go on as they are there; None: all at once

    def __post_init__(self) -> None:
        self.trains = True in self.in_grads and True in self.runner.differentiable
        self.dense = [
            t if t.is_contiguous() and not t.is_neg() and t.dtype not in CARRIERS else row_major(t) for t in self.inputs
        ]

    def plan_for(self, out_grads: Sequence[Mask], retain_graph: bool = False) -> None:
        """Choose the plan and draw the seed; NotExportable if there can be none."""
        try:
            with tracing_lock:
                self.plan = self.runner.session.plan(self.dense, self.in_grads, *out_grads, retain_graph=retain_graph)
        except (NotImplementedError, ValueError) as error:
            raise NotExportable(str(error)) from error
        for watch in self.runner.watchers:
            watch(self.plan)
        if self.plan.random:
            self.seed = int(torch.randint(1, 2**63 - 1, ()))

    def forward(self) -> list[Tensor]:
        """Run forward, which brings the module's buffers up to date; all outputs of the graph."""
        runner = self.runner
        outputs, self.run = as_it_is(runner.callbacks.device, self.plan.forward, self.dense, self.seed)
        self.forwarded = True
        self._note_updates()
        self.planned = runner.planned(self.plan)
        for i in self.planned.copied:
            self.dense[i] = self.plan.empty_like(self.dense[i]).copy_(self.dense[i])
        # Aliases: the outputs themselves will hold the node that holds this call.
        self.outputs = {i: outputs[i].detach() for i in self.planned.kept}
        self.output_versions = {i: t._version for i, t in self.outputs.items()}
        return outputs

    def _note_updates(self) -> None:
        """Let autograd know of what was written over."""
        for i in self.runner.updates:
            given, dense = self.inputs[i], self.dense[i]
            if dense.data_ptr() == given.data_ptr():
                torch.autograd.graph.increment_version(given)
            else:
                given.copy_(dense if dense.dtype == given.dtype else decoded(dense, given.dtype))
            if self.trains:
                self.versions[i] = given._version

    def stow(self) -> None:
        """Give what backward needs to saved-tensor hooks, which may keep, move or drop it."""
        assert self.run is not None
        read = {i for of in self.plan.reads_inputs for i in of}
        self.stowed = [i for i, t in enumerate(self.inputs) if i in read or not t.is_leaf]
        tensors = [(self.dense if i in self.planned.copied else self.inputs)[i] for i in self.stowed]
        with torch.enable_grad():
            self.stowage = _Stow.apply(
                torch.empty(0, requires_grad=True), self.run.pack(), *tensors, *self.outputs.values()
            )
        gone = set(self.stowed)
        self.inputs = [_GONE if i in gone else t for i, t in enumerate(self.inputs)]
        self.dense = [_GONE if i in gone else t for i, t in enumerate(self.dense)]
        self.outputs = dict.fromkeys(self.outputs, _GONE)

    def opened(self) -> "Call":
        """With what saved-tensor hooks give back, where there were any."""
        if self.stowed is None:
            return self
        packed, *saved = self.stowage.grad_fn.saved_tensors
        call = copy.copy(self)
        call.packed, call.inputs, call.dense = packed, list(self.inputs), list(self.dense)
        call.versions = list(self.versions)
        for i, t in zip(self.stowed, saved, strict=False):
            call.inputs[i], call.dense[i], call.versions[i] = t, row_major(t), t._version
        call.outputs = dict(zip(self.outputs, saved[len(self.stowed) :], strict=True))
        call.output_versions = {i: t._version for i, t in call.outputs.items()}
        return call

    def start(self) -> list[Tensor]:
        """Run forward; the results, of which autograd does not know yet."""
        outputs = self.forward()
        if _hooked():
            self.stow()
        return outputs[: self.runner.n_results]

    def is_freed(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether a backward for the results that have a gradient may not follow those that there were."""
        return bool(self.freed & self.runner.freed(self._mask(grads)))

    def _mask(self, grads: Sequence[Tensor | None]) -> Mask:
        return (*[g is not None for g in grads], *[False] * len(self.runner.updates))

    def go_back(
        self, grads: Sequence[Tensor | None], asked: Asked, opened: "Call", others_follow: bool = False
    ) -> tuple[Sequence[Tensor], Computed | Coming, bool]:
        """A backward of autograd's from these results, of which others may follow within the same; see :meth:`opened`.

        Returns
        -------
        inputs, gradients
            Those of the graph.
        is_left
            Whether PyTorch lets another one follow.
        """
        runner, mask = self.runner, self._mask(grads)
        if True not in mask:
            return opened.inputs, Computed([None] * len(opened.inputs)), True
        for watch in self.watching:
            watch.check(mask)
        keep = others_follow or torch._C._autograd._get_current_graph_task_keep_graph()
        runner.habits.note(mask, keep or self.begun)
        freed = self.freed | runner.freed(mask)
        is_left = keep or runner.leaves(freed)
        given = [*[None if g is None else row_major(g) for g in grads], *[None] * len(runner.updates)]
        results: Computed | Coming
        if self.together is not None and not others_follow and mask in self.plan.out_grads:
            results = Coming(opened, mask, given, is_left, asked)
        else:
            results = Computed(opened.backward(mask, given, is_left, asked))
        self.begun = True
        if not keep:
            self.freed = freed
        return opened.inputs, results, is_left

    def backward(self, mask: Mask, grads: Sequence[Tensor | None], keep: bool, asked: Asked) -> list[Tensor | None]:
        """Gradients of the graph's inputs for those of these outputs, None where autograd reaches none or asks none."""
        if mask in self.plan.out_grads:
            return self._backward(mask, grads, keep, asked)
        runner = self.runner
        parts = runner.parts(mask)
        if any(part not in self.plan.out_grads for part in parts):
            runner.unprepared += 1
            raise ORTModuleError(
                "ORTModule was not prepared to go back from these outputs together through a custom function; "
                "call the module again, which then is, or runs in PyTorch"
            )
        total: list[Tensor | None] = [None] * len(self.inputs)
        for part in parts:
            given = [g if p else None for g, p in zip(grads, part, strict=True)]
            total = [*map(_sum, total, self._backward(part, given, keep or part is not parts[-1], asked))]
        return total

    def _backward(self, mask: Mask, grads: Sequence[Tensor | None], keep: bool, asked: Asked) -> list[Tensor | None]:
        """The same of one backward of the plan."""
        runner, run = self.runner, self.run
        assert run is not None
        back = runner.backward(self.planned, mask, asked)
        self.check(back)
        with runner.callbacks.noting() if runner.callbacks.ops else NOTHING as none:
            results = as_it_is(runner.callbacks.device, self.plan.backward, run, *self.given(grads, keep, back))
        reached = runner.reached(mask, none, asked) if none else back.reached
        for i in self.planned.wanted:
            results[i] = self.gradient(i, results[i], reached)
        return results

    def given(self, grads: Gradients, keep: bool, back: _Backward) -> Given:
        """What a backward of the plan is given."""
        return self.dense, [self.outputs.get(i) for i in range(len(grads))], grads, keep, self.packed, back.needed

    def gradient(self, i: int, found: Tensor | None, reached: Collection[int]) -> Tensor | None:
        """What autograd gets for an input."""
        if i not in reached:
            return None
        given = self.inputs[i]
        if found is None:  # what led there was found to be 0
            return torch.zeros_like(given)
        return found if found.dtype == given.dtype else decoded(found, given.dtype)

    def check(self, back: _Backward) -> None:
        """Raise as PyTorch does if any of what a backward needs was changed in place since."""
        self.check_unchanged(back.inputs, back.outputs)

    def check_unchanged(self, of_inputs: Iterable[int], of_outputs: Iterable[int]) -> None:
        """The same of these."""
        inputs, versions = self.inputs, self.versions
        for i in of_inputs:
            if inputs[i]._version != versions[i]:
                raise _changed(inputs[i], versions[i])
        for i in of_outputs:
            if self.outputs[i]._version != self.output_versions[i]:
                raise _changed(self.outputs[i], self.output_versions[i])


def _changed(t: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead."
    )


def _either(bits: Sequence[int], chosen: Sequence[bool]) -> int:
    """The bits of the chosen ones together."""
    return functools.reduce(operator.or_, itertools.compress(bits, chosen), 0)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _Stow(torch.autograd.Function):
    """Holds tensors as autograd holds what it saves, but until it is dropped.

    What a node saves itself is gone after the first of the backwards through it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()


def _hooked() -> bool:
    """Whether saved-tensor hooks are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _overlaps(t: Tensor) -> bool:
    """Whether some elements may be repeated in memory."""
    extent = 1
    for stride, size in sorted((d, n) for n, d in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False
