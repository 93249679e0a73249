"""Runs a module through TorchDynamo: what cannot be traced is broken out, a statement at a time.

Of a module that :mod:`ortmodule_c.capture.export` refuses, Dynamo makes several graphs, with Python in between, and
guards them.
"""

import contextlib
import functools
import logging
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from inspect import signature
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo import config, convert_frame, eval_frame, utils
from torch._dynamo.exc import FailOnRecompileLimitHit, SkipFrame, TorchDynamoException, unimplemented
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.utils import calculate_time_spent, count_calls, counters, graph_break_reasons
from torch._dynamo.variables.lazy import LazySymNodeFormatString
from torch._dynamo.variables.misc import AutogradFunctionVariable, DeletedVariable, StringFormatVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._guards import TracingContext
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves

from .. import graphs  # noqa: F401  sets Dynamo's lock, which is exchanged below
from ..budget import Budget
from ..capture.recurrent import computes_with_its_parameters, recurrent_layers
from ..capture.shapes import MAX_RANK
from ..capture.symbols import let_go, remembered
from ..errors import NotRunnable, first_lines
from ..function import Runner
from ..guards.given import Given, given
from ..guards.held import Held, autocast_dtypes
from ..guards.policy import named_and_missed
from ..guards.surroundings import Surroundings
from ..onnx.files import Files
from ..options import DebugOptions, logger
from ..process import tracing
from ..report import FallbackReport
from ..signals import Interrupted, waiting
from ..stack import innermost
from .backend import Compiled
from .containers import have_as_python
from .gradients import asks_to_differentiate_gradients
from .identity import answer_as_python

# Whose loggers say what becomes of what is compiled.
_COMPILERS = (
    "torch._dynamo",
    "torch._functorch",
    "torch._guards",
    "torch._higher_order_ops",
    "torch._subclasses",
    "torch.fx",
)
_LIMIT = re.compile(r"hit config\.\w+ \((\d+)\)\s+function: '(.*?)' \((.*?)\)\s+last reason: (.*)")
_FRAME = re.compile(r"CONVERT \S+ (\S+) line (\d+)")
_MOST_VERSIONS = 4  # of what is held; each is compiled anew
# Nobody else meets what is compiled for a wrapper, nor its limits.
_ALONE = {"isolate_recompiles": True}
_SINCE = f"graphs by TorchDynamo need PyTorch 2.13 or newer, and this is {torch.__version__}"
_TOO_OLD = _SINCE if _ALONE.keys() - signature(torch.compile).parameters else ""
_NOTHING = "TorchDynamo compiles nothing of it"
_GOES_ON = TORCH_DYNAMO_RESUME_IN_PREFIX  # of code that Dynamo makes of the rest of what it has traced before
_LOOP = re.compile(r"graph break in loop.*frame skipped: \S+ \((.*?) line (\d+)\)", re.DOTALL)
_IN_LOOP = "a graph break in a loop leaves the function to Python; a submodule for the loop's body would be compiled"
_CHECKS_ARGUMENTS = "a distribution checks its arguments, as it is not told validate_args=False"
# What Dynamo says where it ends a graph early, because of a break that it has found further on.
_IN_WORDS = {"step_unsupported": "a graph ends here, before what TorchDynamo cannot trace in what is called next"}
_OTHERWISE = ", which TorchDynamo sees otherwise than eager"
_heard = threading.local()
_dynamos_warn_once = utils.warn_once


def _is_ours() -> bool:
    """Whether what Dynamo does in this thread it does for one of ours."""
    return getattr(_heard, "heard", None) is not None


def _keep_back(record: logging.LogRecord) -> bool:
    """Hears what is logged while a second way runs in this thread; below a warning is only what somebody asked for."""
    heard: _Heard | None = getattr(_heard, "heard", None)
    if heard is None or record.levelno < logging.WARNING:
        return True
    heard.records.append(record)
    logger.debug("TorchDynamo: %s", record.getMessage(), exc_info=record.exc_info)
    return False


