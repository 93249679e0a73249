"""What a forward reads of Python while it is traced: held by value or identity, or refused by name.

A graph knows tensors only. Whatever else its forward read must be as it was when it was traced, and whatever the
forward changed besides is lost. So a trace is watched. Reads of instances go through a lookup put into their classes
for the time of the trace (:meth:`Watch._lookup`). Globals, closures, defaults, and the attributes of classes and of
Python modules, which have no such lookup, are those that the code that ran names (:mod:`frames` tells which that is).
What is read is followed into containers, functions and further objects. PyTorch, NumPy and Python's own library are
not followed: of these, what the user's code names is held by identity.
"""

import abc
import array
import contextlib
import copy
import enum
import functools
import inspect
import itertools
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
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from .anatomy import (
    CONTENTS,
    HEAP,
    INERT,
    Memo,
    Seen,
    dict_of,
    functions_of,
    is_constant,
    is_importing,
    is_of_python,
    is_plain_slice,
    is_remembered,
    is_users_class,
    of_cell,
    parts,
    refill,
    remembered,
    same_content,
    same_items,
    same_state,
    slots,
    state_of_random,
    tensor_content,
    type_in,
)
from .errors import NotExportable, NotRunnable
from .frames import Frames, is_trusted, is_trusted_module
from .guards import BY_REPR, BY_VALUE, INTERNAL, MISSING, Held, Write, ambient, layout
from .looks import looks
from .policy import is_missed_by_dynamo, refusal_of_c, refusal_of_python
from .stack import is_users

_ALL_AT_ONCE = frozenset({"__dict__", "__dir__", "__getstate__", "__reduce__", "__reduce_ex__"})
_OF_PARAMETERS = frozenset({"_flat_weight_refs"})  # of recurrent layers, made of what is a parameter
_LARGEST = 10_000  # items of containers
_LARGEST_ARRAY = 1 << 16  # bytes
_BUILTINS = vars(__import__("builtins"))
_OF_NO_INTEREST = frozenset({"logging", "typing", "abc", "_abc", "functools", "torch._ops"})
_OURS = __name__.split(".")[0]
_SEEN_BY_PYTORCH = frozenset({"requires_grad", "data", "grad"})  # setters that are functions of PyTorch
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DETAILS = frozenset(
    {"__getattribute__", "__doc__", "__module__", "__dict__", "__annotations__", "__weakref__", "__builtins__"}
)
# What of PyTorch others exchange, though the user's code does not name it.
_EXCHANGED = (
    (vars(F), "torch.nn.functional"),
    (dict_of(nn.Module), "torch.nn.Module"),
    (dict_of(Tensor), "torch.Tensor"),
)
_IDENTITY = (id, operator.is_, operator.is_not)
# What has attributes whose reads are not seen.
_WITHOUT_LOOKUP = (type, types.ModuleType, types.FunctionType)


