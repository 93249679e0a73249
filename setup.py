"""Build of the C extension and of the C tests.

Every file of ``csrc/`` is compiled once. Those of ``csrc/cpu/ops`` are also compiled once per row of
``csrc/cpu/variants.def`` and instruction set, with its compiler flags, and so are the
``*_variant.c`` of ``csrc/cpu``, these for nothing else. ``python setup.py ctest`` builds the C core and
``tests/c`` into one program and runs it; ``--sanitize`` adds the address and undefined behaviour
sanitizers, ``--thread`` the thread sanitizer. ``python setup.py fuzz`` runs the core on randomly
changed texts.
"""

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

if not sys.platform.startswith("linux"):
    raise SystemExit(f"ortmodule_c is built on Linux alone, and this is {sys.platform}: see docs/install.md")

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")
CUDA = Path("cuda")
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]

WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes"]
FLAGS = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fwrapv",  # sums and products of integers wrap around, as PyTorch's
    *WARNINGS,
]
# Instruction set -> (compiler flags, bytes of a vector).
ISAS = {
    "base": ([], 16),
    "avx2": (["-mavx2", "-mfma", "-mf16c"], 32),
    "avx512": (
        ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
        64,
    ),
}
ISAS["avx512bf16"] = ([*ISAS["avx512"][0], "-mavx512bf16"], 64)
# Those of tiles are attributes of functions, where the compiler knows them, see cpu/gemm_tiles.h.
ISAS["amx"] = ISAS["amxfp16"] = ([*ISAS["avx512bf16"][0], "-DOMC_TILES"], 64)
# The files of the variants of pairs.
PAIRS = [
    "gemm_pack_variant",
    "gemm_kernel_variant",
    "gemm_lines_variant",
    "conv_product_variant",
    "conv_weight_variant",
    "recurrent_variant",
]
# What variants.def calls them, where there are others than the base.
GROUPS = {
    "all": ["base", "avx2", "avx512"],
    "base": ["base"],
    "bf16": ["avx512bf16", "amx"],
    "f16": ["amxfp16"],
}
LIBRARIES = ["m", "dl", "pthread", "gomp"]


def variants() -> list[tuple[str, list[str]]]:
    """The name of each kernel variant and its compiler flags; see the file for the columns of a row."""
    rows = re.findall(r"^  ROW\(" + r"(\w+), " * 5, (ROOT / CSRC / "cpu/variants.def").read_text(), re.M)
    x86 = platform.machine() in ("x86_64", "AMD64")
    made = []
    for name, dtype, compute, kind, isas in rows:
        for isa in GROUPS[isas] if x86 else {"base"} & {*GROUPS[isas]}:
            flags, width = ISAS[isa]
            defines = [
                f"-DOMC_VARIANT={name}_{isa}",
                f"-DOMC_COMPUTE_VARIANT={compute}_{isa}",
                f"-DOMC_STORAGE=OMC_{dtype}",
                f"-DOMC_STORAGE_IS_{dtype}",
                f"-DOMC_COMPUTE_{compute.upper()}",
                f"-DOMC_KIND={kind}",
                f"-DOMC_KIND_IS_{kind}",
                f"-DOMC_VL={8 * width // int(compute[1:])}",
            ]
            # A vector type wider than the baseline has no stable calling convention; verbs are inlined: none is used.
            quiet = ["-Wno-psabi"]
            if kind == "INT":
                quiet.append("-Wno-unused-function")  # not every family has kernels for integers
            made.append((f"{name}_{isa}", [*defines, *flags, *quiet]))
    return made


