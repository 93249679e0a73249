"""Exported graphs of one module: when one is made, when it may be used, how many are kept."""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import _C, onnx_io
from .errors import NeedsStatic, NotExportable
from .export import Captured, capture
from .flatten import Spec, unflatten
from .function import Runner
from .guards import Attributes, Survey
from .ingest import ingest
from .lowering import lower
from .options import DebugOptions, logger
from .report import FallbackReport
from .shapes import Fit, Sizes

_export_lock = threading.RLock()  # tracing changes process-wide state
_OPS = _C.ops()
_OWN_OPS = frozenset(name for name, (_, standard, _) in _OPS.items() if not standard)


def _supports(op: str, dtype: str) -> bool:
    """Whether there is such an op and it has a kernel for this dtype."""
    return op in _OPS and _C.supports(op, dtype)


@dataclass(eq=False)
class Graph:
    """One exported graph, or the decision to run in PyTorch (`runner` is None)."""

    key: Hashable
    attributes: Attributes
    fit: Fit | None
    runner: Runner | None
    out_spec: Spec

    def serves(self, sizes: Sizes) -> bool:
        """Whether it may be used for inputs of these sizes now."""
        return (self.fit is None or self.fit.accepts(sizes)) and self.attributes.hold()

    def run(self, inputs: Sequence[Tensor]) -> object:
        """The module's outputs."""
        assert self.runner is not None
        return unflatten(self.out_spec, iter(self.runner(inputs)))


@dataclass
class _History:
    """What was seen of calls with one key, to decide which axes are made dynamic."""

    sizes: list[Sizes] = field(default_factory=list)
    tried: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)

    def varying(self, now: Sizes) -> tuple[tuple[int, ...], ...]:
        """Axes of each tensor whose size is not always the same."""
        return tuple(
            tuple(a for a in range(len(shape)) if any(old[i][a] != shape[a] for old in self.sizes))
            for i, shape in enumerate(now)
        )


