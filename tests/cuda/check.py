"""Device code through the compilers for GPUs, without a GPU: ``make cuda-check``.

The sources are those that the provider writes for the table of ops, their gradients and the optimizers. Each is
compiled by NVRTC, as the provider does it, and by nvcc where there is one, warnings being errors. Printed are the most
registers, spills and shared memory of its kernels; a spill is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
ARCHITECTURES = (80, 90, 100)
INCLUDES = (ROOT, ROOT / "csrc")


def write_sources(folder: str) -> None:
    """What the provider writes for every case of the table of ops that it has kernels for, and for optimizers.

    In a process with its stand-ins.
    """
    os.environ |= {"EMULATED_SOURCES": folder, "XDG_CACHE_HOME": folder}  # where nothing is kept from before
    sys.path[:0] = [str(ROOT / "tests" / "device"), str(ROOT / "tests" / "ops")]
    import on_device

    on_device.build()
    on_device.install("gpu")
    import torch

    from case import expected, free_inputs, session, wanted
    from test_ops import CASES, FLOAT_CASES, out_grads

    for case in CASES:
        free = free_inputs(case)
        inputs, no_outputs = [case.inputs[i].contiguous() for i in free], [False] * case.outputs
        with contextlib.suppress(NotImplementedError):
            session(case).plan(inputs, [False] * len(inputs), no_outputs)
        if case in FLOAT_CASES:
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

    def compiled(self, source: bytes, architecture: int) -> tuple[str, dict[str, int]]:
        """What the compiler says against it, and what ptxas says of its kernels."""
        program = ctypes.c_void_p()
        n = len(self.names)
        self.library.nvrtcCreateProgram(ctypes.byref(program), source, b"unit.cu", n, self.texts, self.names)
        options = [
            b"--std=c++17",
            b"--fmad=false",
            b"-default-device",
            b"--ptxas-options=-v",
            f"--gpu-architecture=sm_{architecture}".encode(),
        ]
        error = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        self.library.nvrtcGetProgramLog(program, log)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        said = log.value.decode()
        return said if error or "warning" in said else "", numbers_of(said)


def by_nvcc(path: Path, architecture: int) -> str:
    """What nvcc says against it; empty: nothing."""
    command = ["nvcc", f"-arch=sm_{architecture}", "-std=c++17", "-fmad=false", "-Werror", "all-warnings"]
    command += [*(f"-I{at}" for at in INCLUDES), "-cubin", str(path), "-o", os.devnull]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr if ran.returncode else ""


def numbers_of(said: str) -> dict[str, int]:
    """The most that ptxas says of a kernel."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "spilled": r"(\d+) bytes spill stores",
        "shared": r"(\d+) bytes smem",
    }
    return {name: max(map(int, re.findall(pattern, said)), default=0) for name, pattern in patterns.items()}


def ops_of(path: Path) -> str:
    """The ops of a program; of another source its header and what is stored."""
    text = path.read_text()
    ops = re.findall(r"= (?:omc_ew_|omc_)(\w+)[<(]", text)
    names = re.findall(r'include "cuda/\w+/(\w+)\.h"', text) + re.findall(r"define OMC_STORAGE (\w+)", text)
    return ", ".join(dict.fromkeys(ops)) or " ".join(names)


def checked(
    paths: list[Path], architectures: tuple[int, ...], nvcc: bool
) -> Iterator[tuple[Path, int, str, dict[str, int]]]:
    compiler = Nvrtc()
    for architecture in architectures:
        for path in paths:
            said, numbers = compiler.compiled(path.read_bytes(), architecture)
            if nvcc and not said:
                said = by_nvcc(path, architecture)
            yield path, architecture, said, numbers


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--architectures", nargs="+", type=int, default=[*ARCHITECTURES])
    p.add_argument("--every", type=int, default=1, metavar="N", help="each N-th source only")
    p.add_argument("--write", metavar="FOLDER", help="only write the sources there")
    a = p.parse_args()
    if a.write:
        write_sources(a.write)
        return
    table = Table("kernel", "sm", "registers", "spilled, B", "shared, B")
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--write", folder], check=True)
        paths = sorted(Path(folder).glob("*.cu"))[:: a.every]
        for path, architecture, said, numbers in checked(
            paths, tuple(a.architectures), shutil.which("nvcc") is not None
        ):
            table.add_row(
                ops_of(path), str(architecture), *(str(numbers.get(k, "")) for k in ("registers", "spilled", "shared"))
            )
            if said or numbers.get("spilled"):
                failures += 1
                print(f"{path.read_text()}\nsm_{architecture}: {said or 'spills'}", file=sys.stderr)
    Console(width=100).print(table)
    print(f"{len(paths)} sources, {failures} failures")
    raise SystemExit(failures != 0)


if __name__ == "__main__":
    main()
