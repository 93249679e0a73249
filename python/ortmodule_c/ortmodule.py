"""ORTModule: a module that trains through the C core."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from . import _C
from .arguments import Arguments
from .budget import MemoryBudget
from .dtypes import CARRIERS, DTYPES, held_whole, holds
from .errors import NotExportable, NotInitialized, NotRunnable, ORTModuleError, TooManyGraphs
from .flatten import flatten_call
from .guards.given import holds_array
from .guards.held import Scan, ambient, mode_refusal, scan, tensor_key
from .one_call import is_for_one_call
from .options import DebugOptions, logger
from .process import NOT_ALONE, one_thread_after_fork, tracing, tracing_lock
from .profile import Profile
from .report import FallbackRecord, FallbackReport
from .signals import Interrupted, waiting
from .stack import users_line
from .stats import totals
from .terms import Precision, Terms
from .wrapper import Wrapper

if TYPE_CHECKING:
    from .dynamo.second_way import SecondWay
    from .function import Call
    from .graphs import Graph, Graphs, Key


@dataclass(slots=True)
class _Attempt:
    """How far a call came before PyTorch had to take it."""

    key: Key | None = None
    graph: Graph | None = None
    computed: list[Tensor] | None = None  # what the graph is given of numbers
    made: bool = False  # the graph
    call: Call | None = None
    ran: bool = False  # the graph, and what it raised is of the values that it was given
    odd: bool = False  # the call: why its graph does not take it says nothing of others


class ORTModule(Wrapper):
    """Runs a module's forward and backward in the C core; otherwise behaves as the module does.

    It is an instance of the module's class too, as `isinstance` and ``__class__`` tell it; `type` tells it apart.

    Parameters
    ----------
    module
        The module to train. Parameters, buffers and submodules stay its own, under the same names. Of a wrapper it is
        the module, with the wrapper's hooks, and its options where none are given.
    debug_options
        Logging, saved ONNX files, what to do about what cannot run here.
    precision
        What the module computes in. ``"bf16"`` and ``"fp16"`` run its forward as under :class:`torch.autocast` of that
        dtype, wherever it is called: products in 16 bits, what needs the range in float32. Parameters stay as they
        are, in float32 those that the optimizer updates. Floating outputs of 16 bits come out in float32, in
        containers too, so that a loss computed of them outside is as exact as one inside. ``"fp32"`` runs it with
        autocast off, so that each op has the dtype of its operands, whatever the caller has on. None, the default,
        leaves that to the caller, and outputs as they are. All hold in evaluation too, and where PyTorch runs the
        module. With ``"fp16"`` small gradients become 0 unless the loss is scaled, by ``torch.amp.GradScaler("cpu")``.
    outputs
        The outputs that a training step uses, such as ``["loss"]``: keys of a dict, fields of a dataclass, a named
        tuple or a ``ModelOutput``, or positions. Others are None, and are neither kept nor differentiated. In
        evaluation all are given. None, the default, stands for all.
    memory_budget
        How much memory a training step may take at once for what it computes, beyond the tensors that it is given,
        gives and leaves as gradients: a float from 0.0 to 1.0 is a share of what it would take, an int is bytes. To
        keep to it the backward computes once more what it needs of the forward, the cheapest first, with the same bits;
        0.0 computes again whatever makes it less. What cannot keep to a budget does as well as it can; of bytes that is
        told in a warning. None, the default, computes nothing twice. It holds where the C core runs the module.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind, or there is no such precision.
    ORTModuleError
        If the module cannot be wrapped; from a call, if its forward returns no such outputs.

    Examples
    --------
    >>> model = ORTModule(model)
    >>> loss = model(x).sum()
    >>> loss.backward()
    >>> model = ORTModule(model, precision="bf16", outputs=["loss"])
    """

    def __init__(
        self,
        module: nn.Module,
        debug_options: DebugOptions | None = None,
        *,
        precision: Precision | None = None,
        outputs: Iterable[Hashable] | None = None,
        memory_budget: MemoryBudget | None = None,
    ) -> None:
        terms = Terms.of(precision, outputs, memory_budget)
        wrapper = module if isinstance(module, ORTModule) else None
        if wrapper is not None:
            if "forward" in vars(wrapper) or type(wrapper).forward not in (ORTModule.forward, type(self).forward):
                raise ORTModuleError(
                    "a wrapper with a forward of its own cannot be wrapped once more, as that forward runs on the "
                    "terms of the wrapper that it is for; wrap its module"
                )
            terms = terms.over(wrapper._ort_terms)
            debug_options = wrapper._ort_options if debug_options is None else debug_options
            module = wrapper.module
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, expected torch.nn.Module")
        if isinstance(module, nn.DataParallel):
            raise ORTModuleError(
                "torch.nn.DataParallel cannot be wrapped; wrap its module, or use DistributedDataParallel outside"
            )
        if _is_of_onnx(module):
            raise ORTModuleError("a module of an ONNX file runs in the C core by itself, without a wrapper")
        super().__init__(module)
        if wrapper is not None:
            self._ort_take_over(wrapper)
        options = debug_options if debug_options is not None else DebugOptions()
        if not isinstance(options, DebugOptions):
            raise TypeError(f"debug_options is a {type(options).__name__}, expected DebugOptions")
        options.set_logging()
        self._ort_options: DebugOptions = options
        self._ort_terms: Terms = terms
        self._ort_report = FallbackReport(options.fallback)
        self._ort_fingerprint: _C.Fingerprint | None = None  # of the last call
        self._ort_initialized: _C.Fingerprint | None = None  # of a call that PyTorch ran as it changed the module
        self._ort_graph: Graph | None = None  # that served it
        self._ort_to_verify = options.verify  # training steps
        self._ort_arguments = Arguments(module)
        self._ort_made: Graphs | None = None
        self._ort_second: SecondWay | None = None
        self._ort_told = False  # why it is needed
        self._ort_whole = "", ""  # why the first way does not take the module, and why PyTorch runs it, as told last

    @property
    def _ort_graphs(self) -> Graphs:
        """Graphs of the module. What makes them takes half as long to import as PyTorch, and is at the first call."""
        if self._ort_made is None:
            with tracing_lock, waiting():  # which a fork waits for, unlike the locks of an import
                from .graphs import Graphs

                made = Graphs(self._ort_module, self._ort_options, self._ort_report, self._ort_arguments)
                self._ort_made = self._ort_made or made
        return self._ort_made

    @contextlib.contextmanager
    def _ort_giving(self, outputs: tuple[Hashable, ...]) -> Iterator[None]:
        """Gives nothing but these outputs in training meanwhile, unless the user has named some."""
        before = self._ort_terms
        self._ort_terms = before.over(Terms(outputs=outputs))
        try:
            yield
        finally:
            self._ort_terms = before

    def _ort_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ort_terms.precision is None:
            return self._ort_call(args, kwargs)
        with self._ort_terms.region(self._ort_module):
            return self._ort_call(args, kwargs)

    def _ort_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        one_thread_after_fork()
        if self._ort_to_verify and torch.is_grad_enabled() and not awaits_first_call(self._ort_module):
            self._ort_verify(args, kwargs)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise ORTModuleError(
                "ORTModule cannot run under torch.func transforms or forward-mode differentiation; use .module there"
            )
        attempt, interrupt = _Attempt(), None
        failure: Exception | None = None
        try:
            if self._ort_options.capture != "dynamo":
                self._ort_prepare(attempt, args, kwargs)
            elif self._ort_second is None:
                self._ort_check_module()
        except NotInitialized as error:
            if self._ort_is_to_be_initialized():
                return self._ort_initialize(args, kwargs, str(error))
            failure = error
        except Exception as error:  # whatever it is, PyTorch can run the module, or raises by itself
            failure = error
        except BaseException as error:
            if attempt.graph is not None:
                raise
            interrupt = error
        if isinstance(interrupt, Interrupted):
            raise interrupt.error
        if interrupt is not None:  # it undid what the forward, while it was traced, had done before
            tracing.run(self._ort_terms.call, self._ort_module, *args, **kwargs)
            raise interrupt  # which was not the forward's own
        if attempt.call is not None and self._ort_report.raises():  # before anything has changed
            self._ort_try_in_pytorch(attempt, args, kwargs)
            self._ort_report.warn()
        refused: ORTModuleError | None = None
        try:
            if attempt.call is not None:
                assert attempt.graph is not None
                try:
                    result = attempt.graph.run(attempt.call)
                except Exception as error:  # as above, or an op in PyTorch gave what it was not traced to
                    if attempt.call.forwarded:
                        raise
                    failure = error
                else:
                    self._ort_report.warn()
                    return result
            return self._ort_otherwise(attempt, failure, args, kwargs)
        except ORTModuleError as error:
            refused = error
        except BaseException:
            self._ort_forget(attempt)
            raise
        self._ort_forget(attempt)
        if self._ort_options.fallback == "error" and not (isinstance(failure, NotExportable) and failure.of_forward):
            self._ort_try_in_pytorch(attempt, args, kwargs)
        raise refused

    def _ort_forget(self, attempt: _Attempt) -> None:
        """Leave nothing behind of a call that ends in an error, but for a graph that serves calls without one."""
        if attempt.ran:
            return
        self._ort_report.forget()
        if attempt.made:
            self._ort_graphs.give_up(None, attempt.graph, False)

    def _ort_try_in_pytorch(self, attempt: _Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise what PyTorch raises of such a call, if it does: the user's own mistakes are told as it tells them."""
        from .verify import kept_as_it_is

        try:
            with kept_as_it_is(self._ort_module):
                tracing.run(self._ort_terms.call, self._ort_module, *args, **kwargs)
        except BaseException:
            self._ort_forget(attempt)
            raise

    def _ort_check_module(self) -> None:
        """Raise if it has to run in PyTorch: this call, or all."""
        if awaits_initialization(self._ort_module):
            raise NotInitialized("its forward gives parameters their shapes")
        for name, part in self._ort_module.named_modules():
            if _is_of_onnx(part):
                raise NotExportable(f"its part {name} is of an ONNX file, and runs in the C core by itself")
            if type(part) is ORTModule:
                raise NotRunnable(f"its part {name} is an ORTModule by itself; wrap the outer module alone")
            if isinstance(part, nn.parallel.DistributedDataParallel):
                raise NotRunnable(
                    "DistributedDataParallel exchanges gradients inside it; wrap what that wraps, as in "
                    "DistributedDataParallel(ORTModule(module))"
                )

    def _ort_is_to_be_initialized(self) -> bool:
        """Whether a call in PyTorch may make of the module, as it is now, what its later calls meet: once only."""
        tried, self._ort_initialized = self._ort_initialized, self._ort_fingerprint
        return self._ort_initialized != tried or awaits_initialization(self._ort_module)

    def _ort_initialize(self, args: tuple[Any, ...], kwargs: dict[str, Any], cause: str) -> Any:
        """Run such a call, as one that gives parameters their shapes and draws them, in the order of eager's draws."""
        name = type(self._ort_module).__name__
        result = tracing.run(self._ort_terms.call, self._ort_module, *args, **kwargs)
        if awaits_initialization(self._ort_module):
            self._ort_report.add(name, "its forward leaves parameters without a shape")
            self._ort_report.warn()
        logger.info("%s: PyTorch ran the call, and the next is looked at anew: %s", name, cause)
        return result

    def _ort_otherwise(
        self, attempt: _Attempt, failure: Exception | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that no exported graph serves: it was refused before, or now because of `failure`."""
        name, report = type(self._ort_module).__name__, self._ort_report
        cause = "" if failure is None else report.cause(name, failure)
        line = "" if failure is None else users_line(failure)
        if line and line not in cause:
            cause = f"{cause}, at {line}"
        if failure is None:
            by_dynamo = attempt.graph is None or attempt.graph.by_dynamo
        else:
            # PyTorch raises it as its own.
            attempt.ran = attempt.call is not None and not isinstance(failure, NotExportable)
            ran = attempt.ran or isinstance(failure, IndexError)
            by_dynamo = self._ort_options.capture != "export" and not (ran or isinstance(failure, NotRunnable))
            if not (by_dynamo or ran):
                report.check(name, cause, failure)
        # Bad input ends here, and says nothing against the module.
        if by_dynamo:
            with report.waiting():  # until it is said why
                returned, whole = tracing.run(self._ort_second_way(), args, kwargs)
            result = self._ort_terms.result(self._ort_module, returned)
        else:
            result, whole = tracing.run(self._ort_terms.call, self._ort_module, *args, **kwargs), cause
        if cause and not attempt.odd:
            self._ort_graphs.give_up(attempt.key, attempt.graph, by_dynamo, isinstance(failure, TooManyGraphs))
        if whole and (cause or self._ort_whole[0], whole) != self._ort_whole:
            self._ort_whole = cause, whole
            report.add(name, f"{cause}; {whole}" if by_dynamo and cause else whole)
        elif whole:
            logger.info("%s runs in PyTorch: %s", name, whole)
        elif cause and isinstance(failure, NotExportable) and self._ort_told:
            logger.info("%s goes through TorchDynamo: %s", name, cause)
        elif cause:
            self._ort_told = True
            report.tell(f"{name} goes through TorchDynamo, which takes longer to start: {cause}", first=True)
        report.warn()
        return result

    def _ort_tell_of(self, method: str, cause: str) -> None:
        self._ort_report.add_once(f"{type(self._ort_module).__name__}.{method}", cause)
        self._ort_report.warn()

    def _ort_second_way(self) -> SecondWay:
        """The module through TorchDynamo."""
        if self._ort_second is None:
            from .dynamo.second_way import SecondWay  # Dynamo takes seconds to import

            with tracing_lock:
                self._ort_second = self._ort_second or SecondWay(
                    self._ort_module, self._ort_options, self._ort_report, self._ort_terms.budget
                )
        return self._ort_second

    def _ort_prepare(self, attempt: _Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """All that comes before the first number is computed: find or make the graph, and its plan for this call."""
        with tracing_lock:  # a module that another thread traces holds stand-ins for its parameters
            now, leaves = self._ort_find(attempt, args, kwargs)
        if attempt.graph is None:
            with tracing as alone:
                now, leaves = self._ort_find(attempt, args, kwargs)  # others may have come before
                if attempt.graph is None:
                    if not alone:
                        attempt.key = None  # the next call may be alone
                        raise NotRunnable(NOT_ALONE)
                    assert attempt.key is not None
                    attempt.graph = self._ort_graph = self._ort_export(attempt.key, leaves, now)
                    attempt.computed = attempt.graph.computed(attempt.key[0])
                    attempt.made = True
        graph = attempt.graph
        if graph.runner is not None:
            assert attempt.computed is not None  # as it serves the call
            inputs = [*leaves, *now.parameters, *graph.outside, *now.buffers, *attempt.computed]
            try:
                attempt.call = graph.prepare(inputs)
            except Exception as error:
                attempt.odd = is_for_one_call(graph.runner, error)
                raise

    def _ort_find(self, attempt: _Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Scan, list[Tensor]]:
        """Look for a graph for this call; the module as it is now, and the call's tensors."""
        last = self._ort_graph
        now = scan(self._ort_module, self._ort_fingerprint, None if last is None else last.held)
        if now.fingerprint is not self._ort_fingerprint:
            self._ort_fingerprint = now.fingerprint
        try:
            leaves, spec = flatten_call(*self._ort_arguments.normal(args, kwargs))
        except TypeError as error:
            if holds_array((args, kwargs)):
                cause = "an argument is an array of NumPy; torch.from_numpy makes a tensor of it"
                raise NotRunnable(cause) from error
            raise
        for i, t in enumerate(leaves):
            if type(t) is not Tensor:
                _check_tensor(t, self._ort_arguments.paths(spec)[i])
        key = (spec, (tensor_key(leaves), now.fingerprint, ambient(), self._ort_terms.outputs))
        graph = self._ort_graphs.find(key, leaves, last, now)
        if graph is None:  # those that there are take no tensors that are refused
            for t, path in zip(leaves, self._ort_arguments.paths(spec), strict=True):
                _check_tensor(t, path)
        attempt.key = key
        attempt.computed = None if graph is None else graph.computed(spec)
        attempt.graph = None if attempt.computed is None else graph  # another thread may change numbers meanwhile
        if graph is not None and graph is not last:
            self._ort_graph = graph
        return now, leaves

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

    def _ort_export(self, key: Key, leaves: list[Tensor], now: Scan) -> Graph:
        """A new graph for this call; NotExportable if there can be none."""
        from .devices import device_refusal
        from .graphs import parameter_refusal

        spec, _ = key
        self._ort_check_module()
        state = [*now.parameters, *now.buffers]
        paths = self._ort_arguments.paths(spec)
        refusal = _mixed_devices(leaves, paths, state) or device_refusal([*leaves, *state]) or parameter_refusal(state)
        refusal = refusal or mode_refusal()
        if refusal:
            raise NotRunnable(refusal)
        if now.refusal:
            opaque = isinstance(self._ort_module, torch.jit.ScriptModule)
            raise (NotRunnable if opaque else NotExportable)(now.refusal)
        return self._ort_graphs.make(key, leaves, paths, now, self._ort_terms)

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: this is compiled. ``.module.compile()`` is there for PyTorch's compiler."""

    def fallback_report(self) -> list[FallbackRecord]:
        """What runs in PyTorch instead of the C core, and why."""
        return self._ort_report.records()

    def stats(self) -> dict[str, float]:
        """What compiling has cost so far and what a run holds.

        Returns
        -------
        dict
            ``graphs`` there are, and ``dynamo_graphs``, those of them that TorchDynamo made; ``graph_breaks`` between
            these; ``export_seconds`` spent on making graphs; ``plans_built``, ``plan_hits``, ``plans_evicted`` and
            the seconds of each stage of planning, ``specialize_seconds`` to ``plan_seconds``; ``replays``, the
            forwards and backwards that a GPU repeated as CUDA graphs; ``plans_cached``, ``runs_live`` and the
            ``constant_bytes`` that plans hold now; and of the largest plan used ``live_bytes``, the most that its
            values take at once, and what a run holds for them: ``arena_bytes`` and ``lent_bytes``, the memory of
            gradients that are yet to come.
        """
        first, second = self._ort_made, self._ort_second
        return totals(
            [] if first is None else first.runners(),
            [] if second is None else second.runners(),
            (0.0 if first is None else first.export_seconds) + (0.0 if second is None else second.seconds),
            0 if second is None else second.n_breaks,
        )

    def profile(self) -> Profile:
        """What the steps of each graph took, as it was planned for its last call; empty without ``OMC_PROFILE=1``.

        Returns
        -------
        Profile
            A list of :class:`~ortmodule_c.profile.ProfiledStep`; ``print`` shows it as a table by op.
        """
        ways = (way for way in (self._ort_made, self._ort_second) if way is not None)
        return Profile(step for way in ways for runner in way.runners() for step in runner.profile())

    def __reduce__(self) -> tuple[Any, ...]:
        return _wrapped, (type(self), self._ort_module, self._ort_options, self._ort_terms), self._ort_state()

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __copy__(self) -> ORTModule:
        _, (cls, module, *how), state = self.__reduce__()
        twin = _wrapped(cls, copy.copy(module), *how)
        twin.__dict__.update(state)
        return twin

    def _replicate_for_data_parallel(self) -> Any:
        raise ORTModuleError("torch.nn.DataParallel cannot wrap an ORTModule; use DistributedDataParallel")


def awaits_initialization(module: nn.Module) -> bool:
    """Whether parameters or buffers have no shape yet, as those of lazy modules before their first call."""
    return any(map(is_lazy, itertools.chain(module.parameters(), module.buffers())))


def awaits_first_call(module: nn.Module) -> bool:
    """Whether a call in PyTorch has to come before any graph: of lazy modules, and of copies of recurrent layers."""
    return awaits_initialization(module) or scan(module).fingerprint.renewed is not None


def _wrapped(cls: type[ORTModule], module: nn.Module, options: DebugOptions, terms: Terms) -> ORTModule:
    """A wrapper of the class, whose own `__init__` may take something else."""
    wrapper = cls.__new__(cls)
    ORTModule.__init__(wrapper, module, options)
    wrapper._ort_terms = terms
    return wrapper


def _is_of_onnx(module: nn.Module) -> bool:
    """Whether it was loaded from an ONNX file; what loads such is not imported for others."""
    loads = sys.modules.get(f"{__package__}.onnx.module")
    return loads is not None and isinstance(module, loads.OnnxModule)


def _check_tensor(t: Tensor, name: str) -> None:
    """NotRunnable, with the argument's name, for a tensor that no graph can take."""
    if type(t) not in (Tensor, nn.Parameter):
        raise NotRunnable(f"{name} is a {type(t).__name__}, a subclass of torch.Tensor")
    if t.is_nested:
        raise NotRunnable(f"{name} is a nested tensor")
    if t.layout is not torch.strided or t.is_quantized:
        raise NotRunnable(f"{name} has layout {t.layout} and dtype {t.dtype}, and is not dense")
    if t.is_meta:
        raise NotRunnable(f"{name} is on the meta device and has no elements")
    if held_whole(t) and t.requires_grad:
        raise NotRunnable(f"{name} has dtype {t.dtype}, through which no gradient goes, and requires grad")
    if not holds(t):
        raise NotRunnable(f"{name} has dtype {t.dtype}, not one of {', '.join(map(str, (*DTYPES, *CARRIERS)))}")


def _mixed_devices(leaves: list[Tensor], paths: list[str], state: list[Tensor]) -> str:
    """Which tensor is on another device than the rest, or nothing."""
    device = (state or leaves)[0].device if state or leaves else None
    for t, path in zip(leaves, paths, strict=True):
        if t.device != device:
            return f"{path} is on {t.device}, the module's tensors are on {device}"
    other = next((t.device for t in state if t.device != device), None)
    return "" if other is None else f"the module's tensors are on {device} and {other}"