def embed_device_code() -> Path:
    """What device code includes, as a C file of its texts: the compiler for the GPU gets them at run time."""
    sources = {str(p): p for p in sorted([*CUDA.glob("gpu/*.h"), *CUDA.glob("ops/*.h")])}
    shared = {
        name for p in sources.values() for name in re.findall(r'^#include "((?:ops|optim)/.*)"', p.read_text(), re.M)
    }
    sources |= {name: CSRC / name for name in sorted({*shared, "optim/numbers.def"})}
    digest = hashlib.sha256()
    text = '#include "cuda/unit.h"\n\nconst omc_cuda_source omc_cuda_sources[] = {\n'
    for name, path in sources.items():
        source = path.read_text()
        digest.update(f"{name}\0{source}\0".encode())
        lines = [line.replace("\\", "\\\\").replace('"', '\\"') for line in source.splitlines()]
        text += f'    {{"{name}",\n' + "".join(f'     "{line}\\n"\n' for line in lines) + "    },\n"
    text += "};\nconst int omc_cuda_n_sources = sizeof omc_cuda_sources / sizeof *omc_cuda_sources;\n"
    text += f'const char omc_cuda_sources_digest[] = "{digest.hexdigest()}";\n'
    text += "_Static_assert(sizeof omc_cuda_sources / sizeof *omc_cuda_sources <= OMC_CUDA_MOST_SOURCES, "
    text += '"a program has room for all of them");\n'
    out = Path("build") / "cuda_sources.c"
    out.parent.mkdir(exist_ok=True)
    if not out.exists() or out.read_text() != text:
        out.write_text(text)
    return out


def compile_jobs(extra: list[Path]) -> list[tuple[Path, str, list[str]]]:
    """All (source, folder of the object, flags)."""

    core = sorted(p for p in [*CSRC.rglob("*.c"), *CUDA.rglob("*.c")] if p.parent.name != "python")
    core.append(embed_device_code())
    kernels = [p for p in core if p.stem.endswith("_variant") or p.parent == CSRC / "cpu" / "ops"]
    jobs = [(p, "core", []) for p in [*core, *extra] if not p.stem.endswith("_variant")]
    for name, flags in variants():
        in_pairs = name.startswith("pairs_")
        jobs += [(p, name, flags) for p in kernels if not in_pairs or p.stem in PAIRS]
    return jobs


def compile_all(compiler, build_temp: str, extra: list[Path], flags: list[str], include_dirs: list[str]) -> list[str]:
    """Compile what is older than its source or any header that it may include; return the objects."""
    of_core = [*CSRC.rglob("*.h"), *CSRC.rglob("*.def"), *Path("tests/c").glob("*.h"), Path("setup.py")]
    of_cuda = [*CUDA.rglob("*.h"), *CUDA.rglob("*.def")]
    newest_of_core, newest_of_cuda = (max(p.stat().st_mtime for p in headers) for headers in (of_core, of_cuda))

    def one(job: tuple[Path, str, list[str]]) -> str:
        source, folder, more = job
        out = Path(build_temp) / folder
        obj = Path(compiler.object_filenames([str(source)], output_dir=str(out))[0])
        rows = CSRC / "ops" / source.name  # included where kernels are made of them
        written = max(p.stat().st_mtime for p in (source, rows) if p.exists())
        if CUDA in source.parents or source.parent.name == "build":
            written = max(written, newest_of_cuda)
        if not obj.exists() or obj.stat().st_mtime < max(written, newest_of_core):
            compiler.compile(
                [str(source)],
                output_dir=str(out),
                include_dirs=["csrc", ".", *include_dirs],
                extra_postargs=[*FLAGS, *flags, *more],
            )
        return str(obj)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, compile_jobs(extra)))


# Assertions are for the C tests: nothing stops somebody's process. Not a folder of one build's: an editable install has
# a new one each time, and objects are to be used again, by the library too.
RELEASE, RELEASE_FLAGS = "build/ext", ["-O3", "-g0", "-DNDEBUG"]


