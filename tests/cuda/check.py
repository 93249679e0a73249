"""Device code through the compilers for GPUs, without a GPU: ``make cuda-check``, ``make hip-check``.

The sources are those that the provider writes for the table of ops, their gradients and the optimizers. For NVIDIA's
each is compiled by NVRTC, as the provider does it, and by nvcc where there is one; for AMD's by clang, whose code calls
functions of AMD's library that is not at hand. Warnings are errors. Printed are the most registers, spills and shared
memory of its kernels; a spill is a failure on NVIDIA's, for which they are written.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CLANG = os.environ.get("HIPCLANG", "clang-19")
INCLUDES = (ROOT, ROOT / "csrc")

Said = tuple[str, dict[str, int]]  # what a compiler says against a source, and the most of its kernels
OF_PTXAS = {
    "registers": r"Used (\d+) registers",
    "spilled": r"(\d+) bytes spill stores",
    "shared": r"(\d+) bytes smem",
}
OF_CLANG = {
    "registers": r"\.vgpr_count: +(\d+)",
    "spilled": r"\.vgpr_spill_count: +(\d+)",
    "shared": r"\.group_segment_fixed_size: +(\d+)",
}


# Of attention on tensor cores: what is stored, elements of a head, causal, dropped, mask.
ATTENTION = [
    *[("bfloat16", d, 1, 0.1, "") for d in (16, 64, 80, 96, 128, 192, 256)],
    *[("bfloat16", d, 0, 0.0, "") for d in (64, 128, 256)],
    *[("float16", d, 0, 0.1, "bool") for d in (64, 128, 256)],
    *[("float16", d, 1, 0.0, "float") for d in (64, 128, 256)],
]


def write_sources(folder: str) -> None:
    """What the provider writes for the table of ops, as far as it has kernels, attention of 16 bits and optimizers.

    In a process with its stand-ins.
    """
    os.environ |= {"EMULATED_SOURCES": folder, "XDG_CACHE_HOME": folder}  # where nothing is kept from before
    sys.path[:0] = [str(ROOT / "tests" / "device"), str(ROOT / "tests" / "ops")]
    import on_device

    on_device.build()
    on_device.install("gpu")
    import torch

    from case import expected, free_inputs, session, wanted
    from cases_matmul import attention
    from test_ops import CASES, FLOAT_CASES, out_grads

    halves = [
        dataclasses.replace(case, attrs={**case.attrs, "p": p})
        for dtype, d, causal, p, mask in ATTENTION
        for case in [attention(1, 1, 2, 2, d, mask, causal, dtype=getattr(torch, dtype))]
    ]
    for case in [*CASES, *halves]:
        free = free_inputs(case)
        inputs, no_outputs = [case.inputs[i].contiguous() for i in free], [False] * case.outputs
        with contextlib.suppress(NotImplementedError):
            session(case).plan(inputs, [False] * len(inputs), no_outputs)
        if case in FLOAT_CASES or case in halves:
            outputs = [g is not None for g in out_grads(case, expected(case))]
            with contextlib.suppress(NotImplementedError):
                session(case).plan(inputs, [i in wanted(case) for i in free], outputs)
    core, device = on_device.loaded()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        row = [device.put(torch.ones(1, dtype=dtype), "gpu") for _ in range(2)]
        with contextlib.suppress(RuntimeError):  # nothing is compiled
            core.optim_step("sgd", [(0, *row, None, None, True, ())], [{}], provider="gpu")
    found: list[Path] = []
    while len(written := sorted(Path(folder).glob("*.cu"))) > len(found):  # by other threads
        found = written
        time.sleep(1)


class Nvrtc:
    """The compiler that the provider uses, of the package nvidia-cuda-nvrtc."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("nvidia")
        libraries = [
            p
            for at in (found.submodule_search_locations or [] if found else [])
            for p in Path(at).rglob("libnvrtc.so.1*")
        ]
        if not libraries:
            raise SystemExit("no libnvrtc: pip install nvidia-cuda-nvrtc")
        self.library = ctypes.CDLL(str(sorted(libraries)[-1]))
        headers = [
            p for at in ("cuda/gpu", "cuda/ops", "csrc/ops", "csrc/optim") for p in sorted((ROOT / at).iterdir())
        ]
        named = {str(p.relative_to(ROOT)).removeprefix("csrc/"): p.read_bytes() for p in headers if p.is_file()}
        self.names = (ctypes.c_char_p * len(named))(*[name.encode() for name in named])
        self.texts = (ctypes.c_char_p * len(named))(*named.values())

    def compiled(self, source: bytes, architecture: str) -> Said:
        program = ctypes.c_void_p()
        n = len(self.names)
        self.library.nvrtcCreateProgram(ctypes.byref(program), source, b"unit.cu", n, self.texts, self.names)
        options = [
            b"--std=c++17",
            b"--fmad=false",
            b"-default-device",
            b"--ptxas-options=-v",
            f"--gpu-architecture={architecture}".encode(),
        ]
        error = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        self.library.nvrtcGetProgramLog(program, log)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        said = log.value.decode()
        return said if error or "warning" in said else "", most(said, OF_PTXAS)


