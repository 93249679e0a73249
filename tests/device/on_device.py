"""Sessions on another device, that of tests/c/device.c or a GPU, in the place of those on the CPU.

`install` makes every session of the process open on the device. Whoever uses one has tensors of the host's as before:
they are copied at the session's border, and so are those of calls back to PyTorch. Within it all is on the device,
where a pointer of the host's is an error, as one of the device's is a fault here. On the device of the tests a graph
that does not call PyTorch is run on the CPU too, and must have the same bits there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ortmodule_c import _C

ROOT = Path(__file__).resolve().parents[2]
BUILT = ("device", "gpu")  # devices that `build` makes


class Different(BaseException):
    """The device gives other bits than the CPU. No reason to fall back to PyTorch, as an Exception would be."""


def build() -> None:
    """Bring the extension up to date."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_device"], cwd=ROOT, check=True)


def load_stand_ins() -> None:
    """Let the provider for CUDA find the libraries of tests/cuda where it looks for NVIDIA's and PyTorch's."""
    for library in ("libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libtorch_cuda.so"):
        # Some names of the last are also those of PyTorch for the CPU, which is not to find them here.
        mode = ctypes.RTLD_LOCAL if library == "libtorch_cuda.so" else ctypes.RTLD_GLOBAL
        ctypes.CDLL(str(ROOT / "build" / "device" / library), mode=mode)


def install(name: str = "device") -> None:
    """Let sessions open on the device of that name.

    That is "device" of tests/c, "gpu", the emulated one, or one that PyTorch has: "cuda". The first two take another
    extension in the place of the product's.
    """
    if name == "gpu":
        load_stand_ins()
    Session.core, Session.device = loaded() if name in BUILT else (SimpleNamespace(**vars(_C)), OfPyTorch())
    Session.name = name
    vars(_C).update({name: value for name, value in vars(Session.core).items() if not name.startswith("__")})
    _C.Session = Session
    # What a provider knows decides what of a graph runs in PyTorch.
    _C.infer = lambda *asked, **named: Session.core.infer(*asked[:5], **{**named, "provider": name})


class OfPyTorch:
    """Tensors on devices that PyTorch has."""

    def put(self, t: Tensor, name: str) -> Tensor:
        return t.to(name)

    def get(self, t: Tensor, name: str) -> Tensor:
        return t.to("cpu")


def loaded() -> tuple[ModuleType, ModuleType]:
    """The core with the device in it, and the module of tensors there."""
    return _loaded("ortmodule_c._C"), _loaded("device")


@functools.cache
def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "build" / "device" / "_C.abi3.so")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else Session.device.put(t.detach(), Session.name) for t in tensors]


def get(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else Session.device.get(t, Session.name) for t in tensors]


class Session:
    """`_C.Session` on the device."""

    core: Any
    device: Any
    name: str

    def __init__(
        self,
        text: str,
        constants: Any,
        callbacks: Any = None,
        max_plans: int = 16,
        provider: str = "cpu",
        **budget: Any,
    ) -> None:
        border = None if callbacks is None else Callbacks(callbacks)
        self._session = self.core.Session(text, constants, border, max_plans, self.name, **budget)
        calls = "TorchCall(" in text
        exact = self.name == "device"  # kernels of its own round otherwise than the CPU's
        self._cpu = None if calls or not exact else self.core.Session(text, constants, None, max_plans)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def plan(self, inputs: Sequence[Tensor], *masks: Sequence[bool], **how: bool) -> Plan:
        plan = self._session.plan(put(inputs), *masks, **how)
        return Plan(plan, None if self._cpu is None else self._cpu.plan(inputs, *masks, **how))


class Callbacks:
    """PyTorch's ops, computed in the host's memory."""

    def __init__(self, callbacks: Any) -> None:
        self._callbacks = callbacks
        self.infer = callbacks.infer

    def forward(self, index: int, inputs: list[Tensor]) -> tuple[list[Tensor | None], object]:
        outputs, state = self._callbacks.forward(index, get(inputs))
        return put(outputs), state

    def backward(self, index: int, state: object, grads: list[Tensor | None]) -> list[Tensor | None]:
        return put(self._callbacks.backward(index, state, get(grads)))


