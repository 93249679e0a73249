"""What a forward reads of Python while it is traced: held by value or identity, or refused by name.

A graph knows tensors only. Whatever else its forward read must be as it was when it was traced, and whatever the
forward changed besides is lost. So a trace is watched. Reads of instances go through a lookup put into their classes
for the time of the trace (:mod:`instances`). Globals, closures, defaults, and the attributes of classes and of Python
modules, which have no such lookup, are those that the code that ran names (:mod:`namespaces`; :mod:`frames` tells which
that is). What is read is followed into containers, functions and further objects. PyTorch, NumPy and Python's own
library are not followed: of these, what the user's code names is held by identity.
"""

import abc
import collections
import contextlib
import enum
import functools
import importlib.util
import inspect
import operator
import os
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..bytecode import with_inner
from ..errors import NotExportable, NotRunnable
from ..symbolic import SYMBOLIC
from .anatomy import (
    HOOKS,
    INERT,
    functions_of,
    hooks_of,
    imported,
    is_importing,
    is_of_python,
    is_remembered,
    is_users_class,
    with_packages,
)
from .frames import Frames, is_trusted_module
from .held import INTERNAL, MISSING, Held, Library, Write, ambient, autocast_elsewhere
from .instances import BASES, Instances
from .looks import BY_NAME, RAW, Looks, looks, picked
from .policy import (
    in_place_of_pytorch,
    is_missed_by_dynamo,
    knows_tracers,
    refusal_of_c,
    refusal_of_python,
    remembers_what_stays,
)

