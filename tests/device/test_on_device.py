"""A device that is none of the CPU's: tensors, callbacks, memory and failures; then what the CPU passes, on it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import on_device
import pytest
import torch
from torch import Tensor

sys.path.append(str(on_device.ROOT / "tests" / "fuzz"))

from fuzz import told, verdicts

STEP = """\
input %x : f32[2,3]
input %w : f32[3,4] grad
const %c : f32[4] = [1, 2, 3, 4]
%0 = MatMul(%x, %w)
%1 = Mul(%0, %c)
return %1, %x
"""
CALL = "input %x : f32[4] grad\n%0 = TorchCall(%x) {index=0}\n%y = Neg(%0)\nreturn %y\n"


@pytest.fixture(scope="module")
def modules() -> tuple[ModuleType, ModuleType]:
    on_device.build()
    return on_device.loaded()


@pytest.fixture
def device(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[1]


@pytest.fixture
def core(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[0]


def test_a_session_takes_tensors_of_its_device_alone(core: ModuleType, device: ModuleType) -> None:
    host = [torch.randn(2, 3), torch.randn(3, 4)]
    masks = [False, True], [True, False]
    for name, given, found in (("cpu", [*map(device.put, host)], "privateuseone:0"), ("device", host, "cpu")):
        with pytest.raises(ValueError, match=f"x: expected a tensor on {name}, got one on {found}"):
            core.Session(STEP, {}, provider=name).plan(given, *masks)


def test_results_are_tensors_of_the_device_with_the_bits_of_the_cpu(core: ModuleType, device: ModuleType) -> None:
    host = [torch.randn(2, 3), torch.randn(3, 4)]
    dy = torch.randn(2, 4)

    def step(name: str, inputs: list[Tensor], dy: Tensor) -> list[Tensor | None]:
        plan = core.Session(STEP, {}, provider=name).plan(inputs, [False, True], [True, False])
        outputs, run = plan.forward(inputs, 0)
        return outputs + plan.backward(run, inputs, outputs, [dy, None])

    got, want = step("device", [*map(device.put, host)], device.put(dy)), step("cpu", host, dy)
    assert {t.device.type for t in got if t is not None} == {device.put(dy).device.type}
    on_device.compare("result", [None if t is None else device.get(t) for t in got], want)


def test_a_step_copies_nothing_from_or_to_the_host(core: ModuleType, device: ModuleType) -> None:
    inputs, dy = [device.put(torch.randn(2, 3)), device.put(torch.randn(3, 4))], device.put(torch.randn(2, 4))
    before = device.counted()
    plan = core.Session(STEP, {}, provider="device").plan(inputs, [False, True], [True, False])
    planned = device.counted()
    assert planned["uploads"] > before["uploads"]
    for _ in range(3):
        outputs, run = plan.forward(inputs, 0)
        plan.backward(run, inputs, outputs, [dy, None])
    after = device.counted()
    assert (after["uploads"], after["from_and_to_host"]) == (planned["uploads"], planned["from_and_to_host"])
    assert after["copies_within"] - planned["copies_within"] == 3  # x, which is an output
    assert after["kernels"] - planned["kernels"] == 3 * plan.n_steps


def test_pytorch_is_called_with_tensors_of_the_device(core: ModuleType, device: ModuleType) -> None:
    x, dy = torch.randn(4), torch.randn(4)
    kind = device.put(x).device

    class Callbacks:
        def infer(self, _index: int, types: list) -> list:
            return types

        def forward(self, _index: int, inputs: list[Tensor]) -> tuple[list[Tensor], object]:
            assert inputs[0].device == kind
            return [device.put(device.get(inputs[0]) * 3)], "state"

        def backward(self, _index: int, state: object, grads: list[Tensor]) -> list[Tensor]:
            assert state == "state" and grads[0].device == kind
            return [device.put(device.get(grads[0]) * 3)]

    given = [device.put(x)]
    plan = core.Session(CALL, {}, Callbacks(), provider="device").plan(given, [True], [True])
    outputs, run = plan.forward(given, 0)
    (dx,) = plan.backward(run, given, outputs, [device.put(dy)])
    assert torch.equal(device.get(outputs[0]), -3 * x)
    assert torch.equal(device.get(dx), -3 * dy)


def test_a_result_of_pytorch_is_on_the_device(core: ModuleType, device: ModuleType) -> None:
    class Callbacks:
        def infer(self, _index: int, types: list) -> list:
            return types

        def forward(self, _index: int, _inputs: list[Tensor]) -> tuple[list[Tensor], object]:
            return [torch.randn(4)], None

    given = [device.put(torch.randn(4))]
    plan = core.Session(CALL, {}, Callbacks(), provider="device").plan(given, [False], [False])
    with pytest.raises(ValueError, match="expected a tensor on device"):
        plan.forward(given, 0)


def test_memory_goes_back_with_the_last_owner(core: ModuleType, device: ModuleType) -> None:
    before = device.used_bytes()
    inputs, dy = [device.put(torch.randn(2, 3)), device.put(torch.randn(3, 4))], device.put(torch.randn(2, 4))
    plan = core.Session(STEP, {}, provider="device").plan(inputs, [False, True], [True, False])
    outputs, run = plan.forward(inputs, 0)
    packed = run.pack()
    results = plan.backward(run, inputs, outputs, [dy, None], packed=packed)
    del plan, run
    assert device.used_bytes() > before
    del inputs, dy, outputs, packed, results
    assert device.used_bytes() == before


def test_a_failure_is_told_when_somebody_waits(core: ModuleType, device: ModuleType) -> None:
    text = "input %x : f32[3,2]\ninput %i : i64[2]\n%y = Gather(%x, %i)\nreturn %y\n"
    inputs = [device.put(torch.randn(3, 2)), device.put(torch.tensor([0, 5]))]
    (y,), _ = core.Session(text, {}, provider="device").plan(inputs, [False, False]).forward(inputs, 0)
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        device.get(y)
    device.get(y)  # it is told once


# What the CPU passes, a part of it: `make device` runs all.
@pytest.mark.parametrize(
    "tests",
    [
        "tests/ops/test_ops.py",
        "tests/module/test_retained.py",
        *(
            pytest.param(f"tests/module/test_{name}.py", marks=pytest.mark.long)
            for name in ("training", "buffers", "backwards", "changed_since")
        ),
    ],
)
def test_what_passes_on_the_cpu_passes_on_the_device(tests: str, every: int) -> None:
    options = ["--device", f"--every={every}", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, tests]
    ran = subprocess.run(command, cwd=on_device.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]


def test_random_programs_are_the_same_on_the_device(every: int) -> None:
    failures = [told(v) for v in verdicts(range(0, 100, every), processes=2, device="device") if v["what"]]
    assert not failures, "\n".join(failures)
