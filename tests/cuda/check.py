"""Device code through the compilers for GPUs, without a GPU: ``make cuda-check``, ``make hip-check``.

The sources are those that the provider writes for the tables of ops and their gradients, in float32, bfloat16 and
float16 and as they are, for the optimizers, and for steps of the models of benchmarks/ in tiny sizes; and, of the
headers that those include, for all other kernels there, as which one is for a tensor is a matter of its sizes. For
NVIDIA's each is compiled by NVRTC, as the provider does it, and some by nvcc too where there is one; for AMD's by
clang, whose code calls functions of AMD's library that is not at hand. Warnings are errors. Printed are the registers,
spills, stack frame and shared memory of each kernel, without what launches add to that; a spill is a failure on
NVIDIA's, for which they are written, and so is a stack frame, which is memory, but for those of CUDA's functions.
``make lint`` does so for some of the sources, without those of models, with the compilers that there are.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ALSO_EVERY = 8  # sources, of which one goes through the second compiler too
CLANG = os.environ.get("HIPCLANG", "clang-19")
INCLUDES = (ROOT, ROOT / "csrc")
REFUSED = "refused.json"

# By kernel: its registers, bytes spilled, of its stack frame, of shared memory; by NVRTC also its instructions.
Numbers = dict[str, dict[str, int]]
Said = tuple[str, Numbers]  # what a compiler says against a source, and of its kernels
KERNEL_OF_PTXAS = r"Compiling entry function '(\w+)'"
KERNEL_OF_CLANG = r"^    \.name: +(\w+)"
OF_PTXAS = {
    "registers": r"Used (\d+) registers",
    "spilled": r"(\d+) bytes spill stores",
    "stack": r"(\d+) bytes stack frame",
    "shared": r"(\d+) bytes smem",
}
OF_CLANG = {
    "registers": r"\.vgpr_count: +(\d+)",
    "spilled": r"\.vgpr_spill_count: +(\d+)",
    "stack": r"\.private_segment_fixed_size: +(\d+)",
    "shared": r"\.group_segment_fixed_size: +(\d+)",
}
RANGE = "%y = Range(%start, %limit, %delta)\nreturn %y\n"
HEADER = r'include "(cuda/\w+/\w+\.h)"'
NOT_WANTED = r"template <typename>\s*static __device__ __forceinline__ void (\w+)\("  # see cuda/gpu/target.h
# Ops that CUDA computes, of large numbers, by a table in memory.
WITH_TABLES = {"Sin", "Cos", "Tan"}
# Ops that have other device code for 2^31 elements and more: programs that broadcast, and pools.
WIDE = {"Add", "Where", "Dropout", "MaxPool", "AveragePool", "AdaptiveAvgPool"}


# Of attention: what is stored, elements of a head, causal, dropped, mask. The last are too long for any kernel.
ATTENTION = [
    *[("bfloat16", d, 1, 0.1, "") for d in (16, 64, 80, 96, 128, 192, 256)],
    *[("bfloat16", d, causal, 0.0, "") for d in (64, 128, 256) for causal in (0, 1)],
    *[("float16", d, 0, 0.1, "bool") for d in (64, 128, 256)],
    *[("float16", d, 1, 0.0, "float") for d in (64, 128, 256)],
    *[(dtype, d, 0, 0.0, "") for dtype, d in (("float32", 129), ("float64", 65), ("bfloat16", 257))],
]


def range_of(dtype: str) -> str:
    """A graph with more numbers than are folded."""
    given = {"start": 0, "limit": 1 << 20, "delta": 1}
    return "\n".join([*(f"const %{name} : {dtype}[] = [{n}]" for name, n in given.items()), RANGE])


def wait_for_sources(folder: str) -> None:
    """Until no more are written there by threads of this process, which do not outlive it."""
    found = -1
    while (written := len([*Path(folder).glob("*.cu")])) > found:
        found = written
        time.sleep(1)


def write_sources(folder: str) -> None:
    """What the provider writes for the tables of ops in all dtypes, more of attention, and optimizers.

    And `REFUSED` there, which says of what it has no kernel. In a process with its stand-ins.
    """
    os.environ |= {"EMULATED_SOURCES": folder, "XDG_CACHE_HOME": folder}  # where nothing is kept from before
    sys.path[:0] = [str(ROOT / "tests" / "device"), str(ROOT / "tests" / "ops")]
    import on_device

    on_device.build()
    on_device.install("gpu")
    import torch

    from case import DTYPE_TEXT, Case, expected, free_inputs, session, wanted
    from cases_matmul import attention
    from ortmodule_c import _C
    from test_ops import CASES, out_grads
    from test_rows_in_half import of_type

    attentions = [
        dataclasses.replace(case, attrs={**case.attrs, "p": p})
        for dtype, d, causal, p, mask in ATTENTION
        for case in [attention(1, 1, 2, 2, d, mask, causal, dtype=getattr(torch, dtype))]
    ]
    refused: dict[str, str] = {}

    def plan(case: Case, name: str, grads: list[bool], outputs: list[bool]) -> None:
        inputs = [case.inputs[i].contiguous() for i in free_inputs(case)]
        try:
            session(case).plan(inputs, grads, outputs)
        except NotImplementedError as error:
            refused[name] = str(error)

    def plan_both(case: Case, of_outputs: list[bool]) -> None:
        free, want = free_inputs(case), wanted(case)
        plan(case, str(case), [False] * len(free), [False] * case.outputs)
        if want and _C.ops()[case.op][2]:
            plan(case, f"{case} backward", [i in want for i in free], of_outputs)

    for case in [*CASES, *attentions]:
        outputs = [g is not None for g in out_grads(case, expected(case))]
        plan_both(case, outputs)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if case not in attentions and any(t is not None and t.dtype.is_floating_point for t in case.inputs):
                plan_both(of_type(case, dtype), outputs)
    os.environ["EMULATED_NARROW_BITS"] = "0"  # of any element
    for case in [case for case in CASES if case.op in WIDE]:
        plan_both(case, [g is not None for g in out_grads(case, expected(case))])
    del os.environ["EMULATED_NARROW_BITS"]
    core, device = on_device.loaded()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        row = [device.put(torch.ones(1, dtype=dtype), "gpu") for _ in range(2)]
        with contextlib.suppress(RuntimeError):  # nothing is compiled
            core.optim_step("sgd", [(0, *row, None, None, True, ())], [{}], provider="gpu")
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
        core.Session(range_of(DTYPE_TEXT[dtype]), {}, provider="gpu").plan([], [], [False])
    wait_for_sources(folder)
    (Path(folder) / REFUSED).write_text(json.dumps(refused, indent=1))


def write_sources_of_models(folder: str) -> None:
    """The same for steps of the models of benchmarks/, each in a process of its own."""
    script = str(ROOT / "benchmarks" / "gpu_model.py")
    for model in ("gpt2", "bert", "resnet18", "resnet50", "mlp"):
        for dtype in ("fp32", "bf16", "fp16"):
            command = [sys.executable, script, "--only-plan", folder, "--models", model, "--dtype", dtype]
            subprocess.run([*command, "--scale", "tiny"], check=True)


def named_in(text: str) -> set[str]:
    """The kernels of what a source includes, by the preprocessor, but for the one that is wanted."""
    command = [os.environ.get("CXX", "g++"), "-E", "-P", "-D__CUDACC_RTC__", *(f"-I{at}" for at in INCLUDES)]
    done = subprocess.run([*command, "-x", "c++", "-"], input=text, capture_output=True, text=True, check=True)
    return {*re.findall(NOT_WANTED, done.stdout)}


def write_others(folder: str) -> None:
    """What else the provider may want of the headers there: each of their kernels, for all that is stored there.

    As those for rows of other lengths, and all of optimizers, whose steps end there where one is not compiled.
    """
    written: dict[tuple[str, ...], set[str]] = {}
    bodies: dict[tuple[str, ...], str] = {}
    for path in sorted(Path(folder).glob("*.cu")):
        wanted, _, body = path.read_text().partition("\n")
        of = (*re.findall(HEADER, body), *re.findall(r"define OMC_STORAGE (\w+)", body))
        written.setdefault(of, set()).add(wanted.split()[1].removeprefix("OMC_WANTED_"))
        bodies.setdefault(of, body)
    for of, body in bodies.items():
        (header, *stored), names = of, named_in(body)
        if not written[of] <= names:
            raise SystemExit(f"{header} has none of {written[of] - names}")
        for name in names - written[of]:
            text = f"#define OMC_WANTED_{name} ,\n{body}"
            (Path(folder) / "_".join([Path(header).stem, *stored, name + ".cu"])).write_text(text)


def find_nvrtc() -> Path | None:
    """The library of the package nvidia-cuda-nvrtc."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found else None
    return max((p for at in folders or [] for p in Path(at).rglob("libnvrtc.so.1*")), default=None)


