"""What has to run on a GPU, in parts: tests, then benchmarks; called by ``benchmarks/gpu.sh``.

Each part is a process with a time limit and leaves ``NAME.json`` and ``NAME.log`` in the folder ``--out``. A part that
has passed or failed on the same machine, of the same commit with the same changes, is not run again, so that the next
call does what there was no time for, what was ended at its limit, and what lacked a program; one that fails stops no
other. Tests run beside each other, on a share of their rows; benchmarks one at a time, what tells most first. What is
ended, at its limit or because all time is over, is interrupted first, so that its log has what has failed by then. All
time is over too when this is interrupted or terminated. At the end ``gpu.json`` has all parts, ``gpu.txt`` the tables,
where "absent" is a part that lacks its program. The exit status is 0 if all other parts have passed, 1 if one has
failed or taken too long, 3 if some have not been run.

``--device cpu --tiny`` rehearses it all without a GPU, on tiny models and a part of the tests, and leaves its files
in a folder of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from machine import machine

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("bf16", "tf32", "fp16", "fp32")
SMALL = ("bert", "mlp", "resnet18")
LARGE = ("bert_large", "gpt2_medium", "resnet50")
ROOM = 64 << 30  # bytes of a GPU that has all arms of the small models at once
NO_ROOM = {"gpt2": ("eager_written",)}  # of 80 GB: arms that take more, and models whose others do at once
CORES = os.cpu_count() or 2
PATIENCE = 12.0  # seconds for what is interrupted: pytest-xdist waits 10 for its processes
AT_ONCE = 4  # parts of tests, which have the cores among them
ARMS = ("eager_written", "eager_fused", "compile_fused", "replay_fused", "ours_fused")
# What the table of ops has for one instruction set of the CPU's is nothing new on a GPU.
ONE_ISA = "not avx2 and not avx512 and not avx512bf16 and not amx"
# Tests of the emulated GPU alone.
STAND_INS = ("test_gpu", "test_devices", "test_races", "test_kernels", "test_wide")
# Tests of kernels whose threads share memory: reductions, moves, running sums, the first of lines, attention.
SHARING = (
    *("tests/cuda/test_lines.py", "tests/cuda/test_moves.py", "tests/cuda/test_attention.py"),
    *("-k", "softmax or sum or transpose or extremes or order or cpu"),
)
MODULES = ("training", "buffers", "backwards", "retained", "changed_since", "mixed_precision", "shapes")


def counted(path: Path) -> dict[str, object]:
    """How many tests of a report in JUnit's format passed, failed and were skipped, and which failed."""
    cases = ET.parse(path).getroot().findall(".//testcase")
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    names = [f"{c.get('classname')}::{c.get('name')}" for c in bad]
    return {"passed": len(cases) - len(bad) - skipped, "failed": len(bad), "skipped": skipped, "failures": names}


