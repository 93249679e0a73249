"""What of Python's state was met while a module is traced: has it changed since, and putting it back."""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType
from typing import Any

from ..errors import NotExportable, NotRunnable
from .anatomy import Seen, dict_of, of_cell, slots
from .held import MISSING


@dataclass(frozen=True)
class _Entry:
    what: str
    is_same: Callable[[], bool]
    put: Callable[[], None] | None  # nothing for what was met in the middle of a change, perhaps
    kind: type[NotExportable] | None  # nothing for what is no change by itself


class Undo:
    """Remembers things as they are when they are first met.

    Attributes
    ----------
    midst
        Whether a library runs that may just be changing what is met: such a thing is compared but never put back.
    """

    def __init__(self) -> None:
        self.midst = False
        self._entries: list[_Entry] = []
        self._classes: dict[int, Any] = {}

    def changed(self) -> tuple[str, type[NotExportable]] | None:
        """What is not as it was, and what that is a reason for; what nobody else sees comes first."""
        found = [(e.what, e.kind) for e in self._entries if e.kind is not None and not e.is_same()]
        return min(found, key=lambda f: f[1] is not NotRunnable, default=None)

    def restore(self) -> None:
        """Put back what was changed; what was met first counts."""
        for entry in reversed(self._entries):
            if entry.put is not None and not entry.is_same():
                entry.put()

    def container(self, value: Any, what: str) -> None:
        """Remember what is in a list, dict or set."""
        before = dict(_kind(value).items(value)) if isinstance(value, dict) else value.copy()
        self._add(what, lambda: _same_content(value, before), lambda: _refill(value, before))

    def object(self, seen: Seen) -> None:
        """Remember the attributes of an object; setting one that is no slot is no change by itself."""
        before, in_slots = seen.before, seen.slots

        def put() -> None:
            seen.now.clear()
            seen.now.update(before)

        def put_slots() -> None:
            for name, value in slots(seen.owner).items():
                if in_slots[name] is MISSING and value is not MISSING:
                    object.__delattr__(seen.owner, name)
                elif value is not in_slots[name]:
                    object.__setattr__(seen.owner, name, in_slots[name])

        self._add(seen.title, lambda: same_items(seen.now, before), put, None)
        if in_slots:
            self._add(f"an attribute of {seen.title}", lambda: same_items(slots(seen.owner), in_slots), put_slots)

    def of_class(self, cls: Any) -> None:
        """What is in a class is put back by its own setter."""
        self._classes[id(dict_of(cls))] = cls

    def namespace(self, state: dict[str, Any], title: str) -> None:
        """Remember what is in a class or function, which TorchDynamo does not see where it is absent."""
        before = dict(state)

        def changes() -> list[str]:
            names = [n for n in {**state, **before} if not n.startswith("__")]  # such as lookups
            return [n for n in names if state.get(n, MISSING) is not before.get(n, MISSING)]

        def put() -> None:
            for name in changes():
                self._put(state, name, before.get(name, MISSING))

        self._add(f"an attribute of {title}", lambda: not changes(), put, NotRunnable)

    def item(self, holder: Any, key: Any, value: Any, what: str) -> None:
        """Remember what lies at a place in a dictionary, or in a cell."""
        if isinstance(holder, CellType):

            def put() -> None:
                if value is MISSING:
                    del holder.cell_contents
                else:
                    holder.cell_contents = value

            self._add(what, lambda: of_cell(holder) is value, put)
        elif type(holder) is dict:
            self._add(what, lambda: holder.get(key, MISSING) is value, lambda: self._put(holder, key, value))

    def state(self, what: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        """Remember a state of random numbers."""
        before = get()
        self._add(what, lambda: pickle.dumps(get()) == pickle.dumps(before), lambda: put(before))

    def _add(
        self,
        what: str,
        is_same: Callable[[], bool],
        put: Callable[[], None],
        kind: type[NotExportable] | None = NotExportable,
    ) -> None:
        self._entries.append(_Entry(what, is_same, None if self.midst else put, kind))

    def _put(self, state: dict[str, Any], name: Any, value: Any) -> None:
        owner = self._classes.get(id(state))
        if owner is not None:
            type.__delattr__(owner, name) if value is MISSING else type.__setattr__(owner, name, value)
        elif value is MISSING:
            state.pop(name, None)
        else:
            state[name] = value


def same_items(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(n in now and now[n] is v for n, v in before.items())


def _same_content(now: Any, before: Any) -> bool:
    """Whether the same things are in the same order."""
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, dict) and not (
        len(now) == len(before) and all(dict.get(now, k, MISSING) is v for k, v in before.items())
    ):
        return False
    places = (_kind(now).__iter__(now), iter(before))
    return len(now) == len(before) and all(x is y for x, y in zip(*places, strict=True))


def _refill(value: Any, content: Any) -> None:
    kind = _kind(value)
    kind.clear(value)
    (kind.extend if kind is list else kind.update)(value, content)


def _kind(value: Any) -> Any:
    """The class whose methods see what is in a container, whatever its own may do."""
    return next(k for k in (OrderedDict, dict, set, list) if isinstance(value, k))


class Nothing(Undo):
    """Remembers nothing, for who puts nothing back."""

    def object(self, seen: Any) -> None: ...

    def of_class(self, cls: Any) -> None: ...

    def namespace(self, state: dict[str, Any], title: str) -> None: ...

    def container(self, value: Any, what: str) -> None: ...

    def item(self, holder: Any, key: Any, value: Any, what: str) -> None: ...