class Nvrtc:
    """The compiler that the provider uses."""

    def __init__(self, library: Path) -> None:
        dlmopen = ctypes.CDLL(None).dlmopen
        dlmopen.restype, dlmopen.argtypes = ctypes.c_void_p, (ctypes.c_long, ctypes.c_char_p, ctypes.c_int)
        # In a namespace of its own: else it would be found in the place of a stand-in of the same name.
        handle = dlmopen(-1, bytes(library), os.RTLD_NOW)
        if not handle:
            raise OSError(f"{library} cannot be loaded")
        self.library = ctypes.CDLL(str(library), handle=handle)
        headers = [
            p for at in ("cuda/gpu", "cuda/ops", "csrc/ops", "csrc/optim") for p in sorted((ROOT / at).iterdir())
        ]
        named = {str(p.relative_to(ROOT)).removeprefix("csrc/"): p.read_bytes() for p in headers if p.is_file()}
        self.names = (ctypes.c_char_p * len(named))(*[name.encode() for name in named])
        self.texts = (ctypes.c_char_p * len(named))(*named.values())

    def compiled(self, path: Path, architecture: str) -> Said:
        program = ctypes.c_void_p()
        n, source = len(self.names), path.read_bytes()
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
        self.library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetCUBIN(program, cubin)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        said = log.value.decode()
        kernels = of_ptxas(said)
        for name, code in code_bytes(cubin.raw).items():
            kernels[name]["instructions"] = code // INSTRUCTION_BYTES
        return said if error or "warning" in said else "", kernels


