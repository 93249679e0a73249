"""Reads of instances while a module is traced, which a lookup sees that is put into their classes."""

import collections
import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import NotRunnable
from ..stack import is_users
from .anatomy import Seen, dict_of, functions_of
from .frames import Frames
from .held import MISSING, Opened
from .looks import picked
from .namespaces import Namespaces

_ALL_AT_ONCE = frozenset({"__dict__", "__dir__", "__getstate__", "__reduce__", "__reduce_ex__"})
_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})  # of recurrent layers, made of what is a parameter
_OF_A_VARIABLE = type(os.environ).__getitem__.__code__
BASES = (dict, collections.OrderedDict, tuple)  # of C, of what is followed
_GENERIC = [base.__getattribute__ for base in (object, *BASES, str, int, float)]  # lookups of C that are no other


class Instances(Namespaces):
    """What is read of objects.

    Parameters
    ----------
    module
        The module.
    """

    frames: Frames  # which code runs

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._watched: dict[Any, Any] = {}
        self._answering: dict[Any, Any] = {}  # classes with a lookup of the user's, which is in their own dictionary
        self._whole_ones: list[Seen] = []  # whose classes have lookups of others
        self._asking: list[types.FrameType | None] = []  # until a lookup tells for what name
        self._of_classes: set[tuple[Any, str]] = set()

    def _put_back(self) -> None:
        """Give the classes their own lookups again."""
        for cls, own in [*dict.fromkeys(self._watched, MISSING).items(), *self._answering.items()]:
            if own is MISSING:
                type.__delattr__(cls, "__getattribute__")
            else:
                type.__setattr__(cls, "__getattribute__", own)
        self._watched.clear()
        self._answering.clear()

    def _lookup(self, cls: Any) -> Callable[[Any, str], Any]:
        seen, note, asking, thread = self._seen, self._note, self._asking, threading.get_ident()

        def read(owner: Any, name: str) -> Any:
            if threading.get_ident() != thread:
                return super(cls, owner).__getattribute__(name)
            of = seen.get(id(owner))
            if asking and asking[-1] is sys._getframe(1):
                asking[-1] = None
                if of is None:  # made meanwhile
                    self._of_class(type(owner), name)
            if of is not None and (name not in of.names or name in _ALL_AT_ONCE):
                note(of, name, name in _ALL_AT_ONCE and is_users(sys._getframe(1)))
            value = super(cls, owner).__getattribute__(name)
            return _read(value, owner, name) if isinstance(value, Opened) else value

        return read

    def _note(self, seen: Seen, name: str, users: bool) -> None:
        if name == "_data" and sys._getframe(2).f_code is _OF_A_VARIABLE:
            self._variable(seen.before[name], seen.before["encodekey"](sys._getframe(2).f_locals["key"]))
            return
        if name in _OF_PARAMETERS and isinstance(seen.owner, nn.RNNBase):  # others, meanwhile; compared by the scan
            if is_users(sys._getframe(2)):
                self.refuse(f"the forward itself looks at {name} of {seen.title}", NotRunnable)
            return
        seen.names.add(name)
        if name in _ALL_AT_ONCE:
            if users:
                seen.need_opened()
                self._whole(seen)
            return
        what = f"attribute {name} of {seen.title}"
        value = seen.before.get(name)
        if isinstance(value, Opened) and value.is_open(seen.state, name):
            pass  # the lookup gives what stands for it
        elif name in seen.before:
            self._hold(seen.state, name, seen.before[name], what, True)
        elif name in seen.slots:
            self._hold(seen.owner, name, seen.slots[name], what, True)
        self._of_class(type(seen.owner), name)

    def _variable(self, environment: dict[Any, Any], name: Any) -> None:
        value = environment.get(name, MISSING)
        self._hold(environment, name, value, f"environment variable {os.fsdecode(name)}")

    def _whole(self, seen: Seen) -> None:
        if seen.state is not None:
            self._hold_content(seen.state, tuple, f"order of attributes of {seen.title}")
        for name in [*seen.before, *seen.slots]:
            if name not in seen.names:
                self._note(seen, name, False)

    def _of_class(self, cls: Any, name: str) -> None:
        if (cls, name) in self._of_classes:
            return
        self._of_classes.add((cls, name))
        for c in cls.__mro__:
            if c in self._classes and name in vars(c):
                if c is not nn.Module:  # whose own are held anyway, as they were before the trace exchanged some
                    self._hold(dict_of(c), name, vars(c)[name], f"attribute {name} of class {c.__name__}")
                return

    def _object(self, value: Any, title: str) -> Seen:
        known = self._seen.get(id(value))
        if known is not None:
            return known
        seen = self._seen[id(value)] = Seen(value, title)
        if id(value) not in self._own:
            self._undo.object(seen)
        cls = type(value)
        self._class(cls)
        if not self._put_lookup(cls):
            self._whole(seen)
            self._whole_class(cls)
            seen.answers = set() if self._put_answers(cls) and not seen.slots else None
            self._whole_ones.append(seen)
        return seen

    def _put_lookup(self, cls: Any) -> bool:
        """Whether what is read of instances of a class will be seen."""
        lookups = {c: vars(c)["__getattribute__"] for c in cls.__mro__ if "__getattribute__" in vars(c)}
        if next(iter(lookups)) in self._watched:
            return all(c in self._watched or lookup in _GENERIC for c, lookup in lookups.items())
        if cls.__getattribute__ not in _GENERIC:
            return False
        try:
            type.__setattr__(cls, "__getattribute__", self._lookup(cls))
        except TypeError:  # a class of C
            return False
        self._watched[cls] = None
        return True

    def _put_answers(self, cls: Any) -> bool:
        """Whether it will be seen what a lookup of the user's is asked for, and answers.

        What it reads for that is not: objects of such a class, and the class, are held whole, but for names that were
        not looked up.
        """
        if cls in self._answering:
            return True
        own = vars(cls).get("__getattribute__", MISSING)
        read = self._answer(cls.__getattribute__)
        for function in [f for f in functions_of(cls.__getattribute__) if f.__code__ is not read.__code__]:
            self.frames.follow(function.__code__, functools.partial(self._check_asker, read.__code__))
        try:
            type.__setattr__(cls, "__getattribute__", read)
        except TypeError:  # a class of C
            return False
        self._answering[cls] = own
        return True

    def check_opened(self) -> None:
        """Raise if a number for which something stands may have been read past a lookup that gives that."""
        for seen in self._whole_ones:
            if not self.sees_answers or self._looked_up(seen) is None:
                seen.need_opened()

    def _check_asker(self, read: types.CodeType, frame: types.FrameType) -> None:
        """See a lookup that is called by other means than looking something up."""
        asker = frame.f_back
        if asker is None or not (asker.f_code is read or picked(asker.f_code)):
            self.sees_answers = False

    def _answer(self, users: Callable[[Any, str], Any]) -> types.FunctionType:
        seen, asking, thread = self._seen, self._asking, threading.get_ident()

        def read(owner: Any, name: str) -> Any:
            if threading.get_ident() != thread:
                return users(owner, name)
            of = seen.get(id(owner))
            if asking and asking[-1] is sys._getframe(1):
                asking[-1] = None
                if of is None:  # made meanwhile
                    self._whole_class(type(owner))
            if of is not None and of.answers is not None:
                of.answers.add(name)
                if type(name) is not str or name in _ALL_AT_ONCE:
                    of.answers = None
            value = users(owner, name)
            return _read(value, owner, name) if isinstance(value, Opened) else value

        return read  # type: ignore[return-value]


def _read(value: Any, owner: Any, name: str) -> Any:
    """What a lookup of the thread that traces gives of such a number."""
    return value.symbol if value.is_open(object.__getattribute__(owner, "__dict__"), name) else +value
