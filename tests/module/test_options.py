"""DebugOptions: what is accepted, and the ONNX files it writes."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch._dynamo
from torch import nn

from ortmodule_c import DebugOptions, LogLevel, ORTModule, ORTModuleError
from ortmodule_c.onnx import files
from wrapped import Function, mlp


def test_values_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="log_level"):
        DebugOptions(log_level=20)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"log_level is .LOUD., expected one of VERBOSE, .* FATAL"):
        DebugOptions(log_level="LOUD")
    with pytest.raises(ValueError, match="onnx_prefix"):
        DebugOptions(save_onnx=True)
    with pytest.raises(TypeError, match="onnx_prefix"):
        DebugOptions(onnx_prefix=3)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"save_path is .* cannot be made"):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path=str(tmp_path / "file" / "inside"))
    with pytest.raises(ValueError, match="fallback"):
        DebugOptions(fallback="maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_graphs"):
        DebugOptions(max_graphs=0)


def test_a_wrapper_that_is_wrapped_again_keeps_its_options() -> None:
    """Of one that may not run in PyTorch a forward that cannot run elsewhere is an error."""
    inner = ORTModule(
        Function(lambda s, x: s.l(x).histc(4) + s.l(x).sum(), l=nn.Linear(3, 2)), DebugOptions(fallback="error")
    )
    x = torch.randn(2, 3)
    with pytest.raises(ORTModuleError, match="histc"):
        ORTModule(inner)(x)
    with pytest.warns(UserWarning, match="histc"):
        ORTModule(inner, DebugOptions())(x)


def test_the_directory_for_files_is_made(tmp_path: Path) -> None:
    DebugOptions(save_onnx=True, onnx_prefix="a", save_path=str(tmp_path / "new" / "graphs"))
    assert (tmp_path / "new" / "graphs").is_dir()


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
    monkeypatch.setenv("ORTMODULE_FALLBACK", "error")
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    options = DebugOptions(log_level=LogLevel.ERROR, fallback="warn", save_path="elsewhere")
    assert (options.log_level, options.fallback, options.directory) == (LogLevel.INFO, "error", tmp_path)
    for name in ("ORTMODULE_LOG_LEVEL", "ORTMODULE_FALLBACK", "ORTMODULE_SAVE_ONNX_PATH"):
        monkeypatch.setenv(name, "")
    options = DebugOptions(log_level=LogLevel.ERROR, fallback="error", save_path="elsewhere")
    assert (options.log_level, options.fallback, options.directory) == (LogLevel.ERROR, "error", Path("elsewhere"))


def test_only_a_level_that_is_asked_for_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTMODULE_LOG_LEVEL", raising=False)
    logger = logging.getLogger("ortmodule_c")
    before = logger.level
    try:
        ORTModule(mlp(), DebugOptions(log_level=LogLevel.INFO))
        ORTModule(mlp())
        ORTModule(mlp(), DebugOptions(fallback="error"))
        assert logger.level == logging.INFO
        ORTModule(mlp(), DebugOptions(log_level="ERROR"))
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


_TOLD = """
import logging, sys, torch
from torch import nn
from ortmodule_c import DebugOptions, ORTModule
if sys.argv[1] == "handled":
    logging.basicConfig(format="handled %(message)s")
for _ in range(2):
    ORTModule(nn.Linear(2, 2), DebugOptions(log_level="INFO", verify=1))(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.parametrize(("handlers", "start"), [("none", "ortmodule_c: "), ("handled", "handled ")])
def test_what_is_asked_for_is_told_once_without_a_handler_too(handlers: str, start: str) -> None:
    run = subprocess.run([sys.executable, "-c", _TOLD, handlers], capture_output=True, text=True, check=True)
    told = [line for line in run.stderr.splitlines() if "Linear: " in line]
    assert all(line.startswith(start) for line in told)
    assert [sum(what in line for line in told) for what in ("verified", "exported", "a graph made in")] == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_with_ops_that_run_in_pytorch_are_written(tmp_path: Path, dtype: torch.dtype) -> None:
    class SoFar(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cummax(1)[0] * 2

    options = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
    with pytest.warns(UserWarning, match="aten.cummax"):
        ORTModule(SoFar(), options)(torch.randn(3, 4, dtype=dtype, requires_grad=True)).sum().backward()
    assert {p.name for p in tmp_path.iterdir()} == {
        f"net_{s}_training.onnx" for s in ("exported", "joint", "optimized")
    }
    for path in tmp_path.iterdir():
        assert any(node.op_type == "TorchCall" for node in onnx.load(path).graph.node)


def test_files_that_cannot_be_written_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "save", fail)
    ours = ORTModule(mlp(), DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path)))
    with pytest.warns(UserWarning, match="could not be written: OSError: no space left on device"):
        ours(torch.randn(2, 6)).sum().backward()
    assert ours.stats()["graphs"] == 1 and not ours.fallback_report()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("ORTMODULE_LOG_LEVEL", "LOUD", "VERBOSE, DEVINFO, INFO, WARNING, ERROR, FATAL"),
        ("ORTMODULE_LOG_LEVEL", "info", "VERBOSE, DEVINFO, INFO, WARNING, ERROR, FATAL"),
        ("ORTMODULE_FALLBACK", "errors", "warn, error"),
        ("ORTMODULE_SAVE_ONNX_PATH", "/dev/null/at/all", "cannot be made: Not a directory"),
        ("ORTMODULE_SAVE_ONNX_PATH", "/dev/null", "cannot be made"),
    ],
)
def test_environment_values_without_a_meaning_are_refused(
    name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, OSError), match=f"{name} is '{value}'.*{allowed}"):
        DebugOptions(save_onnx=True, onnx_prefix="net")


