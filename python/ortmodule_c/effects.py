"""Which functions of C a forward may call: those that know of nothing but their arguments."""

import _random
import re
import types
from collections.abc import Container
from typing import Any

# Modules of C, without underscores, whose functions the user's code may call.
_PURE = frozenset(
    {
        *("builtins", "math", "cmath", "operator", "itertools", "functools", "collections", "re"),
        *("sys", "copyreg", "weakref", "abc", "warnings", "contextvars", "string", "torch", "numpy"),
        *("struct", "json", "codecs", "unicodedata", "binascii", "bisect", "heapq", "typing"),
        *("statistics", "array", "pickle", "thread"),
    }
)
# What of them acts or looks elsewhere nevertheless.
_EFFECTS = frozenset({"print", "open", "input", "breakpoint", "globals", "__import__", "_getframe", "_abc_register"})
# Those that act, if Python's own library calls them for the user's code.
_ACTING = frozenset({"posix", "io", "time", "socket", "uuid", "signal", "fcntl", "select", "posixsubprocess"})
_THREADS = frozenset({"start_new_thread", "get_ident", "_set_sentinel"})
# PyTorch's own state, but what each call is compared by or a trace carries.
_STATE_OF_TORCH = re.compile(r"_?(get|set)_(?!autocast|default_dtype|grad_enabled|nested)\w+|fromfile|from_file|memmap")


def effect(function: Any, generators: Container[int]) -> str:
    """What a call of a function of C by the user's code would do or ask besides its arguments, or nothing.

    Parameters
    ----------
    generators
        The generators of random numbers, by id, whose state is compared.
    """
    owner = getattr(function, "__self__", None)
    name = function.__name__
    if isinstance(owner, _random.Random):
        return "" if id(owner) in generators else f"calls {name}() of a generator of random numbers"
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
    elif isinstance(owner, type):  # of the class that has it, as torch's Function has apply
        module = next((c for c in owner.__mro__ if name in vars(c)), owner).__module__
    elif type(owner).__module__ == "_io":
        return f"calls {name}() of a file"
    elif type(owner).__name__ == "PyCapsule":
        module = function.__module__
    else:
        return ""
    top = module.split(".")[0].lstrip("_")
    if top == "builtins":
        return f"calls {name}()" if name in _EFFECTS else ""
    impure = top not in _PURE or name in _EFFECTS or (top == "thread" and name in _THREADS)
    if top in ("torch", "numpy"):
        impure = ".random" in module or _STATE_OF_TORCH.fullmatch(name) is not None
    return f"calls {module}.{name}()" if impure else ""


def acts(function: Any) -> bool:
    """Whether a function of C that Python's own library calls acts or looks outside of the process's objects."""
    top = module_of(function).lstrip("_")
    return (top in _ACTING and function.__name__ != "fspath") or (top == "thread" and function.__name__ in _THREADS)


def module_of(function: Any) -> str:
    """The name of the module of C that has a function, or the class of the object that it is a method of."""
    module: str = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
    return module
