"""What the fused optimizers have in common: the protocol of ``torch.optim``, and lists of tensors for the core."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _C

Group = dict[str, Any]
Row = tuple[int, Tensor | None, Tensor, Tensor | None, Tensor | None, bool, tuple[Tensor, ...]]

DEVICES = ("cpu",)  # those that a provider has kernels for
HALVES = (torch.bfloat16, torch.float16)
PLAIN = frozenset((Tensor, torch.nn.Parameter))  # not sharded, or whatever else a subclass is


def is_dense(t: Tensor) -> bool:
    """Whether its elements are all of a run of memory, in some order of the dims."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def in_one_order(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The tensors as the runs of memory that they are, if their elements lie in the same order; else None."""
    for t in tensors:
        if t.is_neg():
            return None
        if not t.is_contiguous():
            break
    else:
        return list(tensors)
    first = tensors[0]
    if not is_dense(first) or any(t.stride() != first.stride() or t.is_neg() for t in tensors):
        return None
    return [t.as_strided((t.numel(),), (1,)) for t in tensors]


def local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that is here; any other tensor itself."""
    return t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]


def is_sharded(t: Tensor) -> bool:
    return type(t) not in PLAIN and hasattr(t, "to_local")


class Rows:
    """The tensors of one step as the core takes them, and what is to be done once it is taken."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.changed: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        group: int,
        param: Tensor,
        grad: Tensor,
        states: list[Tensor],
        master: Tensor | None,
        step: Tensor | None,
        first: bool,
        writes_grad: bool,
    ) -> None:
        """Adds a parameter; `first` says that its states have no values yet."""
        written = [param, *states] if master is None else [param, *states, master]
        self.changed += written
        if writes_grad:
            self.changed.append(grad)
        if step is not None:
            self.changed.append(step)
        arrays = [grad, *written] if type(param) in PLAIN else [local(t) for t in (grad, *written)]
        runs = in_one_order(arrays)
        if runs is None:
            runs = [t.resolve_neg().contiguous() for t in arrays]
            changed = zip(arrays if writes_grad else arrays[1:], runs if writes_grad else runs[1:], strict=True)
            self.copies += [(to, run) for to, run in changed if to is not run]
        last = None if master is None else runs.pop()
        self.rows.append((group, runs[1], runs[0], last, step, first, tuple(runs[2:])))

    def finish(self) -> None:
        """Puts what was computed in copies where it belongs, and tells autograd what was changed."""
        for to, run in self.copies:
            to.copy_(run)
        torch.autograd.graph.increment_version(self.changed)


class FusedOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose step is one call of the core.

    A subclass names its rule, checks its numbers, and says what state a parameter has.
    """

    rule: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]  # what torch's groups say of how a step is computed, and it is so here
    counts: ClassVar[bool] = True  # whether its state has a step
    whole: ClassVar[bool] = False  # whether it must see all of a parameter
    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves dividing by the scale to the step

    def __init__(self, params: Any, defaults: Group, max_grad_norm: float | None, set_grad_none: bool) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise ValueError(f"Invalid max_grad_norm: {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self.set_grad_none = set_grad_none
        self.grad_norm: float | None = None
        super().__init__(params, defaults)

    # ---- for subclasses ----

    def _numbers(self, group: Group) -> dict[str, float]:
        """Of the group, by the names of csrc/optim/numbers.def."""
        raise NotImplementedError

    def _check(self, group: Group) -> None:
        """Raises ValueError for numbers that make no sense."""
        raise NotImplementedError

    def _settle(self, group: Group) -> None:
        """Sets what a group says of how its step is computed."""
        group.update(self.fixed)

    def _states(self, group: Group) -> tuple[str, ...]:
        """Names of the tensors in the state of a parameter, in the order of csrc/optim/optim.h."""
        raise NotImplementedError

    def _new_state(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)

    def _is_wide(self, group: Group, p: Tensor) -> bool:
        """Whether the state of a parameter of 16 bits is kept in 32."""
        return p.dtype in HALVES and bool(group["master_weights"] or group["stochastic_rounding"])

    # ---- torch.optim.Optimizer ----

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as :meth:`torch.optim.Optimizer.add_param_group` does.

        Raises
        ------
        ValueError
            A number is out of its range, or asks for what is not here, such as ``differentiable=True``.
        """
        if isinstance(param_group, dict):  # all else torch.optim refuses
            self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._settle(self.param_groups[-1])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or set them to 0; which one, `set_grad_none` of the constructor says by default."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("max_grad_norm", "set_grad_none", "grad_norm")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)
            self._settle(group)
            for p in group["params"]:
                of_p = self.state.get(p, {})
                if "step" in of_p:
                    of_p["step"] = torch.as_tensor(of_p["step"], dtype=torch.float32).reshape(()).clone()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the class of ``torch.optim`` that it stands for.

        What such a state does not know, as `master_weights`, stays as it is. States of parameters of 16 bits keep
        the dtype that they were saved in.
        """
        given: dict[str, Any] = {}

        def look(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            groups = [
                {**{k: v for k, v in ours.items() if k != "params"}, **theirs}
                for ours, theirs in zip(self.param_groups, loaded["param_groups"], strict=False)
            ]
            given.update(loaded)
            return {**loaded, "param_groups": [*groups, *loaded["param_groups"][len(groups) :]]}

        hook = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        for group, saved in zip(self.param_groups, given["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in given["state"].get(key, {}).items():
                    if p.dtype in HALVES and name != "step" and isinstance(value, Tensor):
                        self.state[p][name] = value.detach().to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Parameters
        ----------
        closure
            Computes the loss again and gives it back; called with gradients enabled before the update.

        Returns
        -------
        What `closure` gave, or None.

        Raises
        ------
        RuntimeError
            A gradient is sparse.
        ValueError
            A parameter is complex, or on a device without kernels.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    # ---- the step ----

    def _look(self, index: int, number: int, p: Tensor) -> None:
        """Raises where a parameter is not for these kernels."""
        what = f"parameter {number} of group {index}, of shape {tuple(p.shape)}, is"
        if p.is_complex() or p.device.type not in DEVICES:
            raise ValueError(
                f"{type(self).__name__} updates real parameters on {' or '.join(DEVICES)}; "
                f"{what} {'complex' if p.is_complex() else f'on {p.device}'}"
            )
        if is_sharded(p) and (self.whole or self.max_grad_norm is not None):
            name = type(self).__name__ if self.whole else f"max_grad_norm of {type(self).__name__}"
            raise ValueError(f"{name} takes norms of what is in this process alone; {what} sharded")

    def _refuse_sparse(self) -> None:
        raise RuntimeError(f"`{type(self).__name__}` does not support sparse gradients")

    @torch._disable_dynamo
    def _update(self) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item() != 0:
            return
        grad_scale = 1.0 if scale is None else float(scale)
        rows, draws = Rows(), False
        made: list[tuple[dict[str, Any], str]] = []
        try:
            for index, group in enumerate(self.param_groups):
                names, rounds = self._states(group), bool(group["stochastic_rounding"])
                for number, p in enumerate(group["params"]):
                    grad = p.grad
                    if grad is None:
                        continue
                    if grad.layout is not torch.strided:
                        self._refuse_sparse()
                    self._look(index, number, p)
                    states, master, first = self._state_of(p, group, names, made)
                    step = self.state[p]["step"] if self.counts else None
                    rows.add(index, p, grad, states, master, step, first, grad_scale != 1.0)
                    draws |= rounds and p.dtype in HALVES
            if not rows.rows:
                return
            self.grad_norm = _C.optim_step(
                self.rule,
                rows.rows,
                [self._numbers(group) for group in self.param_groups],
                grad_scale=grad_scale,
                max_norm=self.max_grad_norm,
                wants_norm=self.max_grad_norm is not None,
                seed=int(torch.randint(2**63 - 1, (), dtype=torch.int64)) if draws else 0,
            )
        except BaseException:  # a state that no step has written is none
            for state, name in made:
                del state[name]
            raise
        rows.finish()

    def _state_of(
        self, p: Tensor, group: Group, names: tuple[str, ...], made: list[tuple[dict[str, Any], str]]
    ) -> tuple[list[Tensor], Tensor | None, bool]:
        """States and master of a parameter, made and noted in `made` where there are none, and whether any were."""
        wide = self._is_wide(group, p)
        state = self.state[p] if names or self.counts or wide else {}
        dtype = torch.float32 if wide else p.dtype
        first = False
        if self.counts and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name in names:
            now = state.get(name)
            if now is None:
                state[name] = self._new_state(p, dtype)
                made.append((state, name))
                first = True
            elif now.dtype is not dtype:
                state[name] = now.to(dtype)
        if not (wide and group["master_weights"]):
            return [state[name] for name in names], None, first
        if state.get("master") is None or state["master"].dtype != torch.float32:
            state["master"] = p.detach().float()
        return [state[name] for name in names], state["master"], first


def refuse(name: str, fused: bool | None, **others: bool | None) -> None:
    """Raises ValueError where torch's choice of an implementation is another than this one."""
    if fused is False:
        raise ValueError(f"{name} is fused: fused=False asks for another implementation, which torch.optim has")
    for option, asked in others.items():
        if asked:
            raise ValueError(f"{name} has no {option} implementation: {option}=True is not supported")


def check_halves(group: Group) -> None:
    """Raises ValueError for what cannot be asked together of parameters of 16 bits."""
    if group["master_weights"] and group["stochastic_rounding"]:
        raise ValueError("master_weights=True keeps what is rounded away, so stochastic_rounding=True has no use")


def check_number(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raises TypeError unless it is or holds a number, ValueError unless it is one of low <= value < high."""
    if isinstance(value, numpy.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, (numbers.Real, Tensor)):
        raise TypeError(f"{name} must be a number, not {value!r} of {type(value).__name__}")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} as a tensor must have 1 element, not {value.numel()}")
    if not low <= float(value) < high:
        raise ValueError(f"Invalid {name}: {value}")