class BuildExt(build_ext):
    def build_extension(self, ext: Extension) -> None:
        binding = [*sorted((CSRC / "python").glob("*.c")), *map(Path, ext.sources)]
        flags = [*RELEASE_FLAGS, "-DPy_LIMITED_API=0x030B0000", f'-DOMC_VERSION="{VERSION}"']
        include_dirs = [*self.compiler.include_dirs, *ext.include_dirs]
        objects = compile_all(self.compiler, RELEASE, binding, flags, include_dirs)
        objects = [o for o in objects if Path(o).parent.name != "train"]  # for the library alone
        exports = Path(RELEASE) / "exports.map"
        exports.write_text("{ global: PyInit_*; local: *; };\n")
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(
            objects,
            target,
            libraries=LIBRARIES,
            extra_postargs=[f"-Wl,--version-script={exports}", *ext.extra_link_args],
            build_temp=RELEASE,
        )


class BuildDevice(BuildExt):
    description = "build the extension with the device of the tests in it, for them alone, as build/device/_C"

    def finalize_options(self) -> None:
        super().finalize_options()
        sources = ["tests/c/device.c", "tests/device/device_module.c"]
        wrapped = ("omc_provider_find", "omc_current_queue", "omc_cuda_narrow")
        wrap = [f"-Wl,--wrap={name}" for name in wrapped]
        self.extensions = [
            Extension("device._C", sources, include_dirs=["tests/c"], extra_link_args=wrap, py_limited_api=True)
        ]
        self.inplace, self.build_lib = False, "build"

    def run(self) -> None:
        super().run()
        build_stand_ins(Path("build") / "device")


