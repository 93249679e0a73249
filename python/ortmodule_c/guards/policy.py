"""Which functions of others a forward may call while it is traced: those known to keep nothing and to look at nothing.

A graph is made by one call and stands for all later ones. A function that looks at the world (files, the environment,
the time, threads) or changes it would be asked once only. Which functions do is not known of all, so this is a list of
those that do not; what is not in it is a reason, by name, not to trace. Asked is for what the user's code itself calls:
PyTorch, NumPy and Python's library may call one another.
"""

import collections
import functools
import inspect
import itertools
import os
import random
import re
import threading
import types
from typing import Any

import numpy
import torch
from torch import Tensor

from ..stack import AS_PYTORCH
from .frames import is_trusted

LOCKS = type(threading.Lock()), type(threading.RLock())
_ALL = frozenset({"*"})
# Modules of C, without a leading underscore, and the functions in them.
_OF_C: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            *("math", "cmath", "operator", "itertools", "functools", "collections", "re", "sre", "string", "struct"),
            *("json", "codecs", "unicodedata", "binascii", "bisect", "heapq", "typing", "statistics", "array"),
            *("weakref", "copyreg", "random", "types"),
        ),
        _ALL,
    ),
    "builtins": frozenset(
        {
            *("abs", "all", "any", "ascii", "bin", "callable", "chr", "compile", "delattr", "dir", "divmod", "eval"),
            *("exec", "format", "getattr", "hasattr", "hash", "hex", "id", "isinstance", "issubclass", "iter", "len"),
            *("locals", "max", "min", "next", "oct", "ord", "pow", "repr", "round", "setattr", "sorted", "sum", "vars"),
            "__build_class__",
        }
    ),
    "abc": frozenset({"get_cache_token"}),
    "posix": frozenset({"fspath"}),
    "sys": frozenset({"intern", "exc_info"}),
    "pickle": frozenset({"dumps", "loads"}),
    # Of PyTorch's other functions there, most read or set what its operators go by.
    "torch._C": frozenset(
        {
            *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "is_autocast_enabled"),
            *("get_autocast_dtype", "is_autocast_cpu_enabled", "get_autocast_cpu_dtype", "is_autocast_available"),
            *("get_autocast_gpu_dtype", "_get_tracing_state", "_is_tracing", "_parse_to"),
            *("_log_api_usage_once", "_is_any_autocast_enabled", "_get_deterministic_algorithms", "is_anomaly_enabled"),
            *("_jit_internal", "_has_torch_function", "_has_torch_function_unary", "_has_torch_function_variadic"),
            *("_is_torch_function_enabled", "_dispatch_keys", "_add_docstr"),
            "_get_privateuse1_backend_name",
        }
    ),
}
_OPERATORS_OF_TORCH = ("torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special", "torch._C._sparse")
_FILES_OF_NUMPY = frozenset({"fromfile", "tofile", "dump", "set_string_function"})
# Of these objects of C the methods change or read what is in them, which is compared, or nothing.
_RECEIVERS: tuple[type, ...] = (
    *(str, bytes, bytearray, memoryview, list, tuple, dict, set, frozenset, int, float, complex, range, slice, type),
    *(BaseException, collections.deque, random.Random, property, classmethod, staticmethod),
    *(re.Pattern, re.Match, types.GeneratorType, types.MappingProxyType, types.FunctionType, types.MethodType),
    *(type({}.keys()), type({}.values()), type({}.items()), itertools.count, itertools.chain, object),
)
_OF_RECEIVERS = frozenset(
    {"builtins", "collections", "re", "array", "functools", "itertools", "operator", "_random", "_struct"}
)
# Modules of Python's library, and what of them is not so: the first part of a qualified name.
_OF_PYTHON: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            *("abc", "collections", "collections.abc", "_collections_abc", "copy", "copyreg", "dataclasses", "enum"),
            *("fractions", "functools", "numbers", "operator", "heapq", "bisect", "re", "string", "textwrap", "types"),
            *("typing", "weakref", "_weakrefset", "keyword", "reprlib", "posixpath", "genericpath", "statistics"),
            *("re._compiler", "re._parser", "json", "json.decoder", "json.encoder", "colorsys", "typing_extensions"),
            *("importlib", "importlib._bootstrap", "_frozen_importlib", "importlib._bootstrap_external"),
            *("_frozen_importlib_external", "zipimport"),
        ),
        frozenset(),
    ),
    "contextlib": frozenset({"redirect_stdout", "redirect_stderr", "_RedirectStream", "chdir"}),
    "inspect": frozenset(
        {"stack", "trace", "getouterframes", "getinnerframes", "getsource", "getfile", "getmembers", "getattr_static"}
    ),
    "abc": frozenset({"ABCMeta.register"}),
    "string": frozenset({"Formatter"}),
    "posixpath": frozenset({"abspath", "realpath", "expanduser", "expandvars", "ismount", "lexists", "relpath"}),
    "genericpath": frozenset(
        {"exists", "isfile", "isdir", "getsize", "getmtime", "getatime", "getctime", "samefile", "sameopenfile"}
    ),
}
# Functions elsewhere whose state is compared: `os.environ`.
_SINGLE = frozenset(
    {
        *((os.__name__, name) for name in ("_Environ", "getenv", "fspath", "_createenviron", "getenvb")),
        *(("pathlib", name) for name in ("PurePath", "PurePosixPath", "_PosixFlavour")),
    }
)
_OF_NUMPY = frozenset(
    {
        *("fromnumeric", "numeric", "shape_base", "function_base", "einsumfunc", "multiarray", "_methods", "_dtype"),
        *("numerictypes", "getlimits", "umath", "index_tricks", "twodim_base", "type_check", "ufunclike", "mixins"),
        *("stride_tricks", "arraysetops", "nanfunctions", "histograms", "arraypad", "linalg", "_linalg", "polynomial"),
        *("_pocketfft", "helper", "array_api_extra", "overrides", "numpy"),
    }
)
_OF_TORCH = (
    *("torch.nn", "torch.functional", "torch._tensor", "torch.autograd", "torch.amp", "torch.cpu.amp"),
    *("torch.cuda.amp", "torch.utils.checkpoint", "torch.utils._pytree", "torch.utils._contextlib", "torch.overrides"),
    *("torch.utils._device", "torch.utils.hooks", "torch._jit_internal", "torch.jit", "torch.distributions"),
    *("torch._ops", "torch.linalg", "torch.masked", "torch.sparse", "torch.nested", "torch.fx", "torch._dynamo"),
    *("torch._compile", "torch._higher_order_ops", "torch.library", "torch._library", "torch._refs", "torch.random"),
    *("torch._prims_common", "torch._C", "torch.types", "torch.func", "torch._functorch", "torch.return_types"),
    *("torch.ao", "torch.signal", "torch._lowrank", "torch._subclasses", "torch._classes", "torch._linalg_utils"),
    *("torch.utils._python_dispatch", "torch._VF", "torch._torch_docs", "torch._decomp", "torch.torch_version"),
    *("torch.utils._functools", "torch.utils.weak", "torch.export", "torch._export", "torch.testing"),
)
_TOP_OF_TORCH = frozenset(
    {
        *("SymInt", "SymFloat", "SymBool", "sym_not", "sym_float", "sym_int", "sym_max", "sym_min", "sym_ite"),
        *("sym_sum", "_sym_sqrt", "is_tensor", "is_storage", "typename", "get_default_device", "__getattr__"),
        *("are_deterministic_algorithms_enabled", "cond", "vmap"),
    }
)
# What PyTorch finds when it is started, and keeps.
_OF_THE_MACHINE = frozenset({"is_available", "is_built", "device_count"})
# What all calls are compared by anyway, whoever asks.
_OF_ALL_CALLS = frozenset({("torch.distributed.distributed_c10d", "is_initialized")})
# What these remember is what is installed, or follows from their arguments alone: modules, and whole packages.
_REMEMBER_WHAT_STAYS = frozenset(
    {
        *("transformers.utils.import_utils", "diffusers.utils.import_utils", "lightning_utilities.core.imports"),
        *("packaging", "PIL"),
    }
)
# These ask whether a tracer runs. Of whoever has code for that, it computes the same.
_ASKS_FOR_TRACER = frozenset({"is_compiling", "is_exporting", "is_dynamo_compiling", "is_fx_tracing"})
_KNOWS_TRACERS = frozenset(
    {
        *("transformers", "diffusers", "timm", "torchvision", "peft", "accelerate", "torch_geometric"),
        *("segmentation_models_pytorch", "kornia", "torchrl", "tensordict"),
    }
)


