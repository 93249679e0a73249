"""The C core under compilers other than the one that builds it, without a warning; nothing is linked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]


def build_rules(monkeypatch: pytest.MonkeyPatch, machine: str) -> dict[str, object]:
    """What setup.py defines, on a machine of this kind."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    rules: dict[str, object] = {"__file__": str(ROOT / "setup.py"), "__name__": "setup"}
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), rules)
    return rules


def complaints(rules: dict, compiler: str, sources: list[Path], flags: list[str]) -> str:
    """What the compiler says of every file of csrc/, each with its variants, and of `sources`."""

    def check(job: tuple[Path, str, list[str]]) -> str:
        source, _, more = job
        command = [compiler, *rules["FLAGS"], *flags, *more, "-O1", "-Werror", "-fsyntax-only", str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return "".join(pool.map(check, rules["compile_jobs"](sources)))


def need(compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")


def test_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    need("clang")
    flags = ["-Icsrc", "-I.", "-Itests/c", f"-isystem{sysconfig.get_path('include')}"]
    flags += ["-DPy_LIMITED_API=0x030B0000", '-DOMC_VERSION="0"']
    sources = [*ROOT.glob("csrc/python/*.c"), *ROOT.glob("tests/c/*.c"), *ROOT.glob("tests/fuzz/*.c")]
    assert complaints(build_rules(monkeypatch, os.uname().machine), "clang", sources, flags) == ""


def test_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    need("aarch64-linux-gnu-gcc")
    rules = build_rules(monkeypatch, "aarch64")
    assert {isa for _, isa in rules["variants"]()} == {"base"}
    sources = list(ROOT.glob("tests/c/*.c"))
    assert complaints(rules, "aarch64-linux-gnu-gcc", sources, ["-Icsrc", "-I.", "-Itests/c"]) == ""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize(
    ("variant", "headers", "product"),
    [
        ("pairs_amx", ["amxbf16intrin.h", "amxintrin.h"], "tdpbf16ps"),
        ("pairs_f16_amxfp16", ["amxfp16intrin.h"], "tdpfp16ps"),
    ],
)
def test_tiles_are_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, variant: str, headers: list[str], product: str
) -> None:
    """The C tests emulate them; here is what they are otherwise, where the compiler has a header of theirs."""
    need(compiler)
    need("objdump")
    includes = " || ".join(f"__has_include(<{header}>)" for header in headers)
    source = f"#if !({includes})\n#error\n#endif\n"
    known = subprocess.run([compiler, "-E", "-xc", "-"], input=source, capture_output=True, text=True, check=False)
    if known.returncode:
        pytest.skip(f"{compiler} has no {headers[-1]}")
    rules = build_rules(monkeypatch, "x86_64")
    flags = [*rules["FLAGS"], *dict(rules["variants"]())[variant], "-Icsrc", "-O3"]
    made = tmp_path / "kernel.o"
    subprocess.run([compiler, *flags, "-c", "csrc/cpu/gemm_kernel_variant.c", "-o", made], check=True)
    text = subprocess.run(["objdump", "-d", made], capture_output=True, text=True, check=True).stdout
    wanted = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", product}
    assert wanted == wanted & {*text.split()}