class Watch:
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

    def __init__(self, module: nn.Module, arguments: Sequence[Any] = (), sizes_are_open: bool = False) -> None:
        self.frames = Frames(self._entered, self._called, self._left, self._raised, self._returned, sizes_are_open)
        self.refusal: NotExportable | None = None
        self.caught = ""
        self.tensors: dict[int, Tensor] = {}  # met at places that are held
        self.asks_layout = False
        self.asks_looseness = False  # of arguments
        self.names: set[str] = set()  # that code which ran may look up
        self.stored: set[str] = set()  # attributes that it may set
        self._looked_at: set[int] = set()
        self._own = {id(m) for m in module.modules()}
        self._places: dict[tuple[int, Any], tuple[Any, Any, Any, Any, str]] = {}
        # What the user's code names of others' modules. PyTorch replaces some of it while it traces.
        self._named_only: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = {}
        self._memos: list[Any] = []
        self._seen: dict[int, Seen] = {}
        self._frozen: dict[int, tuple[Any, Any]] = {}
        self._contents: list[tuple[Any, Any, str]] = []
        self._states: list[tuple[Any, Any, Callable[[], Any], Callable[[Any], Any]]] = []
        self._size = 0
        self._watched: dict[Any, Any] = {}
        self._classes: dict[Any, None] = {}
        self._namespaces: list[tuple[dict[str, Any], str]] = []
        self._asked: set[str] = set()
        self._computes = False
        self._computes_of: set[str] = set()
        self._looked_past: list[type] = []
        self._by_name: set[int] = set()  # modules of Python that no code which computes names was seen to reach
        self._dicts: dict[int, tuple[Any, dict[str, Any], dict[str, Any], str]] = {}
        self._exchanged = [(None, state, tuple(state), tuple(state.values()), what) for state, what in _EXCHANGED]
        self._children = [
            (None, m._modules, tuple(m._modules), tuple(m._modules.values()), f"submodules of {type(m).__name__}")
            for m in module.modules()
        ]
        self._generators = {id(getattr(random, "_inst", None))}
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
            type.__setattr__(Tensor, "__setattr__", self._set_of_tensors())
            with self.frames.watched():
                yield
            if ambient() != before:
                self.refuse("the forward changes PyTorch's own state", NotRunnable)
        finally:
            if "__setattr__" in vars(Tensor):
                type.__delattr__(Tensor, "__setattr__")
            for cls in self._watched:
                type.__delattr__(cls, "__getattribute__")
            self._watched.clear()

    def _begin(self) -> None:
        self._states.append(("Python's random numbers", random.getstate(), random.getstate, random.setstate))
        self._random(numpy.random.mtrand._rand, "NumPy's random numbers")
        for m in self._modules:
            self._object(m, type(m).__name__).names |= INTERNAL | _OF_PARAMETERS  # compared by the survey
        for value in vars(Tensor).values():
            if isinstance(value, types.FunctionType) and not is_trusted_module(value.__module__):
                self._register(value)
        for value in self._arguments:
            self._freeze(value, "an argument")

    # Reads of instances

    def _lookup(self) -> Callable[[Any, str], Any]:
        seen, plain, note = self._seen, object.__getattribute__, self._note

        def read(owner: Any, name: str) -> Any:
            of = seen.get(id(owner))
            if of is not None and (name not in of.names or name in _ALL_AT_ONCE):
                note(of, name, name in _ALL_AT_ONCE and is_users(sys._getframe(1)))
            return plain(owner, name)

        return read

    def _set_of_tensors(self) -> Callable[[Tensor, str, Any], None]:
        """A trace has others in their place, on which what is set would be lost."""
        plain, thread, refuse = object.__setattr__, threading.get_ident(), self.refuse

        def write(owner: Tensor, name: str, value: Any) -> None:
            ours = threading.get_ident() == thread and is_users(sys._getframe(1))
            if ours and name not in _SEEN_BY_PYTORCH:
                refuse(f"the forward sets attribute {name} of a tensor")
            plain(owner, name, value)

        return write

    def _note(self, seen: Seen, name: str, users: bool) -> None:
        seen.names.add(name)
        if name in _ALL_AT_ONCE:
            if users:
                self._whole(seen)
            return
        what = f"attribute {name} of {seen.title}"
        if name in seen.before:
            self._hold(seen.state, name, seen.before[name], what)
        elif name in seen.slots:
            self._hold(seen.owner, name, seen.slots[name], what)
        self._of_class(type(seen.owner), name)

    def _whole(self, seen: Seen) -> None:
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

    # Values

    def _hold(self, holder: Any, key: Any, value: Any, what: str) -> None:
        place = id(holder), key
        if place not in self._places:
            self._places[place] = (holder, key, value, value, what)
            if value is not MISSING:
                self._places[place] = (holder, key, self._freeze(value, what), value, what)

    def _hold_content(self, value: Any, content: Callable[[Any], Any], what: str) -> None:
        now = content(value)
        holder = functools.partial(content, value)
        self._places[id(holder), None] = (holder, None, self._freeze(now, what), now, what)

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
        for _, key, _, value, what in self._places.values():
            unseen = isinstance(value, _WITHOUT_LOOKUP) or any(f.__name__ != key for f in functions_of(value))
            if key in self._computes_of and unseen:
                raise NotExportable(f"the forward computes names of attributes of {what}")

    def _freeze(self, value: Any, what: str) -> Any:
        """A copy that does not change with the value, whose parts that are held by identity are themselves."""
        cls = type(value)
        if cls in BY_VALUE or cls in BY_REPR or isinstance(value, (*INERT, type)):
            return self._inert(value, what)
        known = self._frozen.get(id(value))
        if known is not None:
            return known[1]
        self._frozen[id(value)] = value, value
        frozen = self._copy(value, cls, what)
        self._frozen[id(value)] = value, frozen
        return frozen

    def _inert(self, value: Any, what: str) -> Any:
        if value is type and self._sizes_are_open:
            self.refuse(f"{what} is type(), which may be asked of a size, which is open")
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            owner = value.__self__
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self._hold(value, "__self__", owner, what)
        elif isinstance(value, types.MethodType):
            self._hold(value, "__self__", value.__self__, what)
            self._freeze(value.__func__, what)
        elif isinstance(value, slice) and not is_plain_slice(value):
            self.refuse(f"{what} is a slice of other things than numbers")
        return value

    def _copy(self, value: Any, cls: Any, what: str) -> Any:
        if isinstance(value, enum.Enum):
            self._whole(self._object(value, cls.__name__))
            return value
        if cls in (list, tuple, dict):
            return self._container(value, cls, what)
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
            return value
        if isinstance(value, types.FunctionType):
            self._function(value)
            return value
        for kinds, see in _KINDS:
            if isinstance(value, kinds):
                see(self, value, what)
                return value
        if hasattr(cls, "__members__") or cls.__module__ in _OF_NO_INTEREST:  # an enumeration of PyTorch's
            pass
        elif cls.__module__.split(".")[0] == _OURS:
            self._freeze(getattr(value, "module", None), what)  # a wrapper
        elif is_of_python(cls):
            self._instance(value, what)
        else:
            self.refuse(f"{what} is or holds a {cls.__module__}.{cls.__qualname__}, which cannot be compared")
        return value

    def _container(self, value: Any, cls: Any, what: str) -> Any:
        if value is _BUILTINS:  # Dynamo, where an op of PyTorch calls it, puts them among the user's globals
            return value
        self._size += len(value)
        if self._size > _LARGEST:
            self.refuse(f"{what} holds more than {_LARGEST} things to compare")
            return value
        if cls is dict:
            self._contents.append((value, dict(value), what))
            return {self._freeze(k, what): self._freeze(v, what) for k, v in list(value.items())}
        if cls is list:
            self._contents.append((value, cls(value), what))
        return cls([self._freeze(v, what) for v in list(value)])

    def hold_value(self, t: Tensor) -> None:
        """Something was made of a tensor's elements, or its form, that is no tensor."""
        what = f"a tensor of shape {tuple(t.shape)}"
        if t.nbytes > _LARGEST_ARRAY:
            self.refuse(f"the forward looks at the values of {what}")
        elif id(t) not in self._looked_at:
            self._looked_at.add(id(t))
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._hold_content(t, tensor_content, what)

    def _subclass(self, value: Any, what: str) -> None:
        """An instance of a class like a list, a tuple, a dict or a set."""
        content = next(c for kind, c in CONTENTS if isinstance(value, kind))
        if not isinstance(value, (tuple, frozenset, types.MappingProxyType)):
            raw = next((c for c in (dict, set, array.array, bytearray) if isinstance(value, c)), list)
            taken = raw(dict.items(value)) if raw is dict else copy.copy(value) if raw is array.array else raw(value)
            self._contents.append((value, taken, what))
        self._hold_content(value, content, what)
        self._hold(value, "__class__", type(value), what)
        if type(value).__flags__ & HEAP and type(value).__module__ != "collections":
            self._object(value, type(value).__name__)

    def _partial(self, value: Any, what: str) -> None:
        for name in ("func", "args", "keywords"):
            self._hold(value, name, getattr(value, name), what)
        self._freeze(value.__dict__, what)

    def _memo(self, value: Any, what: str) -> None:
        self._memos.append(value)
        self._freeze(value.__wrapped__, what)

    def _descriptor(self, value: Any, what: str) -> None:
        for part in parts(value):
            self._freeze(part, what)

    def _random(self, value: Any, what: str) -> None:
        get, put = state_of_random(value)
        self._generators.add(id(value))
        self._states.append((what, get(), get, put))

    def _namespace(self, value: types.ModuleType, _what: str) -> None:
        """A module of Python: held is what code names of it."""
        if not is_trusted_module(value.__name__):
            self._add_names(value.__dict__, f"module {value.__name__}")

    def _plain_object(self, value: Any, what: str) -> None:
        self._object(value, type(value).__name__)
        self._hold(value, "__class__", type(value), what)

    def _instance(self, value: Any, what: str) -> None:
        self._object(value, type(value).__name__)
        self._hold(value, "__class__", type(value), what)
        if isinstance(value, nn.Module) and id(value) not in self._own:
            for m in value.modules():
                of = self._object(m, type(m).__name__)
                for name in INTERNAL & of.before.keys():
                    of.names.add(name)
                    self._hold(of.state, name, of.before[name], f"{name} of {type(m).__name__}")

    def _object(self, value: Any, title: str) -> Seen:
        known = self._seen.get(id(value))
        if known is not None:
            return known
        seen = self._seen[id(value)] = Seen(value, title)
        cls = type(value)
        self._class(cls)
        if not self._put_lookup(cls) or issubclass(cls, tuple(self._looked_past)):
            self._whole(seen)
        return seen

    def _put_lookup(self, cls: Any) -> bool:
        """Whether what is read of instances of a class will be seen."""
        if any(c in self._watched for c in cls.__mro__):
            return all("__getattribute__" not in vars(c) or c in self._watched or c is object for c in cls.__mro__)
        if cls.__getattribute__ is not object.__getattribute__:
            return False
        try:
            type.__setattr__(cls, "__getattribute__", self._lookup())
        except TypeError:  # a class of C
            return False
        self._watched[cls] = None
        return True

    # Code

    def _class(self, cls: Any) -> None:
        if is_users_class(type(cls)):
            kind = NotExportable if is_trusted_module(cls.__module__) else NotRunnable
            self.refuse(f"class {cls.__name__} has a metaclass of its own, {type(cls).__name__}", kind)
        for c in cls.__mro__:
            if c in self._classes or not c.__flags__ & HEAP:
                continue
            self._classes[c] = None
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

    def _keep(self, owner: Any, state: dict[str, Any], title: str) -> None:
        """Hold the keys of a dictionary."""
        self._dicts.setdefault(id(state), (owner, state, dict(state), title))

    def _add_names(self, state: dict[str, Any], title: str) -> None:
        self._namespaces.append((state, title))
        self._named(state, title, self.names, self._asked)

    def _named(self, state: dict[str, Any], title: str, names: set[str], asked: set[str]) -> None:
        if self._computes and id(state) not in self._by_name:
            self._keep(None, state, title)
            for name in set(state) - names - _DETAILS:
                value = state[name]
                if functions_of(value):  # known by their code, if they run
                    self._places.setdefault((id(state), name), (state, name, value, value, f"{name} of {title}"))
                else:
                    self._hold(state, name, value, f"attribute {name} of {title}")
        for name in names & state.keys():
            if name not in _DETAILS:
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
        if is_importing(frame):
            return
        if code not in self._functions and code not in self._nested and not self._locate(code, frame):
            if code.co_flags & inspect.CO_GENERATOR:  # one of another time, that is closed as garbage
                return
            self.refuse(f"it is not known where the forward has {code.co_qualname} from")
        self._ran.add(code)
        look = looks(code)
        if look.hidden:
            self.refuse(f"{code.co_qualname} looks by {look.hidden} at what is not watched")
        outer = {} if code in self._nested else {v: frame.f_locals.get(v, ()) for v in code.co_freevars}
        if any(_is_exchangeable({**_BUILTINS, **frame.f_globals, **outer}, chain) for chain in look.compared):
            self._refuse_identity(code.co_qualname)
        if self._sizes_are_open:
            if look.tells_symbols:
                self._refuse_types(code)
            if look.typed:
                self.frames.followed[code] = functools.partial(self._check_types, look.typed)
        if look.passes_by:
            cls = type(frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None)
            self._looked_past.append(cls)
            for seen in [s for s in self._seen.values() if isinstance(s.owner, cls)]:
                self._whole(seen)
        self.stored |= look.stored
        self._computes_of |= look.computes_names_of
        nested = [code]
        while nested:
            inner = [c for c in nested.pop().co_consts if isinstance(c, types.CodeType)]
            self._nested.update(inner)
            nested += inner
        of_self = "" in look.computes_names_of and isinstance(frame.f_locals.get("self"), _WITHOUT_LOOKUP)
        computes = (look.computes_names or of_self) and not self._computes
        self._computes |= computes
        for name in code.co_names:
            self._global(name, frame.f_globals, look.scope, look.names, look.computes_names)
        new, asked = look.names - self.names, look.asked - self._asked
        self.names |= new
        self._asked |= asked
        for namespace, of in list(self._namespaces) if new or asked or computes else ():
            self._named(namespace, of, set(new), set(asked))
        for function in self._functions.get(code, ()):
            self._hold_function(function, False)
        if code in self._owners:
            of_class, name, value, title = self._owners[code]
            self._hold(of_class, name, value, f"attribute {name} of class {title}")

    def _refuse_identity(self, who: str) -> NoReturn:
        """TorchDynamo does not see which lists are one."""
        self.refuse(f"{who} may compare tensors, or what is held by value, by identity", NotRunnable)

    def _check_types(self, typed: frozenset[str], frame: types.FrameType) -> None:
        if any(type(frame.f_locals.get(name)) in _SIZES for name in typed):
            self._refuse_types(frame.f_code)

    def _refuse_types(self, code: types.CodeType) -> NoReturn:
        self.refuse(f"{code.co_qualname} may ask for the type of a size, which is open, or what it is")

    def _global(
        self, name: str, state: dict[str, Any], scope: frozenset[str], names: frozenset[str], computes: bool
    ) -> None:
        """What a name of code that runs stands for outside of it."""
        value, what = None, f"global {name} of module {state.get('__name__')}"
        if name not in scope:
            value = _imported(name, str(state.get("__package__")))
        elif name in state:
            value = state[name]
            if isinstance(value, types.ModuleType) and not computes:
                self._by_name.add(id(value.__dict__))
            self._hold(state, name, value, what)
        else:
            self._hold(state, name, MISSING, what)
            if name in _BUILTINS:
                self._named_only[id(_BUILTINS), name] = (_BUILTINS, name, f"builtin {name}")
        if isinstance(value, types.ModuleType):
            self._module(value, names, computes)
            if value is os and "getenv" in names:
                self._hold(vars(os), "environ", os.environ, "environ of module os")

    def _module(self, module: types.ModuleType, names: frozenset[str], computes: bool) -> None:
        """What code names of a module of Python, and of those in it."""
        found, pending = {id(module)}, [module]
        while pending:
            state = pending.pop().__dict__
            title = str(state.get("__name__"))
            trusted = is_trusted_module(title)
            if computes and trusted:
                self._exchanged.append((None, state, tuple(state), tuple(state.values()), title))
            elif computes:
                self._by_name.discard(id(state))
                self._add_names(state, title)
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

    def _called(self, function: Any) -> None:
        """Refuse a function of C that reads or changes what is not compared."""
        refusal, owner = refusal_of_c(function), getattr(function, "__self__", None)
        if type(owner) is str and function.__name__.startswith("format") and re.search(r"{[^{}]*[.\[]", owner):
            self.refuse("the forward formats attributes of objects", NotRunnable)
        if function in _IDENTITY:
            self._refuse_identity(function.__name__)
        if isinstance(owner, random.Random) and id(owner) not in self._generators:
            refusal = f"{function.__name__}() of a generator of random numbers"
        caller = sys._getframe(2)
        if refusal and not is_importing(caller) and not is_remembered(caller):
            self.refuse(
                f"the forward calls {refusal}", NotRunnable if isinstance(owner, random.Random) else NotExportable
            )

    def _left(self, frame: types.FrameType) -> None:
        """The same of a function of Python that is not the user's."""
        scope, code, caller = frame.f_globals, frame.f_code, frame.f_back
        module, name = scope.get("__name__", ""), code.co_qualname
        if module == os.__name__ and name == "getenv":
            self._freeze(os.environ, "the environment")
        elif module == abc.__name__ and name.endswith("check__"):
            self._hold(abc.get_cache_token, None, abc.get_cache_token(), "the classes registered as others'")
        assert caller is not None
        refusal = refusal_of_python(module, name, caller.f_globals.get("__name__", ""))
        if refusal and not is_importing(caller) and not is_remembered(caller):
            kind = NotRunnable if is_missed_by_dynamo(module, name) else NotExportable
            self.refuse(f"the forward calls {refusal}", kind)

    def _returned(self, code: types.CodeType, value: Any) -> None:
        if code.co_name in self._computes_of and isinstance(value, _WITHOUT_LOOKUP):
            self.refuse(f"the forward computes names of attributes of what {code.co_qualname} gives")

    def _raised(self, line: str) -> None:
        self.caught = self.caught or f"the forward catches what is raised at {line}, in eager perhaps not"

    # Afterwards

    def changed(self, writes: Sequence[Write]) -> str:
        """What was changed meanwhile; NotExportable for what a memo gives to anybody who asks it."""
        for memo in self._memos:
            if not is_trusted_module(memo.__module__) and not all(map(is_constant, remembered(memo))):
                # TorchDynamo looks through it.
                self.refuse(f"{memo.__qualname__}() remembers objects, which may change", NotRunnable)
        for _, state, before, title in self._dicts.values():
            names = [n for n in {**state, **before} if not n.startswith("__")]
            if any(
                state.get(n, MISSING) is not before.get(n, MISSING) for n in names
            ):  # TorchDynamo does not see what is absent
                self.refuse(f"the forward changes an attribute of {title}", NotRunnable)
        for value, before, what in self._contents:
            if not same_content(value, before):
                return what
        for seen in self._seen.values():
            if seen.slots and not same_items(slots(seen.owner), seen.slots):
                return f"an attribute of {seen.title}"
        written = {id(seen.state) for seen in self._seen.values() if seen.state is not None}
        for holder, key, _, value, what in self._places.values():
            if id(holder) in written:
                continue
            if type(holder) is dict and holder.get(key, MISSING) is not value:
                return what
            if isinstance(holder, types.CellType) and of_cell(holder) is not value:
                return what
        for what, before, get, _ in self._states:
            if not same_state(get(), before):
                if not what.endswith("random numbers"):  # a generator of the user's, which TorchDynamo draws from once
                    self.refuse(f"the forward changes {what}", NotRunnable)
                return what
        for m in self._modules:
            if "training" in m.__dict__ and m.__dict__["training"] is not self._seen[id(m)].before["training"]:
                return f"the mode of {type(m).__name__}"
        held = Held(*self._held(writes, {(id(w.module.__dict__), w.name) for w in writes}, ()))
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return held.changed() or ""

    def check_results(self, result: Any, arguments: Any) -> None:
        """Refuse results that are, or hold, an object that was there before: eager gives the object itself."""
        there = {id(value) for value, _ in self._frozen.values()} | set(self._seen)
        pending, met = [arguments], set()
        while pending:
            value = pending.pop()
            if _is_nest(value) and id(value) not in there:
                there.add(id(value))
                pending += _inside(value)
        pending = [result]
        while pending:
            value = pending.pop()
            if _is_nest(value):
                mutable = not isinstance(value, tuple)
                if mutable and (id(value) in there or id(value) in met):
                    self.refuse(f"the forward returns a {type(value).__name__} that was there before, or twice")
                met.add(id(value))
                pending += _inside(value)

    def writes(self) -> list[Write]:
        """Attributes of objects other than the module and its submodules that were set meanwhile."""
        return [
            Write(seen.owner, name, seen.before.get(name, MISSING), seen.now.get(name, MISSING))
            for seen in self._seen.values()
            if id(seen.owner) not in self._own
            for name in {**seen.before, **seen.now}
            if seen.now.get(name, MISSING) is not seen.before.get(name, MISSING)
        ]

    def restore(self) -> None:
        """Put back what was changed meanwhile."""
        for value, before, _ in self._contents:
            if not same_content(value, before):
                refill(value, before)
        for seen in self._seen.values():
            if id(seen.owner) not in self._own and not same_items(seen.now, seen.before):
                seen.now.clear()
                seen.now.update(seen.before)
            now = slots(seen.owner)
            for name, value in seen.slots.items():
                if value is MISSING and now[name] is not MISSING:
                    object.__delattr__(seen.owner, name)
                elif now[name] is not value:
                    object.__setattr__(seen.owner, name, value)
        classes = {id(dict_of(c)): c for c in self._classes}
        for _, state, before, _ in self._dicts.values():
            for key in [k for k in {**state, **before} if state.get(k, MISSING) is not before.get(k, MISSING)]:
                if key.startswith("__"):  # such as lookups
                    continue
                if id(state) not in classes:
                    state.update({key: before[key]}) if key in before else state.pop(key)
                elif key in before:
                    type.__setattr__(classes[id(state)], key, before[key])
                else:
                    type.__delattr__(classes[id(state)], key)
        for holder, key, _, value, _ in self._places.values():
            if type(holder) is dict and holder.get(key, MISSING) is not value:
                if value is MISSING:
                    holder.pop(key)
                elif id(holder) in classes:
                    type.__setattr__(classes[id(holder)], key, value)
                else:
                    holder[key] = value
            if isinstance(holder, types.CellType) and of_cell(holder) is not value:
                holder.cell_contents = value
        for _, before, get, put in self._states:
            if not same_state(get(), before):
                put(before)

    def held(self, writes: Sequence[Write], outside: Sequence[Tensor], state: Sequence[Tensor]) -> Held:
        """What has to be as it was.

        Parameters
        ----------
        outside
            Tensors that become inputs of the graph: they may get other values.
        state
            Parameters and buffers.
        writes
            What the forward sets. Of what it overwrites only the type is held, unless that is plain.
        """
        places: list[tuple[Any, Any, Any, str]] = []
        for w in writes:
            if not w.plain:
                places.append((functools.partial(type_in, w.module.__dict__, w.name), None, type(w.before), str(w)))
        for t in state if self.asks_layout else ():
            places.append(
                (functools.partial(layout, t), None, layout(t), f"strides of a tensor of shape {tuple(t.shape)}")
            )
        for t in outside:
            for name in ("shape", "dtype", "device", "requires_grad"):
                places.append((t, name, getattr(t, name), f"{name} of a tensor of shape {tuple(t.shape)}"))
        held = self._held(writes, {(id(w.module.__dict__), w.name) for w in writes if not w.plain}, places)
        return Held([*self._exchanged, *held[0]], held[1])

    def _held(
        self, writes: Sequence[Write], but: set[tuple[int, str]], more: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """All places `but` some, and `more`; dictionaries have what is written into them too."""
        added: dict[int, dict[str, None]] = {}
        for w in writes:
            if w.before is MISSING:
                added.setdefault(id(w.module.__dict__), {})[w.name] = None
        dicts: list[Any] = list(self._children)
        whole = [(s.owner, s.state, s.before, s.title) for s in self._seen.values() if s.state is not None]
        whole += self._dicts.values()
        inside = set()
        for owner, state, before, title in whole:
            at = id(state)
            inside.add(at)
            values = []
            keys = (*before, *[n for n in added.get(at, ()) if n not in before])
            for key in keys:
                known = self._places.get((at, key))
                values.append(MISSING if known is None or (at, key) in but else known[2])
            dicts.append((owner, state, keys, tuple(values), title))
        places = [
            (h, k, frozen, what)
            for (h, k, frozen, _, what) in self._places.values()
            if id(h) not in inside and (id(h), k) not in but
        ]
        places += [(state, name, state.get(name, MISSING), what) for state, name, what in self._named_only.values()]
        return dicts, [*places, *more]


def _is_exchangeable(scope: dict[str, Any], chain: tuple[str, ...]) -> bool:
    """Whether what lies at the end of a chain of names is not known to be held by identity."""
    value = scope.get(chain[0], ()) if chain else ()
    for name in chain[1:]:
        value = inspect.getattr_static(value, name, ())
    return isinstance(value, (Tensor, list, tuple, dict, set, frozenset))


def _imported(name: str, package: str) -> Any:
    """The module of Python that code in a package may import by a name."""
    while name not in sys.modules and package:
        if f"{package}.{name}" in sys.modules:
            return sys.modules[f"{package}.{name}"]
        package = package.rpartition(".")[0]
    return sys.modules.get(name)


def _is_nest(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict, set)) or (
        is_of_python(type(value)) and not isinstance(value, (type, types.FunctionType, enum.Enum, *_SIZES))
    )


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set)) else list(getattr(value, "__dict__", {}).values())


_KINDS: tuple[tuple[Any, Callable[[Watch, Any, str], None]], ...] = (
    (types.ModuleType, Watch._namespace),
    (types.SimpleNamespace, Watch._plain_object),
    (functools.partial, Watch._partial),
    ((property, staticmethod, classmethod, functools.cached_property, functools.partialmethod), Watch._descriptor),
    (Memo, Watch._memo),
    ((random.Random, numpy.random.RandomState, numpy.random.Generator), Watch._random),
    (tuple(itertools.chain(*[k if isinstance(k, tuple) else (k,) for k, _ in CONTENTS])), Watch._subclass),
)