def build_stand_ins(folder: Path) -> None:
    """The libraries of tests/cuda, under the names of those they stand in for."""
    emulator = (ROOT / "tests" / "cuda").resolve()
    watched = [Path("setup.py"), CUDA / "api.def", *emulator.iterdir()]
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    torch_ops = [str(emulator / "torch_ops.cpp"), "-isystem", str(torch / "include")]
    torch_devices = ["-std=c++20", "-isystem", str(torch / "include"), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    version = zlib.crc32(b"".join((emulator / name).read_bytes() for name in ("emulator.h", "nvrtc.cpp"))) >> 1
    for source, name, more in (
        ("driver.cpp", "libcuda.so.1", []),
        (
            "nvrtc.cpp",
            "libnvrtc.so.13",
            [f'-DEMULATOR="{emulator}"', f"-DVERSION={version}", str(folder / "libcuda.so.1")],
        ),
        ("cublaslt.cpp", "libcublasLt.so.13", [f"-I{ROOT}", f"-I{emulator}", str(folder / "libcuda.so.1")]),
        ("torch_cuda.cpp", "libtorch_cuda.so", [*torch_ops, f"-I{ROOT}", str(folder / "libcuda.so.1")]),
        ("torch_devices.cpp", "libtorch_devices.so", [*torch_devices, str(folder / "libtorch_cuda.so")]),
    ):
        out = folder / name
        if out.exists() and out.stat().st_mtime > max(p.stat().st_mtime for p in watched):
            continue
        flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-fPIC", "-shared", f"-Wl,-soname,{name}"]
        command = [
            os.environ.get("CXX", "g++"),
            *flags,
            str(emulator / source),
            *more,
            "-o",
            str(out),
            "-ldl",
            "-lpthread",
        ]
        subprocess.run(command, check=True)


# Checks of addresses are calls: written out, a kernel of products takes gcc 12 a minute and more. What the checks of
# null pointers and sizes of objects would find, those of addresses find.
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=null,object-size", "-fno-sanitize-recover=all"]
SANITIZE += ["--param=asan-instrumentation-with-call-threshold=0"]

# Build of the C tests -> (compiler flags, which tests, environment). ThreadSanitizer knows nothing of the barriers of
# libgomp, so it gets one thread per region; the tests start threads of their own.
CTESTS = {
    "ctest": (["-O2", "-g"], [], {}),
    "ctest-sanitize": (["-O1", "-g1", *SANITIZE], [], {}),
    "ctest-thread": (["-O1", "-g1", "-fsanitize=thread"], ["threads_"], {"OMP_NUM_THREADS": "1"}),
}


def link_core(name: str, sources: list[Path], werror: bool) -> str:
    """The path of a program of the C core and `sources`, the first of which has ``main``; `name` is one of CTESTS.

    It has matrix tiles, emulated, whatever the CPU has.
    """
    from setuptools._distutils.ccompiler import new_compiler
    from setuptools._distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    flags, _, _ = CTESTS[name]
    more = [*(["-Werror"] if werror else []), "-UNDEBUG", "-Itests/c", "-includetests/c/tiles.h"]
    sources = [*sources, *({Path("tests/c/tiles.c")} - {*sources})]
    objects = compile_all(compiler, f"build/{name}", sources, [*flags, *more], [])
    program = str(Path("build") / name / sources[0].stem)
    link_flags = ["-Wl,--wrap=omc_tiles_get", *(flag for flag in flags if flag.startswith("-fsanitize="))]
    compiler.link_executable(objects, program, libraries=LIBRARIES, extra_postargs=link_flags)
    return program


class CTest(Command):
    description = "build and run the tests of the C core"
    user_options: ClassVar = [
        ("sanitize", None, "with the address and undefined behaviour sanitizers"),
        ("thread", None, "with the thread sanitizer, those tests that start threads"),
        ("werror", None, "warnings are errors"),
    ]
    boolean_options: ClassVar = ["sanitize", "thread", "werror"]

    def initialize_options(self) -> None:
        self.sanitize = self.thread = self.werror = False

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        name = "ctest-sanitize" if self.sanitize else "ctest-thread" if self.thread else "ctest"
        _, tests, env = CTESTS[name]
        sources = sorted(Path("tests/c").glob("*.c"), key=lambda p: p.stem != "runner")
        program = link_core(name, sources, self.werror)
        raise SystemExit(subprocess.run([program, *tests], env=os.environ | env, check=False).returncode)


class Library(Command):
    description = "build the C library, which trains where there is no Python, with its headers"
    user_options: ClassVar = [("prefix=", None, "where lib/ and include/ are made, by default build/library")]

    def initialize_options(self) -> None:
        self.prefix = str(Path("build") / "library")

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        from setuptools._distutils.ccompiler import new_compiler
        from setuptools._distutils.sysconfig import customize_compiler

        compiler = new_compiler()
        customize_compiler(compiler)
        objects = compile_all(compiler, RELEASE, [], RELEASE_FLAGS, [])
        lib, include = Path(self.prefix) / "lib", Path(self.prefix) / "include" / "ortmodule_c"
        compiler.create_static_lib(objects, "ortmodule_c", str(lib))
        compiler.link_shared_lib(objects, "ortmodule_c", str(lib), libraries=LIBRARIES)
        for header in included([CSRC / "train" / "trainer.h", CSRC / "train" / "safetensors.h"]):
            to = include / header.relative_to(CSRC)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(header, to)


def included(headers: list[Path]) -> list[Path]:
    """These headers of the core, and all that they include of it."""
    found: list[Path] = []
    while headers:
        header = headers.pop()
        if header not in found:
            found.append(header)
            headers += [CSRC / name for name in re.findall(r'^#include "(.*)"', header.read_text(), re.M)]
    return found


class Fuzz(Command):
    description = "plan and run graphs of randomly changed text, under the address and undefined behaviour sanitizers"
    user_options: ClassVar = [
        ("seconds=", None, "for how long, by default 30"),
        ("seed=", None, "of the changes, by default 0"),
    ]

    def initialize_options(self) -> None:
        self.seconds, self.seed = "30", "0"

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        sources = [Path("tests/fuzz/mutate_text.c"), Path("tests/c/roundtrip.c")]
        program = link_core("ctest-sanitize", sources, werror=True)  # objects as those of the tests
        corpus = sorted(map(str, Path("tests/passes").glob("*/*.txt")))
        raise SystemExit(subprocess.run([program, self.seconds, self.seed, *corpus], check=False).returncode)


setup(
    ext_modules=[Extension("ortmodule_c._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildExt, "build_device": BuildDevice, "ctest": CTest, "library": Library, "fuzz": Fuzz},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
