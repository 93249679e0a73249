"""What runs on a GPU, rehearsed without one: each kind of part, what it leaves, and what becomes of those that fail."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu import (
    ARMS,
    DTYPES,
    PATIENCE,
    SMALL,
    Outcome,
    Part,
    Runner,
    benchmarks,
    default_out,
    origin,
    parts,
    status_of,
    table_of_steps,
    table_of_tests,
)
from gpu_models import GPU, TINY

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.host


def rehearse(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--tiny", "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def left_by(out: Path, name: str) -> Outcome:
    return Outcome(**json.loads((out / f"{name}.json").read_text()))


@pytest.mark.parametrize("together", [False, True])
def test_every_model_is_measured_once_in_each_dtype(together: bool) -> None:
    assert {*GPU} == {*TINY}
    found = [(model, dtype) for _, models, dtype in benchmarks(together) for model in models]
    assert sorted(found) == sorted(itertools.product(GPU, DTYPES))
    names = [part.name for part in parts("cuda", False, together)]
    assert len({*names}) == len(names)


def test_a_rehearsal_stands_for_no_part_on_a_gpu() -> None:
    assert default_out("cuda", False) not in (
        default_out("cpu", True),
        default_out("cpu", False),
        default_out("cuda", True),
    )


@pytest.mark.parametrize(
    "command",
    [["benchmarks/gpu.py", "--build"], ["-m", "pytest", "--on", "cuda", "tests/ops"]],
    ids=["gpu.py", "pytest"],
)
def test_without_a_gpu_it_is_said_at_once(command: list[str]) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode in (1, pytest.ExitCode.USAGE_ERROR)
    told = done.stderr.strip().splitlines()
    assert len(told) == 1 and (" sees no GPU here" in told[0] or " has no such device here: " in told[0]), done.stderr


@pytest.mark.parametrize(
    "name",
    ["ops", "kernels", *(pytest.param(n, marks=pytest.mark.long) for n in ("training", "modules"))],
)
def test_parts_of_tests_count_them(name: str, tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--parts", name)
    found = left_by(tmp_path, name)
    assert (done.returncode, found.status) == (0, "passed"), (tmp_path / f"{name}.log").read_text()[-3000:]
    assert int(found.found["passed"]) > 5 and found.found["failed"] == 0  # type: ignore[call-overload]
    assert name in done.stdout and found.machine in (tmp_path / "gpu.txt").read_text().replace("\n", " ")


@pytest.mark.long
@pytest.mark.parametrize(("name", "models"), [("small-bf16", SMALL), ("bert_large-fp16", ("bert_large",))])
def test_benchmarks_have_the_figures_of_each_arm(name: str, models: tuple[str, ...], tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--parts", name)
    outcome = left_by(tmp_path, name)
    assert (done.returncode, outcome.status) == (0, "passed"), (tmp_path / f"{name}.log").read_text()[-3000:]
    figures: list[dict] = outcome.found["figures"]  # type: ignore[assignment]
    found = [(f["model"], f["arm"]) for f in figures]
    assert found == [*itertools.product(models, (*ARMS[:2], ARMS[-1]))]
    for f in figures:
        assert f["dtype"] == name.split("-")[1] and not f["error"]
        assert len(f["steps"]) == 2 and min(f["steps"]) > 0 and f["first"] > 0 and f["loss"] > 0
    assert json.loads((tmp_path / "gpu.json").read_text())[name]["found"] == outcome.found


@pytest.mark.long
def test_random_programs_and_losses_of_ten_steps(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--parts", "fuzz", "agreement", "sanitizer", "races")
    assert done.returncode == 0, done.stdout
    assert "4 equal to eager" in (tmp_path / "fuzz.log").read_text()
    losses: dict = left_by(tmp_path, "agreement").found["losses"]  # type: ignore[assignment]
    assert losses.keys() == {f"{model} {dtype}" for model in ("mlp", "bert") for dtype in ("fp32", "bf16")}
    assert {left_by(tmp_path, name).status for name in ("sanitizer", "races")} == {"absent"}


def test_the_host_s_time_is_told_beyond_autograds(tmp_path: Path) -> None:
    command = ["benchmarks/worker.py", "--model", "mlp", "--arm", "ours_fused", "--scale", "tiny"]
    asked = "step\nturn 3\nhost 5\n"
    done = subprocess.run([sys.executable, *command], cwd=ROOT, input=asked, capture_output=True, text=True, check=True)
    ready, step, turn, host = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True} and turn["loss"] < step["loss"] and turn["seconds"] > 0
    assert host["host"] > host["empty"] > 0


def script(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


# As pytest-xdist, which waits for its processes first.
INTERRUPTED = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(2)
    print('what has failed', flush=True)
"""


