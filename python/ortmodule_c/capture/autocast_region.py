"""Regions of autocast: which there is, and another in its place."""

import contextlib
from collections.abc import Iterator

import torch

Region = tuple[tuple[str, torch.dtype, bool], ...]  # for types of devices, what autocast casts to, and whether it is on

_DEVICES = ("cpu", "cuda")


def around() -> Region:
    """The region that this thread is in."""
    return tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in _DEVICES)


@contextlib.contextmanager
def within(region: Region, caches: bool = False) -> Iterator[None]:
    """Autocast as in a region.

    Parameters
    ----------
    region
        Other types of devices are left as they are.
    caches
        Whether what parameters are cast to is kept, if it is around; else nothing is.
    """
    with contextlib.ExitStack() as stack:
        for device, dtype, on in region:
            stack.enter_context(torch.autocast(device, dtype, on, None if caches else False))
        yield


def off(region: Region) -> Region:
    """The same devices without autocast."""
    return tuple((device, dtype, False) for device, dtype, _ in region)


def casts_to(region: Region, device: str) -> torch.dtype | None:
    """What operands of products are cast to on a type of device; None if it is off there."""
    return next((dtype for of, dtype, on in region if on and of == device), None)


@contextlib.contextmanager
def none() -> Iterator[Region]:
    """Autocast turned off; gives where it was on."""
    region = tuple(of_device for of_device in around() if of_device[-1])
    with within(off(region), caches=True):
        yield region
