"""The backend of TorchDynamo: ``torch.compile(model, backend="ortmodule_c")``."""

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import FloatTensorSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from ..budget import Budget
from ..capture.export import Captured, apart, quiet
from ..capture.numbers import Inputs, Numbers
from ..capture.symbols import remembered
from ..devices import device_refusal
from ..dtypes import holds
from ..errors import NeedsStatic, NotExportable, of_the_machine
from ..flatten import Spec, unflatten
from ..function import Call, Runner
from ..lowering.lower import lower
from ..one_call import is_for_one_call
from ..onnx.files import Files
from ..options import DebugOptions, logger
from ..process import no_collection, one_thread_after_fork, tracing
from ..report import FallbackReport
from ..stack import users_line_in
from . import noted
from .batches import without_batches
from .fx_capture import capture_graph
from .segments import draw_alike, split

Key = tuple[Any, ...]
_OF_ORTMODULE = ("capture", "verify")
_BUDGET = "memory_budget"
_OPTIONS = [*[field.name for field in fields(DebugOptions) if field.name not in _OF_ORTMODULE], _BUDGET]


def backend(graph: fx.GraphModule, examples: Sequence[Any], *, mode: Any = None, options: Any = None) -> "Compiled":
    """Compile one of TorchDynamo's graphs for the C core.

    Parameters
    ----------
    graph
        Its placeholders are sizes, parameters, buffers and user tensors.
    examples
        The values of the call that is being compiled.
    mode
        Not used.
    options
        Fields of :class:`DebugOptions` but `capture` and `verify`, as in
        ``torch.compile(..., options={"fallback": "error"})``, and `memory_budget`, as :class:`ORTModule` has it.

    Returns
    -------
    Compiled
        Computes what the graph does. What cannot run here it runs in PyTorch, with a warning; where `fallback` is
        ``"error"`` its call raises ORTModuleError instead.
    """
    options = options or {}
    for name in options:
        if name in _OF_ORTMODULE:
            raise ValueError(f"option {name} is for ORTModule, which sees whole steps")
        if name not in _OPTIONS:
            raise ValueError(f"option {name} is unknown, there are {', '.join(_OPTIONS)}")
    budget = Budget.of(options.get(_BUDGET))
    settings = DebugOptions(**{name: value for name, value in options.items() if name != _BUDGET})
    settings.set_logging()
    report = FallbackReport(settings.fallback)
    return Compiled(graph, examples, report, settings.max_graphs, Files(settings, report), budget)


@dataclass
class _Made:
    """A graph and the places of its inputs among the arguments."""

    runner: Runner
    inputs: list[int]
    out_spec: Spec
    n_masks: int  # that it draws
    numbers: Inputs | None  # its last inputs, computed of these arguments:
    open: tuple[int, ...]

    def given(self, args: Sequence[Any]) -> list[Any] | None:
        """What it takes of these arguments; None if it is not for them."""
        numbers = self.numbers.of([_number(args[i]) for i in self.open]) if self.numbers is not None else []
        return None if numbers is None else [*[args[i] for i in self.inputs], *numbers]


