"""Which of the core's providers computes on a device of PyTorch's.

A module runs where its tensors are: its graphs' sessions are opened on the provider of that device, which says what it
has no kernel for; such ops run in PyTorch, on the device.
"""

import atexit
import functools
import os
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from . import _C
from .errors import first_lines

PROVIDERS = ("cpu", "cuda")  # by PyTorch's names for kinds of devices


def provider_of(device: torch.device) -> str:
    """The name of a device's provider, ``"cpu"`` or ``"cuda:1"``."""
    return device.type if device.index is None else f"{device.type}:{device.index}"


def device_refusal(tensors: Iterable[Tensor]) -> str:
    """Why tensors where they are cannot be computed on by one graph, or nothing."""
    devices = sorted({t.device for t in tensors}, key=str)
    if len(devices) > 1:
        return f"tensors are on {devices[0]} and {devices[1]}"
    return "".join(map(_refusal, devices))


def _refusal(device: torch.device) -> str:
    if device.type not in PROVIDERS:
        return f"there are no kernels for device {device.type!r}"
    try:
        _C.infer("Neg", [("f32", (1,))], provider=provider_of(device))
    except (NotImplementedError, RuntimeError) as error:
        return f"device {device} cannot be computed on: {first_lines(error)}"
    if device.type != "cpu":
        tell_at_exit(provider_of(device))
    return ""


@functools.cache
def tell_at_exit(provider: str) -> None:
    """Have a warning say at the end of the process what nobody has asked the provider after its last step."""
    atexit.register(_tell, provider, os.getpid())


def _tell(provider: str, process: int) -> None:
    if os.getpid() != process:  # a forked child has nothing of the device
        return
    try:
        _C.told(provider)
    except RuntimeError as error:
        warnings.warn(f"at the end of the process: {first_lines(error)}", stacklevel=1)
