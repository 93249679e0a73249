"""What the fused optimizers have in common: the protocol of ``torch.optim``, and lists of tensors for the core."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from ..devices import device_refusal, provider_of

Group = dict[str, Any]

HOST = "cpu"  # the kind of device whose memory Python reads without waiting
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


def extent(t: Tensor) -> tuple[int, int]:
    """Addresses of its first byte in memory, and of what is past its last one."""
    low = t.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return low, low + (last + 1) * t.element_size() if t.numel() else low


def stretches(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers of the stretches of memory that tensors lie in: the same one for those whose extents meet."""
    found = [0] * len(tensors)
    number = end = 0
    for low, high, i in sorted((*extent(t), i) for i, t in enumerate(tensors)):
        number += low >= end
        end = max(end, high)
        found[i] = number
    return found


def local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that is here; any other tensor itself."""
    return t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]


def is_sharded(t: Tensor) -> bool:
    return type(t) not in PLAIN and hasattr(t, "to_local")


def number_on(value: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A number where kernels of a device read it; a device is not waited for."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=dtype, device=device)
    return value.detach().to(device, dtype, non_blocking=device.type != HOST).reshape(())


def lr_on(value: Any, device: torch.device) -> float | Tensor:
    """A learning rate as kernels of a device take it: a number, or a float64 there if no more is known here."""
    known = not isinstance(value, Tensor) or value.device.type == HOST
    return float(value) if known else number_on(value, device, torch.float64)


@torch._disable_dynamo
def refuse_capture(name: str) -> None:
    """Raises RuntimeError while PyTorch's stream is captured, as those of ``torch.optim`` that are not capturable."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} takes no step while a CUDA graph is captured: each launch of the graph would repeat the numbers "
            "of this step, such as its learning rate; take the step after the launch"
        )


class Rows:
    """The tensors of one step on one device, and what is to be done once it is taken."""

    def __init__(self) -> None:
        self.rows: list[_C.Row] = []
        self.scattered = False  # whether tensors of a row lie otherwise than the core takes them
        self.made: dict[tuple[Tensor, str], dict[str, Any]] = {}  # states that no step has written yet
        self.rounds = False  # whether any parameter is rounded at random
        self.changed: list[Tensor] = []

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
        self.scattered |= runs is None
        self.rows.append(row_of(runs or arrays, group, master is not None, step, first))

    def parts(self) -> list[list[_C.Row]]:
        """The rows in their order; where there will be copies, no two of a part share memory of parameters."""
        if not self.scattered:
            return [self.rows]
        parts: list[list[_C.Row]] = [[]]
        met: set[int] = set()
        for row, stretch in zip(self.rows, stretches([arrays_of(row)[1] for row in self.rows]), strict=True):
            if stretch in met:
                parts.append([])
                met.clear()
            met.add(stretch)
            parts[-1].append(row)
        return parts

    def taken(self, writes_grad: bool) -> Iterator[list[_C.Row]]:
        """Rows as the core takes them; each list is to be stepped before the next, whose copies see what it became."""
        for part in self.parts():
            copies: list[tuple[Tensor, Tensor]] = []
            yield [in_runs(row, writes_grad, copies) for row in part] if self.scattered else part
            for to, run in copies:
                to.copy_(run)

    def clip(self, grad_scale: Tensor | None, max_norm: float, norm: Tensor | None, provider: str) -> None:
        """Divides gradients by `grad_scale`, and has rows take copies of them, clipped by the norm of all."""
        grads = [row[2] for row in self.rows]
        if grad_scale is not None:
            quotients = [g.to(torch.promote_types(g.dtype, grad_scale.dtype)) / grad_scale for g in grads]
            for grad, quotient in zip(grads, quotients, strict=True):
                grad.copy_(quotient)
        clipped = [g.resolve_neg().clone(memory_format=torch.contiguous_format) for g in grads]
        rows: list[_C.Row] = [(0, None, g, None, None, False, ()) for g in clipped]
        _C.optim_step("scale", rows, [{}], max_norm=max_norm, norm=norm, provider=provider)
        self.rows = [(*row[:2], g, *row[3:]) for row, g in zip(self.rows, clipped, strict=True)]

    def undo(self) -> None:
        """Takes back the states that no step has written."""
        for (_, name), state in self.made.items():
            del state[name]

    def finish(self) -> None:
        """Tells autograd what was changed."""
        self.made.clear()
        torch.autograd.graph.increment_version(self.changed)


