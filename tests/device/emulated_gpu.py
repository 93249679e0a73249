"""The GPU of the stand-ins of tests/cuda: sessions and tensors there, what is counted, and failures."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

LAUNCH_FAILED = 719


class Counts(ctypes.Structure):
    _fields_ = [
        ("launches", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("compiled", ctypes.c_uint64),
        ("mistakes", ctypes.c_uint64),
        ("allocated_bytes", ctypes.c_size_t),
        ("events", ctypes.c_uint64),
        ("graphs", ctypes.c_uint64),
        ("streams", ctypes.c_uint64),
        ("replays", ctypes.c_uint64),
    ]


class Gpu:
    """Sessions and tensors of an emulated GPU, by the name of its provider and its number."""

    def __init__(
        self, core: ModuleType, device: ModuleType, driver: ctypes.CDLL, name: str = "gpu", number: int = 0
    ) -> None:
        self.core, self._device, self.driver, self.name, self.number = core, device, driver, name, number
        driver.emulated_counted.restype = driver.emulated_counted_on.restype = Counts
        driver.emulated_stream.restype = ctypes.c_void_p
        driver.emulated_launched.restype = ctypes.c_char_p
        self.torch = ctypes.CDLL("libtorch_cuda.so")
        self.torch.emulated_tensors.restype = ctypes.c_int64

    def put(self, t: Tensor) -> Tensor:
        return self._device.put(t, self.name)

    def fresh(self, like: Tensor) -> Tensor:
        """One there of which nothing is written."""
        return self._device.fresh(like, self.name)

    def get(self, t: Tensor) -> Tensor:
        return self._device.get(t, self.name)

    def rest(self, t: Tensor, first: int) -> Tensor:
        """The elements from there on of a tensor of one dim, which must live as long."""
        return self._device.rest(t, first, self.name)

    def used_bytes(self) -> int:
        """That the provider has handed out."""
        return self._device.used_bytes(self.name)

    def give_back(self, address: int, size: int) -> None:
        """Memory, as the provider's users do."""
        self._device.give_back(address, size, self.name)

    def write(self, to: Tensor, t: Tensor) -> None:
        """Other elements where there are some."""
        address, host = ctypes.c_void_p(to.data_ptr()), t.contiguous()
        self.driver.emulated_write(address, ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(host.nbytes))

    def stream(self) -> int:
        """Another stream than the default one, which is 0."""
        return self.driver.emulated_stream(self.number)

    def use(self, stream: int) -> None:
        """Work in a stream from now on."""
        self._device.use_stream(stream)
        self.torch.emulated_use(self.number, ctypes.c_void_p(stream))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Who calls the driver himself does so within the device's context."""
        context = ctypes.c_void_p()
        self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.number)
        self.driver.cuCtxPushCurrent_v2(context)
        yield
        self.driver.cuCtxPopCurrent_v2(ctypes.byref(context))

    def counted(self) -> Counts:
        """Of all GPUs."""
        return self.driver.emulated_counted()

    def counted_here(self) -> Counts:
        return self.driver.emulated_counted_on(self.number)

    @contextlib.contextmanager
    def launches(self) -> Iterator[list[tuple[str, int]]]:
        """Those within, once they have been: the kernel of each and its blocks."""
        found: list[tuple[str, int]] = []
        self.driver.emulated_launched(1)
        yield found
        lines = self.driver.emulated_launched(0).decode().splitlines()
        found.extend((name, int(blocks)) for name, blocks in map(str.split, lines))

    def tensors(self) -> int:
        """PyTorch's that are out."""
        return self.torch.emulated_tensors()

    def channels_last(self, on: bool) -> None:
        """Whether what PyTorch's ops give lies with channels innermost from now on."""
        self.torch.emulated_channels_last(int(on))

    def pause(self, stream: int) -> None:
        self.driver.emulated_pause(ctypes.c_void_p(stream))

    def resume(self, stream: int) -> None:
        self.driver.emulated_resume(ctypes.c_void_p(stream))

    def wait(self, stream: int) -> None:
        self.driver.emulated_wait(ctypes.c_void_p(stream))

    def fail(self, n: int, name: bytes | None, error: int) -> bool:
        """Let call `n` from now on to a function fail; whether one that was to fail had yet to come."""
        return bool(self.driver.emulated_fail(ctypes.c_int64(n), name, error))

    @contextlib.contextmanager
    def watched_memory(self, called: Callable[[], None]) -> Iterator[None]:
        """With `called` whenever PyTorch is asked for memory or given it back."""
        watcher = ctypes.CFUNCTYPE(None)(called)
        self.torch.emulated_watch_memory(watcher)
        yield
        self.torch.emulated_watch_memory(None)

    def fork(self) -> None:
        """Another process, which ends at once."""
        self.torch.emulated_fork()

    @contextlib.contextmanager
    def waits_for_nothing(self) -> Iterator[None]:
        """Whoever waits for the device here fails."""
        self.fail(0, b"cuStreamSynchronize", LAUNCH_FAILED)
        yield
        self.fail(-1, None, 0)

    def plan(self, text: str, inputs: list[Tensor], outputs: int = 1) -> Any:
        given = [self.put(t) for t in inputs]
        plan = self.core.Session(text, {}, provider=self.name).plan(given, [False] * len(given), [False] * outputs)
        return plan, given

    def forward(self, text: str, inputs: list[Tensor], seed: int = 7, outputs: int = 1) -> list[Tensor]:
        plan, given = self.plan(text, inputs, outputs)
        outputs, _ = plan.forward(given, seed)
        return [self.get(t) for t in outputs]

    def on_the_cpu(self, text: str, inputs: list[Tensor], seed: int = 7, outputs: int = 1) -> list[Tensor]:
        plan = self.core.Session(text, {}).plan(inputs, [False] * len(inputs), [False] * outputs)
        return plan.forward(inputs, seed)[0]
