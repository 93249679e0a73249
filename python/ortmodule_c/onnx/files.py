"""The ONNX files that a user asked for."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from .. import _C
from ..lowering.lower import Lowered
from ..lowering.to_text import to_text
from ..options import DebugOptions, logger
from ..report import FallbackReport
from .description import described, type_text
from .write import save

_numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))  # by the beginning of the names


class Files:
    """The ONNX files of one module's graphs; where one cannot be written that is told and changes nothing.

    Parameters
    ----------
    options
        Whether there are files, and their place and names.
    report
        Where is told what could not be written.
    """

    def __init__(self, options: DebugOptions, report: FallbackReport) -> None:
        self._wanted = options.save_onnx
        self._beginning = str(options.directory / options.onnx_prefix)
        self._report = report
        self._written: set[str] = set()

    def watchers(
        self, lowered: Lowered, text: str, constants: dict[str, Tensor], numbered: bool = False
    ) -> list[Callable[[_C.Plan], None]]:
        """What writes a graph once a plan of it is known, if it has to be written.

        Of graphs without numbers, which stand for the whole module, the first is written in each mode. One with a
        number is one of several, and each is; of a graph that has no gradient there is no mode but inference.
        """
        if not self._wanted:
            return []
        beginning = f"{self._beginning}_{next(_numbers[self._beginning])}" if numbered else self._beginning
        typed = to_text(lowered.model, typed=True)[0]

        def write(plan: _C.Plan, mode: str) -> None:
            optimized = plan.describe()
            stages = {"exported": _C.describe(typed, "parse", constants=constants), "optimized": optimized}
            if mode == "training":
                stages["joint"] = _C.describe(
                    text,
                    "differentiate",
                    types=[type_text(kind) for _, kind, _ in described(optimized).inputs if kind is not None],
                    out_grads=plan.out_grads[0],
                    in_grads=plan.in_grads,
                    constants=constants,
                    callbacks=lowered.callbacks,
                )
            for stage, graph in stages.items():
                save(graph, Path(f"{beginning}_{stage}_{mode}.onnx"))

        def write_once(plan: _C.Plan) -> None:
            mode = "training" if any(map(any, plan.out_grads)) else "inference"
            if f"{beginning}_{mode}" in self._written:
                return
            self._written.add(f"{beginning}_{mode}")
            try:
                write(plan, mode)
            except Exception as error:
                logger.debug("no ONNX files", exc_info=True)
                self._report.tell(f"the {mode} graphs could not be written: {type(error).__name__}: {error}")

        return [write_once]
