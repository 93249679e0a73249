"""What a forward reads of Python while it is traced: held by value or identity, or refused by name.

A graph knows tensors only. Whatever else its forward read must be as it was when it was traced, and whatever the
forward changed besides is lost. So a trace is watched. Reads of instances go through a lookup put into their classes
for the time of the trace (:meth:`Watch._lookup`). Globals, closures, defaults, and the attributes of classes and of
Python modules, which have no such lookup, are those that the code that ran names (:mod:`frames` tells which that is).
What is read is followed into containers, functions and further objects. PyTorch, NumPy and Python's own library are
not followed: of these, what the user's code names is held by identity.
"""

import array
import contextlib
import copy
import enum
import functools
import inspect
import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .anatomy import (
    CONTENTS,
    HEAP,
    INERT,
    NUMBERS,
    Memo,
    array_content,
    compares_identity,
    computes_names,
    dict_of,
    functions_of,
    is_constant,
    is_importing,
    is_of_python,
    is_plain_slice,
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
    variable_content,
)
from .errors import NotExportable
from .frames import Frames, is_trusted, is_trusted_module
from .guards import BY_VALUE, INTERNAL, MISSING, Held, Write, layout
from .stack import is_users

_ALL_AT_ONCE = frozenset({"__dict__", "__dir__", "__getstate__", "__reduce__", "__reduce_ex__"})
_LARGEST = 10_000  # items of containers
_LARGEST_ARRAY = 1 << 16  # bytes
_BUILTINS = vars(__import__("builtins"))
_OF_NO_INTEREST = frozenset({"logging", "typing", "abc", "_abc", "functools", "torch._ops", "torch._C"})
_OURS = __name__.split(".")[0]
_DETAILS = frozenset(
    {"__getattribute__", "__doc__", "__module__", "__dict__", "__annotations__", "__weakref__", "__builtins__"}
)
# What functions of C the user's code may call: those of other modules know of a state that is not compared.
_PURE = frozenset(
    {
        *("builtins", "math", "cmath", "operator", "itertools", "functools", "collections", "re"),
        *("sys", "gc", "copyreg", "weakref", "abc", "warnings", "contextvars", "string"),
        *("struct", "json", "codecs", "unicodedata", "binascii", "bisect", "heapq", "typing"),
        *("statistics", "array", "decimal", "pickle", "thread"),
    }
)
_EFFECTS = frozenset({"print", "open", "input", "breakpoint", "globals", "__import__"})


class _Seen:
    """An object whose attributes are watched.

    Attributes
    ----------
    owner
        The object.
    state
        Its dictionary, which may be another's or empty.
    before
        What was in it, and in its slots.
    names
        Attributes that were read.
    """

    __slots__ = ("before", "names", "owner", "slots", "state", "title")

    def __init__(self, owner: Any, title: str) -> None:
        self.owner, self.title = owner, title
        try:
            self.state: dict[str, Any] = object.__getattribute__(owner, "__dict__")
        except AttributeError:
            self.state = {}
        self.before = dict(self.state)
        self.slots = slots(owner)
        self.names: set[str] = set()