INSTRUCTION_BYTES = 16


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Of each kernel in an object file (ELF of 64 bits), as the headers of its sections say; of none, nothing."""
    if not cubin.startswith(b"\x7fELF"):
        return {}
    (at,), (each, n, naming) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, at + i * each) for i in range(n)]
    names = headers[naming][4]
    named = [(cubin[names + name :].partition(b"\0")[0].decode(), size) for name, *_, size in headers]
    return {name.removeprefix(".text."): size for name, size in named if name.startswith(".text.")}


def numbers_in(text: str, patterns: dict[str, str]) -> dict[str, int]:
    return {name: max(map(int, re.findall(p, text)), default=0) for name, p in patterns.items()}


def of_ptxas(said: str) -> Numbers:
    """A kernel's numbers follow its name."""
    parts = re.split(KERNEL_OF_PTXAS, said)
    return {name: numbers_in(text, OF_PTXAS) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def of_clang(said: str) -> Numbers:
    """A list of records, of which each has the name somewhere."""
    _, _, records = said.partition("amdhsa.kernels:")
    named = ((re.search(KERNEL_OF_CLANG, text, re.M), text) for text in re.split(r"^  - ", records, flags=re.M))
    return {name[1]: numbers_in(text, OF_CLANG) for name, text in named if name}


def ran(command: list[str]) -> tuple[str, str]:
    """What is said against a source, and all that is said."""
    done = subprocess.run([*command, *(f"-I{at}" for at in INCLUDES)], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    return said if done.returncode else "", said


def by_nvcc(path: Path, architecture: str) -> Said:
    options = ["-std=c++17", "-fmad=false", "-Werror", "all-warnings", "-cubin", "-Xptxas", "-v"]
    against, said = ran(["nvcc", f"-arch={architecture}", *options, str(path), "-o", os.devnull])
    return against, of_ptxas(said)


def by_clang(path: Path, architecture: str) -> Said:
    options = ["-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "-std=c++17", "-ffp-contract=off", "-O3"]
    # Integers too are asked whether they are numbers; how far a loop is unrolled is a wish.
    options += ["-Wall", "-Wextra", "-Werror", "-Wno-tautological-compare", "-Wno-cuda-compat", "-Wno-pass-failed"]
    against, said = ran([CLANG, f"--offload-arch={architecture}", *options, "-S", str(path), "-o", "-"])
    return against, of_clang(said)


@functools.cache  # in each process
def compilers_for(architecture: str) -> list[Callable[[Path, str], Said]]:
    """Those that are here."""
    if not architecture.startswith("sm_"):
        return [by_clang] if shutil.which(CLANG) else []
    library = find_nvrtc()
    return [*([Nvrtc(library).compiled] if library else []), *([by_nvcc] if shutil.which("nvcc") else [])]


def ops_of(path: Path) -> str:
    """The ops of a program; of another source its header and what is stored."""
    text = path.read_text()
    ops = re.findall(r"= (?:omc_ew_|omc_)(\w+)[<(]", text)
    names = re.findall(r'include "cuda/\w+/(\w+)\.h"', text) + re.findall(r"define OMC_(?:STORAGE|DIM) (\w+)", text)
    return ", ".join(dict.fromkeys(ops)) or " ".join(names)


def found_in(path: Path, kernels: Numbers, architecture: str) -> str:
    """What of a source's numbers is a failure."""
    if not kernels:
        return "no kernel"
    if not architecture.startswith("sm_"):
        return ""
    if any(numbers["spilled"] for numbers in kernels.values()):
        return "spills"
    has_table = not WITH_TABLES.isdisjoint(ops_of(path).split(", "))
    return "a stack frame" if not has_table and any(numbers["stack"] for numbers in kernels.values()) else ""


def compiled(path: Path, architecture: str, most: int) -> Said:
    """What any compiler, of the first so many, says against a source, and the numbers of the first."""
    said = [compiler(path, architecture) for compiler in compilers_for(architecture)[:most]]
    return "".join(against for against, _ in said), said[0][1]


def checked(paths: list[Path], architectures: list[str], also_every: int) -> Iterator[tuple[Path, str, Said]]:
    """On all cores, in that order; each so many sources, 0: none, by all compilers that there are."""
    jobs = [
        (path, architecture, 2 if also_every and i % also_every == 0 else 1)
        for architecture in architectures
        for i, path in enumerate(paths)
    ]
    with ProcessPoolExecutor() as pool:
        found = pool.map(compiled, *zip(*jobs, strict=True), chunksize=8)
        for (path, architecture, _), said in zip(jobs, found, strict=True):
            yield path, architecture, said


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--architectures", nargs="+", default=[*ARCHITECTURES], metavar="NAME", help="sm_90, gfx942")
    p.add_argument("--every", type=int, default=1, metavar="N", help="each N-th source only")
    p.add_argument("--found", action="store_true", help="the first compiler that there is, if any; no table")
    p.add_argument("--write", metavar="FOLDER", help="only write the sources there")
    a = p.parse_args()
    if a.write:
        write_sources(a.write)
        return
    also_every = 0 if a.found else ALSO_EVERY
    architectures = list(a.architectures)
    for architecture in [name for name in architectures if not compilers_for(name)]:
        lacks = "nvidia-cuda-nvrtc and nvcc" if architecture.startswith("sm_") else CLANG
        if not a.found:
            raise SystemExit(f"no compiler for {architecture}: {lacks} are not installed")
        print(f"device code is not compiled for {architecture}: there is no {lacks}")
        architectures.remove(architecture)
    if not architectures:
        return
    table = Table("of", "kernel", "for", "registers", "spilled, B", "stack, B", "shared, B")
    failures = n_kernels = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--write", folder], check=True)
        if not a.found:
            write_sources_of_models(folder)
        write_others(folder)
        paths = sorted(Path(folder).glob("*.cu"))[:: a.every]
        for path, architecture, (said, kernels) in checked(paths, architectures, also_every):
            n_kernels += len(kernels)
            for kernel, numbers in kernels.items():
                table.add_row(ops_of(path), kernel, architecture, *(str(numbers[k]) for k in OF_PTXAS))
            if failure := said or found_in(path, kernels, architecture):
                failures += 1
                print(f"{path.read_text()}\n{architecture}: {failure}", file=sys.stderr)
    if not a.found:
        Console(width=120).print(table)
    print(f"{len(paths)} sources, {n_kernels} kernels for {' '.join(architectures)}, {failures} failures")
    raise SystemExit(failures != 0)


if __name__ == "__main__":
    main()