def most(said: str, patterns: dict[str, str]) -> dict[str, int]:
    return {name: max(map(int, re.findall(p, said)), default=0) for name, p in patterns.items()}


def ran(command: list[str]) -> tuple[str, str]:
    """What is said against a source, and all that is said."""
    done = subprocess.run([*command, *(f"-I{at}" for at in INCLUDES)], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    return said if done.returncode else "", said


def by_nvcc(path: Path, architecture: str) -> str:
    options = ["-std=c++17", "-fmad=false", "-Werror", "all-warnings", "-cubin"]
    return ran(["nvcc", f"-arch={architecture}", *options, str(path), "-o", os.devnull])[0]


def by_clang(path: Path, architecture: str) -> Said:
    options = ["-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "-std=c++17", "-ffp-contract=off", "-O3"]
    # Integers too are asked whether they are numbers; how far a loop is unrolled is a wish.
    options += ["-Wall", "-Wextra", "-Werror", "-Wno-tautological-compare", "-Wno-cuda-compat", "-Wno-pass-failed"]
    against, said = ran([CLANG, f"--offload-arch={architecture}", *options, "-S", str(path), "-o", "-"])
    return against, most(said, OF_CLANG)


def ops_of(path: Path) -> str:
    """The ops of a program; of another source its header and what is stored."""
    text = path.read_text()
    ops = re.findall(r"= (?:omc_ew_|omc_)(\w+)[<(]", text)
    names = re.findall(r'include "cuda/\w+/(\w+)\.h"', text) + re.findall(r"define OMC_(?:STORAGE|DIM) (\w+)", text)
    return ", ".join(dict.fromkeys(ops)) or " ".join(names)


class Nvidia:
    """Both of NVIDIA's compilers."""

    def __init__(self) -> None:
        self.nvrtc = Nvrtc()
        self.nvcc = shutil.which("nvcc") is not None

    def compiled(self, path: Path, architecture: str) -> Said:
        said, numbers = self.nvrtc.compiled(path.read_bytes(), architecture)
        return said or (by_nvcc(path, architecture) if self.nvcc else ""), numbers


def checked(paths: list[Path], architectures: list[str]) -> Iterator[tuple[Path, str, Said]]:
    nvidia = Nvidia() if any(a.startswith("sm_") for a in architectures) else None
    for architecture in architectures:
        compiled = nvidia.compiled if nvidia and architecture.startswith("sm_") else by_clang
        for path in paths:
            yield path, architecture, compiled(path, architecture)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--architectures", nargs="+", default=[*ARCHITECTURES], metavar="NAME", help="sm_90, gfx942")
    p.add_argument("--every", type=int, default=1, metavar="N", help="each N-th source only")
    p.add_argument("--write", metavar="FOLDER", help="only write the sources there")
    a = p.parse_args()
    if a.write:
        write_sources(a.write)
        return
    table = Table("kernel", "for", "registers", "spilled, B", "shared, B")
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--write", folder], check=True)
        paths = sorted(Path(folder).glob("*.cu"))[:: a.every]
        for path, architecture, (said, numbers) in checked(paths, a.architectures):
            table.add_row(ops_of(path), architecture, *(str(numbers[k]) for k in OF_PTXAS))
            if said or (numbers["spilled"] and architecture.startswith("sm_")):
                failures += 1
                print(f"{path.read_text()}\n{architecture}: {said or 'spills'}", file=sys.stderr)
    Console(width=100).print(table)
    print(f"{len(paths)} sources, {failures} failures")
    raise SystemExit(failures != 0)


if __name__ == "__main__":
    main()
