"""A PyTorch without CUDA has tensors on two emulated GPUs, "cuda:0" and "cuda:1": ``pytest --gpus``.

They lie in the memory of tests/cuda/driver.cpp, where the provider computes on them. What PyTorch is asked for of them
it computes in the host's memory, with copies of theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import on_device
import torch
from emulated_gpu import Gpu
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ortmodule_c import _C

aten = torch.ops.aten
ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
OF_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # where PyTorch notes what is a view of what
VIEWS = (aten.as_strided.default, aten.view.default, aten._reshape_alias.default)  # of which the host's know no memory

gpus: list[Gpu] = []


def is_there(t: Any) -> bool:
    return isinstance(t, Tensor) and t.device.type == "cuda"


def spread(t: Tensor) -> Tensor:
    """From its first element to its last all that lies there, in a row."""
    extent = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.as_strided((extent,), (1,), t.storage_offset())


def get(t: Tensor) -> Tensor:
    """A copy of it in the host's memory, with the same strides."""
    return gpus[t.device.index].get(spread(t.detach())).as_strided(t.shape, t.stride())


def write(to: Tensor, values: Tensor) -> None:
    copy = get(to)
    copy.copy_(values)
    if to.numel():
        gpus[to.device.index].write(spread(to.detach()), spread(copy))


def new(size: list[int], stride: list[int] | None, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """As PyTorch's own a view of nothing, on the current GPU if no other is named."""
    number = here() if device.index is None else device.index
    with torch._C._ExcludeDispatchKeyGuard(OF_VIEWS), current(number):  # it has a context from now on
        like = torch.empty(size, dtype=dtype) if stride is None else torch.empty_strided(size, stride, dtype=dtype)
        return gpus[number].fresh(spread(like)).as_strided(like.shape, like.stride())


def empty(size: list[int], *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    stride = None if memory_format is None else torch.empty(size, memory_format=memory_format).stride()
    return new(size, stride, dtype, device)


def empty_strided(size: list[int], stride: list[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return new(size, stride, dtype, device)


def empty_here(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """On the current GPU, as code of Inductor's makes its results."""
    return new(list(size), list(stride), dtype, torch.device("cuda", here()))


def here() -> int:
    return gpus[0].torch.emulated_current_device()


def copy_(to: Tensor, source: Tensor, _non_blocking: bool = False) -> Tensor:
    values = get(source) if is_there(source) else source
    if is_there(to):
        write(to, values)
    else:
        to.copy_(values)
    return to


def on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any other op, of copies in the host's memory."""
    given: list[tuple[Tensor, Tensor]] = []

    def host(a: Any) -> Any:
        if not is_there(a):
            return a
        given.append((a, get(a) if a.numel() else torch.empty_like(a, device="cpu")))  # which can be resized
        return given[-1][1]

    def back(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        for there, copy in given:
            if a is copy:
                return there
        return gpus[device.index].put(a.contiguous())

    device = kwargs.get("device")
    host_args, host_kwargs = tree_map(host, (args, kwargs))
    devices = {there.device for there, _ in given if there.dim()} or {there.device for there, _ in given}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {op} is given {devices}")
    if device is None:
        (device,) = devices
    else:
        host_kwargs["device"] = torch.device("cpu")
    results = op(*host_args, **host_kwargs)
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    for there, copy in given:
        if any(there is a for name in written for a in tree_leaves(named.get(name))):
            if there.shape == copy.shape:
                write(there, copy)
            else:
                there.data = gpus[there.device.index].put(copy.contiguous())
    return tree_map(back, results)


@contextlib.contextmanager
def current(number: int) -> Iterator[None]:
    """As ``torch.cuda.device`` has it, a GPU is current to PyTorch."""
    library, guard = gpus[0].torch, ctypes.c_void_p()
    library.aoti_torch_create_cuda_guard(number, ctypes.byref(guard))
    yield
    library.aoti_torch_delete_cuda_guard(guard)


def install() -> None:
    """Let PyTorch have the GPUs, and the product the extension that knows them."""
    on_device.load_stand_ins()
    torch._C._dynamo.guards._empty_strided_cuda = empty_here
    torch._C._cuda_getDevice = here
    ctypes.CDLL(str(on_device.ROOT / "build" / "device" / "libtorch_devices.so"))
    core, device = on_device.loaded()
    driver = ctypes.CDLL("libcuda.so.1")
    gpus.extend(Gpu(core, device, driver, f"cuda:{n}", n) for n in range(2))
    vars(_C).update({name: value for name, value in vars(core).items() if not name.startswith("__")})
    torch.cuda._lazy_init = lambda: None
    library.fallback(on_host, "CUDA")
    for op in VIEWS:
        kernels.impl(op, lambda *args, op=op, **kwargs: op.redispatch(ON_HOST, *args, **kwargs), "CUDA")
    kernels.impl("empty.memory_format", empty, "CUDA")
    kernels.impl("empty_strided", empty_strided, "CUDA")
    kernels.impl("copy_", copy_, "CUDA")


library, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