class Plan:
    """`_C.Plan` on the device, and the CPU's unless it calls PyTorch."""

    def __init__(self, plan: Any, cpu: Any) -> None:
        self._plan, self._cpu = plan, cpu
        self._asked: dict[bytes, Sequence[int]] = {}  # inputs, by what their gradients need

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Torch's, as all tensors that are given to a plan are until `put`."""
        return torch.empty_like(tensor)

    def forward(self, inputs: Sequence[Tensor], seed: int) -> tuple[list[Tensor | None], Run | None]:
        given, own, cpu_left = put(inputs), [t.detach().clone() for t in inputs], None
        on_device, left = self._plan.forward(given, seed)
        outputs = get(on_device)
        if self._cpu is not None:
            expected, cpu_left = self._cpu.forward(own, seed)
            compare("output", outputs, expected)
        # What is written over an input is that input.
        places = {id(t): i for i, t in enumerate(given)}
        for k, i in [(k, places[id(t)]) for k, t in enumerate(on_device) if id(t) in places]:
            inputs[i].data.copy_(outputs[k])
            outputs[k] = inputs[i]
        return outputs, None if left is None else Run(left, cpu_left)

    def backward(
        self,
        run: Run,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
        keep: bool = False,
        packed: Tensor | None = None,
        needed: bytes | None = None,
    ) -> list[Tensor | None]:
        on_device = self._plan.backward(run.run, put(inputs), put(outputs), put(grads), keep, *put([packed]), needed)
        results = get(on_device)
        if self._cpu is not None:
            cpu_packed = None if packed is None else run.cpu_packed
            expected = self._cpu.backward(run.cpu, inputs, outputs, grads, keep, cpu_packed)
            asked = range(len(results)) if needed is None else self._asked[needed]
            compare("gradient of input", [results[i] for i in asked], [expected[i] for i in asked])
        return results

    def begin(
        self,
        run: Run,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
        keep: bool = False,
        packed: Tensor | None = None,
        needed: bytes | None = None,
    ) -> Backward:
        begun = self._plan.begin(run.run, put(inputs), put(outputs), put(grads), keep, *put([packed]), needed)
        if self._cpu is None:
            return Backward(begun, None)
        cpu_packed = None if packed is None else run.cpu_packed
        return Backward(begun, self._cpu.begin(run.cpu, inputs, outputs, grads, keep, cpu_packed))

    def needed(self, backward: int, inputs: Sequence[int]) -> tuple[bytes, tuple[int, ...], tuple[int, ...]]:
        found: tuple[bytes, tuple[int, ...], tuple[int, ...]] = self._plan.needed(backward, inputs)
        self._asked[found[0]] = inputs
        return found


class Backward:
    """`_C.Backward` on the device, and the CPU's."""

    def __init__(self, backward: Any, cpu: Any) -> None:
        self._backward, self._cpu = backward, cpu

    def take(self, inputs: Sequence[int]) -> list[Tensor | None]:
        results = get(self._backward.take(inputs))
        if self._cpu is not None:
            compare("gradient of input", results, self._cpu.take(inputs))
        return results

    def end(self) -> None:
        for backward in (self._backward, self._cpu):
            if backward is not None:
                backward.end()


class Run:
    """`_C.Run` of both."""

    def __init__(self, run: Any, cpu: Any) -> None:
        self.run, self.cpu = run, cpu
        self.cpu_packed: Tensor | None = None

    def pack(self) -> Tensor:
        self.cpu_packed = None if self.cpu is None else self.cpu.pack()
        return Session.device.get(self.run.pack(), Session.name)


def compare(what: str, found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Different if any bit is."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if (a is None) != (b is None) or (a is not None and not torch.equal(_bits(a), _bits(b))):
            raise Different(f"{what} {i} on the device:\n{a}\non the CPU:\n{b}")


def _bits(t: Any) -> Tensor:
    return t.reshape(-1).view(torch.uint8)