def refusal_of_c(function: Any) -> str:
    """The name of a function of C, bound if it is a method, that a forward may not call, or nothing."""
    name, owner = function.__name__, getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
    elif isinstance(owner, type):  # of the class that has it, as torch's Function has apply
        module = next((c for c in owner.__mro__ if name in vars(c)), owner).__module__
    elif owner is None or type(owner).__name__ == "PyCapsule" or type(owner).__module__ == "pybind11_builtins":
        module = function.__module__ or ""
    else:
        return _refusal_of_method(owner, name)
    short = module.lstrip("_")
    if short.split(".")[0] == "numpy":
        allowed = "random" not in module and name not in _FILES_OF_NUMPY
    elif module == "torch" and owner is None:
        allowed = True  # an operator
    elif short.split(".")[0] == "torch":
        allowed = module.startswith(_OPERATORS_OF_TORCH) or isinstance(owner, type) or name in _OF_C["torch._C"]
        allowed |= module.startswith("torch._C._functorch")
    else:
        names = _OF_C.get(short.split(".")[0], frozenset())
        allowed = names is _ALL or name in names
    return "" if allowed else f"{module}.{name}()"


def _refusal_of_method(owner: Any, name: str) -> str:
    cls = type(owner)
    if isinstance(owner, (numpy.ndarray, numpy.generic)):
        allowed = name not in _FILES_OF_NUMPY
    elif isinstance(owner, torch.Generator):
        allowed = False
    elif isinstance(owner, LOCKS):  # what is done while it is held is seen, and one that is held is let go
        allowed = name in ("__enter__", "__exit__", "release")
    else:
        # A class of Python has methods of C of its bases only.
        base = next(
            (c for c in cls.__mro__ if name in vars(c) and not isinstance(vars(c)[name], types.FunctionType)), cls
        )
        allowed = isinstance(owner, Tensor) or base in _RECEIVERS or base.__module__.split(".")[0] == "torch"
        allowed |= base.__module__ in _OF_RECEIVERS
        allowed &= name != "cache_clear"
    return "" if allowed else f"{name}() of a {cls.__module__}.{cls.__qualname__}"