_BUILTINS = vars(__import__("builtins"))
_READ_THE_ENVIRONMENT = {("os", "getenv"), ("os", "getenvb")}
_OF_NO_INTEREST = frozenset({"logging", "typing", "abc", "_abc", "torch._ops"})
_OURS = __name__.split(".")[0]
_WITH_CONTENT = (dict, tuple, list, set, frozenset, collections.deque)
_IDENTITY = (id, operator.is_, operator.is_not)
_LOOKUPS = (getattr, hasattr, vars, dir)  # by names, or of all of them
_ASK_FOR_AUTOCAST = (torch.is_autocast_enabled, torch.get_autocast_dtype, torch._C._is_any_autocast_enabled)
# May give what an object has past the lookup of its class.
_OF_C = (
    *(types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
)
# What has attributes whose reads are not seen.
_WITHOUT_LOOKUP = (type, types.ModuleType, types.FunctionType, super)


class Watch(Instances):
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

    bases: tuple[type, ...] = BASES

    def __init__(self, module: nn.Module, arguments: Sequence[Any] = (), sizes_are_open: bool = False) -> None:
        super().__init__(module)
        self.frames = Frames(self._entered, self._called, self._ended, self._left, self._raised, sizes_are_open)
        self.refusal: NotExportable | None = None
        self.caught = ""
        self.stored: set[str] = set()  # attributes that it may set
        self._reads_raw = False  # something may go past the lookups that are put into classes
        self._nested: set[types.CodeType] = set()
        self._imported: set[str] = set()
        self._libraries: dict[int, types.ModuleType] = {}  # that were met
        self._modules = list(module.modules())
        self._arguments = arguments
        self._sizes_are_open = sizes_are_open
        self._of_pytorch = in_place_of_pytorch()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it, what this thread reads is held. NotExportable for what can be neither held nor undone."""
        try:
            self._begin()
            before = ambient()
            with self.frames.watched():
                yield
            self._hold_imported()
            if self._reads_raw:
                self._hold_all()
            if ambient() != before:
                self.refuse("the forward changes PyTorch's own state", NotRunnable)
        finally:
            self._put_back()

    def _begin(self) -> None:
        self._undo.state("Python's random numbers", random.getstate, random.setstate)
        self._undo.state("NumPy's random numbers", numpy.random.get_state, numpy.random.set_state)
        for m in self._modules:
            self._object(m, type(m).__name__).names |= INTERNAL  # compared by the scan
            if any(m.__dict__[name] for name in HOOKS):
                self._hold_content(m, hooks_of, f"hooks of {type(m).__name__}")
        for value in vars(Tensor).values():
            if isinstance(value, types.FunctionType) and not is_trusted_module(value.__module__):
                self._register(value)
        for value in self._arguments:
            self._freeze(value, "an argument")

    def _hold_all(self) -> None:
        done: set[int] = set()
        while new := [seen for at, seen in self._seen.items() if at not in done]:
            done.update(id(seen.owner) for seen in new)
            for seen in new:
                seen.need_opened()
                self._whole(seen)

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
        self.check_opened()

    def _follow(self, value: Any, what: str) -> None:
        hold = next(h for kinds, h in _OF_FAMILY if isinstance(value, kinds))
        hold(self, value, what)

    def _descriptor_of_c(self, value: Any, _what: str) -> None:
        self._reads_raw |= value.__name__ in RAW
        self.sees_answers = False

    def _method_of_c(self, value: Any, what: str) -> None:
        if value in (*_LOOKUPS, *_IDENTITY):
            self.refuse(f"{what} is {value.__name__}(), which may be called by another name")
        if value.__self__ is not None and not isinstance(value.__self__, (types.ModuleType, type)):
            self._reads_raw |= value.__name__ in RAW
            self.sees_answers = False
            self._hold(value, "__self__", value.__self__, what)

    def _memo(self, value: Any, what: str) -> None:
        """TorchDynamo calls it each time."""
        if remembers_what_stays(value):
            return
        kind = NotExportable if knows_tracers(value.__module__) else NotRunnable
        self.refuse(f"{what} remembers its results", kind)

    def _member(self, value: enum.Enum, _what: str) -> None:
        self._whole(self._object(value, type(value).__name__))

    def _namespace(self, value: types.ModuleType, _what: str) -> None:
        """A module of Python: held is what code names of it."""
        if is_trusted_module(value.__name__):
            self._libraries[id(value)] = value
        else:
            self._add_names(value.__dict__, f"module {value.__name__}", absence_counts=True)

    def _instance(self, value: Any, what: str) -> None:
        cls = type(value)
        enumeration = hasattr(cls, "__members__")
        if (enumeration or cls.__module__ in _OF_NO_INTEREST) and not is_users_class(cls):
            return
        if cls.__module__.split(".")[0] == _OURS:
            self._freeze(getattr(value, "module", None), what)  # a wrapper
            return
        if not is_of_python(cls, *self.bases) or isinstance(value, threading.local):
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

    # Code

    def _type(self, value: Any, what: str) -> None:
        if value is type and self._sizes_are_open:
            self.refuse(f"{what} is type(), which may be asked of a size, which is open")
        self._class(value)

    def _entered(self, code: types.CodeType, frame: types.FrameType) -> None:
        """Hold what code can read by name, before it runs for the first time."""
        if is_importing(frame) or is_remembered(frame):
            return
        self._undo.midst = self.frames.is_within_library(frame.f_back)
        try:
            if code in self._of_pytorch:
                self.refuse(f"{code.co_qualname} is in the place of {self._of_pytorch[code]}", NotRunnable)
            elif code in self._functions or code in self._nested or self._locate(code, frame):
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
        self._nested.update(inner for inner in with_inner(code) if inner is not code)
        for name in code.co_names:
            self._global(name, frame.f_globals, look.scope, look.names)
        for level, name in look.imports:
            with contextlib.suppress(ImportError):  # beyond the package, which the code meets too
                package = str(frame.f_globals.get("__package__") or "")
                full = importlib.util.resolve_name("." * level + name, package) if level else name
                self._import(full, frame.f_globals)
        new, asked = look.names - self.names, look.asked - self._asked
        self.names |= new
        self._asked |= asked
        if new or asked:
            self._look_up(set(new), set(asked))
        for function in self._functions.get(code, ()):
            self._hold_function(function, False)
        for owner in self._owners.get(code, ()):
            self._hold(*owner)

    def _look_up(self, new: set[str], asked: set[str]) -> None:
        """Hold what further names stand for wherever code may look them up."""
        for namespace, of, absence_counts in list(self._namespaces):
            self._named(namespace, of, new, new if absence_counts else asked)

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
        self._check_identity(look, code)
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

    def _check_identity(self, look: Looks, code: types.CodeType) -> None:
        if look.takes_identity:
            self._refuse_identity(code.co_qualname, NotRunnable)
        if look.compared or look.paired:
            self.frames.follow(code, functools.partial(self._check_compared, look))

    def _check_compared(self, look: Looks, frame: types.FrameType) -> None:
        """Refuse whenever things are compared that may be exchanged for others.

        No submodule is such a thing: wherever one is read, another is seen.
        """
        if any(self._is_exchangeable(chain, frame) for chain in look.compared):
            self._refuse_identity(frame.f_code.co_qualname, NotExportable)
        for pair in look.paired:
            if all(id(frame.f_locals.get(name)) not in self._own for name in look.fixed.intersection(pair)):
                self._refuse_identity(frame.f_code.co_qualname, NotExportable)

    def _is_exchangeable(self, chain: tuple[str, ...], frame: types.FrameType) -> bool:
        """Whether what lies at the end of a chain of names is not known to be held by identity."""
        value: Any = ()
        if chain and chain[0] in frame.f_code.co_freevars:
            value = () if frame.f_code in self._nested else frame.f_locals.get(chain[0], ())
        elif chain:
            value = frame.f_globals.get(chain[0], _BUILTINS.get(chain[0], ()))
        for name in chain[1:]:
            value = inspect.getattr_static(value, name, ())
        return isinstance(value, (Tensor, list, tuple, dict, set, frozenset))

    def _refuse_identity(self, who: str, kind: type[NotExportable]) -> NoReturn:
        self.refuse(f"{who} may compare tensors, or what is held by value, by identity", kind)

    def _check_types(self, typed: frozenset[str], frame: types.FrameType) -> None:
        if any(issubclass(type(frame.f_locals.get(name)), SYMBOLIC) for name in typed):
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

    def _import(self, name: str, _scope: dict[str, Any]) -> None:
        """The modules that an import in code leads to, if there are."""
        for full in with_packages(name):
            self._imported.add(full)
            if not is_trusted_module(full):
                self._named_only[id(sys.modules), full] = (sys.modules, full, f"module {full}")
        self._hold_imported()

    def libraries(self) -> list[Library]:
        asked = frozenset(self.names)
        return [Library(vars(m), asked) for m in {id(m): m for m in self._libraries.values()}.values()]

    def _hold_imported(self) -> None:
        """What is there of what the forward imports, which it may have put there."""
        for full in list(self._imported):
            if isinstance(module := sys.modules.get(full), types.ModuleType):
                self._freeze(module, f"module {full}")

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """What code names of a module of Python, and of those in it."""
        found, pending = {id(module)}, [module]
        while pending:
            state = pending.pop().__dict__
            title = str(state.get("__name__"))
            trusted = is_trusted_module(title)
            if trusted:
                self._libraries[id(state)] = sys.modules.get(title, module)
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
            self._refuse_identity(function.__name__, NotRunnable)
        if function in _ASK_FOR_AUTOCAST:  # of which device is not seen
            self._hold_itself(autocast_elsewhere, None, autocast_elsewhere(), "autocast of another type of device")
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
            self._registered()
        assert caller is not None
        refusal = refusal_of_python(module, name, caller.f_globals.get("__name__", ""))
        if refusal and not is_importing(caller) and not is_remembered(caller):
            kind = NotRunnable if is_missed_by_dynamo(module, name) else NotExportable
            self.refuse(f"the forward calls {refusal}", kind)

    def _registered(self) -> None:
        self._hold(abc.get_cache_token, None, abc.get_cache_token(), "the classes registered as others'")

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