# A call of three parts, the second of which takes long.
CALL = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu
write = f"import os, time; open('{sys.argv[2]}/slow.pid', 'x').write(str(os.getpid())); time.sleep(60)"
def script(text): return sys.executable, "-c", text
gpu.parts = lambda *_: [
    gpu.Part("quick", script(""), 60), gpu.Part("slow", script(write), 60), gpu.Part("late", script(""), 60, alone=True)
]
sys.argv[1:] = ["--device", "cpu", "--out", sys.argv[2]]
gpu.main()
"""


def test_a_part_that_fails_stops_no_other_and_is_told(tmp_path: Path) -> None:
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"a\": 1}'); print('done')"
    wanted = [
        Part("bad", script("raise SystemExit('broken')"), 60),
        Part("cut", script(INTERRUPTED), 1.5),
        Part("good", (*script(write), "{result}"), 60, alone=True),
        Part("other", script(""), 60, needs="a-program-that-nobody-has"),
    ]
    begin = time.monotonic()
    outcomes = Runner(tmp_path, "cpu", 60).run_all(wanted)
    assert time.monotonic() - begin < 30
    assert {n: o.status for n, o in outcomes.items()} == {
        "bad": "failed",
        "cut": "timeout",
        "good": "passed",
        "other": "absent",
    }
    assert outcomes["good"].found == {"a": 1} and outcomes["bad"].code == 1
    assert "broken" in (tmp_path / "bad.log").read_text() and "what has failed" in (tmp_path / "cut.log").read_text()
    assert status_of(wanted, outcomes) == 1 and status_of(wanted[2:], {"good": outcomes["good"]}) == 3


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    once = f"open({str(count)!r}, 'a').write('x')"
    wanted = [Part("a", script(once), 60), Part("b", script(once), 60, alone=True)]
    first = Runner(tmp_path / "out", "cpu", 60).run_all(wanted[:1])
    assert {*first} == {"a"} and status_of(wanted, first) == 3
    again = Runner(tmp_path / "out", "cpu", 60).run_all(wanted)
    assert {*again} == {"a", "b"} and status_of(wanted, again) == 0 and count.read_text() == "xx"


@pytest.mark.parametrize("other", ["machine", "commit", "changes"])
def test_of_another_commit_or_machine_it_is(other: str, tmp_path: Path) -> None:
    count = tmp_path / "count"
    wanted = [Part("a", script(f"open({str(count)!r}, 'a').write('x')"), 60)]
    Runner(tmp_path, "cpu", 60).run_all(wanted)
    left = json.loads((tmp_path / "a.json").read_text())
    assert (left["machine"], left["commit"], left["changes"]) == origin("cpu")
    (tmp_path / "a.json").write_text(json.dumps({**left, other: "another"}))
    assert not Runner(tmp_path, "cpu", 0).run_all(wanted)  # nor is it told of this one
    outcomes = Runner(tmp_path, "cpu", 60).run_all(wanted)
    assert asdict(outcomes["a"]) == {**left, "seconds": outcomes["a"].seconds} and count.read_text() == "xx"


def test_the_table_says_of_which_commit_a_part_is() -> None:
    part, commit = Part("x", (), 60), "0123456789abcdef"
    for changes, told in (("", "012345678"), ("5f", "012345678+")):
        table = table_of_tests([part], {"x": Outcome("x", "passed", commit=commit, changes=changes)})
        assert next(iter(table.columns[-1].cells)) == told


def test_what_was_ended_at_its_limit_or_lacked_its_program_is_tried_again_by_the_next_call(tmp_path: Path) -> None:
    tried = str(tmp_path / "tried")
    slow = f"import os, time; seen = os.path.exists({tried!r}); open({tried!r}, 'a').write('x'); seen or time.sleep(60)"
    out, lacks = tmp_path / "out", Part("lacks", script(""), 60, needs="a-program-that-nobody-has")
    first = Runner(out, "cpu", 60).run_all([Part("slow", script(slow), 2.0), lacks])
    assert {n: o.status for n, o in first.items()} == {"slow": "timeout", "lacks": "absent"}
    assert Path(tried).read_text() == "x"
    again = Runner(out, "cpu", 60).run_all([Part("slow", script(slow), 30.0), replace(lacks, needs="")])
    assert {n: o.status for n, o in again.items()} == {"slow": "passed", "lacks": "passed"}


def test_the_table_says_what_a_part_lacks() -> None:
    part = Part("x", (), 60, needs="compute-sanitizer")
    table = table_of_tests([part], {"x": Outcome("x", "absent")})
    assert [next(iter(c.cells)) for c in table.columns][:2] == ["x", "absent: no compute-sanitizer"]


def test_the_time_of_a_call_is_counted_from_its_script_s_begin(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--parts", "small-fp16", "--minutes", "5", "--begun", str(time.time() - 300))
    assert done.returncode == 3 and not (tmp_path / "small-fp16.json").exists()


def test_what_there_is_no_time_for_leaves_no_file(tmp_path: Path) -> None:
    """Nor does what is cut short before it has had its own time, which says by then what has failed."""
    wanted = [Part("cut", script(INTERRUPTED), 60), Part("late", script(""), 60, alone=True)]
    outcomes = Runner(tmp_path, "cpu", PATIENCE + 2, least=PATIENCE).run_all(wanted)
    assert not outcomes and status_of(wanted, outcomes) == 3
    assert "what has failed" in (tmp_path / "cut.log").read_text()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_leaves_nothing_at_work_and_the_rest_to_the_next_call(by: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CALL, str(ROOT / "benchmarks"), str(tmp_path)]
    call = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "slow.pid").exists():
        time.sleep(0.1)
    call.send_signal(by)
    said, _ = call.communicate(timeout=PATIENCE)
    assert call.returncode == 3 and said.count("not run") == 2
    assert {*json.loads((tmp_path / "gpu.json").read_text())} == {"quick"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "slow.pid").read_text()), 0)


def test_an_arm_that_fails_leaves_the_others_at_work(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = ["benchmarks/run.py", "--models", "mlp", "--dtypes", "fp32", "--arms", "eager", "ours", "--scale", "tiny"]
    broken = "import os, sys\nif '--arm' in sys.argv and 'ours' in sys.argv: os._exit(7)\n"
    (tmp_path / "sitecustomize.py").write_text(broken)
    done = subprocess.run(
        [sys.executable, *command, "--steps", "2", "--json", str(result)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'python'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "an arm has failed" in done.stderr
    eager, ours = json.loads(result.read_text())["figures"]
    assert len(eager["steps"]) == 2 and not eager["error"]
    assert not ours["steps"] and ours["error"] == "ours on mlp ended with code 7"


def test_the_table_has_ratios_of_what_was_measured() -> None:
    arms = {"eager_fused": 0.004, "compile_fused": 0.003, "ours_fused": 0.002}
    figures = [
        {
            "model": "gpt2",
            "dtype": "bf16",
            "arm": arm,
            "error": "",
            "steps": [s, s, 9.0],
            "peak": 100 * s,
            "host": 3e-4,
            "empty": 1e-4,
        }
        for arm, s in arms.items()
    ]
    table = table_of_steps({"small-bf16": Outcome("small-bf16", "passed", found={"figures": figures})})
    assert table is not None
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["gpt2-bf16", "", "4.00", "3.00", "", "2.00", "1.50", "", "0.50", "200"]
