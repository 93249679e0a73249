"""Exported graphs of one module: when one is made, when it may be used, how many are kept."""

import contextlib
import copy
import itertools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame

from .arguments import Arguments
from .capture.export import Captured, Layout, capture, quiet
from .capture.numbers import Inputs, Numbers
from .capture.shapes import Axes, Fit, Openings, Sizes
from .changing import Changing, Key, bare, opened, standing_in
from .errors import (
    ForwardRaised,
    NeedsStatic,
    NodeRefused,
    NotExportable,
    NotInitialized,
    TooManyGraphs,
    first_lines,
    of_the_machine,
)
from .flatten import Spec, flatten, numbers_by_path, plain_leaves, unflatten
from .function import Call, Runner
from .guards.held import Attribute, Held, Scan, Write, by_identity, is_any_forgotten
from .lowering.lower import lower
from .onnx.files import Files
from .options import DebugOptions, logger
from .process import no_collection, tracing, tracing_lock
from .report import FallbackReport
from .signals import waiting
from .terms import Terms

# Tracing replaces methods of nn.Module for all threads: none may be compiled by Dynamo meanwhile.
convert_frame.compile_lock = tracing  # type: ignore[assignment]

_ONE_TENSOR = flatten((torch.empty(0), [], []))[1]  # returned, and no attribute or buffer set
_MANY_CHANGES = 4  # graphs made because of one plain value that are worth a warning
_LATELY = 100  # calls since a graph served that do not yet tell that nobody needs it, at first
_MAX_COUNTED = 2  # graphs made because of one attribute that the forward itself had set


