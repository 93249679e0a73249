"""ORTModule: a module that trains through the C core."""

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import _C
from .arguments import Arguments
from .builder import DTYPES
from .errors import NotExportable, ORTModuleError
from .flatten import flatten
from .function import Call
from .graphs import Graph, Graphs, Key, device_refusal, parameter_refusal
from .guards import Survey, ambient, survey, tensor_key
from .options import DebugOptions, logger
from .process import one_thread_after_fork, tracing_lock
from .report import FallbackRecord, FallbackReport

_DELEGATED = (
    "_apply",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "add_module",
    "apply",
    "children",
    "extra_repr",
    "get_buffer",
    "get_extra_state",
    "get_parameter",
    "get_submodule",
    "load_state_dict",
    "modules",
    "named_buffers",
    "named_children",
    "named_modules",
    "named_parameters",
    "parameters",
    "buffers",
    "register_buffer",
    "register_module",
    "register_parameter",
    "requires_grad_",
    "set_extra_state",
    "state_dict",
    "zero_grad",
)
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OWN = "_ort_"


@dataclass(slots=True)
class _Attempt:
    """How far a call came before PyTorch had to take it."""

    key: Key | None = None
    graph: Graph | None = None
    call: Call | None = None


class ORTModule(nn.Module):
    """Runs a module's forward and backward in the C core; otherwise behaves as the module does.

    Parameters
    ----------
    module
        The module to train. Parameters, buffers and submodules stay its own, under the same names.
    debug_options
        Logging, saved ONNX files, what to do about what cannot run here.

    Examples
    --------
    >>> model = ORTModule(model)
    >>> loss = model(x).sum()
    >>> loss.backward()
    """

    def __init__(self, module: nn.Module, debug_options: DebugOptions | None = None) -> None:
        if isinstance(module, ORTModule):
            module = module.module
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, expected torch.nn.Module")
        if isinstance(module, nn.DataParallel):
            raise ORTModuleError(
                "torch.nn.DataParallel cannot be wrapped; wrap its module, or use DistributedDataParallel outside"
            )
        self.__dict__["_ort_module"] = module
        super().__init__()
        options = debug_options if debug_options is not None else DebugOptions()
        logger.setLevel(options.python_level)
        self._ort_options = options
        self._ort_report = FallbackReport(options.fallback)
        self._ort_facts: _C.Facts | None = None  # of the last call
        self._ort_to_verify = options.verify  # training steps
        self._ort_arguments = Arguments(module)
        self._ort_graphs = Graphs(module, options, self._ort_report, self._ort_arguments)
        for registry in _SHARED:
            self.__dict__[registry] = getattr(module, registry)

    # The call

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The module's forward, with the signature of the user's.

        Made at each access: if the wrapper kept it, the two would keep each other.
        """
        return _forward(self)

    @torch.compiler.disable
    def _ort_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._ort_module
        one_thread_after_fork()
        if self._ort_to_verify and torch.is_grad_enabled():
            self._ort_verify(args, kwargs)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise ORTModuleError(
                "ORTModule cannot run under torch.func transforms or forward-mode differentiation; use .module there"
            )
        attempt, cause = _Attempt(), ""
        try:
            self._ort_prepare(attempt, args, kwargs)
        except Exception as error:  # whatever it is, PyTorch can run the module, or raises by itself
            cause = self._ort_report.cause(type(module).__name__, error)
        self._ort_report.warn()
        if attempt.call is not None:
            assert attempt.graph is not None
            try:
                return attempt.graph.run(attempt.call)
            except IndexError as error:  # PyTorch raises it by itself, as the class that is its own
                cause = str(error)
            except NotExportable as error:  # an op that runs in PyTorch gives what it was not traced to give
                cause = self._ort_report.cause(type(module).__name__, error)
        result = module(*args, **kwargs)  # bad input ends here, and says nothing against the module
        if cause:
            self._ort_graphs.give_up(attempt.key, cause, attempt.graph)
            self._ort_report.warn()
        return result

    def _ort_prepare(self, attempt: "_Attempt", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """All that comes before the first number is computed: find or make the graph, and its plan for this call."""
        module = self._ort_module
        with tracing_lock:  # a module that another thread traces holds stand-ins for its parameters
            now = survey(module, self._ort_facts)
            self._ort_facts = now.facts
            leaves, spec = flatten(self._ort_arguments.normal(args, kwargs))
            for i, t in enumerate(leaves):
                plain = type(t) is Tensor and t.layout is torch.strided and t.dtype in DTYPES
                if not plain or t.is_meta or t.is_nested:
                    _check_tensor(t, self._ort_arguments.paths(spec)[i])
            attempt.key = key = (spec, (tensor_key(leaves), now.facts, ambient()))
            attempt.graph = graph = self._ort_graphs.find(key, tuple([t.shape for t in leaves]))
            if graph is None:
                attempt.graph = graph = self._ort_export(key, leaves, now)
        if graph.runner is not None:
            attempt.call = graph.runner.prepare([*leaves, *now.parameters, *now.buffers])

    def _ort_verify(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the step that begins with this call with PyTorch's."""
        from .verify import compare

        left, self._ort_to_verify = self._ort_to_verify - 1, 0  # the step is run through this module
        try:
            found = compare(self, args, kwargs)
        except ORTModuleError as error:
            self._ort_report.tell(f"a step of {type(self._ort_module).__name__} cannot be compared: {error}")
            return
        finally:
            self._ort_to_verify = left
        if found.ok is None:
            self._ort_report.tell(f"a step of {type(self._ort_module).__name__} cannot be compared\n{found}")
        elif found.ok:
            logger.info("%s: verified\n%s", type(self._ort_module).__name__, found)
        else:
            name = type(self._ort_module).__name__
            self._ort_report.check(name, f"a step differs from PyTorch's\n{found}")
            self._ort_report.tell(f"a step of {name} differs from PyTorch's\n{found}")

    def _ort_export(self, key: Key, leaves: list[Tensor], now: Survey) -> Graph:
        """A new graph for this call; NotExportable if there can be none."""
        spec, _ = key
        state = [*now.parameters, *now.buffers]
        paths = self._ort_arguments.paths(spec)
        refusal = (
            now.refusal
            or _mixed_devices(leaves, paths, state)
            or device_refusal([*leaves, *state])
            or parameter_refusal(state)
        )
        if refusal:
            raise NotExportable(refusal)
        what = self._ort_graphs.churn(key, tuple([t.shape for t in leaves]))
        if what is not None:
            self._ort_report.tell(
                f"{type(self._ort_module).__name__} is exported anew each time {what} takes a new value; "
                "a tensor may change without that"
            )
        return self._ort_graphs.make(key, leaves, paths, now)

    def fallback_report(self) -> list[FallbackRecord]:
        """What runs in PyTorch instead of the C core, and why."""
        return self._ort_report.records()

    def stats(self) -> dict[str, float]:
        """What compiling has cost so far and what a run holds.

        Returns
        -------
        dict
            ``graphs`` exported and ``export_seconds`` spent on it; ``plans_built``, ``plan_hits``,
            ``plans_evicted`` and the seconds of each stage of planning, ``bind_seconds`` to
            ``plan_seconds``; ``plans_cached``, ``runs_live`` and the ``constant_bytes`` that plans hold
            now; ``arena_bytes`` of the largest plan used.
        """
        return self._ort_graphs.stats()

    # The wrapped module seen through the wrapper

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._ort_module

    @property
    def training(self) -> bool:
        """The mode of the user's module."""
        return self._ort_module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_parameters" in self.__dict__:
            self._ort_module.training = mode

    def train(self, mode: bool = True) -> "ORTModule":
        """Set the mode of the user's module."""
        self._ort_module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["_ort_module"]
        value = getattr(module, name)
        function = getattr(type(module), name, None)
        if not isinstance(function, types.FunctionType) or getattr(value, "__self__", None) is not module:
            return value
        # A method that calls self(...) then runs here; one that asks for the class of self needs its own.
        code = inspect.unwrap(function).__code__
        asks = {"type", "__class__"}.intersection((*code.co_names, *code.co_freevars))
        return value if asks else types.MethodType(function, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # as torch.nn.utils.parametrize does
            raise ORTModuleError("an ORTModule keeps its class; do this to its .module instead")
        if name.startswith(_OWN) or name in self.__dict__ or "_ort_graphs" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._ort_module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._ort_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._ort_module[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ort_module[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._ort_module[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._ort_module

    def __iter__(self) -> Any:
        return iter(self._ort_module)

    def __len__(self) -> int:
        return len(self._ort_module)

    def __bool__(self) -> bool:
        return bool(self._ort_module)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._ort_module)})

    def __repr__(self) -> str:
        return f"ORTModule({self._ort_module!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        own_hooks = {n: v for n, v in self.__dict__.items() if "_hooks" in n and n not in _SHARED}
        return type(self), (self._ort_module, self._ort_options), own_hooks

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def _replicate_for_data_parallel(self) -> Any:
        raise ORTModuleError("torch.nn.DataParallel cannot wrap an ORTModule; use DistributedDataParallel")


def _delegate(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(nn.Module, name))
    def method(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._ort_module, name)(*args, **kwargs)
        return self if result is self._ort_module else result

    return method


for _name in _DELEGATED:
    setattr(ORTModule, _name, _delegate(_name))


def _forward(wrapper: ORTModule) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        traced = torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing()
        # The flag of an export is seen by all threads, the mode that traces by its own only.
        if traced or (torch.compiler.is_exporting() and torch._C._len_torch_dispatch_stack() > 0):
            return wrapper._ort_module(*args, **kwargs)
        return wrapper._ort_run(args, kwargs)

    original = wrapper._ort_module.forward
    forward.__doc__ = original.__doc__
    forward.__wrapped__ = original  # type: ignore[attr-defined]  # for inspect.signature
    return forward


def _check_tensor(t: Tensor, name: str) -> None:
    """NotExportable, with the argument's name, for a tensor that no graph can take."""
    if type(t) not in (Tensor, nn.Parameter):
        raise NotExportable(f"{name} is a {type(t).__name__}, a subclass of torch.Tensor")
    if t.is_nested:
        raise NotExportable(f"{name} is a nested tensor")
    if t.layout is not torch.strided or t.is_quantized:
        raise NotExportable(f"{name} has layout {t.layout} and dtype {t.dtype}, and is not dense")
    if t.is_meta:
        raise NotExportable(f"{name} is on the meta device and has no elements")
    if t.dtype not in DTYPES:
        raise NotExportable(f"{name} has dtype {t.dtype}, not one of {', '.join(map(str, DTYPES))}")


def _mixed_devices(leaves: list[Tensor], paths: list[str], state: list[Tensor]) -> str:
    """Which tensor is on another device than the rest, or nothing."""
    device = (state or leaves)[0].device if state or leaves else None
    for t, path in zip(leaves, paths, strict=True):
        if t.device != device:
            return f"{path} is on {t.device}, the module's tensors are on {device}"
    other = next((t.device for t in state if t.device != device), None)
    return "" if other is None else f"the module's tensors are on {device} and {other}"
