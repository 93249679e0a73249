"""PyTorch's own samples of its operators and modules, each as a small module and the tensors to call it with."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16)
}
# That the core holds as others: they are run where they are asked for.
CARRIED = {str(d).removeprefix("torch."): d for d in (torch.complex64, torch.uint16, torch.uint32, torch.uint64)}
ERRORS = "errors"  # in the place of a dtype: samples that PyTorch refuses

_ALL = DTYPES | CARRIED
# Their results are whatever the memory held.
_UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, order=True)
class Group:
    """The samples of one operator or module in one dtype.

    Attributes
    ----------
    name
        ``nn.functional.pad.constant``: an operator and its variant; ``add (in place)``: its method that writes over
        its operand; ``nn.Linear (module)``: a module.
    dtype
        A key of `DTYPES` or `CARRIED`, or `ERRORS`.
    """

    name: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}"


class Sample(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


@dataclass
class Case:
    """One sample.

    Attributes
    ----------
    make
        Makes the module, always the same one.
    tensors
        The arguments, never changed: each run has `copies` of its own.
    text
        The call in words.
    shape
        What is particular about the call, values apart: samples alike in it are likely to fare alike.
    defined
        Whether the results are determined by the arguments and the seed.
    """

    make: Callable[[], nn.Module]
    tensors: list[Tensor]
    text: str
    shape: Any = None
    defined: bool = True


def groups(pattern: str = "", dtypes: Sequence[str] = (*DTYPES, ERRORS)) -> list[Group]:
    """All groups whose name contains the pattern and that are of these dtypes."""
    found = []
    for name in [*_OPS, *_IN_PLACE, *_MODULES]:
        if re.search(pattern, name):
            found += [Group(name, d) for d in dtypes if _has(name, d)]
    return found


def cases(group: Group) -> Iterator[Case]:
    """The samples of a group, always the same ones."""
    torch.manual_seed(0)
    if group.name in _MODULES:
        info, errors = _MODULES[group.name], group.dtype == ERRORS
        dtype = torch.float32 if errors else _ALL[group.dtype]
        make = info.module_error_inputs_func if errors else info.module_inputs_func
        for training in (True, False) if info.train_and_eval_differ else (True,):
            for sample in make(info, device="cpu", dtype=dtype, requires_grad=True, training=training):
                if not errors:
                    yield _module_case(info, sample, dtype, training)
                elif sample.error_on is ModuleErrorEnum.FORWARD_ERROR:
                    yield _module_case(info, sample.module_error_input, dtype, training)
        return
    op = _OPS.get(group.name) or _IN_PLACE[group.name]
    function = op.op if group.name in _OPS else _in_place(op)
    if group.dtype == ERRORS:
        for error in op.error_inputs("cpu"):
            yield _case(op, function, error.sample_input)
    else:
        dtype = _ALL[group.dtype]
        for sample in op.sample_inputs("cpu", dtype, requires_grad=dtype in op.supported_backward_dtypes("cpu")):
            yield _case(op, function, sample)


def chosen(all_cases: Sequence[Case], most: int) -> list[int]:
    """At most `most` of the samples: the first, the last, and between them one of each kind, spread evenly."""
    if len(all_cases) <= most:
        return list(range(len(all_cases)))
    kinds: dict[str, int] = {}
    for i, case in enumerate(all_cases):
        kinds.setdefault(repr(case.shape), i)
    rest = sorted(set(kinds.values()) - {0, len(all_cases) - 1})
    rest += sorted(set(range(1, len(all_cases) - 1)) - set(rest)) if len(rest) < most - 2 else []
    n = most - 2
    picked = rest[:n] if len(rest) < 2 * n else [rest[k * len(rest) // n] for k in range(n)]
    return sorted({0, *picked, len(all_cases) - 1})


def copies(tensors: Sequence[Tensor], convert: Callable[[Tensor], Tensor] = lambda t: t) -> list[Tensor]:
    """Tensors of the same values, strides and overlaps, those that require grad as leaves.

    A tensor that is given twice stays one, and views of one memory stay so.
    """
    storages: dict[int, Any] = {}
    made: dict[int, Tensor] = {}
    for t in tensors:
        if id(t) in made:
            continue
        plain = t.layout is torch.strided and not t.is_nested and type(t) in (Tensor, nn.Parameter)
        if plain and not (t.is_neg() or t.is_conj() or t.is_quantized or t.is_meta):
            key = t.untyped_storage()._cdata
            if key not in storages:
                storages[key] = t.untyped_storage().clone()
            own = torch.empty(0, dtype=t.dtype).set_(storages[key], t.storage_offset(), t.shape, t.stride())
        else:
            own = t.detach().clone()
        made[id(t)] = convert(own).requires_grad_(t.requires_grad)
    return [made[id(t)] for t in tensors]


# Operators


def _in_place(op: OpInfo) -> Callable[..., Any]:
    """The operator's method that writes over its operand; over a copy of it if that is a leaf that requires grad."""

    method = op.inplace_variant

    def function(operand: Any, *args: Any, **kwargs: Any) -> Any:
        written = operand.clone() if operand.requires_grad else operand
        result = method(written, *args, **kwargs)
        return result, written

    return function


