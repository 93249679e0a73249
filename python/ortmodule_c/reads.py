"""Which attributes of its objects a forward reads: the others need no guard."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .stack import is_users

_ALL_AT_ONCE = frozenset({"__dict__", "__dir__", "__getstate__", "__reduce__", "__reduce_ex__"})


class Reads:
    """What is read of `objects` while they are watched."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = objects
        self._names: set[tuple[int, str]] = set()
        self._whole: set[int] = set()

    def has(self, owner: Any, name: str) -> bool:
        """Whether this attribute may have been read."""
        return (id(owner), name) in self._names or id(owner) in self._whole

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Sees reads through Python's own lookup; of classes with another lookup all counts as read.

        PyTorch itself looks into the dictionary of a module for parameters, buffers and submodules
        only, which are not attributes in this sense.
        """
        names, whole = self._names, self._whole

        def read(owner: Any, name: str) -> Any:
            names.add((id(owner), name))
            if name in _ALL_AT_ONCE and is_users(sys._getframe(1)):
                whole.add(id(owner))
            return object.__getattribute__(owner, name)

        classes = {type(o) for o in self.objects}
        plain: list[Any] = [c for c in classes if c.__getattribute__ is object.__getattribute__]
        watched: list[Any] = []
        try:
            for c in plain:
                with contextlib.suppress(TypeError):  # a class of C cannot be changed
                    c.__getattribute__ = read
                    watched.append(c)
            whole.update(id(o) for o in self.objects if type(o) not in watched)
            yield
        finally:
            for c in watched:
                del c.__getattribute__
