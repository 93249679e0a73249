"""Runs ONNX's own tests of single nodes, and of small models, on the backend, and writes what of them passes.

python tests/onnx_files/nodes.py            # prints what fails
python tests/onnx_files/nodes.py --coverage # writes docs/onnx-nodes.md
"""

from __future__ import annotations

import argparse
import re
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import ModelProto
from onnx.backend.test import BackendTest

from ortmodule_c import NotExportable
from ortmodule_c.backend import CpuBackend, Rep

PAGE = Path(__file__).resolve().parents[2] / "docs" / "onnx-nodes.md"
KINDS = ("Node", "PyTorchConverted", "PyTorchOperator", "Simple")  # those that come with the package

# Tests that run and give other numbers, by the beginning of their names, and why that is right.
OTHERWISE = {
    "test_bernoulli": "draws are from PyTorch's generator, not from NumPy's",
    "test_attention_4d_causal_fp16": "products and softmax of float16 are summed in float32, and rounded less often",
    "test_dft_inverse": "what is 0 but for rounding is nearer to 0",
    "test_loop16_seq_none": "the comparison of the test takes no scalars in a sequence",
    "test_training_dropout": "dropout draws from PyTorch's generator, not from NumPy's",
}


class _Refused(unittest.SkipTest):
    pass


class _Told(Rep):
    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        try:
            return super().run(inputs, **kwargs)
        except NotExportable as error:
            raise _Refused(str(error)) from error


class _Telling(CpuBackend):
    """What the backend refuses by name is a test left out; any other error is a failure."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> Rep:
        try:
            return _Told(super().prepare(model, device, **kwargs).module)
        except NotExportable as error:
            raise _Refused(str(error)) from error


class _Result(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []
        self.refused: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed.append(_name(test))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.refused[_name(test)] = reason

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.failed[_name(test)] = str(err[1])

    addError = addFailure


def _name(test: unittest.TestCase) -> str:
    return test.id().split(".")[-1].removesuffix("_cpu")


def run() -> _Result:
    """All tests, each once."""
    torch.set_num_threads(1)
    result = _Result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = BackendTest(_Telling, __name__).test_cases
        for kind in KINDS:
            names = unittest.defaultTestLoader.loadTestsFromTestCase(cases[f"OnnxBackend{kind}ModelTest"])
            unittest.TestSuite(t for t in names if t.id().endswith("_cpu")).run(result)
    return result


def explained(name: str) -> bool:
    """Whether it is told why a test gives other numbers."""
    return any(name.startswith(beginning) for beginning in OTHERWISE)


def of_op(name: str) -> str:
    """The family of a test: the first word of its name."""
    return re.sub(r"^test_(operator_)?", "", name).split("_")[0].rstrip("0123456789") or name


def table(result: _Result) -> dict[str, tuple[int, int]]:
    """By family, how many pass, and how many there are."""
    passed = Counter(map(of_op, result.passed))
    every = passed + Counter(map(of_op, [*result.refused, *result.failed]))
    return {op: (passed[op], every[op]) for op in sorted(every)}


def page(result: _Result) -> Iterator[str]:
    """The lines of docs/onnx-nodes.md."""
    rows = table(result)
    total, of = (sum(column) for column in zip(*rows.values(), strict=True))
    yield "# ONNX's own tests"
    yield ""
    yield f"Written by `make onnx-nodes` with onnx {onnx.__version__}; a test holds the figures to growing. Tests of"
    yield "single nodes and small models that come with `onnx`, run by its `BackendTest` on `ortmodule_c.backend`. What"
    yield "does not pass is refused by an error that names the node, or is listed here:"
    yield ""
    for beginning, reason in OTHERWISE.items():
        yield f"- `{beginning}*`: {reason}."
    yield ""
    yield "| tests | pass | of |"
    yield "|---|---|---|"
    yield f"| **all** | **{total}** | **{of}** |"
    yield from (f"| {op} | {n} | {m} |" for op, (n, m) in rows.items())


def read() -> dict[str, tuple[int, int]]:
    """The figures of the page."""
    found = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.M)
    return {op: (int(n), int(m)) for op, n, m in found}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coverage", action="store_true", help="write docs/onnx-nodes.md")
    arguments = parser.parse_args()
    result = run()
    for name, error in result.failed.items():
        print(name, error)
    print(len(result.passed), "pass,", len(result.refused), "refused,", len(result.failed), "fail")
    if arguments.coverage:
        PAGE.write_text("\n".join(page(result)) + "\n")


if __name__ == "__main__":
    main()
