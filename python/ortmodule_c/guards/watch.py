"""What a forward reads of Python while it is traced: held by value or identity, or refused by name.

A graph knows tensors only. Whatever else its forward read must be as it was when it was traced, and whatever the
forward changed besides is lost. So a trace is watched. Reads of instances go through a lookup put into their classes
for the time of the trace (:meth:`Watch._lookup`). Globals, closures, defaults, and the attributes of classes and of
Python modules, which have no such lookup, are those that the code that ran names (:mod:`frames` tells which that is).
What is read is followed into containers, functions and further objects. PyTorch, NumPy and Python's own library are
not followed: of these, what the user's code names is held by identity.
"""

import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import operator
import os
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import NotExportable, NotRunnable
from ..stack import is_users
from .anatomy import (
    HEAP,
    HOOKS,
    INERT,
    Seen,
    dict_of,
    functions_of,
    hooks_of,
    imported,
    is_importing,
    is_of_python,
    is_remembered,
    is_users_class,
    of_cell,
    parts,
)
from .frames import Frames, is_trusted, is_trusted_module
from .held import BY_REPR, BY_VALUE, INTERNAL, MISSING, Held, Write, ambient
from .looks import BY_NAME, Looks, looks, picked
from .places import Places
from .policy import is_missed_by_dynamo, knows_tracers, refusal_of_c, refusal_of_python