class Watch:
    """What is read while it is active.

    Parameters
    ----------
    module
        The module that will be traced.
    arguments
        What else its forward is given that is no tensor.
    """

    def __init__(self, module: nn.Module, arguments: Sequence[Any] = ()) -> None:
        self.frames = Frames(self._entered, self._called)
        self.refusal = ""
        self.tensors: dict[int, Tensor] = {}  # met at places that are held
        self.compares_identity = False  # of whatever, tensors perhaps
        self.asks_layout = False
        self._looked_at: set[int] = set()
        self._own = {id(m) for m in module.modules()}
        self._places: dict[tuple[int, Any], tuple[Any, Any, Any, Any, str]] = {}
        # What the user's code names of others' modules. PyTorch replaces some of it while it traces.
        self._named_only: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = {}
        self._memos: list[Any] = []
        self._seen: dict[int, _Seen] = {}
        self._frozen: dict[int, tuple[Any, Any]] = {}
        self._contents: list[tuple[Any, Any, str]] = []
        self._states: list[tuple[Any, Any, Callable[[], Any], Callable[[Any], Any]]] = []
        self._size = 0
        self._watched: dict[Any, Any] = {}
        self._classes: dict[Any, None] = {}
        self._namespaces: list[tuple[dict[str, Any], str]] = []
        self._names: set[str] = set()
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self._owners: dict[types.CodeType, tuple[dict[str, Any], str, Any, str]] = {}
        self._nested: set[types.CodeType] = set()
        self._ran: set[types.CodeType] = set()
        self._of_classes: set[tuple[Any, str]] = set()
        self._modules = list(module.modules())
        self._arguments = arguments

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it, what this thread reads is held. NotExportable for what can be neither held nor undone."""
        try:
            self._begin()
            with self.frames.watched():
                yield
        finally:
            for cls in self._watched:
                type.__delattr__(cls, "__getattribute__")
            self._watched.clear()

    def _begin(self) -> None:
        self._states.append(("Python's random numbers", random.getstate(), random.getstate, random.setstate))
        self._random(numpy.random.mtrand._rand, "NumPy's random numbers")
        for m in self._modules:
            self._object(m, type(m).__name__).names |= INTERNAL  # compared by the survey
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

    def _note(self, seen: _Seen, name: str, users: bool) -> None:
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

    def _whole(self, seen: _Seen) -> None:
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
            self._places[place] = (holder, key, self._freeze(value, what), value, what)

    def _hold_content(self, value: Any, content: Callable[[Any], Any], what: str) -> None:
        now = content(value)
        holder = functools.partial(content, value)
        self._places[id(holder), None] = (holder, None, self._freeze(now, what), now, what)

    def _refuse(self, cause: str) -> None:
        """At once, before anything is lost; the forward may catch what is raised."""
        self.refusal = self.refusal or cause
        raise NotExportable(cause)

    def _freeze(self, value: Any, what: str) -> Any:
        """A copy that does not change with the value, whose parts that are held by identity are themselves."""
        cls = type(value)
        if cls in BY_VALUE or isinstance(value, (*INERT, type)):
            return self._inert(value, what)
        known = self._frozen.get(id(value))
        if known is not None:
            return known[1]
        self._frozen[id(value)] = value, value
        frozen = self._copy(value, cls, what)
        self._frozen[id(value)] = value, frozen
        return frozen

    def _inert(self, value: Any, what: str) -> Any:
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self._freeze(owner, what)
        elif isinstance(value, types.MethodType):
            self._freeze(value.__self__, what)
            self._freeze(value.__func__, what)
        elif isinstance(value, slice) and not is_plain_slice(value):
            self._refuse(f"{what} is a slice of other things than numbers")
        return value

    def _copy(self, value: Any, cls: Any, what: str) -> Any:
        if isinstance(value, enum.Enum):
            return value
        if cls in (list, tuple, dict) or (cls in (set, frozenset) and not any(isinstance(v, NUMBERS) for v in value)):
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
        if cls.__module__.split(".")[0] == "torch" and not isinstance(value, nn.Module) and not is_of_python(cls):
            pass  # an enumeration or a description
        elif cls.__module__ in _OF_NO_INTEREST:
            pass
        elif cls.__module__.split(".")[0] == _OURS:
            self._freeze(getattr(value, "module", None), what)  # a wrapper
        elif is_of_python(cls):
            self._instance(value, what)
        else:
            self._refuse(f"{what} is or holds a {cls.__module__}.{cls.__qualname__}, which cannot be compared")
        return value

    def _container(self, value: Any, cls: Any, what: str) -> Any:
        if value is _BUILTINS:  # Dynamo, where an op of PyTorch calls it, puts them among the user's globals
            return value
        self._size += len(value)
        if self._size > _LARGEST:
            self._refuse(f"{what} holds more than {_LARGEST} things to compare")
            return value
        if cls is dict:
            self._contents.append((value, dict(value), what))
            return {self._freeze(k, what): self._freeze(v, what) for k, v in list(value.items())}
        if cls in (list, set):
            self._contents.append((value, cls(value), what))
        return cls([self._freeze(v, what) for v in list(value)])

    def hold_value(self, t: Tensor) -> None:
        """Something was made of a tensor's elements, or its form, that is no tensor."""
        what = f"a tensor of shape {tuple(t.shape)}"
        if t.nbytes > _LARGEST_ARRAY:
            self._refuse(f"the forward looks at the values of {what}")
        elif id(t) not in self._looked_at:
            self._looked_at.add(id(t))
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._hold_content(t, tensor_content, what)

    def _array(self, value: Any, what: str) -> None:
        if value.nbytes > _LARGEST_ARRAY:
            self._refuse(f"{what} holds an array of {value.nbytes} bytes")
        else:
            self._hold_content(value, array_content, what)

    def _subclass(self, value: Any, what: str) -> None:
        """An instance of a class like a list, a tuple, a dict or a set."""
        content = next(c for kind, c in CONTENTS if isinstance(value, kind))
        if not isinstance(value, (tuple, frozenset, types.MappingProxyType)):
            raw = next((c for c in (dict, set, array.array, bytearray) if isinstance(value, c)), list)
            self._contents.append((value, copy.copy(value) if raw is array.array else raw(value), what))
        self._hold_content(value, content, what)
        if type(value).__flags__ & HEAP and type(value).__module__ != "collections":
            self._object(value, type(value).__name__)

    def _partial(self, value: Any, what: str) -> None:
        for name in ("func", "args", "keywords"):
            self._hold(value, name, getattr(value, name), what)
        self._freeze(value.__dict__, what)

    def _reference(self, value: Any, what: str) -> None:
        target = value()
        self._hold(value, None, target, what)

    def _variable(self, value: Any, what: str) -> None:
        self._hold_content(value, variable_content, what)

    def _memo(self, value: Any, what: str) -> None:
        self._memos.append(value)
        self._freeze(value.__wrapped__, what)

    def _descriptor(self, value: Any, what: str) -> None:
        for part in parts(value):
            self._freeze(part, what)

    def _random(self, value: Any, what: str) -> None:
        get, put = state_of_random(value)
        self._states.append((what, get(), get, put))

    def _namespace(self, value: types.ModuleType, _what: str) -> None:
        """A module of Python: held is what code names of it."""
        if not is_trusted_module(value.__name__):
            self._add_names(value.__dict__, f"module {value.__name__}")

    def _plain_object(self, value: Any, _what: str) -> None:
        self._object(value, type(value).__name__)

    def _instance(self, value: Any, what: str) -> None:
        self._object(value, type(value).__name__)
        self._hold(value, "__class__", type(value), what)
        if isinstance(value, nn.Module) and id(value) not in self._own:
            for m in value.modules():
                of = self._object(m, type(m).__name__)
                for name in INTERNAL & of.before.keys():
                    of.names.add(name)
                    self._hold(of.state, name, of.before[name], f"{name} of {type(m).__name__}")

    def _object(self, value: Any, title: str) -> _Seen:
        known = self._seen.get(id(value))
        if known is not None:
            return known
        seen = self._seen[id(value)] = _Seen(value, title)
        cls = type(value)
        self._class(cls)
        if not self._put_lookup(cls):
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
        for c in cls.__mro__:
            if c in self._classes or not c.__flags__ & HEAP:
                continue
            self._classes[c] = None
            if is_users_class(c):
                state = dict_of(c)
                for name, value in list(vars(c).items()):
                    for function in functions_of(value):
                        self._owners.setdefault(function.__code__, (state, name, value, c.__name__))
                        self._register(function)
                self._add_names(state, f"class {c.__name__}")

    def _add_names(self, state: dict[str, Any], title: str) -> None:
        self._namespaces.append((state, title))
        self._named(state, title, self._names)

    def _named(self, state: dict[str, Any], title: str, names: set[str]) -> None:
        for name in names & state.keys():
            if name not in _DETAILS:
                self._hold(state, name, state[name], f"attribute {name} of {title}")

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
        if function.__dict__ and not is_trusted_module(function.__module__):
            self._add_names(function.__dict__, f"function {function.__name__}")

    def _hold_function(self, function: types.FunctionType, trusted: bool) -> None:
        name = function.__name__
        if trusted and is_trusted_module(function.__module__):
            return
        if not trusted:
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                self._hold(function, part, getattr(function, part), f"{part} of {name}")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if variable != "__class__":
                self._hold(cell, "cell_contents", of_cell(cell), f"variable {variable} of {name}")

    def _entered(self, code: types.CodeType, frame: types.FrameType) -> None:
        """Hold what code can read by name, before it runs for the first time."""
        if is_importing(frame):
            return
        if code not in self._functions and code not in self._nested and not self._locate(code, frame):
            if code.co_flags & inspect.CO_GENERATOR:  # one of another time, that is closed as garbage
                return
            self._refuse(f"it is not known where the forward has {code.co_qualname} from")
        self._ran.add(code)
        self.compares_identity |= compares_identity(code, () if code in self._nested else code.co_freevars)
        nested = [code]
        while nested:
            inner = [c for c in nested.pop().co_consts if isinstance(c, types.CodeType)]
            self._nested.update(inner)
            nested += inner
        names = {*code.co_names, *[c for c in code.co_consts if type(c) is str and c.isidentifier()]}
        state, computed = frame.f_globals, computes_names(code)
        title = f"module {state.get('__name__')}"
        for name in code.co_names:
            if name in state:
                value = state[name]
                self._hold(state, name, value, f"global {name} of {title}")
            elif name in _BUILTINS:
                value = _BUILTINS[name]
                self._named_only[id(_BUILTINS), name] = (_BUILTINS, name, f"builtin {name}")
            else:
                value = sys.modules.get(name)
            if isinstance(value, types.ModuleType):
                self._module(value, names)
            elif computed and isinstance(value, type):
                for c in filter(is_users_class, value.__mro__):
                    self._named(dict_of(c), f"class {c.__name__}", set(vars(c)))
        new = names - self._names
        self._names |= new
        for namespace, of in self._namespaces:
            self._named(namespace, of, new)
        for function in self._functions.get(code, ()):
            self._hold_function(function, False)
        if code in self._owners:
            of_class, name, value, title = self._owners[code]
            self._hold(of_class, name, value, f"attribute {name} of class {title}")

    def _module(self, module: types.ModuleType, names: set[str]) -> None:
        """What code names of a module of Python, and of those in it."""
        found, pending = {id(module)}, [module]
        while pending:
            state = pending.pop().__dict__
            trusted = is_trusted_module(state.get("__name__"))
            for name in names & state.keys():
                value = state[name]
                if isinstance(value, types.ModuleType):
                    pending += [] if id(value) in found else [value]
                    found.add(id(value))
                elif value is sys.modules:
                    continue
                what = f"{name} of module {state.get('__name__')}"
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
        owner = getattr(function, "__self__", None)
        if isinstance(owner, types.ModuleType):
            module = owner.__name__
        elif isinstance(owner, type):  # of the class that has it, as torch's Function has apply
            module = next((c for c in owner.__mro__ if function.__name__ in vars(c)), owner).__module__
        elif type(owner).__module__ == "_io":
            self._refuse(f"the forward calls {function.__name__}() of a file")
            return
        elif type(owner).__name__ == "PyCapsule":
            module = function.__module__
        else:
            return
        if module == "builtins" and function.__name__ in _EFFECTS:
            self._refuse(f"the forward calls {function.__name__}()")
        top = module.split(".")[0].lstrip("_")
        if top not in _PURE and not (top in ("torch", "numpy") and ".random" not in module):
            self._refuse(f"the forward calls {module}.{function.__name__}()")

    # Afterwards

    def changed(self) -> str:
        """What was changed meanwhile; NotExportable for what a memo gives to anybody who asks it."""
        for memo in self._memos:
            if not is_trusted_module(memo.__module__) and not all(map(is_constant, remembered(memo))):
                self._refuse(f"{memo.__qualname__}() remembers objects, which may change")
        for value, before, what in self._contents:
            if not same_content(value, before):
                return what
        for seen in self._seen.values():
            if seen.slots and not same_items(slots(seen.owner), seen.slots):
                return f"an attribute of {seen.title}"
        written = {id(seen.state) for seen in self._seen.values()}
        for holder, key, _, value, what in self._places.values():
            if id(holder) in written:
                continue
            if isinstance(holder, dict) and holder.get(key, MISSING) is not value:
                return what
            if isinstance(holder, types.CellType) and of_cell(holder) is not value:
                return what
        for what, before, get, _ in self._states:
            if not same_state(get(), before):
                return what
        return ""

    def writes(self) -> list[Write]:
        """Attributes of objects other than the module and its submodules that were set meanwhile."""
        return [
            Write(seen.owner, name, seen.before.get(name, MISSING), seen.state.get(name, MISSING))
            for seen in self._seen.values()
            if id(seen.owner) not in self._own
            for name in {**seen.before, **seen.state}
            if seen.state.get(name, MISSING) is not seen.before.get(name, MISSING)
        ]

    def restore(self) -> None:
        """Put back what was changed meanwhile."""
        for value, before, _ in self._contents:
            if not same_content(value, before):
                refill(value, before)
        for seen in self._seen.values():
            if id(seen.owner) not in self._own and not same_items(seen.state, seen.before):
                seen.state.clear()
                seen.state.update(seen.before)
            for name, value in seen.slots.items():
                if object.__getattribute__(seen.owner, name) is not value:
                    object.__setattr__(seen.owner, name, value)
        classes = {id(dict_of(c)): c for c in self._classes}
        for holder, key, _, value, _ in self._places.values():
            if isinstance(holder, dict) and holder.get(key, MISSING) is not value:
                if id(holder) in classes:
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
        overwritten = {(id(w.module.__dict__), w.name) for w in writes if not w.plain}
        places = [
            (h, k, frozen, what) for (h, k, frozen, _, what) in self._places.values() if (id(h), k) not in overwritten
        ]
        places += [(state, name, state.get(name, MISSING), what) for state, name, what in self._named_only.values()]
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
        for m in self._modules:
            children = m._modules
            places += [(children, n, child, f"submodule {n} of {type(m).__name__}") for n, child in children.items()]
        keys = [s.state for s in self._seen.values() if s.names and s.state]
        keys += [dict_of(c) for c in self._classes]
        return Held(places, keys)


_KINDS: tuple[tuple[Any, Callable[[Watch, Any, str], None]], ...] = (
    (types.ModuleType, Watch._namespace),
    (types.SimpleNamespace, Watch._plain_object),
    (functools.partial, Watch._partial),
    (weakref.ref, Watch._reference),
    (ContextVar, Watch._variable),
    ((property, staticmethod, classmethod, functools.cached_property, functools.partialmethod), Watch._descriptor),
    (Memo, Watch._memo),
    ((random.Random, numpy.random.RandomState, numpy.random.Generator), Watch._random),
    (numpy.ndarray, Watch._array),
    (tuple(itertools.chain(*[k if isinstance(k, tuple) else (k,) for k, _ in CONTENTS])), Watch._subclass),
)
