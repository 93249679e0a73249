"""What a graph assumed of the module and of the moment, compared at every call.

:func:`survey` walks the module once per call and gives its tensors and a hashable key. What is too
varied for a key (plain attributes of submodules and of their configuration objects) is held by
:class:`Attributes` and compared with what is there now.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_DEVICE_TYPES = ("cpu", "cuda")
_DEPTH = 2  # attributes of attributes: a module's config, and what that nests


@dataclass(slots=True)
class Survey:
    """A module's tensors, each once and in order, and the flags of every submodule."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    key: tuple[Hashable, ...]
    hooked: str


def survey(module: nn.Module) -> Survey:
    """Walk the module; tied tensors appear once, and the key tells which names share one."""
    tensors: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
    places: dict[int, int] = {}
    key: list[Any] = []
    seen: set[int] = set()
    hooked = ""
    pending = [module]
    while pending:
        m = pending.pop()
        m = m.__dict__.get("_ort_module", m)  # a wrapped module inside this one
        if id(m) in seen:
            continue
        seen.add(id(m))
        state = m.__dict__
        key.append(type(m))
        key.append(state["training"])
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
        ):
            hooked = type(m).__name__
        for found, named in zip(tensors, (state["_parameters"], state["_buffers"]), strict=True):
            for name, t in named.items():
                key.append(name)
                if t is None:
                    continue
                place = places.setdefault(id(t), len(places))
                key.append((place, t.shape, t.dtype, t.device, t.requires_grad))
                found[id(t)] = t
        children = state["_modules"]
        key.append(tuple(children))
        pending.extend([c for c in reversed(children.values()) if c is not None])
    return Survey(list(tensors[0].values()), list(tensors[1].values()), tuple(key), hooked)


def ambient() -> tuple[Hashable, ...]:
    """State of PyTorch outside the module that changes what a module computes."""
    return (
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *[(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICE_TYPES],
    )


def tensor_key(tensors: list[Tensor]) -> tuple[Hashable, ...]:
    """What a graph assumes of the user's tensors, but for their sizes."""
    return tuple([(t.dtype, t.dim(), t.device, t.requires_grad) for t in tensors])


def snapshot_modules(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """A shallow copy of every submodule's state, for :func:`restore_modules`."""
    kept = []
    for m in module.modules():
        state = dict(m.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            state[name] = dict(state[name])
        kept.append((m, state))
    return kept


def restore_modules(kept: list[tuple[nn.Module, dict[str, Any]]]) -> set[tuple[int, str]]:
    """Put back what a trace changed; returns (id of module, attribute name) of each plain change."""
    changed = set()
    for m, state in kept:
        now = m.__dict__
        for name in ("_parameters", "_buffers", "_modules"):
            registry = now[name]
            if any(registry.get(k) is not v for k, v in state[name].items()) or len(registry) != len(state[name]):
                registry.clear()
                registry.update(state[name])
            state[name] = registry
        for name in [n for n in now if n not in state]:
            changed.add((id(m), name))
            del now[name]
        for name, value in state.items():
            if now.get(name) is not value:
                changed.add((id(m), name))
                now[name] = value
    return changed


class Attributes:
    """Plain attribute values of submodules and of the configuration objects they hold.

    Parameters
    ----------
    module
        The module that was captured.
    ignore
        (id of module, attribute name) pairs that the forward itself changes.
    """

    def __init__(self, module: nn.Module, ignore: set[tuple[int, str]]) -> None:
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._nested: list[tuple[dict[str, Any], str, Any]] = []
        seen: set[int] = set()
        for m in module.modules():
            names = [n for n in m.__dict__ if n[0] != "_" and (id(m), n) not in ignore]
            self._add(m.__dict__, names, seen, 0)

    def _add(self, state: dict[str, Any], names: list[str], seen: set[int], depth: int) -> None:
        for name in names:
            value = state[name]
            if isinstance(value, _PLAIN):
                self._plain.append((state, name, value))
            elif isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
                self._nested.append((state, name, value[:]))
            elif isinstance(value, dict) and all(isinstance(v, _PLAIN) for v in value.values()):
                self._nested.append((state, name, dict(value)))
            elif depth < _DEPTH and id(value) not in seen and not isinstance(value, (nn.Module, Tensor, type)):
                inner = getattr(value, "__dict__", None)
                if isinstance(inner, dict) and not callable(value):
                    seen.add(id(value))
                    self._add(inner, [n for n in inner if isinstance(n, str)], seen, depth + 1)

    def hold(self) -> bool:
        """Whether everything still has the value it had."""
        missing = self
        for state, name, value in self._plain:
            now = state.get(name, missing)
            if now is not value and (now != value or type(now) is not type(value)):
                return False
        return all(state.get(name, missing) == value for state, name, value in self._nested)