def _warn_once(msg: str, stacklevel: int = 1) -> None:
    """What Dynamo warns of besides a graph break, in words for those who develop it."""
    if _is_ours() and "file an issue" in msg:
        logger.debug("TorchDynamo: %s", msg)
    else:
        _dynamos_warn_once(msg, stacklevel + 1)


def _broken_out(
    method: Callable[..., Any], what: str, explanation: str, when: Callable[..., bool] = lambda *_, **__: True
) -> Callable[..., Any]:
    """A method of Dynamo's that sees something otherwise than eager: a second way breaks the statement out instead.

    ``when`` is asked with what the method is called with.
    """

    @functools.wraps(method)
    def broken(*args: Any, **kwargs: Any) -> Any:
        if _is_ours() and when(*args, **kwargs):
            unimplemented(gb_type=what, context="", explanation=explanation, hints=[])
        return method(*args, **kwargs)

    return broken


def _judged(compile_subgraph: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's function that ends a graph: of one without ops, which no backend sees, it is held what its code read."""

    @functools.wraps(compile_subgraph)
    def judged(output: OutputGraph, *args: Any, **kwargs: Any) -> Any:
        heard: _Heard | None = getattr(_heard, "heard", None)
        if heard is not None and not count_calls(output.graph):
            try:
                heard.judge(output.traced_code)
            except NotRunnable as error:
                raise SkipFrame(str(error)) from error  # Python runs it
        return compile_subgraph(output, *args, **kwargs)

    return judged


def _in_vmap(*_: Any, **__: Any) -> bool:
    """Whether a call of ``torch.vmap`` is traced."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def _is_deleted(_effects: Any, _item: Any, _name: str, value: Any, *_: Any, **__: Any) -> bool:
    """Whether an attribute is deleted, which Dynamo does of modules and slots even where there is none any more."""
    return isinstance(value, DeletedVariable)


def _has_metaclass_that_writes(_effects: Any, item: Any, *_: Any, **__: Any) -> bool:
    """Whether what is written to is a class, and its metaclass has something to say on that."""
    if not isinstance(item, UserDefinedClassVariable):
        return False
    meta = type(item.value)
    return meta.__setattr__ is not type.__setattr__ or meta.__delattr__ is not type.__delattr__


# Dynamo finds no key in a dict by a text of what is open, and returns numbers for it.
for _text in (LazySymNodeFormatString, StringFormatVariable):
    _made = _broken_out(_text.__init__, "text of an open number", "it is made by Python")
    _text.__init__ = _made  # type: ignore[method-assign]
AutogradFunctionVariable.call_apply = _broken_out(  # type: ignore[method-assign]
    AutogradFunctionVariable.call_apply,
    "custom autograd.Function within torch.vmap",
    "TorchDynamo would trace its forward alone",
    _in_vmap,
)
answer_as_python(_is_ours)
have_as_python(_is_ours)
OutputGraph.compile_subgraph = _judged(OutputGraph.compile_subgraph)  # type: ignore[method-assign]
SideEffects.store_attr = _broken_out(  # type: ignore[method-assign]
    SideEffects.store_attr,
    "attribute of a class written by its metaclass",
    "TorchDynamo would write it once more",
    _has_metaclass_that_writes,
)
SideEffects.store_attr = _broken_out(  # type: ignore[method-assign]
    SideEffects.store_attr, "attribute that is deleted", "Python knows whether it is there", _is_deleted
)


def _hear() -> None:
    utils.warn_once = _warn_once
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(_COMPILERS):
            logging.getLogger(name).addFilter(_keep_back)


def _let_dynamo_change_pytorch() -> None:
    """What Dynamo does to PyTorch before it first compiles, but for the checks of distributions, which it turns off."""
    checks = Distribution._validate_args
    eval_frame.TorchPatcher.patch()
    Distribution.set_default_validate_args(checks)


class _CompileLock:
    """Dynamo's lock: signals wait while something is compiled for a second way, whose errors are not raised.

    What Dynamo counts, for all threads together, is that second way's meanwhile.

    Who compiles need not be alone. Dynamo reads modules and exchanges nothing of them, and our backend traces graphs of
    its own: what other threads run meanwhile computes the same.
    """

    def __init__(self) -> None:
        self._entered: list[contextlib.ExitStack] = []  # by the thread that has the lock

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(tracing)
        heard: _Heard | None = getattr(_heard, "heard", None)
        if heard is not None:
            if not self._entered:
                stack.enter_context(heard.counting())
                stack.callback(let_go, stack.enter_context(remembered()))
            stack.enter_context(waiting())
        self._entered.append(stack)

    def __exit__(self, *error: Any) -> None:
        try:
            self._entered.pop().__exit__(*error)
        except Interrupted as interrupt:
            raise interrupt.error from None


convert_frame.compile_lock = _CompileLock()  # type: ignore[assignment]


@dataclass
class _Heard:
    """What Dynamo says during one run: in its log, of breaks, of what else it met, and how long it compiled.

    Attributes
    ----------
    judge
        Holds what code may read that Dynamo has traced.
    """

    judge: Callable[[Iterable[CodeType]], None]
    records: list[logging.LogRecord] = field(default_factory=list)
    breaks: list[Any] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        n_breaks, seconds, met = len(graph_break_reasons), _seconds(), counters["unimplemented"].copy()
        try:
            yield
        finally:
            self.breaks += graph_break_reasons[n_breaks:]
            self.seconds += _seconds() - seconds
            self.met += counters["unimplemented"] - met


@contextlib.contextmanager
def _listening(judge: Callable[[Iterable[CodeType]], None]) -> Iterator[_Heard]:
    before = getattr(_heard, "heard", None)
    _heard.heard = heard = _Heard(judge)
    try:
        yield heard
    finally:
        _heard.heard = before


@dataclass(eq=False)
class _Version:
    """What Dynamo has compiled for some arguments, the code it has traced, and what that may have read.

    Attributes
    ----------
    beside
        What of PyTorch's own state it is for besides what Dynamo guards.
    around
        What led to what is held, within a call.
    graphs
        Those of its code, which are there as long as it is: until a call drops it, and those that it still serves end.
    """

    given: Given
    beside: list[Any]
    compiled: Any = None
    traced: set[CodeType] = field(default_factory=set)
    held: Held = field(default_factory=lambda: Held([], []))
    around: Surroundings | None = None
    graphs: list[Compiled] = field(default_factory=list)
    served: bool = False


class SecondWay:
    """A module as Dynamo runs it.

    Parameters
    ----------
    module
        The user's module.
    options
        How many graphs there may be for one function, and whether PyTorch may run what is broken out.
    report
        Where is told what runs in PyTorch.
    budget
        The memory that each graph may take.
    """

    def __init__(self, module: nn.Module, options: DebugOptions, report: FallbackReport, budget: Budget) -> None:
        _hear()
        _let_dynamo_change_pytorch()
        self._name = type(module).__name__
        self._report = report
        self._whole = options.fallback == "error"
        self.seconds = 0.0  # spent on making graphs
        self._breaks: dict[str, str] = {}  # where, and why
        # Layers of one class share a function.
        limit = options.max_graphs * max(Counter(id(type(m)) for m in module.modules()).values())
        limits = {"recompile_limit": limit, "accumulated_recompile_limit": 64 * limit}
        # What Dynamo cannot compile is left to Python at the place where it is, and so is an assertion of a tensor,
        # hooks that are added are seen, and random numbers of NumPy are NumPy's. No graph is cut for the buckets of
        # DistributedDataParallel, as gradients go on as they are there.
        settings = {
            "suppress_errors": not self._whole,
            "rewrite_assert_with_torch_assert": False,
            "skip_nnmodule_hook_guards": False,
            "use_numpy_random_stream": True,
            "optimize_ddp": False,
            "error_on_nested_fx_trace": False,  # in another thread: this one then runs a call in Python
        }
        # By whether recurrent layers are traced. For all calls: what each leaves behind is never freed.
        self._settings = [config.patch(limits | settings | {"allow_rnn": traced}) for traced in (False, True)]
        self._module = module
        self._versions: list[_Version] = []
        self._most = min(_MOST_VERSIONS, options.max_graphs)
        self._cause = _TOO_OLD or asks_to_differentiate_gradients(module)  # why PyTorch runs the module from now on
        # Dynamo keeps the backend with the code that it made, longer than the module: it must not know the module, nor
        # the graphs more than weakly.
        way, files = weakref.ref(self), Files(options, report)
        how = report, options.max_graphs, files, budget
        self._backend = lambda version, *graph: _compile(way, version, how, *graph)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """What the module returns, or raises; and why PyTorch ran it as a whole, if it did.

        Raises
        ------
        ORTModuleError
            If something has to run in PyTorch and must not.
        """
        what = given(args, kwargs)
        version = None if what.missed else self._version(what)
        if version is None:
            cause = self._cause or f"{what.missed}{_OTHERWISE}"
            self._report.check(self._name, cause)
            return self._module(*args, **kwargs), cause
        n_records = len(self._report.records())
        _open_sizes(args, kwargs)
        settings = self._settings[all(map(computes_with_its_parameters, recurrent_layers(self._module)))]
        with settings, _listening(functools.partial(self.judge, version)) as heard:
            try:
                result = version.compiled.forward(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # asked for one graph, it has run nothing
                self._report.check(self._name, _in_words(error), error)
                raise
            except BaseException as error:
                if self._whole and isinstance(error, RuntimeError) and "no compiled frames" in str(error):
                    self._report.check(self._name, _NOTHING, error)
                # What was compiled for it, and would not be told again, is not there for later calls.
                if heard.breaks or not version.served or len(self._report.records()) > n_records:
                    with contextlib.suppress(ValueError):  # another call may have dropped it
                        self._versions.remove(version)
                raise
            finally:
                self.seconds += heard.seconds
                version.held = version.held.still()  # what the forward itself changes is left to Dynamo
                version.around = None
        version.served = True
        if not self._cause:
            self._note_breaks(heard.breaks)
        if self._cause:
            return result, self._cause
        for record in heard.records:
            self._note_record(record)
        loops = _loops(heard.met)
        if not version.graphs and not self._graphs() and not self._report.records():
            return result, f"{_NOTHING}: {_IN_LOOP}" if loops else _NOTHING
        for place in sorted(loops):
            self._report.add(place, _IN_LOOP)
        return result, ""

    @property
    def n_breaks(self) -> int:
        """How many statements are broken out."""
        return len(self._breaks)

    def runners(self) -> list[Runner]:
        """Those of its graphs."""
        return [r for graph in self._graphs() for r in graph.runners()]

    def _graphs(self) -> list[Compiled]:
        """Those that later calls may use."""
        return [graph for version in [*self._versions] for graph in version.graphs]

    def _version(self, what: Given) -> "_Version | None":
        """The one that serves such a call now, made if there is none; nothing if PyTorch has to run the module."""
        if self._cause:
            return None
        beside = [*_hooks_of_all_modules(), *autocast_dtypes()]  # where autocast is off Dynamo guards no dtype
        versions = [*self._versions]  # another thread may drop one
        for version in versions:
            if version.given.key == what.key and version.beside == beside and version.held.hold():
                return version
        if len(versions) >= self._most:
            changed = versions[-1].held.changed() or "an argument"
            times = f"what the forward reads has changed {self._most} times"
            self._give_up(f"{changed} takes a new value; {times}, which TorchDynamo by itself may not see")
            return None
        version = _Version(what, beside)
        backend = functools.partial(self._backend, weakref.ref(version))
        state = self._module.__dict__
        own = {*state}
        version.compiled = torch.compile(self._module, backend=backend, fullgraph=self._whole, **_ALONE)  # type: ignore[call-overload]
        for name in state.keys() - own:  # what is meant for that is written into the user's module
            del state[name]
        kept = eval_frame.cached_backends  # for ever, to be reset, which ours need not
        for key in [key for key, value in [*kept.items()] if getattr(value, "compiler_fn", None) is backend]:
            del kept[key]
        self._versions.append(version)
        return version

    def _give_up(self, cause: str) -> None:
        self._cause = cause
        self._report.check(self._name, cause)

    def judge(self, version: "_Version", traced: Iterable[CodeType]) -> None:
        """Hold what the code that Dynamo has traced may read.

        Raise, before anything runs, if that cannot be held, or if Dynamo sees something otherwise than eager.
        """
        if self._cause:
            raise NotRunnable(self._cause)
        new = {code for code in traced if not code.co_name.startswith(_GOES_ON)} - version.traced
        version.traced |= new
        named = next(filter(None, map(named_and_missed, new)), "")
        cause = f"the forward asks for {named}{_OTHERWISE}" if named else ""
        try:
            around = version.around if version.held.hold() else None
            if around is not None and not new:
                return
            if around is None or not around.follow(new):
                around = version.around = Surroundings(self._module, version.given.objects, version.traced)
            version.held = around.as_they_are()
            cause = cause or (f"{around.missed}{_OTHERWISE}" if around.missed else "")
        except Exception as error:
            cause = f"what it reads cannot be compared: {self._report.cause(self._name, error)}"
        if cause:
            self._give_up(cause)
            raise NotRunnable(cause)

    def _note_breaks(self, reasons: list[Any]) -> None:
        """Where there are several for one place, the longest explains; the others follow from it."""
        told: dict[str, list[str]] = {}
        for reason in reasons:
            place = innermost((f.filename, f.lineno) for f in reason.user_stack)
            told.setdefault(place, []).append(reason.reason)
        for place, texts in told.items():
            cause = f"graph break: {_in_words(max(texts, key=len))}"
            self._report.add(place, self._breaks.setdefault(place, cause))

    def _note_record(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        limit, frame = _LIMIT.search(text), _FRAME.search(text)
        if limit is not None:
            n, function, place, why = limit.groups()
            self._report.add(place, f"{function} needs more than {n} graphs, the last because of {why.strip()}")
        elif frame is not None and record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if isinstance(getattr(error, "inner_exception", None), NotRunnable):  # told where it was raised
                return
            self._report.add(":".join(frame.groups()), f"{type(error).__name__}: {first_lines(error)}")


def _hooks_of_all_modules() -> list[Any]:
    """Those of PyTorch's that no module has by itself: Dynamo compares only what a module has."""
    registered = (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
    return [hook for name in registered for hook in getattr(nn.modules.module, name).values()]


def _open_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Ask for open sizes of all arguments; images keep their height and width, as on the first way.

    Dynamo by itself opens those that have changed: it compiles once more when the batch does, and when the length does.
    """
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor):
            torch._dynamo.maybe_mark_dynamic(t, list(range(t.dim() if t.dim() <= MAX_RANK else 1)))


def _loops(met: Counter[str]) -> set[str]:
    """File and line of the functions that Dynamo has left to Python because of a break in a loop."""
    found = map(_LOOP.search, met)
    return {":".join(match.groups()) for match in found if match is not None}


def _in_words(why: BaseException | str) -> str:
    """A reason of Dynamo's in a line, with the user's line if it knows that."""
    text = str(why)
    text = "Data-dependent branching" if text.startswith("generic_jump") else first_lines(text)
    if "distributions/constraints.py" in text:
        text = _CHECKS_ARGUMENTS
    text = _IN_WORDS.get(text, text.replace(" Explanation: ", ": "))
    stack = getattr(why, "real_stack", None)
    return f"{text}, at {innermost((f.filename, f.lineno) for f in stack)}" if stack else text


def _seconds() -> float:
    """That Dynamo, and backends in it, have spent on all that was compiled."""
    return calculate_time_spent().get("entire_frame_compile", 0.0)


def _compile(
    way: "weakref.ref[SecondWay]",
    version: "weakref.ref[_Version]",
    how: tuple[FallbackReport, int, Files, Budget],
    graph: Any,
    examples: Any,
) -> Callable[..., Any]:
    of, serving = way(), version()
    assert of is not None and serving is not None  # it is within a call of them
    of.judge(serving, TracingContext.get_traced_code() or ())
    compiled = Compiled(graph, examples, *how)
    serving.graphs.append(compiled)
    return functools.partial(_run, weakref.ref(compiled))


def _run(compiled: "weakref.ref[Compiled]", *args: Any) -> Any:
    graph = compiled()
    assert graph is not None  # as the call that runs it has its version
    return graph(*args)