@dataclass(eq=False)
class Graph:
    """One exported graph, or where it has no `runner`, the decision to do without, with TorchDynamo's or in PyTorch.

    Attributes
    ----------
    asked
        What its forward may ask tensors for as attributes that they had not.
    met
        Tensors besides those of the call and of the module that it met.
    outside
        Tensors it takes besides those of the call and of the module.
    layouts
        How those inputs lay in memory of which that matters.
    in_grads
        The inputs whose gradients autograd may come for, once it has served a call.
    openings
        Of the graphs for calls that differ in sizes alone.
    counting
        Attributes that its forward set to other plain values: the owner's id and which it is.
    fallbacks
        ATen op and cause of each node that runs in PyTorch.
    numbers, attributes
        Its last inputs, computed of the numbers in a call and of those in these attributes.
    gives_numbers
        Whether a node that runs in PyTorch is given such.
    used
        Number of the last call that it served.
    again
        Whether it has served another call than that for which it was made.
    until
        Number of the call from which on a decision to do without is thought over.
    """

    key: Key
    by_dynamo: bool = False
    held: Held | None = None
    fit: Fit | None = None
    runner: Runner | None = None
    out_spec: Spec = ()
    written: list[tuple[nn.Module, str]] = field(default_factory=list)
    rebound: list[tuple[nn.Module, str]] = field(default_factory=list)
    asked: frozenset[str] = frozenset()
    met: list[ref[Tensor]] = field(default_factory=list)
    outside: list[Tensor] = field(default_factory=list)

    layouts: list[Layout] = field(default_factory=list)
    in_grads: tuple[bool, ...] | None = None
    openings: Openings = field(default_factory=Openings)
    counting: list[tuple[int, str]] = field(default_factory=list)
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    numbers: Inputs | None = None
    attributes: Sequence[Attribute] = ()
    gives_numbers: bool = False
    used: int = 0
    again: bool = False
    until: float = math.inf

    @property
    def opened(self) -> bool:
        """Whether it serves other sizes too."""
        return self.fit is not None and self.fit.dynamic

    def among(self, openings: Openings, sizes: Sizes, axes: Axes) -> "Graph":
        """This graph, noted as made for a call of these sizes, of which these were to be left open."""
        assert self.fit is not None
        openings.add(sizes, axes, self.fit)
        self.openings = openings
        return self

    def serves(self, spec: Spec, leaves: Sequence[Tensor], now: Scan, checked: int) -> bool:
        """Whether it may be used for such a call of these inputs now; what it holds is `checked` so far."""
        return (
            (self.fit is None or self.fit.accepts(tuple([t.shape for t in leaves])))
            and (not self.asked or self._are_bare(leaves, now))
            and all(look(leaves[i]) == lay for i, look, lay in self.layouts)
            and (self.held is None or self.held.hold(checked))
            and self.computed(spec) is not None
        )

    def _are_bare(self, leaves: Sequence[Tensor], now: Scan) -> bool:
        """Whether no tensor has an attribute that its forward may ask for."""
        met = [t for r in self.met if (t := r()) is not None]
        for t in (*leaves, *now.parameters, *now.buffers, *met):
            if t.__dict__ and not self.asked.isdisjoint(t.__dict__):
                return False
        return True

    def computed(self, spec: Spec) -> list[Tensor] | None:
        """The inputs that are computed of numbers, those of a described call among them; None if it is not for them."""
        if self.numbers is None:
            return []
        values = [v for _, v in numbers_by_path(spec)]
        return self.numbers.of([*values, *[a.state.get(a.name) for a in self.attributes]])

    def read_of(self, attributes: Sequence[Attribute], before: int) -> list[Attribute]:
        """The attributes behind so many numbers of calls; one of an object that it did not read is as it was then."""
        assert self.numbers is not None and self.held is not None
        read, near = self.numbers.read(), self.held.dictionaries()
        return [
            a if i in read or id(a.state) in near else Attribute({a.name: a.now}, a.name, a.title)
            for i, a in enumerate(attributes, before)
        ]

    def prepare(self, inputs: Sequence[Tensor]) -> Call:
        """A call with its inputs, planned; NotExportable if there can be no plan."""
        assert self.runner is not None
        if self.in_grads is None:  # of all calls that it serves
            self.in_grads = self.runner.wanted(inputs)
        return self.runner.prepare(inputs, self.in_grads)

    def run(self, call: Call) -> object:
        """The module's outputs, once the attributes and buffers that its forward sets are set."""
        if self.fallbacks or self.written or self.rebound:
            return tracing.run(self._run, call)
        return self._run(call)

    def _run(self, call: Call) -> object:
        results = call.runner.run(call)
        if self.out_spec == _ONE_TENSOR:
            return results[0]
        outputs, written, rebound = unflatten(self.out_spec, iter(results))
        for (module, name), value in zip(self.written, written, strict=True):
            module.__dict__[name] = value
        for (module, name), value in zip(self.rebound, rebound, strict=True):
            module._buffers[name] = value
        return outputs


