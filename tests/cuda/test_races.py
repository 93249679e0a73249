"""Threads of a block are kept in order: ThreadSanitizer finds no race in shared memory, where it would.

Each thread of an emulated block is one to it, in such order as a GPU keeps alone (see emulator.h): a warp is not in
lockstep there, and a copy may come as soon as it has been asked for.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import on_device
import pytest
from cold_gpu import Cold
from races import CASES

BARRIERS = ("__syncthreads();", "omc_wait_for_copies();")
OPTIONS = "halt_on_error=1 ignore_noninstrumented_modules=1 symbolize=0"
TOLD = 66  # how a process ends of which something is told
# Some ThreadSanitizers want addresses that are not at random.
FIXED = ("setarch", "-R") if subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0 else ()


def barriers_of(file: str) -> list[str]:
    """Where they are, as emulator.h is told."""
    lines = (on_device.ROOT / file).read_text().splitlines()
    return [f"/{Path(file).name}:{n}" for n, line in enumerate(lines, 1) if any(b in line for b in BARRIERS)]


NEEDED = [(name, barriers_of(file)[n]) for name, case in CASES.items() for file, of in case.needs.items() for n in of]


@pytest.fixture(scope="module")
def watched(stand_ins: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cold]:
    """Processes under ThreadSanitizer, for which kernels are compiled; the rest is not looked at."""
    library = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    server = Cold(
        "races",
        command=FIXED,
        LD_PRELOAD=library.stdout.strip(),
        TSAN_OPTIONS=OPTIONS,
        EMULATED_FLAGS="-fsanitize=thread",
        OMP_NUM_THREADS="1",  # it does not know how OpenMP orders its threads
        XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache")),
        PYTHONPATH=":".join(str(on_device.ROOT / at) for at in ("python", "tests/ops", "tests/cuda")),
    )
    yield server
    server.end()


def said(watched: Cold, name: str, lacks: str = "") -> tuple[int, str]:
    """How a case ends, and what is said of it."""
    ran = watched.run(f"races.CASES[{name!r}].run(gpu)", EMULATED_LACKS=lacks, LD_PRELOAD="")
    return ran.code, ran.err


@pytest.mark.parametrize("name", CASES)
def test_threads_are_in_order(watched: Cold, name: str) -> None:
    assert said(watched, name) == (0, "")


@pytest.mark.parametrize(("name", "lacks"), NEEDED)
def test_where_a_barrier_lacks_it_is_told(watched: Cold, name: str, lacks: str) -> None:
    code, told = said(watched, name, lacks)
    assert code == TOLD and "data race" in told


def test_there_is_a_case_of_every_barrier() -> None:
    files = [f"cuda/{at}/{file.name}" for at in ("gpu", "ops") for file in (on_device.ROOT / "cuda" / at).glob("*.h")]
    assert {place for _, place in NEEDED} == {place for file in files for place in barriers_of(file)}