def refusal_of_python(module: str, name: str, caller: str) -> str:
    """The same of a function of Python's library, NumPy or PyTorch in `module`, with its qualified name.

    Parameters
    ----------
    caller
        The module of the code that calls it.
    """
    top, last = module.split(".", maxsplit=1)[0], module.rsplit(".", maxsplit=1)[-1]
    first = name.split(".", maxsplit=1)[0]
    if name.endswith(".__del__"):
        allowed = True  # of another time
    elif name == "Tensor.__hash__":
        allowed = False  # by identity
    elif top == "numpy":
        allowed = ".random" not in module and last in _OF_NUMPY
    elif top == "torch":
        allowed = _is_pure_of_torch(module, first, caller)
    elif top in ("ortmodule_c", "sympy", "mpmath", *AS_PYTORCH) or top.startswith("namedtuple_"):
        allowed = True
    else:
        acting = _OF_PYTHON.get(module)
        allowed = (acting is not None and not acting & {first, name}) or (module, first) in _SINGLE
    return "" if allowed else f"{module}.{name}()"


def _is_pure_of_torch(module: str, name: str, caller: str) -> bool:
    if name in _ASKS_FOR_TRACER:
        return knows_tracers(caller)
    if name in _OF_THE_MACHINE or (module, name) in _OF_ALL_CALLS:
        return True
    if module == "torch":
        return name in _TOP_OF_TORCH or name.startswith(("_check", "_assert"))
    return any(module == m or module.startswith(m + ".") for m in _OF_TORCH)


def remembers_what_stays(memo: Any) -> bool:
    """Whether the results that a function remembers are such as do not change."""
    module = str(memo.__module__)
    return not _REMEMBER_WHAT_STAYS.isdisjoint((module, module.split(".", maxsplit=1)[0]))


def knows_tracers(module: str) -> bool:
    """Whether a module of Python is of a library that computes the same where it is traced."""
    return module.split(".", maxsplit=1)[0] in _KNOWS_TRACERS


_MISSED = frozenset({"ABCMeta.register", "set_default_dtype"})
# What is asked of tensors that the graphs of TorchDynamo answer otherwise than eager does.
ASKED_OF_TENSORS = frozenset({"grad_fn", "is_leaf", "retains_grad", "_base", "_backward_hooks"})


def is_missed_by_dynamo(module: str, name: str) -> bool:
    """Whether the graphs of TorchDynamo would be stale too, or see another answer than eager does."""
    first, last = name.split(".", maxsplit=1)[0], name.rsplit(".", maxsplit=1)[-1]
    return last in _ASKS_FOR_TRACER or (module == "random" and first == "Random") or name in _MISSED


def in_place_of_pytorch() -> dict[types.CodeType, str]:
    """Code of somebody else's that runs under the names of functions of PyTorch's, and these.

    Where a tracer looks on, a function of PyTorch's hands on what is called by its name, which is what is in its place.
    """
    named = (("torch.nn.functional", torch.nn.functional), ("torch", torch), ("torch.Tensor", Tensor))
    return {
        function.__code__: f"{of}.{name}"
        for of, namespace in named
        for name, value in [*vars(namespace).items()]
        if (function := _called(value)) and not is_trusted(function.__code__.co_filename, function.__globals__)
    }


def _called(value: Any) -> types.FunctionType | None:
    """What of Python runs first where it is called."""
    while isinstance(value, functools.partial):
        value = value.func
    if not isinstance(value, (types.FunctionType, type)):
        value = inspect.getattr_static(type(value), "__call__", None)
    return value if isinstance(value, types.FunctionType) else None


def named_and_missed(code: types.CodeType) -> str:
    """What a user's code names that TorchDynamo, which has traced it, sees otherwise than eager; or nothing."""
    named = sorted((ASKED_OF_TENSORS | _ASKS_FOR_TRACER | _MISSED) & {*code.co_names})
    if not named:
        return ""
    module = inspect.getmodule(code)
    name = "" if module is None else module.__name__
    return "" if is_trusted(code.co_filename, {"__name__": name}) or knows_tracers(name) else named[0]
