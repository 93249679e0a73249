"""What of modules is the tracing thread's own, and what other threads do to them meanwhile."""

import contextlib
import threading
import weakref
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

REGISTRIES = ("_parameters", "_buffers")


class _Registry(UserDict[str, Any], dict[str, Any]):  # type: ignore[misc]
    """Two dictionaries in the place of one: the thread that makes it has one of its own. A copy is a plain one."""

    def __init__(self, everyones: dict[str, Any], own: dict[str, Any]) -> None:
        self._everyones, self._own = everyones, own
        self._thread = threading.get_ident()
        dict.update(self, everyones)  # which code of C sees

    def end(self) -> None:
        """Let all see the same: a copy of what had it may still have it."""
        self._own = self._everyones

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        return self._own if threading.get_ident() == self._thread else self._everyones

    def copy(self) -> Any:
        return self.data.copy()

    __copy__ = copy

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (self.data.copy(),)


@contextlib.contextmanager
def in_place_of(module: nn.Module, *of_registries: tuple[Sequence[Tensor], Sequence[Tensor]]) -> Iterator[None]:
    """Within it this thread sees others in the place of tensors of a module, wherever it has them.

    Parameters
    ----------
    of_registries
        The parameters and what is in their place, and the same of buffers.
    """
    exchanged: list[tuple[dict[str, Any], str, Any, Any]] = []
    made: dict[int, _Registry] = {}  # of modules that have one in common, too
    for registry, (there, instead) in zip(REGISTRIES, of_registries, strict=True):
        by_id = {id(t): new for t, new in zip(there, instead, strict=True)}
        for m in module.modules():
            before = m.__dict__[registry]
            own = {name: by_id.get(id(t), t) for name, t in before.items()}
            exchanged.append((m.__dict__, registry, before, made.setdefault(id(before), _Registry(before, own))))
            if registry == "_parameters" and isinstance(m, nn.RNNBase):
                exchanged += [(m.__dict__, *lists) for lists in _lists_of(m, by_id)]
    try:
        for state, registry, _, private in exchanged:
            state[registry] = private
        yield
    finally:
        for state, registry, before, _ in exchanged:
            state[registry] = before
        for private in made.values():
            private.end()


def _lists_of(layer: nn.RNNBase, by_id: dict[int, Tensor]) -> Iterator[tuple[str, Any, Any]]:
    """The lists in which a recurrent layer has its parameters too: name, before, and with others in their place."""
    if (weights := layer.__dict__.get("_flat_weights")) is not None:
        yield "_flat_weights", weights, [by_id.get(id(t), t) for t in weights]
    if (refs := layer.__dict__.get("_flat_weight_refs")) is not None:
        yield "_flat_weight_refs", refs, [weakref.ref(by_id[id(r())]) if r and id(r()) in by_id else r for r in refs]


@contextlib.contextmanager
def set_elsewhere() -> Iterator[set[tuple[int, str]]]:
    """Notes the attributes of modules that other threads set meanwhile: a module's id, and the name."""
    plain, thread = nn.Module.__setattr__, threading.get_ident()
    found: set[tuple[int, str]] = set()

    def write(module: nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() != thread:
            found.add((id(module), name))
        plain(module, name, value)

    nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]