def _case(op: OpInfo, called: Callable[..., Any], sample: Any) -> Case:
    leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> Any:
        now = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            now[i] = t
        first, args, kwargs = pytree.tree_unflatten(now, spec)
        return called(first, *args, **kwargs)

    words = pytree.tree_unflatten([_Word(v) for v in leaves], spec)
    arguments = [repr(words[0]), *map(repr, words[1]), *(f"{k}={v!r}" for k, v in words[2].items())]
    kinds = [
        (v.dim(), 0 in v.shape, v.is_contiguous() if v.layout is torch.strided else v.layout)
        if isinstance(v, Tensor)
        else type(v).__name__
        for v in leaves
    ]
    return Case(
        lambda: Sample(function),
        [leaves[i] for i in where],
        f"{op.full_name}({', '.join(arguments)})",
        (str(spec), kinds),
        op.name not in _UNINITIALISED,
    )


class _Word:
    """Prints a tensor as dtype and shape."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        v = self.value
        if not isinstance(v, Tensor):
            return repr(v)
        dense = v.layout is torch.strided
        notes = ["grad"] * v.requires_grad
        if dense and v.numel() > 0 and not v.is_contiguous():
            notes.append(f"strides {v.stride()}")
        if not dense:
            notes.append(str(v.layout))
        if dense and v.numel() == 1 and not v.is_meta and not v.requires_grad:
            notes.append(str(v.item()))
        return f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" + (f" <{', '.join(notes)}>" if notes else "")


# Modules


def _module_case(info: Any, sample: Any, dtype: torch.dtype, training: bool) -> Case:
    made = sample.constructor_input
    leaves, spec = pytree.tree_flatten((tuple(sample.forward_input.args), dict(sample.forward_input.kwargs)))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def make() -> nn.Module:
        torch.manual_seed(0)
        module = info.module_cls(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs)).to(dtype).train(training)
        return _Called(module, leaves, where, spec)

    words = pytree.tree_unflatten([_Word(v) for v in leaves], spec)
    text = ", ".join([*map(repr, words[0]), *(f"{k}={v!r}" for k, v in words[1].items())])
    options = ", ".join([*map(_brief, made.args), *(f"{k}={_brief(v)}" for k, v in made.kwargs.items())])
    kinds = (sorted(made.kwargs), [v.dim() if isinstance(v, Tensor) else repr(v) for v in leaves], training)
    return Case(
        make,
        [leaves[i] for i in where],
        f"nn.{info.module_cls.__name__}({options}).train({training})({text})",
        (str(spec), kinds),
    )


def _brief(value: Any) -> str:
    return repr(pytree.tree_map(_Word, value))


class _Called(nn.Module):
    """A module called with plain arguments in the places between the tensors."""

    def __init__(self, module: nn.Module, leaves: list[Any], where: list[int], spec: Any) -> None:
        super().__init__()
        self.module = module
        self.call = lambda: (leaves, where, spec)

    def forward(self, *tensors: Tensor) -> Any:
        leaves, where, spec = self.call()
        now = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            now[i] = t
        args, kwargs = pytree.tree_unflatten(now, spec)
        return self.module(*args, **kwargs)


def _has(name: str, dtype: str) -> bool:
    if name in _MODULES:
        info = _MODULES[name]
        errors, dtypes = info.module_error_inputs_func, info.supported_dtypes("cpu")
    else:
        op = _OPS.get(name) or _IN_PLACE[name]
        errors, dtypes = op.error_inputs_func if name in _OPS else None, op.supported_dtypes("cpu")
    return errors is not None if dtype == ERRORS else _ALL[dtype] in dtypes


# Their random operators set the seed inside of the call, which is no part of what is to be computed.
def _called(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


common_methods_invocations.wrapper_set_seed = _called

_OPS = {op.full_name: op for op in op_db}
_IN_PLACE = {f"{op.full_name} (in place)": op for op in op_db if op.inplace_variant is not None}
_MODULES = {f"{info.name} (module)": info for info in module_db}
