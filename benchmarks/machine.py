"""What a result was measured on: one line, written beside the figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

# Instructions that products are made of, by their names in /proc/cpuinfo.
_TELLING = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


def gpu(device: str) -> str:
    """The GPU's name, architecture and memory, and the CUDA that PyTorch was built with."""
    of = torch.cuda.get_device_properties(device)
    return (
        f"{of.name} (sm_{of.major}{of.minor}, {of.multi_processor_count} multiprocessors, "
        f"{of.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}, "
    )


def machine(device: str = "cpu") -> str:
    """A GPU if it is on one; processor, its instructions for products, threads and PyTorch."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    flags = info.get("flags", "").split()
    has = " ".join(name for name in _TELLING if name in flags)
    name = f"{info.get('model name', platform.machine())} family {info.get('cpu family')} model {info.get('model')}"
    on = "" if device == "cpu" else gpu(device)
    return f"{on}{name} ({has}), {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