def read_json(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found


@dataclass(frozen=True)
class Part:
    """A command, what it may take, and how to read what it finds.

    Parameters
    ----------
    name
        Of the files that it leaves.
    command
        Words of it, of which ``{result}`` stands for a file that it may write.
    limit
        Seconds after which it is ended.
    alone
        Whether nothing else may run meanwhile.
    read
        What of that file is kept.
    needs
        A program without which the part is left out.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    alone: bool = False
    read: Callable[[Path], dict[str, object]] = read_json
    needs: str = ""


@dataclass
class Outcome:
    """What became of a part: "passed", "failed", "timeout" (its own limit), or "absent" where it lacks a program.

    And what that is of: a commit, with changes by a sum of theirs if there are any, on a machine.
    """

    part: str
    status: str
    seconds: float = 0.0
    code: int | None = None
    machine: str = ""
    found: dict[str, object] = field(default_factory=dict)
    commit: str = ""
    changes: str = ""

    def revision(self) -> str:
        """The commit in short, with a plus where files were changed."""
        return self.commit[:9] + ("+" if self.changes else "")


def git(*words: str) -> bytes:
    """What it says; nothing where there is no repository."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout
    return b""


def origin(device: str) -> tuple[str, str, str]:
    """Of what outcomes are from now on: machine, commit, changes."""
    changes = git("diff", "HEAD")
    summed = hashlib.sha256(changes).hexdigest()[:16] if changes else ""
    return machine(device), git("rev-parse", "HEAD").decode().strip(), summed


def default_out(device: str, tiny: bool) -> Path:
    """Where parts leave their files; those of a rehearsal stand for no part on a GPU."""
    return ROOT / "build" / ("gpu-rehearsal" if tiny or device == "cpu" else "gpu")


def share(sixteenths: int) -> str:
    """So much of the cores, in words of a command."""
    return str(max(1, CORES * sixteenths // 16))


def parts(device: str, tiny: bool, together: bool) -> list[Part]:
    """All parts, in the order of what they tell."""
    here = sys.executable
    has_xdist = importlib.util.find_spec("xdist") is not None
    # Each test is named as it ends, and one that takes long says where it is.
    told = ("-v", "-rfE", "--tb=short", "-o", "faulthandler_timeout=60")
    pytest = (here, "-m", "pytest", *told, "-p", "no:cacheprovider", "--junitxml={result}")

    def spread(sixteenths: int) -> tuple[str, ...]:
        """Over so much of the cores; who has nothing left takes tests from others, as a few are long."""
        return (*pytest, *(("-n", share(sixteenths), "--dist", "worksteal") if has_xdist and not tiny else ()))

    at_once = ("env", "OMC_SYNC=1")  # tests that ask for an op's error ask for it in its step
    on = ("--on", device)
    ops = ("-k", "MatMul or Softmax" if tiny else ONE_ISA)
    modules = [f"tests/module/test_{name}.py" for name in (MODULES[1:2] if tiny else MODULES)]
    kernels = [str(p) for p in sorted((ROOT / "tests/cuda").glob("test_*.py")) if p.stem not in STAND_INS]
    kernels = [name for name in kernels if not tiny or "products" in name] + (["-k", "not tf32"] if tiny else [])
    checked = ("tests/ops/test_ops.py", "-k", f"test_gradient_equals_autograd and f32 and {ONE_ISA}")
    fuzz = (
        *at_once,
        here,
        "tests/fuzz/fuzz.py",
        *on,
        "--seeds",
        "0:4" if tiny else "0:60",
        "--processes",
        share(4),
    )
    agreement = (here, "benchmarks/agreement.py", "--device", device, "--dtypes", "fp32", "bf16", "--json", "{result}")
    agreed = ("--scale", "tiny", "--models", "mlp", "bert") if tiny else ()
    errors = Part("errors", (*at_once, *spread(2), *on, "-m", "at_once", "tests/cuda"), 120, read=counted)
    found = [
        Part("training", (*spread(4), "tests/cuda/hardware.py"), 180, read=counted),
        Part("kernels", (*spread(4), *on, "--every", "8", *kernels), 180, read=counted),
        Part("ops", (*at_once, *spread(3), *on, "--every", "20", "tests/ops", *ops), 180, read=counted),
        Part("modules", (*at_once, *spread(5), *on, "--every", "6", *modules), 180, read=counted),
        *([errors] if device != "cpu" else []),  # which has other words for them
        Part("fuzz", fuzz, 120, read=lambda _: {}),
        Part("agreement", (*agreement, *agreed), 150),
    ]
    for name, models, dtype in benchmarks(together):
        command = (here, "benchmarks/run.py", "--device", device, "--together", "--models", *models, "--dtypes", dtype)
        quick = ("--scale", "tiny", "--steps", "2", "--warmup", "1", "--turn", "2")
        arms = [arm for arm in ARMS if arm not in NO_ROOM.get(models[0], ())]
        arms = [arm for arm in arms if "eager" in arm or "ours" in arm] if tiny else arms
        apart = ("--apart",) if models[0] in NO_ROOM else ()
        how = (*(quick if tiny else ()), *apart, "--arms", *arms)
        found.append(Part(f"{name}-{dtype}", (*command, *how, "--json", "{result}"), 240, alone=True))
    # Blocks of PyTorch's tensors are CUDA's own then, so that what reads past their ends is told.
    sanitizer = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--error-exitcode", "9")
    memory = (*sanitizer, *pytest, *on, "--every", "10", *checked)
    races = (*sanitizer, "--tool", "racecheck", *pytest, *on, "--every", "20", *SHARING)
    for name, command in (("sanitizer", memory), ("races", races)):
        found.append(Part(name, command, 300, alone=True, read=counted, needs="compute-sanitizer"))
    return found


def benchmarks(together: bool) -> list[tuple[str, tuple[str, ...], str]]:
    """Names of parts, and what each measures. Small models may be one part, whose arms are made ready together."""
    usual = [("gpt2", ("gpt2",)), *([("small", SMALL)] if together else [(model, (model,)) for model in SMALL])]
    large = [(model, (model,)) for model in LARGE]
    order = [(usual, DTYPES[:3]), (large, DTYPES[:1]), (usual, DTYPES[3:]), (large, DTYPES[1:])]
    return [(*models, dtype) for group, dtypes in order for dtype in dtypes for models in group]


def has_room(device: str) -> bool:
    """For all arms of the small models at once."""
    return device == "cpu" or torch.cuda.get_device_properties(device).total_memory >= ROOM


def end(process: subprocess.Popen[bytes], patience: float) -> None:
    """With all that it has started; who still runs is interrupted, upon which pytest says what has failed so far."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Runner:
    """Runs parts until there is no time left.

    Parameters
    ----------
    out
        Where they leave their files.
    device
        That they run on, for what they say of the machine.
    seconds
        That are left for all of them.
    least
        Seconds that have to be left for a part to be started.
    """

    def __init__(self, out: Path, device: str, seconds: float, least: float = 30.0) -> None:
        self.out, self.device, self.least = out, device, least
        self.origin = origin(device)
        self.end = time.monotonic() + seconds
        out.mkdir(parents=True, exist_ok=True)
        self.said = threading.Lock()

    def left(self) -> float:
        return self.end - time.monotonic()

    def stop(self, *_: object) -> None:
        """As if the time of all were over: what runs is interrupted, and is for the next call."""
        self.end = time.monotonic() + PATIENCE

    def wait(self, process: subprocess.Popen[bytes], limit: float) -> int | None:
        """Its exit status, or nothing at its limit or where the time of all is over."""
        until = time.monotonic() + limit
        while (code := process.poll()) is None and time.monotonic() < min(until, self.end - PATIENCE):
            time.sleep(0.05)
        return code

    def file(self, part: Part) -> Path:
        return self.out / f"{part.name}.json"

    def outcome(self, part: Part) -> Outcome | None:
        """What has become of a part so far; of another commit or on another machine nothing."""
        if not self.file(part).exists():
            return None
        left = Outcome(**read_json(self.file(part)))  # type: ignore[arg-type]
        return left if (left.machine, left.commit, left.changes) == self.origin else None

    def run(self, part: Part) -> None:
        """Run a part that has neither passed nor failed; it leaves no file if the time of all is over first."""
        before = self.outcome(part)
        if before is not None and before.status in ("passed", "failed"):
            return
        if part.needs and shutil.which(part.needs) is None:
            self.keep(part, Outcome(part.name, "absent"))
            return
        if self.left() < self.least:
            return
        result = self.out / f"{part.name}.result"
        result.unlink(missing_ok=True)
        command = [word.replace("{result}", str(result)) for word in part.command]
        begin = time.monotonic()
        with (self.out / f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = self.wait(process, part.limit)
            finally:
                end(process, min(PATIENCE, max(0.0, self.left())))
        seconds = time.monotonic() - begin
        if code is None and seconds < part.limit:
            return
        found: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError, ET.ParseError):
            found = part.read(result)
        status = "timeout" if code is None else "failed" if code else "passed"
        self.keep(part, Outcome(part.name, status, seconds, code, found=found))
        result.unlink(missing_ok=True)

    def keep(self, part: Part, outcome: Outcome) -> None:
        outcome.machine, outcome.commit, outcome.changes = self.origin
        unfinished = self.out / f"{part.name}.part"
        unfinished.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        unfinished.replace(self.file(part))
        with self.said:
            print(f"{part.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)

    def run_all(self, wanted: list[Part]) -> dict[str, Outcome]:
        """Run those that are still to be run; the outcomes of all that have one by then."""
        beside = [part for part in wanted if not part.alone]
        with ThreadPoolExecutor(max(1, min(AT_ONCE, CORES // 2))) as pool:
            list(pool.map(self.run, beside))
        for part in wanted:
            if part.alone:
                self.run(part)
        return {part.name: o for part in wanted if (o := self.outcome(part)) is not None}


def table_of_tests(wanted: list[Part], outcomes: dict[str, Outcome]) -> Table:
    """All parts, and what their tests said."""
    table = Table("part", "", "seconds", "passed", "failed", "skipped", "commit")
    for part in wanted:
        o = outcomes.get(part.name)
        if o is None:
            table.add_row(part.name, "not run")
        else:
            tests = [str(o.found.get(k, "")) for k in ("passed", "failed", "skipped")]
            status = f"absent: no {part.needs}" if o.status == "absent" else o.status
            table.add_row(part.name, status, f"{o.seconds:.0f}", *tests, o.revision())
    return table


def table_of_steps(outcomes: dict[str, Outcome]) -> Table | None:
    """Median steps of all arms, ms; then ours over the others': steps, peak memory; the host's time."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}  # by model and dtype: the figures of each arm
    for f in [f for o in outcomes.values() for f in o.found.get("figures", ())]:  # type: ignore[attr-defined]
        rows.setdefault(f"{f['model']}-{f['dtype']}", {}).update({} if f["error"] else {f["arm"]: f})
    if not rows:
        return None
    table = Table("ms", *ARMS, "x compile", "x replay", "memory", "host, us")
    for name, arms in rows.items():
        middle = {arm: sorted(f["steps"])[len(f["steps"]) // 2] for arm, f in arms.items() if f["steps"]}
        ours, eager = arms.get("ours_fused"), arms.get("eager_fused")

        def ratio(arm: str, middle: dict[str, float] = middle) -> str:
            return f"{middle[arm] / middle['ours_fused']:.2f}" if {arm, "ours_fused"} <= middle.keys() else ""

        memory = f"{ours['peak'] / eager['peak']:.2f}" if ours and eager and eager["peak"] > 0 else ""
        host = f"{(ours['host'] - ours['empty']) * 1e6:.0f}" if ours and ours["host"] else ""
        steps = [f"{middle[arm] * 1e3:.2f}" if arm in middle else "" for arm in ARMS]
        table.add_row(name, *steps, ratio("compile_fused"), ratio("replay_fused"), memory, host)
    return table


def status_of(wanted: list[Part], outcomes: dict[str, Outcome]) -> int:
    """The exit status."""
    if any(o.status in ("failed", "timeout") for o in outcomes.values()):
        return 1
    return 0 if all(part.name in outcomes for part in wanted) else 3


def told(runner: Runner, wanted: list[Part], outcomes: dict[str, Outcome]) -> None:
    """Print the tables, and leave them and all outcomes in files."""
    (runner.out / "gpu.json").write_text(json.dumps({n: asdict(o) for n, o in outcomes.items()}, indent=1) + "\n")
    with (runner.out / "gpu.txt").open("w") as file:
        for console in (Console(width=140), Console(width=140, file=file)):
            console.print(machine(runner.device))
            for table in (table_of_tests(wanted, outcomes), table_of_steps(outcomes)):
                if table is not None:
                    console.print(table)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, help="folder of what the parts leave: build/gpu, rehearsals build/gpu-rehearsal")
    p.add_argument("--device", default="cuda")
    p.add_argument("--minutes", type=float, default=9.0, help="for all of this call")
    p.add_argument("--begun", type=float, default=time.time(), help="when it began, in seconds of the epoch")
    p.add_argument("--parts", nargs="+", metavar="NAME", help="some parts only")
    p.add_argument("--tiny", action="store_true", help="tiny models and a part of the tests, to rehearse")
    p.add_argument("--build", action="store_true", help="bring the extension up to date first")
    a = p.parse_args()
    if a.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU here; --device cpu --tiny rehearses without one")
    every = parts(a.device, a.tiny, has_room(a.device))
    unknown = {*(a.parts or ())} - {part.name for part in every}
    if unknown:
        p.error(f"no parts {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in every)}")
    wanted = [part for part in every if not a.parts or part.name in a.parts]
    if a.build:
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, timeout=300, check=True)
    runner = Runner(a.out or default_out(a.device, a.tiny), a.device, a.begun + 60 * a.minutes - time.time())
    for by in (signal.SIGINT, signal.SIGTERM):
        signal.signal(by, runner.stop)
    outcomes = runner.run_all(wanted)
    told(runner, wanted, outcomes)
    raise SystemExit(status_of(wanted, outcomes))


if __name__ == "__main__":
    main()
