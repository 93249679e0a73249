"""The one `torch.autograd.Function` through which a whole module runs."""

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _C
from .errors import NotExportable, ORTModuleError
from .fallback import Host
from .lowering import Lowered
from .process import tracing_lock

Mask = tuple[bool, ...]


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
        self.host: Host = lowered.host
        self.results = lowered.results
        self.updates = lowered.updates
        self.differentiable = lowered.differentiable
        self.reaches = lowered.reaches
        self._ranks = lowered.ranks
        self.n_results = len(lowered.differentiable) - len(lowered.updates)
        self.retain = False
        self.arena_bytes = 0  # of the largest plan used
        self.out_grads: Mask | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The module's results for the graph's inputs, connected to autograd."""
        grad = torch.is_grad_enabled()
        in_grads = tuple([grad and t.requires_grad for t in inputs])
        call = _Call(self, inputs, in_grads)
        if any(in_grads) and any(self.differentiable):
            outputs = _Run.apply(call, *[t for t, g in zip(inputs, in_grads, strict=True) if g])
        else:
            with torch.no_grad():
                call.plan_for((False,) * len(self.differentiable))
                outputs, _ = call.forward()
        return [inputs[i] if kind == "input" else outputs[i] for kind, i in self.results]

    def expected(self) -> Mask:
        """Which output gradients backward will probably give: those of last time, else those of the loss alone."""
        if self.out_grads is None:
            first = self.differentiable.index(True)
            only_first = self._ranks[first] == 0
            self.out_grads = tuple([d and (i == first or not only_first) for i, d in enumerate(self.differentiable)])
        return self.out_grads


@dataclass(eq=False)
class _Call:
    """One forward and what repeating it takes."""

    runner: Runner
    inputs: Sequence[Tensor]
    in_grads: Mask
    dense: list[Tensor] = field(init=False)
    plan: _C.Plan = field(init=False)
    seed: int = 0
    host_state: Tensor | None = None
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.dense = [_dense(t) for t in self.inputs]

    def plan_for(self, out_grads: Mask) -> None:
        """Choose the plan and, at the first time, draw the seed; NotExportable if there can be none."""
        try:
            with tracing_lock:
                self.plan = self.runner.session.plan(self.dense, self.in_grads, out_grads, self.runner.retain)
        except (NotImplementedError, ValueError) as error:
            raise NotExportable(str(error)) from error
        self.runner.arena_bytes = max(self.runner.arena_bytes, self.plan.arena_bytes)
        if self.runner.watcher is not None:
            self.runner.watcher(self.plan)
        if self.plan.random and not self.seed:
            self.seed = int(torch.randint(1, 2**63 - 1, ()))
        if self.runner.host.random and self.host_state is None:
            self.host_state = torch.get_rng_state()

    def forward(self) -> tuple[list[Tensor], Tensor | None]:
        """Run forward and bring the module's buffers up to date; all outputs of the graph."""
        outputs, token = self.plan.forward(self.dense, self.seed)
        n = self.runner.n_results
        kept = set(self.plan.saves_inputs)
        for i in self.runner.updates:
            if i in kept:  # backward reads what it was before
                self.dense[i] = self.dense[i].clone()
        if self.runner.updates:
            torch._foreach_copy_([self.inputs[i] for i in self.runner.updates], outputs[n:])
        return outputs, token

    def note_versions(self) -> None:
        """Remember the state of the inputs, for :meth:`again`."""
        self.versions = [0 if t.is_inference() else t._version for t in self.inputs]

    def again(self, out_grads: Mask) -> tuple[list[Tensor], Tensor | None]:
        """Repeat the forward for a plan that serves these output gradients; buffers stay."""
        moved = [
            i
            for i, (t, v) in enumerate(zip(self.inputs, self.versions, strict=True))
            if i not in self.runner.updates and not t.is_inference() and t._version != v
        ]
        if moved:
            raise RuntimeError(
                f"backward has to repeat the forward, but its input {moved[0]} of shape "
                f"{tuple(self.inputs[moved[0]].shape)} has been changed in place since"
            )
        self.plan_for(out_grads)
        if self.host_state is None:
            return self.plan.forward(self.dense, self.seed)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.host_state)
            return self.plan.forward(self.dense, self.seed)


class _Run(torch.autograd.Function):
    """Forward and backward of a whole graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_tensors: Tensor) -> tuple[Tensor, ...]:
        runner = call.runner
        call.plan_for(runner.expected())
        outputs, token = call.forward()
        call.note_versions()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[o for o, d in zip(outputs[: runner.n_results], runner.differentiable, strict=False) if not d]
        )
        saved = [call.inputs[i] if i not in runner.updates else call.dense[i] for i in call.plan.saves_inputs]
        ctx.save_for_backward(token, *saved, *[outputs[i] for i in call.plan.saves_outputs])
        # The call lives as long as the token, that is, until autograd lets go of what backward needs;
        # saved-tensor hooks replace the token, then it lives as long as the node.
        assert token is not None
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ctx.call = call if hooked else None
        ctx.token = token if hooked else None
        if not hooked:
            token.call = call  # type: ignore[attr-defined]
        return tuple(outputs[: runner.n_results])

    @staticmethod
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
        token, *saved = ctx.saved_tensors
        call: _Call = ctx.call or token.call
        runner, plan = call.runner, call.plan
        wanted = [t for t, g in zip(call.inputs, call.in_grads, strict=True) if g]
        given: list[Tensor | None] = [None if g is None else _dense(g) for g in grads]
        given += [None] * len(runner.updates)
        mask = tuple([g is not None for g in given])
        if not any(mask):
            return wanted, [None] * len(wanted)
        inputs: list[Tensor | None] = [None] * len(call.inputs)
        outputs: list[Tensor | None] = [None] * len(runner.differentiable)
        for i, t in zip(plan.saves_inputs, saved, strict=False):
            inputs[i] = _dense(t)
        for i, t in zip(plan.saves_outputs, saved[len(plan.saves_inputs) :], strict=True):
            outputs[i] = t
        results = None
        if mask == plan.out_grads:
            try:
                results = plan.backward(token if ctx.token is None else ctx.token, inputs, outputs, given)
            except _C.ConsumedError:
                runner.retain = True
        if results is None:
            runner.out_grads = mask
            other = copy.copy(call)  # another thread may be in a backward of this one
            repeated, fresh = other.again(mask)
            assert fresh is not None
            results = other.plan.backward(fresh, other.dense, repeated, given)
        if ctx.token is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.token = ctx.call = None
        reached = functools.reduce(operator.or_, [r for r, m in zip(runner.reaches, mask, strict=True) if m])
        for i in [i for i, is_wanted in enumerate(call.in_grads) if is_wanted]:
            if not reached >> i & 1:
                results[i] = None
            elif results[i] is None:  # what led there was found to be 0
                results[i] = torch.zeros_like(call.inputs[i])
        return wanted, [g for g, is_wanted in zip(results, call.in_grads, strict=True) if is_wanted]


class _Final(torch.autograd.Function):
    """Gradients made of inputs and of gradients of outputs, which cannot be differentiated again."""

    @staticmethod
    def forward(_ctx: Any, n_origins: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[n_origins:]

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise ORTModuleError("ORTModule cannot differentiate its gradients again; use .module for double backward")


def _dense(t: Tensor) -> Tensor:
    """The elements in row-major order, as they are and not as views with a pending sign would have them."""
    return t if t.is_contiguous() and not t.is_neg() else t.resolve_neg().contiguous()