IMPORTS = """
import os, sys
for name, value in [("OMC_ISA", "avx1024"), ("OMC_GEMM", "mkl"), ("OMC_PROFILE", "yes"), ("OMC_VERIFFY", "1"),
                    ("OMC_DUMP", "/nowhere/at/all"), ("OMC_DUMP", "/" * 5000)]:
    os.environ[name] = value
    try:
        import ortmodule_c
    except ValueError as e:
        assert name in str(e) and value[:50] in str(e), e
    else:
        raise AssertionError(f"{name}={value} passed")
    del os.environ[name]
import ortmodule_c
"""


def test_the_switches_of_the_core_are_checked_when_it_is_imported() -> None:
    """... each by an exception that says what was set; put right, the import succeeds in the same process."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_saved_graphs(kind: str, tmp_path: Path) -> None:
    conv = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU6(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 2),
        nn.LayerNorm(2),
    )
    module, x = (mlp(), torch.randn(2, 6)) if kind == "mlp" else (conv, torch.randn(2, 3, 8, 8))
    ours = ORTModule(module, DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path)))
    ours(x).sum().backward()
    with torch.no_grad():
        ours(x)
    names = {p.name for p in tmp_path.iterdir()}
    training = {f"net_{stage}_training.onnx" for stage in ("exported", "joint", "optimized")}
    assert names == training | {"net_exported_inference.onnx", "net_optimized_inference.onnx"}
    for name in names:
        model = onnx.load(tmp_path / name)
        onnx.checker.check_model(model)
        assert {o.domain for o in model.opset_import} == {"", "ai.ortmodule_c"}
    joint = onnx.load(tmp_path / "net_joint_training.onnx")
    assert len(joint.graph.output) > len(onnx.load(tmp_path / "net_exported_training.onnx").graph.output)


def test_a_variable_that_is_none_of_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBAC", "error")
    with pytest.warns(UserWarning, match=r"ORTMODULE_FALLBAC is unknown, there are ORTMODULE_CAPTURE, "):
        ORTModule(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "given", [{"max_graphs": "3"}, {"max_graphs": 2.5}, {"verify": True}, {"save_onnx": 1}, {"save_path": 1}]
)
def test_a_field_of_another_type_is_named(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(TypeError, match=f"{name} is a {type(given[name]).__name__}, expected"):
        DebugOptions(**given)
    with pytest.raises(TypeError, match="debug_options is a dict, expected DebugOptions"):
        ORTModule(mlp(), given)  # type: ignore[arg-type]


class Branching(nn.Module):
    """Two graphs of TorchDynamo, between them a branch that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        return self.second(h * 2) if h.sum() > -1 else self.second(h)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("entrance", ["wrapper", "backend"])
def test_the_graphs_of_dynamo_are_written_with_numbers(entrance: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    settings = {"save_onnx": True, "onnx_prefix": "net", "save_path": str(tmp_path)}
    module: Any = Branching()
    ours = (
        ORTModule(module, DebugOptions(**settings))
        if entrance == "wrapper"
        else torch.compile(module, backend="ortmodule_c", options=settings)
    )
    for _ in range(2):
        ours(torch.rand(2, 6)).sum().backward()
    names = {p.name for p in tmp_path.iterdir()}
    stages = ("exported", "joint", "optimized")
    assert names == {f"net_{number}_{stage}_training.onnx" for number in (1, 2) for stage in stages}
    for name in names:
        onnx.checker.check_model(onnx.load(tmp_path / name))


def test_a_profile_tells_what_the_last_steps_took() -> None:
    script = """
import torch
from ortmodule_c import ORTModule
model = ORTModule(torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)))
assert model.profile() == []
for _ in range(2):
    model(torch.randn(4, 7)).sum().backward()
rows = model.profile()
assert {row.phase for row in rows} == {"forward", "backward"}, rows
assert all(row.runs == 2 and row.seconds > 0 for row in rows), rows
assert ("forward", "FusedMatMul", 2 * 4 * 7 * 5 + 4 * 5) in [(row.phase, row.op, row.operations) for row in rows], rows
last = model(torch.randn(4, 7)).sum()
torch.autograd.grad(last, model.module[2].bias)
assert {row.runs for row in model.profile()} == {2, 3}
print(rows)
"""
    told = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"OMC_PROFILE": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert told[0].split() == ["op", "phase", "steps", "ms", "part", "GFLOP/s", "GB/s"]
    times = [float(line[40:49]) for line in told[1:-1]]
    assert times == sorted(times, reverse=True) and abs(sum(times) - float(told[-1].split()[-1])) < 1e-3 * len(times)
    model = ORTModule(mlp())
    model(torch.randn(2, 6))
    assert model.profile() == [] and "OMC_PROFILE=1" in str(model.profile())