class Graphs:
    """Cache of a module's graphs, least recently used first. Finding needs `tracing_lock`, making :data:`tracing`.

    Parameters
    ----------
    module
        The user's module.
    options
        Bounds of the cache and what is written to disk.
    report
        Where fallbacks are told.
    arguments
        Names of the module's arguments.
    """

    def __init__(self, module: nn.Module, options: DebugOptions, report: FallbackReport, arguments: Arguments) -> None:
        self._module = module
        self._options = options
        self._report = report
        self._arguments = arguments
        self._terms = Terms()  # of the graph that is made
        self._graphs: OrderedDict[int, Graph] = OrderedDict()
        self._by_key: dict[Hashable, list[Graph]] = {}
        self._counting: Counter[tuple[int, str]] = Counter()
        self._changing: dict[Key, Changing] = {}  # by what the calls have in common
        self._attributes: dict[tuple[int, str], Attribute] = {}  # numbers that change
        self._needed: set[tuple[int, str]] = set()  # of these
        self._are_open = False  # numbers in calls, in some graph
        self._last: Key | None = None  # key of the last export
        self._changes: Counter[str] = Counter()
        self._files = Files(options, report)
        self.export_seconds = 0.0
        self._calls = 0
        self._lately = _LATELY
        self._refused = False  # a graph, since others took the place of those that nobody needs

    def find(self, key: Key, leaves: Sequence[Tensor], last: Graph | None, now: Scan) -> Graph | None:
        """A graph that serves this call, if there is one; of what `last` holds `now` says how much is checked."""
        self._calls += 1
        found = None
        if last is not None and last.runner is not None and last.key[0] is key[0] and last.key == key:
            found = last if id(last) in self._graphs and last.serves(key[0], leaves, now, now.checked) else None
        if found is None:
            candidates = itertools.chain.from_iterable(self._by_key.get(keyed, ()) for keyed in self._keys(key))
            in_force = (g for g in candidates if g.until > self._calls)
            served = (g for g in in_force if g.serves(key[0], leaves, now, now.checked if g is last else 0))
            found = next(served, None)
        if found is not None:
            self._graphs.move_to_end(id(found))
            found.used, found.again = self._calls, True
        return found

    def _keys(self, key: Key) -> Iterator[Key]:
        """Those of graphs that may serve a call: its own, and with numbers left open."""
        yield key
        changing = self._changing.get(bare(key)) if self._are_open else None
        for places in changing.open if changing is not None else ():
            yield opened(key, places)

    def make(self, key: Key, leaves: Sequence[Tensor], paths: Sequence[str], scan: Scan, terms: Terms) -> Graph:
        """Export a graph for this call; the terms say what of the module's result it gives, and in how much memory.

        Raises
        ------
        NotExportable
            If the module must run in PyTorch.
        Interrupted
            If the handler of a signal that came meanwhile raised.
        """
        begin = time.perf_counter()
        self._terms = terms
        with waiting():
            with quiet(), no_collection():
                graph = self._with_open_numbers(key, leaves, paths, scan)
                if graph is None:
                    openings, sizes = self._openings(key), tuple([t.shape for t in leaves])
                    last, changes, known = self._last, self._changes.copy(), copy.deepcopy(openings)
                    self._check_churn(key, sizes, paths, openings)
                    try:
                        graph = self._export(key, leaves, paths, scan, openings)
                    except BaseException:  # perhaps the call is a mistake, which says nothing of others
                        self._last, self._changes = last, changes
                        vars(openings).update(vars(known))
                        raise
            seconds = time.perf_counter() - begin
            logger.info("%s: a graph made in %.1f s", type(self._module).__name__, seconds)
            self.export_seconds += seconds
            self._keep(graph)
            self._drop_forgotten()
            self._forget_numbers()
        return graph

    def _with_open_numbers(self, key: Key, leaves: Sequence[Tensor], paths: Sequence[str], scan: Scan) -> Graph | None:
        """Export a graph that leaves open the numbers that change from call to call, if there are any and it can."""
        changing = self._changing.setdefault(bare(key), Changing())
        self._note_attributes(key)
        values = [v for _, v in numbers_by_path(key[0])]
        changing.see(values)
        while True:
            places = changing.changed()
            attributes = [a for at, a in self._attributes.items() if at not in self._needed and a.is_number()]
            if not places and not attributes:
                return None
            self._check_limit(key, "")
            given = [*[v if i in places else None for i, v in enumerate(values)], *[a.now for a in attributes]]
            names = [*self._arguments.numbers(key[0]), *map(str, attributes)]
            to_open, open_key = Numbers(given, names), opened(key, places)
            try:
                with standing_in(attributes, to_open.symbols[len(values) :]):
                    graph = self._export(open_key, leaves, paths, scan, self._openings(open_key), to_open)
            except Exception as error:
                if isinstance(error, NotInitialized) or of_the_machine(error) is not None:
                    raise
                logger.info("%s: not exported with open numbers: %s", type(self._module).__name__, first_lines(error))
                logger.debug("", exc_info=error)
                needed = to_open.needed or {i for i, v in enumerate(given) if v is not None}
                changing.needed |= needed
                self._needed |= {a.place for i, a in enumerate(attributes, len(values)) if i in needed}
                continue
            graph.attributes = graph.read_of(attributes, len(values))
            self._note(changing, places)
            return graph

    def _note(self, changing: Changing, places: frozenset[int]) -> None:
        changing.note(places)
        self._are_open = self._are_open or bool(places)

    def _note_attributes(self, key: Key) -> None:
        """Note the attributes that are numbers and were others when a graph was made, where nothing else was."""
        common = bare(key)
        for held in [g.held for g in self._graphs.values() if g.held is not None and bare(g.key) == common]:
            self._attributes |= {a.place: a for a in held.changed_numbers() or ()}

    def _alike(self, key: Key) -> list[Graph]:
        """The graphs for calls that are alike but for what they are given that is no tensor."""
        return [g for g in self._graphs.values() if g.runner is not None and g.key[1] == key[1]]

    def give_up(self, key: Key | None, useless: Graph | None, by_dynamo: bool, for_now: bool = False) -> None:
        """Run calls with this key otherwise from now on, or `for_now`, unless a graph but `useless` serves them.

        Without a key the next call is looked at again.
        """
        with tracing_lock:
            if useless is not None and id(useless) in self._graphs:
                self._drop(useless)
            if key is not None:  # whose graph remembers what is known of its numbers
                changing = self._changing.get(bare(key))
                if changing is not None and changing.refused():  # whatever its numbers are
                    places = changing.changed(needed=True)
                    self._note(changing, places)
                    key = opened(key, places)
                self._keep(Graph(key, by_dynamo, until=self._calls + self._lately if for_now else math.inf))
            self._forget_numbers()

    def runners(self) -> list[Runner]:
        """Those of its graphs."""
        return [graph.runner for graph in list(self._graphs.values()) if graph.runner is not None]

    def _openings(self, key: Key) -> Openings:
        """Of the graphs, if there are any, that were made where all that they read was as it is.

        New ones inherit what is known of the sizes of calls that differ in numbers alone.
        """
        found = next((g.openings for g in self._by_key.get(key, ()) if g.held is not None and g.held.hold()), None)
        if found is not None:
            return found
        common = bare(key)
        alike = next((g for g in reversed(self._graphs.values()) if g.held is not None and bare(g.key) == common), None)
        return Openings() if alike is None else alike.openings.inherited()

    def _check_churn(self, key: Key, sizes: Sizes, paths: Sequence[str], openings: Openings) -> None:
        """Tell, once, what it is that graphs are made because of again and again.

        Refuse one more graph of a kind that fills the cache, if all are in use: each would push out the next.
        """
        when = self._difference(key, sizes, paths, openings)
        self._last = key
        self._changes[when] += 1
        if when:
            logger.info("%s is exported once more: %s", type(self._module).__name__, when)
        if when and self._changes[when] == _MANY_CHANGES:
            self._report.tell(f"{type(self._module).__name__} is exported anew each time {when}")
        self._check_limit(key, when)

    def _check_limit(self, key: Key, when: str) -> None:
        limit, alike = self._options.max_graphs, self._alike(key)
        if len(alike) < limit:
            return
        if all(g.used > self._calls - self._lately for g in alike):
            self._refused = True
            often = f", one more each time {when}" if when else ""
            raise TooManyGraphs(f"more than max_graphs={limit} graphs would be needed{often}")
        if self._refused and not any(g.again for g in alike):  # so many more may be of as little use
            self._lately *= 2
        self._refused = False

    def _difference(self, key: Key, sizes: Sizes, paths: Sequence[str], openings: Openings) -> str:
        """What happened that no graph serves this call, if others were made for calls like it."""
        (spec, rest), (last_spec, last_rest) = key, self._last or key
        made = [(g.held, g.fit) for g in self._by_key.get(key, ()) if g.held is not None and g.fit is not None]
        fits = [fit.accepts(sizes) for held, fit in made if held.hold()]
        size, what, is_number = openings.changed(sizes), None, False
        if any(fits):
            return "an argument lies otherwise in memory"
        if size is not None:
            of, dim, why = size
            return f"the size of {paths[of]} in dim {dim} changes; {why}"
        if made and not fits:
            what, is_number = made[0][0].changed(), bool(made[0][0].changed_numbers())
        elif not made and rest == last_rest:
            difference = self._arguments.difference(last_spec, spec)
            what = None if difference is None else f"argument {difference}"
            is_number = bare(key) == bare(self._last or key)
        advice = "; a tensor may change without that" if is_number else ""
        return f"{what} takes a new value{advice}" if what else ""

    def _keep(self, graph: Graph) -> None:
        graph.used = self._calls
        alike = [g for g in self._graphs.values() if (g.runner is None) == (graph.runner is None)]
        if len(alike) >= self._options.max_graphs:
            self._drop(alike[0])
        self._graphs[id(graph)] = graph
        same_key = self._by_key.setdefault(graph.key, [])
        same_key.insert(0 if graph.runner is not None else len(same_key), graph)

    def _drop_forgotten(self) -> None:
        """Drop the graphs that wait for an object to come back which nobody else has any more."""
        graphs = list(self._graphs.values())
        changed = [g for g in graphs if g.held is not None and not g.held.hold()]
        if not changed and not any(by_identity(plain_leaves(g.key[0])) for g in graphs):
            return
        ours = Counter(id(v) for g in graphs for v in [*g.outside, *plain_leaves(g.key[0])])
        attributes = {id(a): a for a in [*self._attributes.values(), *[a for g in graphs for a in g.attributes]]}
        ours.update(id(a.state) for a in attributes.values())
        for graph in graphs:
            ours += Counter() if graph.held is None else graph.held.references()
        for graph in graphs:
            forgotten = graph in changed and graph.held is not None and graph.held.is_forgotten(ours)
            if forgotten or is_any_forgotten(by_identity(plain_leaves(graph.key[0])), ours):
                self._drop(graph)

    def _drop(self, graph: Graph) -> None:
        del self._graphs[id(graph)]
        self._by_key[graph.key].remove(graph)
        if not self._by_key[graph.key]:
            del self._by_key[graph.key]

    def _forget_numbers(self) -> None:
        """Forget of numbers what no graph has to do with any more: it would keep the objects that they came with."""
        graphs = self._graphs.values()
        common = {bare(g.key) for g in graphs}
        self._changing = {key: c for key, c in self._changing.items() if key in common}
        read = {place for g in graphs if g.held is not None for place in g.held.dictionaries()}
        read |= {id(a.state) for g in graphs for a in g.attributes}
        self._attributes = {at: a for at, a in self._attributes.items() if at[0] in read}
        self._needed &= self._attributes.keys()

    def _export(
        self,
        key: Key,
        leaves: Sequence[Tensor],
        paths: Sequence[str],
        scan: Scan,
        openings: Openings,
        to_open: Numbers | None = None,
    ) -> Graph:
        spec, _ = key
        sizes = tuple([t.shape for t in leaves])
        spare: Graph | None = None
        for axes in openings.candidates(sizes):
            try:
                graph = self._build(key, self._capture(spec, leaves, paths, scan, axes, to_open))
                self._check_fallbacks(key, graph, to_open)
                if graph.fallbacks and not openings.seen:  # that may be for the open sizes, which nobody needs so far
                    spare = graph
                    break
                self._tell(graph)
            except Exception as error:
                hopeless = isinstance(error, NotInitialized) or of_the_machine(error) is not None
                if hopeless or (to_open is not None and to_open.needed):
                    raise
                cause = first_lines(error)
                openings.fail(axes, f"it cannot be left open: {cause}")
                logger.info("%s: not exported with open sizes: %s", type(self._module).__name__, cause)
                logger.debug("", exc_info=error)
                continue
            return graph.among(openings, sizes, axes)
        known: Axes = ((),) * len(leaves)
        try:
            try:
                graph = self._build(key, self._capture(spec, leaves, paths, scan, known, to_open))
            except NodeRefused:  # once more, to say where
                graph = self._build(key, self._capture(spec, leaves, paths, scan, known, to_open, lines=True))
            self._check_fallbacks(key, graph, to_open)
        except NeedsStatic as error:
            raise NotExportable(str(error)) from error
        if spare is not None and len(spare.fallbacks) <= len(graph.fallbacks):
            graph = spare
        self._tell(graph)
        return graph.among(openings, sizes, known)

    def _check_fallbacks(self, key: Key, graph: Graph, to_open: Numbers | None) -> None:
        """Refuse to leave numbers open where an op would run in PyTorch because of that."""
        n = len(graph.fallbacks)
        if to_open is None or not graph.gives_numbers:
            return
        if n > min((len(g.fallbacks) for g in self._alike(key)), default=n):
            to_open.refuse("an op would run in PyTorch because of it")

    def _capture(self, *args: Any, **kwargs: Any) -> Captured:
        try:
            return capture(self._module, self._terms, *args, **kwargs)
        except NotExportable as error:
            error.of_forward = not isinstance(error, ForwardRaised)
            raise

    def _tell(self, graph: Graph) -> None:
        """Report what of a graph runs in PyTorch, and refuse one that would be made anew at each call."""
        for name, cause in graph.fallbacks:
            self._report.add(name, cause)
        self._counting.update(graph.counting)
        for owner, attribute in graph.counting:
            if self._counting[owner, attribute] > _MAX_COUNTED:
                raise NotExportable(f"the forward sets {attribute} to a new value each time")

    def _build(self, key: Key, captured: Captured) -> Graph:
        self._check_writes(captured.writes, captured.outside)
        lowered = lower(captured)
        inputs, _ = captured.placeholders()
        fit = Fit([n.meta["val"] for n in inputs[: captured.n_user]])
        runner = Runner.of(lowered, self._terms.budget, self._files, self._report)
        logger.info("%s: exported %d nodes", type(self._module).__name__, len(lowered.model.graph))
        watch = captured.watch
        assert watch is not None
        registries = [r for m in self._module.modules() for r in (m._parameters, m._buffers)]
        held = watch.held(captured.writes, captured.outside, registries)
        own = {id(t) for r in registries for t in r.values()}
        written = [(w.module, w.name) for w in captured.writes]
        graph = Graph(
            key,
            held=held,
            fit=fit,
            runner=runner,
            out_spec=captured.out_spec,
            written=written,
            rebound=captured.rebound,
            asked=frozenset(watch.names),
            met=[ref(t) for t in watch.tensors.values() if id(t) not in own],
            outside=captured.outside,
            layouts=captured.layouts,
            counting=[(id(w.module), str(w)) for w in captured.writes if w.counts],
            fallbacks=lowered.fallbacks,
            numbers=lowered.numbers,
            gives_numbers=lowered.gives_numbers,
        )
        vars(watch).clear()  # its parts refer to each other, and would keep what it has seen
        return graph

    @staticmethod
    def _check_writes(writes: Sequence[Write], read: Sequence[Tensor]) -> None:
        """Refuse attributes that carry something from one forward to the next; buffers may."""
        ids = {id(t) for t in read}
        for w in writes:
            with contextlib.suppress(TypeError):
                if any(id(t) in ids for t in flatten(w.before)[0]):
                    raise NotExportable(f"the forward reads and sets {w}, which is no buffer")


def parameter_refusal(tensors: Sequence[Tensor]) -> str:
    """Why these parameters and buffers cannot be given to a graph, or nothing."""
    for t in tensors:
        if type(t) not in (Tensor, nn.Parameter, nn.Buffer) or t.layout is not torch.strided:
            hint = "; shard the wrapper as one group, as in fully_shard(ORTModule(module))"
            sharded = type(t).__name__ == "DTensor"
            return f"a parameter or buffer is a {type(t).__name__} with layout {t.layout}{hint if sharded else ''}"
    return ""
