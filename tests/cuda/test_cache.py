"""Device code kept on disk: what is loaded without being compiled again, and what never is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cold_gpu import Cold

# A step of one kernel, with a compiler that fails where it is asked.
STEP = """
gpu.fail({failing}, b"nvrtcCompileProgram", 2)
text = "input %x : f32[3]\\n%0 = Tanh(%x)\\n%y = Mul(%0, %0)\\nreturn %y\\n"
try:
    (y,) = gpu.forward(text, [torch.ones(3)])
    print(torch.allclose(y, torch.ones(3).tanh() ** 2))
except RuntimeError as error:
    print("compiled" if "does not compile" in str(error) else error)
gpu.fail(-1, None, 0)
"""
HEADER_BYTES = 32  # of a file: magic, bytes of key and image, their sum


def step(cold: Cold, home: Path, failing: int = -1) -> str:
    ran = cold.run(STEP.format(failing=failing), XDG_CACHE_HOME=str(home))
    assert (ran.err, ran.code) == ("", 0)
    return ran.out.strip()


def is_compiled(cold: Cold, home: Path) -> bool:
    """Whether a new process has to compile."""
    said = step(cold, home, failing=0)
    assert said in ("True", "compiled")
    return said == "compiled"


@pytest.fixture
def kept(cold: Cold, tmp_path: Path) -> Path:
    """The file that a process has left."""
    assert is_compiled(cold, tmp_path)
    assert step(cold, tmp_path) == "True"
    (file,) = (tmp_path / "ortmodule_c").iterdir()
    return file


def test_what_one_process_has_compiled_others_load(cold: Cold, kept: Path) -> None:
    assert not is_compiled(cold, kept.parents[1])
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_folders_that_lack_are_made(cold: Cold, tmp_path: Path) -> None:
    home = tmp_path / "scratch" / "cache"
    assert step(cold, home) == "True" and not is_compiled(cold, home)
    assert {folder.stat().st_mode & 0o777 for folder in (home.parent, home)} == {0o700}


def test_a_home_that_lacks_is_not_made(cold: Cold, tmp_path: Path) -> None:
    home = tmp_path / "nobody"
    for there in (False, True):
        ran = cold.run(STEP.format(failing=-1), XDG_CACHE_HOME="", HOME=str(home))
        assert (ran.out, ran.err, ran.code) == ("True\n", "", 0)
        assert [*home.glob("**/ortmodule_c")] == [home / ".cache" / "ortmodule_c"] * there
        home.mkdir(exist_ok=True)


def changed(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def shorter_than_its_key(file: Path) -> None:
    data = bytearray(file.read_bytes()[: HEADER_BYTES + 8])
    n_key = int.from_bytes(data[8:16], "little")
    data[16:24] = ((8 - n_key) % 2**64).to_bytes(8, "little")  # the bytes of the image that then are left
    file.write_bytes(data)


def linked(file: Path) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def folder_linked(file: Path) -> None:
    folder = file.parent
    folder.rename(folder.with_suffix(".elsewhere"))
    folder.symlink_to(folder.with_suffix(".elsewhere"))


TAMPERING: dict[str, Callable[[Path], object]] = {
    "another magic": lambda file: changed(file, 0),
    "another length": lambda file: changed(file, 16),
    "another sum": lambda file: changed(file, HEADER_BYTES - 1),
    "another key": lambda file: changed(file, HEADER_BYTES),
    "another byte of the image": lambda file: changed(file, -1),
    "a byte less": lambda file: os.truncate(file, file.stat().st_size - 1),
    "a byte more": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "only a header": lambda file: os.truncate(file, HEADER_BYTES),
    "nothing": lambda file: os.truncate(file, 0),
    "a part of its key": shorter_than_its_key,
    "a group that may write": lambda file: file.chmod(0o620),
    "others who may write": lambda file: file.chmod(0o602),
    "a group that may write to the folder": lambda file: file.parent.chmod(0o770),
    "others who may write to the folder": lambda file: file.parent.chmod(0o707),
    "a link": linked,
    "a link to the folder": folder_linked,
}


@pytest.mark.parametrize("how", TAMPERING)
def test_what_cannot_be_trusted_is_compiled_again(cold: Cold, kept: Path, how: str) -> None:
    TAMPERING[how](kept)
    assert is_compiled(cold, kept.parents[1])
    assert step(cold, kept.parents[1]) == "True"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("of", ["file", "folder"])
def test_what_is_another_users_is_compiled_again(cold: Cold, kept: Path, of: str) -> None:
    os.chown(kept if of == "file" else kept.parent, 12345, -1)
    assert is_compiled(cold, kept.parents[1])


def test_a_file_of_other_code_under_its_name_is_not_loaded(cold: Cold, kept: Path) -> None:
    other = STEP.format(failing=-1).replace("Tanh", "Exp").replace(".tanh()", ".exp()")
    ran = cold.run(other, XDG_CACHE_HOME=str(kept.parents[1]))
    assert ran.out == "True\n"
    (second,) = {*kept.parent.iterdir()} - {kept}
    kept.write_bytes(second.read_bytes())
    kept.chmod(0o600)
    assert step(cold, kept.parents[1]) == "True"
