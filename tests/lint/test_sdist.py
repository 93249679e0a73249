"""The source distribution: what `pip` builds the package from where there is no wheel and no repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Path to content of every file of a source distribution of this tree."""
    out = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", out, "sdist", "--dist-dir", out]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(out.glob("*.tar.gz"))) as tar:
        return {
            m.name.partition("/")[2]: tar.extractfile(m).read()  # type: ignore[union-attr]
            for m in tar.getmembers()
            if m.isfile()
        }


def test_it_holds_every_tracked_file(files: dict[str, bytes]) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this tree is no repository")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.splitlines() if (ROOT / name).exists()}
    about_the_repository = {".gitignore", ".ci/run"}
    assert tracked - about_the_repository - set(files) == set()


def test_it_holds_nothing_that_was_built(files: dict[str, bytes]) -> None:
    assert [name for name in files if name.endswith((".so", ".o", ".pyc")) or name.startswith("build/")] == []


def test_it_is_built_on_linux_alone() -> None:
    """Elsewhere a sentence comes before any error of a compiler or linker."""
    script = "import sys, setuptools.command.build_ext; sys.platform = 'darwin'; exec(open('setup.py').read())"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and not ran.stdout
    assert ran.stderr == "ortmodule_c is built on Linux alone, and this is darwin: see docs/install.md\n"


def test_the_build_finds_there_what_it_compiles_here(files: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    script = (
        "import setuptools; setuptools.setup = lambda **_: None\n"
        "rules = {'__file__': 'setup.py', '__name__': 'setup'}\n"
        "exec(open('setup.py').read(), rules)\n"
        "print(sorted(map(str, rules['compile_jobs']([*rules['CSRC'].glob('python/*.c')]))))"
    )
    here, there = (
        subprocess.run([sys.executable, "-c", script], cwd=at, capture_output=True, text=True, check=True).stdout
        for at in (ROOT, tmp_path)
    )
    assert here == there
    for source in (ROOT / "csrc").rglob("*"):
        if source.is_file():
            assert files[str(source.relative_to(ROOT))] == source.read_bytes()