_ALL_AT_ONCE = frozenset({"__dict__", "__dir__", "__getstate__", "__reduce__", "__reduce_ex__"})
_OF_PARAMETERS = frozenset({"_flat_weight_refs"})  # of recurrent layers, made of what is a parameter
_BUILTINS = vars(__import__("builtins"))
_READ_THE_ENVIRONMENT = {("os", "getenv"), ("os", "getenvb")}
_OF_A_VARIABLE = type(os.environ).__getitem__.__code__
_OF_NO_INTEREST = frozenset({"logging", "typing", "abc", "_abc", "torch._ops"})
_OURS = __name__.split(".")[0]
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DETAILS = frozenset(
    {"__getattribute__", "__doc__", "__module__", "__dict__", "__annotations__", "__weakref__", "__builtins__"}
)
_BASES = (dict, collections.OrderedDict, tuple)  # of C, of what is followed
_GENERIC = [base.__getattribute__ for base in (object, *_BASES)]
_WITH_CONTENT = (dict, tuple, list, set, frozenset, collections.deque)
_IDENTITY = (id, operator.is_, operator.is_not)
_LOOKUPS = (getattr, hasattr, vars, dir)  # by names, or of all of them
_PLAIN = (BY_VALUE - {types.MethodType}) | BY_REPR | {list, tuple, dict}
# May give what an object has past the lookup of its class.
_OF_C = (
    *(types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
)
# What of a class is seen when it is used.
_OF_PYTHON = (
    *(types.FunctionType, types.NoneType, type, set, frozenset),
    type(vars(dataclasses.make_dataclass("_Made", ()))["__dataclass_params__"]),
)
# What has attributes whose reads are not seen.
_WITHOUT_LOOKUP = (type, types.ModuleType, types.FunctionType, super)


class Watch(Places):
    """What is read while it is active.

    Parameters
    ----------
    module
        The module that will be traced.
    arguments
        What else its forward is given that is no tensor.
    sizes_are_open
        Whether sizes are symbols.
    """

    bases: tuple[type, ...] = _BASES

    def __init__(self, module: nn.Module, arguments: Sequence[Any] = (), sizes_are_open: bool = False) -> None:
        super().__init__(module)
        self.frames = Frames(self._entered, self._called, self._ended, self._left, self._raised, sizes_are_open)
        self.refusal: NotExportable | None = None
        self.caught = ""
        self.names: set[str] = set()  # that code which ran may look up
        self.stored: set[str] = set()  # attributes that it may set
        self._watched: dict[Any, Any] = {}
        self._answering: dict[Any, Any] = {}  # classes with a lookup of the user's, which is in their own dictionary
        self._classes: dict[Any, None] = {}
        self._namespaces: list[tuple[dict[str, Any], str]] = []
        self._asked: set[str] = set()
        self._asking: list[types.FrameType | None] = []  # until a lookup tells for what name
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self._owners: dict[types.CodeType, tuple[dict[str, Any], str, Any, str]] = {}
        self._nested: set[types.CodeType] = set()
        self._ran: set[types.CodeType] = set()
        self._of_classes: set[tuple[Any, str]] = set()
        self._modules = list(module.modules())
        self._arguments = arguments
        self._sizes_are_open = sizes_are_open

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it, what this thread reads is held. NotExportable for what can be neither held nor undone."""
        try:
            self._begin()
            before = ambient()
            with self.frames.watched():
                yield
            if ambient() != before:
                self.refuse("the forward changes PyTorch's own state", NotRunnable)
        finally:
            for cls, own in [*dict.fromkeys(self._watched, MISSING).items(), *self._answering.items()]:
                if own is MISSING:
                    type.__delattr__(cls, "__getattribute__")
                else:
                    type.__setattr__(cls, "__getattribute__", own)
            self._watched.clear()
            self._answering.clear()

    def _begin(self) -> None:
        self._undo.state("Python's random numbers", random.getstate, random.setstate)
        self._undo.state("NumPy's random numbers", numpy.random.get_state, numpy.random.set_state)
        for m in self._modules:
            self._object(m, type(m).__name__).names |= INTERNAL | _OF_PARAMETERS  # compared by the scan
            if any(m.__dict__[name] for name in HOOKS):
                self._hold_content(m, hooks_of, f"hooks of {type(m).__name__}")
        for value in vars(Tensor).values():
            if isinstance(value, types.FunctionType) and not is_trusted_module(value.__module__):
                self._register(value)
        for value in self._arguments:
            self._freeze(value, "an argument")

    # Reads of instances

    def _lookup(self) -> Callable[[Any, str], Any]:
        seen, plain, note, asking = self._seen, object.__getattribute__, self._note, self._asking

        def read(owner: Any, name: str) -> Any:
            of = seen.get(id(owner))
            if asking and asking[-1] is sys._getframe(1):
                asking[-1] = None
                if of is None:  # made meanwhile
                    self._of_class(type(owner), name)
            if of is not None and (name not in of.names or name in _ALL_AT_ONCE):
                note(of, name, name in _ALL_AT_ONCE and is_users(sys._getframe(1)))
            return plain(owner, name)

        return read

    def _note(self, seen: Seen, name: str, users: bool) -> None:
        if name == "_data" and sys._getframe(2).f_code is _OF_A_VARIABLE:
            self._variable(seen.before[name], seen.before["encodekey"](sys._getframe(2).f_locals["key"]))
            return
        seen.names.add(name)
        if name in _ALL_AT_ONCE:
            if users:
                self._whole(seen)
            return
        what = f"attribute {name} of {seen.title}"
        if name in seen.before:
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
                self._hold(dict_of(c), name, vars(c)[name], f"attribute {name} of class {c.__name__}")
                return

    # What is met

    def refuse(self, cause: str, kind: type[NotExportable] = NotExportable) -> NoReturn:
        """At once, before anything is lost; the forward may catch what is raised."""
        self.refusal = self.refusal or kind(cause)
        raise kind(cause)

    def check(self) -> None:
        """Raise what the forward may have caught."""
        if self.refusal is not None:
            raise self.refusal
        if self.caught:
            raise NotExportable(self.caught)

    def _follow(self, value: Any, what: str) -> None:
        hold = next(h for kinds, h in _OF_FAMILY if isinstance(value, kinds))
        hold(self, value, what)

    def _descriptor_of_c(self, _value: Any, _what: str) -> None:
        self.sees_answers = False

    def _method_of_c(self, value: Any, what: str) -> None:
        if value in (*_LOOKUPS, *_IDENTITY):
            self.refuse(f"{what} is {value.__name__}(), which may be called by another name")
        if value.__self__ is not None and not isinstance(value.__self__, (types.ModuleType, type)):
            self.sees_answers = False
            self._hold(value, "__self__", value.__self__, what)

    def _memo(self, value: Any, what: str) -> None:
        """TorchDynamo calls it each time."""
        kind = NotExportable if knows_tracers(value.__module__) else NotRunnable
        self.refuse(f"{what} remembers its results", kind)

    def _member(self, value: enum.Enum, _what: str) -> None:
        self._whole(self._object(value, type(value).__name__))

    def _namespace(self, value: types.ModuleType, _what: str) -> None:
        """A module of Python: held is what code names of it."""
        if not is_trusted_module(value.__name__):
            self._add_names(value.__dict__, f"module {value.__name__}")

    def _instance(self, value: Any, what: str) -> None:
        cls = type(value)
        if hasattr(cls, "__members__") or cls.__module__ in _OF_NO_INTEREST:  # an enumeration of PyTorch's
            return
        if cls.__module__.split(".")[0] == _OURS:
            self._freeze(getattr(value, "module", None), what)  # a wrapper
            return
        if not is_of_python(cls, *self.bases):
            self._refuse_kind(value, f"{what} is or holds a {cls.__module__}.{cls.__qualname__}")
            return
        if isinstance(value, _WITH_CONTENT):
            self._content(value, what)
        self._object(value, cls.__name__)
        self._hold(value, "__class__", cls, what)
        for m in value.modules() if isinstance(value, nn.Module) and id(value) not in self._own else ():
            of = self._object(m, type(m).__name__)
            for name in INTERNAL & of.before.keys():
                of.names.add(name)
                self._hold(of.state, name, of.before[name], f"{name} of {type(m).__name__}", True)

    def _refuse_kind(self, _value: Any, what: str) -> None:
        self.refuse(f"{what}, which cannot be compared")

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
        return seen

    def _put_lookup(self, cls: Any) -> bool:
        """Whether what is read of instances of a class will be seen."""
        if any(c in self._watched for c in cls.__mro__):
            return all("__getattribute__" not in vars(c) or c in self._watched or c is object for c in cls.__mro__)
        if cls.__getattribute__ not in _GENERIC:
            return False
        try:
            type.__setattr__(cls, "__getattribute__", self._lookup())
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

    def _check_asker(self, read: types.CodeType, frame: types.FrameType) -> None:
        """See a lookup that is called by other means than looking something up."""
        asker = frame.f_back
        if asker is None or not (asker.f_code is read or picked(asker.f_code)):
            self.sees_answers = False

    def _answer(self, users: Callable[[Any, str], Any]) -> types.FunctionType:
        seen, asking = self._seen, self._asking

        def read(owner: Any, name: str) -> Any:
            of = seen.get(id(owner))
            if asking and asking[-1] is sys._getframe(1):
                asking[-1] = None
                if of is None:  # made meanwhile
                    self._whole_class(type(owner))
            if of is not None and of.answers is not None:
                of.answers.add(name)
                if type(name) is not str or name in _ALL_AT_ONCE:
                    of.answers = None
            return users(owner, name)

        return read  # type: ignore[return-value]

    # Code

    def _type(self, value: Any, what: str) -> None:
        if value is type and self._sizes_are_open:
            self.refuse(f"{what} is type(), which may be asked of a size, which is open")
        self._class(value)

    def _class(self, cls: Any) -> None:
        if is_users_class(type(cls)):
            kind = NotExportable if is_trusted_module(cls.__module__) else NotRunnable
            self.refuse(f"class {cls.__name__} has a metaclass of its own, {type(cls).__name__}", kind)
        for c in cls.__mro__:
            if c in self._classes or not c.__flags__ & HEAP:
                continue
            self._classes[c] = None
            self._undo.of_class(c)
            state, title = dict_of(c), f"class {c.__name__}"
            if is_users_class(c) or issubclass(c, nn.Module):  # a trace exchanges methods of PyTorch's other classes
                self._keep(None, state, title)
            if is_users_class(c):
                self._hold(c, "__bases__", c.__bases__, f"the bases of {title}")
                for name, value in list(vars(c).items()):
                    for function in functions_of(value):
                        self._owners.setdefault(function.__code__, (state, name, value, c.__name__))
                        self._register(function)
                self._add_names(state, title)

    def _whole_class(self, cls: Any) -> None:
        """Hold all that the user's classes have: plain things by value, whatever else by identity."""
        self._class(cls)
        for c in [c for c in cls.__mro__ if is_users_class(c)]:
            state = dict_of(c)
            for name in state.keys() - _DETAILS:
                value, what = state[name], f"attribute {name} of class {c.__name__}"
                if type(value) in _PLAIN:
                    self._hold(state, name, value, what)
                else:
                    self.sees_answers &= all(isinstance(v, _OF_PYTHON) for v in parts(value) or (value,))
                    self._places.setdefault((id(state), name), (state, name, value, value, what))

    def _add_names(self, state: dict[str, Any], title: str) -> None:
        self._namespaces.append((state, title))
        self._named(state, title, self.names, self._asked)

    def _named(self, state: dict[str, Any], title: str, names: set[str], asked: set[str]) -> None:
        for name in names & state.keys() - _DETAILS:
            self._hold(state, name, state[name], f"attribute {name} of {title}")
        if id(state) not in self._dicts:
            for name in asked - state.keys():
                self._hold(state, name, MISSING, f"attribute {name} of {title}")

    def _register(self, function: types.FunctionType) -> bool:
        """Whether a function was unknown; it is found by its code from now on."""
        known = self._functions.setdefault(function.__code__, [])
        if any(f is function for f in known):
            return False
        known.append(function)
        return True

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._register(function)
        trusted = is_trusted(code.co_filename, function.__globals__)
        if code in self._ran or trusted:
            self._hold_function(function, trusted)
        if not trusted:
            self._keep(function, function.__dict__, f"function {function.__name__}")
            self._add_names(function.__dict__, f"function {function.__name__}")

    def _hold_function(self, function: types.FunctionType, trusted: bool) -> None:
        name = function.__name__
        if trusted and is_trusted_module(function.__module__):
            return
        if not trusted:
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                self._hold(function, part, getattr(function, part), f"{part} of {name}")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if trusted and isinstance(of_cell(cell), (list, dict, set)):
                self.refuse(f"{name} keeps what it does in variable {variable}")
            if variable != "__class__":
                self._hold(cell, "cell_contents", of_cell(cell), f"variable {variable} of {name}")

    def _entered(self, code: types.CodeType, frame: types.FrameType) -> None:
        """Hold what code can read by name, before it runs for the first time."""
        if is_importing(frame) or is_remembered(frame):
            return
        self._undo.midst = self.frames.is_within_library(frame.f_back)
        try:
            if code in self._functions or code in self._nested or self._locate(code, frame):
                self._hold_named(code, frame)
            elif not code.co_flags & inspect.CO_GENERATOR:  # one of another time is closed as garbage
                self.refuse(f"it is not known where the forward has {code.co_qualname} from")
        finally:
            self._undo.midst = False

    def _hold_named(self, code: types.CodeType, frame: types.FrameType) -> None:
        self._ran.add(code)
        look = looks(code)
        self._check(look, code, frame)
        self.stored |= look.stored
        nested = [code]
        while nested:
            inner = [c for c in nested.pop().co_consts if isinstance(c, types.CodeType)]
            self._nested.update(inner)
            nested += inner
        for name in code.co_names:
            self._global(name, frame.f_globals, look.scope, look.names)
        new, asked = look.names - self.names, look.asked - self._asked
        self.names |= new
        self._asked |= asked
        for namespace, of in list(self._namespaces) if new or asked else ():
            self._named(namespace, of, set(new), set(asked))
        for function in self._functions.get(code, ()):
            self._hold_function(function, False)
        if code in self._owners:
            of_class, name, value, title = self._owners[code]
            self._hold(of_class, name, value, f"attribute {name} of class {title}")

    def _check(self, look: Looks, code: types.CodeType, frame: types.FrameType) -> None:
        """Refuse code that looks in ways which are not watched."""
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        hidden = look.hidden
        if look.passes_by and (isinstance(first, _WITHOUT_LOOKUP) or self._put_lookup(type(first))):
            hidden = "__getattribute__"
        if look.raw and picked(code) is None:
            self.sees_answers = False
        if look.whole_self and isinstance(frame.f_locals.get("self"), _WITHOUT_LOOKUP):
            hidden = "__dict__"
        if hidden:
            self.refuse(f"{code.co_qualname} looks by {hidden} at what is not watched")
        outer = {} if code in self._nested else {v: frame.f_locals.get(v, ()) for v in code.co_freevars}
        if any(_is_exchangeable({**_BUILTINS, **frame.f_globals, **outer}, chain) for chain in look.compared):
            self._refuse_identity(code.co_qualname)
        if look.paired:
            given = [frame.f_locals.get(name) for name in look.paired]
            tensors = all(v is None or isinstance(v, Tensor) for v in given)
            self._refuse_identity(code.co_qualname, NotExportable if tensors else NotRunnable)
        if look.names & BY_NAME and not look.names_are_constant:
            self._see_own(frame)
            self.frames.follow(code, self._see_own)
        if self._sizes_are_open:
            if look.tells_symbols:
                self._refuse_types(code)
            if look.typed:
                self.frames.follow(code, functools.partial(self._check_types, look.typed))

    def _see_own(self, frame: types.FrameType) -> None:
        """See what is read of the object whose method runs, if it was made meanwhile."""
        owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if owner is not None and is_users_class(type(owner)):
            self._class(type(owner))
            self._put_lookup(type(owner))

    def _refuse_identity(self, who: str, kind: type[NotExportable] = NotRunnable) -> NoReturn:
        """TorchDynamo sees which arguments are one, but not which lists are, nor what was there before."""
        self.refuse(f"{who} may compare tensors, or what is held by value, by identity", kind)

    def _check_types(self, typed: frozenset[str], frame: types.FrameType) -> None:
        if any(issubclass(type(frame.f_locals.get(name)), _SIZES) for name in typed):
            self._refuse_types(frame.f_code)

    def _refuse_types(self, code: types.CodeType) -> NoReturn:
        self.refuse(f"{code.co_qualname} may ask for the type of a size, which is open, or what it is")

    def _global(self, name: str, state: dict[str, Any], scope: frozenset[str], names: frozenset[str]) -> None:
        """What a name of code that runs stands for outside of it."""
        value, what = None, f"global {name} of module {state.get('__name__')}"
        if name not in scope:
            value = imported(name, str(state.get("__package__")))
        else:
            value = state.get(name, MISSING)
            self._hold(state, name, value, what)
            if value is MISSING and name in _BUILTINS:
                self._named_only[id(_BUILTINS), name] = (_BUILTINS, name, f"builtin {name}")
        if isinstance(value, types.ModuleType):
            self._module(value, names)
            if value is os and "getenv" in names:
                self._hold(vars(os), "environ", os.environ, "environ of module os")

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """What code names of a module of Python, and of those in it."""
        found, pending = {id(module)}, [module]
        while pending:
            state = pending.pop().__dict__
            title = str(state.get("__name__"))
            trusted = is_trusted_module(title)
            for name in names & state.keys():
                value = state[name]
                if value is torch.backends or value is sys.modules:
                    self.refuse(f"the forward looks at {title}.{name}")
                if isinstance(value, types.ModuleType):
                    pending += [] if id(value) in found else [value]
                    found.add(id(value))
                what = f"{name} of module {title}"
                if state is vars(numpy.random) and getattr(value, "__self__", None) is not numpy.random.mtrand._rand:
                    self.refuse(f"the forward uses {what}")
                if trusted and callable(value):
                    self._named_only[id(state), name] = (state, name, what)
                else:
                    self._hold(state, name, value, what)

    def _locate(self, code: types.CodeType, frame: types.FrameType) -> bool:
        """Find the function that runs `code`, to which nothing that was read led."""
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if first is not None:
            self._class(first if isinstance(first, type) else type(first))
        value: Any = frame.f_globals
        for name in code.co_qualname.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
            if isinstance(value, type):
                self._class(value)
        for function in functions_of(value):
            self._register(function)
        return code in self._functions or code.co_name == "<module>"

    def _called(self, function: Any, frame: types.FrameType) -> None:
        """Refuse a function of C that reads or changes what is not compared."""
        owner = getattr(function, "__self__", None)
        if function in _LOOKUPS:
            constant = function in (getattr, hasattr) and looks(frame.f_code).names_are_constant
            self._asking.append(None if constant else frame)
        if function in _IDENTITY:
            self._refuse_identity(function.__name__)
        if type(owner) is str and function.__name__.startswith("format") and re.search(r"{[^{}]*[.\[]", owner):
            self.refuse("the forward formats attributes of objects", NotRunnable)
        refusal = refusal_of_c(function)
        if isinstance(owner, random.Random) and owner is not getattr(random, "_inst", None):
            refusal = f"{function.__name__}() of a generator of random numbers"
        if refusal and not is_importing(frame) and not is_remembered(frame):
            kind = NotRunnable if isinstance(owner, random.Random) else NotExportable
            self.refuse(f"the forward calls {refusal}", kind)

    def _ended(self, function: Any) -> None:
        if function in _LOOKUPS and self._asking.pop() is not None:
            self.refuse(f"the forward computes names of attributes, for {function.__name__}(), of what is not watched")

    def _left(self, frame: types.FrameType) -> None:
        """The same of a function of Python that is not the user's."""
        scope, code, caller = frame.f_globals, frame.f_code, frame.f_back
        module, name = scope.get("__name__", ""), code.co_qualname
        if (module, name) in _READ_THE_ENVIRONMENT:
            self._freeze(os.environ, "the environment")
            self._freeze(os.environb, "the environment")
        elif module == abc.__name__ and name.endswith("check__"):
            self._hold(abc.get_cache_token, None, abc.get_cache_token(), "the classes registered as others'")
        assert caller is not None
        refusal = refusal_of_python(module, name, caller.f_globals.get("__name__", ""))
        if refusal and not is_importing(caller) and not is_remembered(caller):
            kind = NotRunnable if is_missed_by_dynamo(module, name) else NotExportable
            self.refuse(f"the forward calls {refusal}", kind)

    def _raised(self, line: str) -> None:
        self.caught = self.caught or f"the forward catches what is raised at {line}, in eager perhaps not"

    # Afterwards

    def check_unchanged(self, writes: Sequence[Write]) -> None:
        """Refuse what was changed meanwhile."""
        changed = self._undo.changed()
        if changed is not None:
            self.refuse(f"the forward changes {changed[0]}", changed[1])
        for m in self._modules:
            if "training" in m.__dict__ and m.__dict__["training"] is not self._seen[id(m)].before["training"]:
                self.refuse(f"the forward changes the mode of {type(m).__name__}")
        held = Held(*self._held(writes, {(id(w.module.__dict__), w.name) for w in writes}, ()))
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            what = held.changed()
        if what:
            self.refuse(f"the forward changes {what}")

    def restore(self) -> None:
        """Put back what was changed meanwhile."""
        self._undo.restore()


def _is_exchangeable(scope: dict[str, Any], chain: tuple[str, ...]) -> bool:
    """Whether what lies at the end of a chain of names is not known to be held by identity."""
    value = scope.get(chain[0], ()) if chain else ()
    for name in chain[1:]:
        value = inspect.getattr_static(value, name, ())
    return isinstance(value, (Tensor, list, tuple, dict, set, frozenset))


_Hold = Callable[[Watch, Any, str], Any]
# How kinds of objects that have kinds of their own are held; nothing else is followed.
_OF_FAMILY: tuple[tuple[Any, _Hold], ...] = (
    ((types.BuiltinFunctionType, types.MethodWrapperType), Watch._method_of_c),
    (_OF_C, Watch._descriptor_of_c),
    (INERT, Watch._as_it_is),
    (type, Watch._type),
    (Tensor, Watch._tensor),
    (types.FunctionType, lambda watch, value, _what: watch._function(value)),
    (types.ModuleType, Watch._namespace),
    ((property, staticmethod, classmethod), Watch._descriptor),
    (functools._lru_cache_wrapper, Watch._memo),
    (enum.Enum, Watch._member),
    (object, Watch._instance),
)