class Compiled:
    """Takes the place of one of TorchDynamo's graphs.

    Its guards, and those that tracing on its own symbols adds to them, say when it is called. Numbers that are
    computed with are inputs. Where the C core needs to know one that they leave open, there is one graph for each.

    They are traced whether or not other threads run modules, which have no part in them.

    Parameters
    ----------
    graph, examples
        As a backend gets them.
    report
        Where is told what runs in PyTorch.
    max_graphs
        For how many sets of numbers there are graphs.
    files
        What writes these.
    budget
        The memory that each may take.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        report: FallbackReport,
        max_graphs: int,
        files: Files,
        budget: Budget,
    ) -> None:
        self._graph = graph
        self._report = report
        self._max_graphs = max_graphs
        self._files = files
        self._budget = budget
        self._name = _name(graph)
        self._floats = _floats(graph)
        self._open: _Made | None = None
        self._by_numbers: dict[Key, list[_Made]] = {}
        self._to_open: list[tuple[int, ...]] = []  # numbers, in the order to be tried
        self._in_pytorch = False
        self._error: BaseException | None = None  # instead of that
        self._parts: fx.GraphModule | None = None
        self._inner: list[Compiled] = []  # in the parts
        draw_alike(graph)
        try:
            stand_ins = _stand_ins(examples)
            self._to_open = _to_open(stand_ins, self._floats)
            numbers = {i: e.item() if type(e) is Tensor else e for i, e in enumerate(examples) if i in self._floats}
            graph = self._graph = without_batches(graph)
            self._parts = split(graph, [numbers.get(i, e) for i, e in enumerate(stand_ins)], self._make_part, report)
            if self._parts is not None:
                return
            known = {i for i, e in enumerate(examples) if i in self._floats or isinstance(e, (int, float))}
            self._open = self._opened(stand_ins, examples, known)
        except NeedsStatic as error:
            logger.info("%s: a graph for each size: %s", self._name, error)
        except Exception as error:
            if of_the_machine(error) is None:
                self._give_up(error)

    def __call__(self, *args: Any) -> Any:
        """The graph's results, connected to autograd."""
        one_thread_after_fork()
        if self._parts is not None:
            self._report.warn()
            return _run(self._parts, args)
        call: Call | None = None
        made: _Made | None = None
        if not self._in_pytorch:
            try:
                made, given = self._for(args)
                state = torch.get_rng_state() if noted.wanted() else None
                call = made.runner.prepare(given)
                if state is not None:
                    noted.note(self._as_noted(made, args, call, state))
                self._report.warn()
                return unflatten(made.out_spec, iter(made.runner.run(call)))
            except IndexError:  # PyTorch raises it by itself, as the class that is its own
                pass
            except NotExportable as error:
                if made is not None and is_for_one_call(made.runner, error):
                    self._report.add_once(self._name, self._report.cause(self._name, error))
                else:
                    self._give_up(error)
            except Exception as error:
                if call is not None:
                    raise
                self._give_up(error)
        self._report.warn()
        if self._error is not None:
            raise self._error
        return _run(self._graph, args)

    def runners(self) -> list[Runner]:
        """Those of its graphs."""
        made = [*([self._open] if self._open is not None else []), *itertools.chain(*self._by_numbers.values())]
        return [*[m.runner for m in made], *[r for inner in self._inner for r in inner.runners()]]

    def _make_part(self, part: fx.GraphModule, examples: Sequence[Any]) -> "Compiled":
        self._inner.append(Compiled(part, examples, self._report, self._max_graphs, self._files, self._budget))
        return self._inner[-1]

    def _as_noted(self, made: _Made, args: Sequence[Any], call: Call, state: Tensor) -> noted.Run:
        given = self._with_numbers(args)
        return noted.Run(
            [t.detach().clone().requires_grad_(t.requires_grad) for t in call.inputs[: len(made.inputs)]],
            state,
            call.seed,
            made.n_masks if call.seed else 0,
            functools.partial(self._capture_again, given),
        )

    def _opened(self, stand_ins: Sequence[Any], values: Sequence[Any], must: Collection[int] = ()) -> _Made:
        """A graph that leaves as many numbers open as can be, and those that it must; NeedsStatic if there is none."""
        while True:
            if not {*self._to_open[0]}.issuperset(must):
                raise NeedsStatic("a number that is not a size is computed with")
            try:
                return self._make(stand_ins, values, self._to_open[0])
            except (NeedsStatic, NotExportable) as error:  # whatever it is, it may be for an open number
                if len(self._to_open) == 1:
                    raise
                logger.info("%s: not made with open numbers: %s", self._name, error)
                self._to_open = self._to_open[1:]

    def _make(self, stand_ins: Sequence[Any], values: Sequence[Any], to_open: tuple[int, ...]) -> _Made:
        """A graph for what is a number among the stand-ins, but for those that are left open."""
        names = [n.name for n in self._graph.graph.nodes if n.op == "placeholder"]
        numbers = Numbers([_number(values[i]) for i in to_open], [names[i] for i in to_open]) if to_open else None
        examples = list(stand_ins)
        for i, symbol in zip(to_open, numbers.symbols if numbers is not None else (), strict=True):
            examples[i] = symbol
        inputs = [i for i, e in enumerate(examples) if isinstance(e, Tensor)]
        tensors = [examples[i] for i in inputs]
        refusal = _refusal(examples) or device_refusal(tensors)
        if refusal:
            raise NotExportable(refusal)
        with tracing, quiet(), no_collection(), remembered():
            captured = capture_graph(self._graph, examples)
            captured.numbers = numbers
            lowered = lower(captured)
            for name, cause in lowered.fallbacks:
                self._report.add(name, cause)
            runner = Runner.of(lowered, self._budget, self._files, self._report, numbered=True)
        logger.info("%s: %d nodes", self._name, len(lowered.model.graph))
        n_masks = sum("subsequence" in node.attributes for node in lowered.model.graph)
        return _Made(runner, inputs, captured.out_spec, n_masks, lowered.numbers, to_open)

    def _capture_again(self, given: Sequence[Any]) -> Captured:
        with tracing, quiet():
            return capture_graph(self._graph, _static(given))

    def _with_numbers(self, args: Sequence[Any]) -> list[Any]:
        return [_number(a) if i in self._floats else a for i, a in enumerate(args)]

    def _for(self, args: Sequence[Any]) -> tuple[_Made, list[Any]]:
        """The graph for the sizes and numbers of this call, and what it takes."""
        found = self._find(args)
        if found is not None:
            return found
        with tracing:
            found = self._find(args)  # another thread may have come before
            if found is not None:
                return found
            if sum(map(len, self._by_numbers.values())) >= self._max_graphs:
                raise NotExportable(f"it would need a graph for each of more than {self._max_graphs} sizes or numbers")
            numbers = self._with_numbers(args)
            try:
                made = self._opened(_static(numbers), args)
            except NeedsStatic as error:
                raise NotExportable(str(error)) from error
            self._by_numbers.setdefault(self._key(numbers), []).append(made)
            given = made.given(args)
            assert given is not None
            return made, given

    def _find(self, args: Sequence[Any]) -> tuple[_Made, list[Any]] | None:
        """The same, if there is one."""
        made = [self._open] if self._open is not None else []
        if not made or self._by_numbers:
            made = [*made, *self._by_numbers.get(self._key(self._with_numbers(args)), ())]
        found = ((m, m.given(args)) for m in made)
        return next(((m, given) for m, given in found if given is not None), None)

    def _key(self, given: Sequence[Any]) -> Key:
        """What a graph is for, but for the numbers that are left open."""
        known = [a for i, a in enumerate(given) if i not in self._to_open[0]]
        return tuple([tuple(a.shape) if isinstance(a, Tensor) else (type(a), repr(a)) for a in known])

    def _give_up(self, error: Exception) -> None:
        """Run in PyTorch from now on."""
        self._in_pytorch = True
        try:
            self._report.add(self._name, self._report.cause(self._name, error))
        except Exception as raised:
            self._error = raised


