"""Device code through the compilers for GPUs, without a GPU: ``make cuda-check``.

The sources are those that the provider writes for the table of elementwise ops. Each is compiled by NVRTC, as the
provider does it, and by nvcc where there is one, warnings being errors. Printed are registers, spills and shared memory
of the kernels; a spill is a failure.
"""

from __future__ import annotations

import argparse
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
    """What the provider writes for every elementwise case of the table of ops; in a process with its stand-ins."""
    os.environ |= {"EMULATED_SOURCES": folder, "XDG_CACHE_HOME": folder}  # where nothing is kept from before
    sys.path[:0] = [str(ROOT / "tests" / "device"), str(ROOT / "tests" / "ops")]
    import on_device

    on_device.build()
    on_device.install("gpu")
    from case import free_inputs, session
    from test_ops import CASES

    for case in CASES:
        inputs = [case.inputs[i].contiguous() for i in free_inputs(case)]
        try:
            session(case).plan(inputs, [False] * len(inputs), [False] * case.outputs)
        except NotImplementedError:
            continue
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

    def failure(self, source: bytes, architecture: int) -> str:
        """What the compiler says against it; empty: nothing."""
        program = ctypes.c_void_p()
        n = len(self.names)
        self.library.nvrtcCreateProgram(ctypes.byref(program), source, b"unit.cu", n, self.texts, self.names)
        options = [
            b"--std=c++17",
            b"--fmad=false",
            b"-default-device",
            f"--gpu-architecture=sm_{architecture}".encode(),
        ]
        error = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        self.library.nvrtcGetProgramLog(program, log)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        said = log.value.decode()
        return said if error or "warning" in said else ""


def by_nvcc(path: Path, architecture: int) -> tuple[str, dict[str, int]]:
    """What nvcc says against it, and what ptxas says of its kernels."""
    command = [
        "nvcc",
        f"-arch=sm_{architecture}",
        "-std=c++17",
        "-fmad=false",
        "-Werror",
        "all-warnings",
        "-Xptxas",
        "-v",
    ]
    command += [*(f"-I{at}" for at in INCLUDES), "-cubin", str(path), "-o", os.devnull]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ran.stdout + ran.stderr
    numbers = {
        "registers": r"Used (\d+) registers",
        "spilled": r"(\d+) bytes spill stores",
        "shared": r"(\d+) bytes smem",
    }
    return said if ran.returncode else "", {
        name: max(map(int, re.findall(pattern, said)), default=0) for name, pattern in numbers.items()
    }


def ops_of(path: Path) -> str:
    return ", ".join(dict.fromkeys(re.findall(r"= (?:omc_ew_|omc_)(\w+)[<(]", path.read_text()))) or "store"


def checked(
    paths: list[Path], architectures: tuple[int, ...], nvcc: bool
) -> Iterator[tuple[Path, int, str, dict[str, int]]]:
    compiler = Nvrtc()
    for architecture in architectures:
        for path in paths:
            said = compiler.failure(path.read_bytes(), architecture)
            numbers: dict[str, int] = {}
            if nvcc and not said:
                said, numbers = by_nvcc(path, architecture)
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