def row_of(arrays: Sequence[Tensor], group: int, has_master: bool, step: Tensor | None, first: bool) -> _C.Row:
    """A row of a gradient, a parameter, its states and, where it has one, its master."""
    grad, param, *states = arrays
    master = states.pop() if has_master else None
    return group, param, grad, master, step, first, tuple(states)


def arrays_of(row: _C.Row) -> list[Tensor]:
    """The arrays that :func:`row_of` made it of."""
    _, param, grad, master, _, _, states = row
    return [t for t in (grad, param, *states, master) if t is not None]


def in_runs(row: _C.Row, writes_grad: bool, copies: list[tuple[Tensor, Tensor]]) -> _C.Row:
    """The row as the core takes it: itself, or of copies, noted in `copies` where they are written."""
    arrays = arrays_of(row)
    if in_one_order(arrays) is not None:
        return row
    runs = [t.resolve_neg().contiguous() for t in arrays]
    written = zip(arrays, runs, strict=True) if writes_grad else zip(arrays[1:], runs[1:], strict=True)
    copies += [(to, run) for to, run in written if to is not run]
    group, _, _, master, step, first, _ = row
    return row_of(runs, group, master is not None, step, first)


class FusedOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose step is one call of the core.

    A subclass names its rule, checks its numbers, and says what state a parameter has.
    """

    rule: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]  # what torch's groups say of how a step is computed, and it is so here
    known: ClassVar[tuple[str, ...]]  # numbers without which a saved group is of another optimizer
    counts: ClassVar[bool] = True  # whether its state has a step
    whole: ClassVar[bool] = False  # whether it must see all of a parameter
    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves dividing by the scale to the step

    def __init__(self, params: Any, defaults: Group, max_grad_norm: float | None, set_grad_none: bool) -> None:
        if max_grad_norm is not None and max_grad_norm != math.inf:
            check_number("max_grad_norm", max_grad_norm, 0.0)
            if max_grad_norm == 0:
                raise ValueError(f"Invalid max_grad_norm: {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self.set_grad_none = set_grad_none
        self._norm: Tensor | None = None
        super().__init__(params, defaults)

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients at the last step that took it; a GPU is waited for.

        Not finite where such gradients had the GPU leave the step out.
        """
        return None if self._norm is None else self._norm.item()

    # ---- for subclasses ----

    def _numbers(self, group: Group) -> dict[str, float]:
        """Of the group but for lr, by the names of csrc/optim/numbers.def."""
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

    def _starts(self) -> bool:
        """Whether a state gets its first values in this step, so that it must be known that there is one."""
        return False

    def _widens(self, group: Group) -> bool:
        """Whether the states of parameters of 16 bits are kept in 32."""
        return bool(group["master_weights"] or group["stochastic_rounding"])

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
        own = {name: getattr(self, name) for name in ("max_grad_norm", "set_grad_none", "_norm")}
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
                    step = torch.as_tensor(of_p["step"], dtype=torch.float32, device=p.device)
                    of_p["step"] = step.reshape(()).clone()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the class of ``torch.optim`` that it stands for.

        What such a state does not know, as `master_weights`, stays as it is. States of parameters of 16 bits keep
        the dtype that they were saved in.

        Raises
        ------
        ValueError
            Its groups do not fit, or lack the numbers of this class, as those of another optimizer do; nothing has
            changed then.
        """
        given: dict[str, Any] = {}

        def look(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            for i, theirs in enumerate(loaded["param_groups"]):
                lacking = [name for name in self.known if name not in theirs]
                if lacking:
                    raise ValueError(
                        f"group {i} of the state is not one of {type(self).__name__}: it lacks {', '.join(lacking)}"
                    )
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
            A gradient is sparse, or a CUDA graph is being captured.
        ValueError
            A parameter is complex, or on a device without kernels, or a norm is to be taken over several devices.
        """
        refuse_capture(type(self).__name__)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    # ---- the step ----

    def _rows_on(self, by_device: dict[torch.device, Rows], index: int, number: int, p: Tensor) -> Rows:
        """Rows of the parameter's device; raises where the parameter is not for these kernels."""
        name, what = type(self).__name__, f"parameter {number} of group {index}, of shape {tuple(p.shape)}, is"
        if p.is_complex():
            raise ValueError(f"{name} updates real parameters; {what} complex")
        if is_sharded(p) and (self.whole or self.max_grad_norm is not None):
            taker = name if self.whole else f"max_grad_norm of {name}"
            raise ValueError(f"{taker} takes norms of what is in this process alone; {what} sharded")
        if p.device in by_device:
            return by_device[p.device]
        refusal = device_refusal([p])
        if refusal:
            raise ValueError(f"{name} updates parameters where there are kernels; {what} on {p.device}: {refusal}")
        if by_device and self.max_grad_norm is not None:
            others = " and ".join(map(str, by_device))
            raise ValueError(
                f"max_grad_norm of {name} takes the norm on one device; {what} on {p.device}, not {others}"
            )
        return by_device.setdefault(p.device, Rows())

    def _refuse_sparse(self) -> None:
        raise RuntimeError(f"`{type(self).__name__}` does not support sparse gradients")

    @torch._disable_dynamo
    def _update(self) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and (found_inf.device.type == HOST or self._starts()):
            if found_inf.item() != 0:
                return
            found_inf = None
        by_device: dict[torch.device, Rows] = {}
        try:
            if not self._gather(by_device, scale is not None):
                self._prepare(by_device, scale is not None)
            for device, rows in by_device.items():
                self._take(device, rows, scale, found_inf)
        except BaseException:
            for rows in by_device.values():
                rows.undo()
            raise

    def _gather(self, by_device: dict[torch.device, Rows], writes_grad: bool) -> bool:
        """Whether there was nothing to prepare: all are on one device, and lie there as the core takes them."""
        groups = self.param_groups
        numbered = ((i, n, p) for i, g in enumerate(groups) for n, p in enumerate(g["params"]) if p.grad is not None)
        first = next(numbered, None)
        if first is None:
            return True
        asked = [(g["params"], self._states(g), self._widens(g), bool(g["master_weights"])) for g in groups]
        found = _C.optim_rows(self.state, asked, self.counts, writes_grad, provider_of(first[2].device))
        if found is None:
            return False
        rows = self._rows_on(by_device, *first)
        rows.rows, rows.changed = found
        rounds = [bool(group["stochastic_rounding"]) for group in groups]
        rows.rounds = any(rounds) and any(rounds[row[0]] and row[2].dtype in HALVES for row in rows.rows)
        return True

    def _prepare(self, by_device: dict[torch.device, Rows], writes_grad: bool) -> None:
        """Makes the states that there are not yet, and rows of tensors that may lie in any way."""
        for index, group in enumerate(self.param_groups):
            names, rounds = self._states(group), bool(group["stochastic_rounding"])
            for number, p in enumerate(group["params"]):
                grad = p.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided:
                    self._refuse_sparse()
                rows = self._rows_on(by_device, index, number, p)
                states, master, first = self._state_of(p, group, names, rows.made)
                step = self.state[p]["step"] if self.counts else None
                rows.add(index, p, grad, states, master, step, first, writes_grad)
                rows.rounds |= rounds and p.dtype in HALVES

    def _take(self, device: torch.device, rows: Rows, scale: Any, found_inf: Tensor | None) -> None:
        """One step of what is on a device, in the stream that PyTorch works in there."""
        provider, max_norm = provider_of(device), self.max_grad_norm
        norm = None if max_norm is None else torch.empty((), dtype=torch.float64, device=device)
        groups = [{**self._numbers(group), "lr": lr_on(group["lr"], device)} for group in self.param_groups]
        grad_scale = None if scale is None else number_on(scale, device)
        found_inf = None if found_inf is None else number_on(found_inf, device)
        written = norm
        if max_norm is not None and len(rows.parts()) > 1:
            rows.clip(grad_scale, max_norm, norm, provider)
            grad_scale = max_norm = written = None
        for part in rows.taken(writes_grad=grad_scale is not None):
            _C.optim_step(
                self.rule,
                part,
                groups,
                grad_scale=grad_scale,
                found_inf=found_inf,
                max_norm=max_norm,
                norm=written,
                seed=int(torch.randint(2**63 - 1, (), dtype=torch.int64)) if rows.rounds else 0,
                provider=provider,
            )
        self._norm = norm
        rows.finish()

    def _state_of(
        self, p: Tensor, group: Group, names: tuple[str, ...], made: dict[tuple[Tensor, str], dict[str, Any]]
    ) -> tuple[list[Tensor], Tensor | None, bool]:
        """States and master of a parameter, and whether a state was made in this step, which `made` is told."""
        wide = p.dtype in HALVES and self._widens(group)
        state = self.state[p] if names or self.counts or wide else {}
        dtype = torch.float32 if wide else p.dtype
        if self.counts and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        for name in names:
            now = state.get(name)
            if now is None:
                state[name] = self._new_state(p, dtype)
                made[p, name] = state
            elif now.dtype is not dtype:
                state[name] = now.to(dtype)
        first = any((p, name) in made for name in names)
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