def _run(graph: fx.GraphModule, args: Sequence[Any]) -> Any:
    """Run in PyTorch; called as a module, a graph prints where an error is."""
    _LazyGraphModule.force_recompile(graph)
    return graph.forward(*args)


def _name(graph: fx.GraphModule) -> str:
    """What a graph is called: by the first line of the user's that it holds."""
    traces = [n.meta["stack_trace"] for n in graph.graph.nodes if n.meta.get("stack_trace")]
    return f"the graph from {users_line_in(traces[0])} on" if traces else "the graph"


def _floats(graph: fx.GraphModule) -> set[int]:
    """Places of the tensors that stand for numbers of Python's: Dynamo says so, or no more than the number is read."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    return {
        i
        for i, n in enumerate(placeholders)
        if isinstance(getattr(n, "_dynamo_source", None), FloatTensorSource)
        or (n.users and all(u.op == "call_method" and u.target == "item" for u in n.users))
    }


def _number(value: Any) -> Any:
    """The number that an argument is, in a tensor or as a symbol."""
    if isinstance(value, Tensor):
        return value.item()
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _to_open(examples: Sequence[Any], floats: set[int]) -> list[tuple[int, ...]]:
    """Which numbers to leave open: all, those that are no integers, or none."""
    sizes: list[Any] = [s for e in examples if isinstance(e, Tensor) for s in e.shape if isinstance(s, torch.SymInt)]
    symbols = set[Any]().union(*[s.node.expr.free_symbols for s in sizes])
    others = [(i, e.node.expr) for i, e in enumerate(examples) if isinstance(e, torch.SymInt)]
    real = [i for i, e in enumerate(examples) if i in floats or type(e) is float]
    whole = [i for i, expr in others if not expr.free_symbols & symbols]
    return [*dict.fromkeys([tuple(sorted([*real, *whole])), tuple(real), ()])]


def _leaf(t: Tensor) -> Tensor:
    """The same memory; whoever looks at the gradient of a tensor that has a history is warned."""
    return t.detach().requires_grad_(t.requires_grad)


def _static(args: Sequence[Any]) -> list[Any]:
    """The arguments without elements, their sizes as they are."""
    mode = FakeTensorMode()
    return apart([mode.from_tensor(_leaf(a), static_shapes=True) if isinstance(a, Tensor) else a for a in args])


def _stand_ins(examples: Sequence[Any]) -> list[Any]:
    """The examples without elements, with the symbols that Dynamo gave their sizes."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None and context.fake_mode is not None else FakeTensorMode()

    def stand_in(t: Any) -> Any:
        if not isinstance(t, Tensor) or isinstance(t, FakeTensor):
            return t
        known = context.tensor_to_context.get(t) if context is not None else None
        if known is None:
            return mode.from_tensor(_leaf(t), static_shapes=True)
        return mode.from_tensor(t, symbolic_context=known, source=known.tensor_source, trace=False)

    return apart([stand_in(t) for t in examples])


def _refusal(examples: Sequence[Any]) -> str:
    """Why no graph can take such inputs, or nothing."""
    for e in examples:
        if not isinstance(e, (Tensor, int, float, torch.SymInt, torch.SymFloat)):
            return f"an input is a {type(e).__name__}"
        if isinstance(e, Tensor) and (e.layout is not torch.strided or e.is_nested or not holds(e)):
            return f"an input has layout {e.layout} and dtype {e.dtype}"
        if isinstance(e, Tensor) and torch._is_functional_tensor(e):
            return "an input is a functional tensor"
    return ""
