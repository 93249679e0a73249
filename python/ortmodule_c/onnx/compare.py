"""What a model of a module gives beside what the module gives, for sizes where they might part."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from onnx import ModelProto
from torch import Tensor, nn

from ..errors import NotExportable
from ..flatten import flatten, unflatten
from ..terms import Terms
from ..whole import WholeGraph, in_mode
from .module import OnnxModule

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def compare(model: ModelProto, graph: WholeGraph, module: nn.Module, terms: Terms) -> None:
    """NotExportable if a model gives anything else than the module where that gives something.

    Both are run for the example, and for sizes that the trace of the forward has left out: 1, which it takes for no
    open size, and what is next to the range that it asks for.
    """
    ours = OnnxModule(model).train(graph.mode == "training")
    for sizes in _to_try(graph):
        leaves = [_resized(t, of, sizes) for t, of in zip(graph.leaves, graph.sizes, strict=True)]
        expected = _given(module, terms, graph, leaves)
        if expected is None:
            continue
        where = ", ".join(f"{name} = {n}" for name, n in sizes.items())
        try:
            with torch.no_grad():
                found = ours(*[t.cpu() for t in leaves])
        except NotExportable:
            if not sizes:  # an op without a kernel: nothing is known
                return
            raise
        except Exception as error:
            if not sizes:
                raise
            raise NotExportable(f"where {where} the module gives a result, and the graph: {error}") from error
        found = found if isinstance(found, tuple) else (found,)
        for i, (got, want) in enumerate(zip(found, expected, strict=True)):
            if not _are_alike(got, want):
                at = f"where {where} " if sizes else ""
                raise NotExportable(f"{at}result {i} of the graph is another than the module's")


def _to_try(graph: WholeGraph) -> Iterator[dict[str, int]]:
    yield {}
    for name, least, most in graph.ranges:
        around = {1, least - 1, *([] if most is None else [most + 1])}
        yield from ({name: n} for n in sorted(around) if n > 0)


def _resized(t: Tensor, sizes: Sequence[int | str], wanted: Mapping[str, int]) -> Tensor:
    """A tensor with its elements again, or fewer, along axes of other sizes."""
    for axis, size in enumerate(sizes):
        if isinstance(size, str) and size in wanted:
            t = t.index_select(axis, torch.arange(wanted[size], device=t.device) % t.shape[axis])
    return t


def _given(module: nn.Module, terms: Terms, graph: WholeGraph, leaves: Sequence[Tensor]) -> list[Tensor] | None:
    """What the module gives; None if it gives nothing for such tensors."""
    args, kwargs = unflatten(graph.spec, iter([t.clone() for t in leaves]))
    try:
        with in_mode(module, graph.mode == "training"), torch.no_grad():
            return [t.cpu() for t in flatten(terms.call(module, *args, **kwargs))[0]]
    except Exception:
        return None


def _are_alike(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.dtype.is_floating_point or not want.numel():
        return torch.equal(got, want)
    tolerance = _TOLERANCE[want.dtype]
    finite = want[want.isfinite()].abs()
    most = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance * most, equal_nan=True)
