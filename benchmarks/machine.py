"""What a result was measured on: one line, written beside the figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

# Instructions that products are made of, by their names in /proc/cpuinfo.
_TELLING = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


def machine() -> str:
    """Processor, its instructions for products, threads and PyTorch."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    flags = info.get("flags", "").split()
    has = " ".join(name for name in _TELLING if name in flags)
    name = f"{info.get('model name', platform.machine())} family {info.get('cpu family')} model {info.get('model')}"
    return f"{name} ({has}), {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