class Graphs:
    """Cache of a module's graphs, least recently used first.

    Parameters
    ----------
    module
        The user's module.
    options
        Bounds of the cache and what is written to disk.
    report
        Where fallbacks are told.
    """

    def __init__(self, module: nn.Module, options: DebugOptions, report: FallbackReport) -> None:
        self._module = module
        self._options = options
        self._report = report
        self._graphs: OrderedDict[int, Graph] = OrderedDict()
        self._by_key: dict[Hashable, list[Graph]] = {}
        self._history: OrderedDict[Hashable, _History] = OrderedDict()
        self._written: set[str] = set()
        self._export_seconds = 0.0

    def find(self, key: Hashable, sizes: Sizes) -> Graph | None:
        """A graph that serves this call, if there is one."""
        for graph in self._by_key.get(key, ()):
            if graph.serves(sizes):
                with contextlib.suppress(KeyError):  # another thread may just have dropped it
                    self._graphs.move_to_end(id(graph))
                return graph
        return None

    def make(
        self, key: Hashable, spec: Spec, leaves: Sequence[Tensor], paths: Sequence[str], survey: Survey, refusal: str
    ) -> Graph:
        """Export a graph for this call; `refusal` is why it must run in PyTorch, or empty."""
        sizes = tuple([t.shape for t in leaves])
        with _export_lock:
            graph = self.find(key, sizes)
            if graph is None:
                begin = time.perf_counter()
                graph = self._whole(key, refusal) if refusal else self._export(key, spec, leaves, paths, survey, sizes)
                self._export_seconds += time.perf_counter() - begin
                self._keep(graph)
        return graph

    def stats(self) -> dict[str, float]:
        """Sums over the graphs' sessions; see :meth:`ORTModule.stats`."""
        sums: dict[str, float] = {"graphs": 0, "export_seconds": self._export_seconds, "arena_bytes": 0}
        for graph in list(self._graphs.values()):
            if graph.runner is None:
                continue
            sums["graphs"] += 1
            sums["arena_bytes"] = max(sums["arena_bytes"], graph.runner.arena_bytes)
            for name, value in graph.runner.session.stats().items():
                sums[name] = sums.get(name, 0) + value
        return sums

    def _keep(self, graph: Graph) -> None:
        if len(self._graphs) >= self._options.max_graphs:
            _, oldest = self._graphs.popitem(last=False)
            self._by_key[oldest.key].remove(oldest)
            if not self._by_key[oldest.key]:
                del self._by_key[oldest.key]
        self._graphs[id(graph)] = graph
        self._by_key.setdefault(graph.key, []).insert(0, graph)
        while len(self._history) > 4 * self._options.max_graphs:
            self._history.popitem(last=False)

    def _whole(self, key: Hashable, cause: str) -> Graph:
        self._report.add(type(self._module).__name__, cause)
        return Graph(key, Attributes(self._module, set()), None, None, ())

    def _export(
        self, key: Hashable, spec: Spec, leaves: Sequence[Tensor], paths: Sequence[str], survey: Survey, sizes: Sizes
    ) -> Graph:
        history = self._history.setdefault(key, _History())
        axes = history.varying(sizes)
        history.sizes = [*history.sizes[-15:], sizes]
        useful = (
            any(axes)
            and axes not in history.tried
            and all(s[a] > 1 for s, varying in zip(sizes, axes, strict=True) for a in varying)
        )
        if useful:
            history.tried.add(axes)
            try:
                return self._build(key, capture(self._module, spec, leaves, paths, survey, axes))
            except (NeedsStatic, NotExportable) as error:
                logger.info("%s: not exported with dynamic sizes: %s", type(self._module).__name__, error)
        try:
            return self._build(key, capture(self._module, spec, leaves, paths, survey, [()] * len(leaves)))
        except (NeedsStatic, NotExportable) as error:
            return self._whole(key, str(error))

    def _build(self, key: Hashable, captured: Captured) -> Graph:
        lowered = lower(captured, _supports, _OWN_OPS)
        for name, cause in lowered.fallbacks:
            self._report.add(name, cause)
        text, constants = ingest(lowered.model)
        session = _C.Session(text, constants, lowered.host)
        inputs, _ = captured.placeholders()
        fit = Fit([n.meta["val"] for n in inputs[: captured.n_user]])
        runner = Runner(
            session,
            lowered,
            self._writer(ingest(lowered.model, typed=True)[0], text, constants) if self._options.save_onnx else None,
        )
        logger.info("%s: exported %d nodes", type(self._module).__name__, len(lowered.model.graph))
        return Graph(key, Attributes(self._module, captured.changed), fit, runner, captured.out_spec)

    def _writer(self, exported: str, text: str, constants: dict[str, Tensor]) -> Callable[[_C.Plan], None]:
        """What writes the ONNX files once a plan is known, once per mode."""

        def write(plan: _C.Plan) -> None:
            mode = "training" if any(plan.out_grads) else "inference"
            if mode in self._written:
                return
            self._written.add(mode)
            stages = {"exported": exported, "optimized": plan.text()}
            if mode == "training":
                types = onnx_io.input_types(plan.text())
                stages["joint"] = _C.transform(
                    text,
                    "differentiate",
                    types=types,
                    out_grads=plan.out_grads,
                    in_grads=plan.in_grads,
                    constants=constants,
                )
            for stage, graph in stages.items():
                path = self._options.directory / f"{self._options.onnx_prefix}_{stage}_{mode}.onnx"
                onnx_io.save(graph, constants, path)

        return write


def device_refusal(tensors: Sequence[Tensor]) -> str:
    """Why tensors on their device cannot be computed on here, or nothing."""
    kinds = {t.device.type for t in tensors}
    return "" if kinds <= {"cpu"} else f"there are no kernels for device {kinds.pop()!r}"


def parameter_refusal(tensors: Sequence[Tensor]) -> str:
    """Why these parameters and buffers cannot be given to a graph, or nothing."""
    for t in tensors:
        if type(t) not in (Tensor, nn.Parameter, nn.Buffer) or t.layout is not torch.strided:
            return f"a parameter or buffer is a {type(t).__name__} with layout {t.layout}"
    return ""
