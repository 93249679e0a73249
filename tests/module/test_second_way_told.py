"""What of a module goes through TorchDynamo or runs in PyTorch is told once, with its reason, file and line."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortmodule_c import DebugOptions, ORTModule
from wrapped import Branching, Function, assert_same_step, close, pair

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Dropping(nn.Module):
    """Leaves out layers by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) > 0.5:
                x = layer(x)
        return x


def test_a_break_in_a_loop_is_told_with_what_helps() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ORTModule(Dropping())(torch.ones(2, 4))
    (message,) = [str(w.message) for w in told]
    line = Dropping.forward.__code__.co_firstlineno + 2
    assert re.match(
        rf"ortmodule_c: Dropping runs in PyTorch: .* {__file__}:{line}; .*a submodule for the loop", message
    )


def test_the_reason_is_told_before_what_follows_from_it() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ORTModule(Branching())(torch.ones(2, 4))
    first, second = [str(w.message) for w in told]
    assert "goes through TorchDynamo" in first and "graph break: Data-dependent" in second
    assert "Explanation:" not in second


def test_a_break_within_pytorch_is_told_with_its_file_and_line() -> None:
    ours = ORTModule(nn.BatchNorm1d(3, momentum=None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours(torch.ones(2, 3))
    assert re.search(r"batchnorm\.py:\d+$", ours.fallback_report()[0].name)


def test_what_dynamo_does_not_look_into_is_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    ours = ORTModule(nn.Sequential(scripted))
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        close(ours(torch.ones(1, 2)), scripted(torch.ones(1, 2)))


def hooked(s: Function, x: Tensor) -> Tensor:
    h = s.l(x)
    h.register_hook(lambda grad: grad * 2)
    return h.sin()


def checkpointed(s: Function, x: Tensor) -> Tensor:
    return checkpoint(lambda v: torch.tanh(s.l(v)), x, use_reentrant=False) + x


def conditional(s: Function, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (s.l(x),)).exp()


def prints(s: Function, x: Tensor) -> Tensor:
    print(end="")
    return s.l(x)


def of_data_dependent_size(s: Function, x: Tensor) -> Tensor:
    h = s.l(x)
    return h[h > 0] * 2


def through_8_bits(s: Function, x: Tensor) -> Tensor:
    return s.l(s.l(x).to(torch.float8_e5m2).float())


def scaled_by_an_element(s: Function, x: Tensor) -> Tensor:
    largest = x.max().item()
    return s.l(x) * largest


REFUSED = [hooked, checkpointed, conditional, prints, of_data_dependent_size, through_8_bits, scaled_by_an_element]


@pytest.mark.parametrize("forward", REFUSED)
def test_why_a_module_goes_through_dynamo_is_told_once(forward: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """... with file and line of what is in the way, and nothing of Dynamo's own besides."""
    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in (3, 3, 2):
            assert_same_step(eager, ours, torch.randn(n, 4, requires_grad=True))
        for m in (eager, ours):
            m.eval()
        assert_same_step(eager, ours, torch.randn(3, 4))
    messages = [str(w.message) for w in told]
    (why,) = [m for m in messages if "goes through TorchDynamo" in m]
    lines = range(forward.__code__.co_firstlineno, forward.__code__.co_firstlineno + 4)
    places = [f"{__file__}:{line}" for line in lines]
    assert any(p in text for p in places for text in (why, *[r.name for r in ours.fallback_report()]))
    assert all(m.startswith("ortmodule_c: ") for m in messages)
    assert capfd.readouterr() == ("", "")


def test_a_number_of_a_tensor_is_told_in_words() -> None:
    with pytest.warns(UserWarning, match="TorchDynamo.*: a number that depends on the values of a tensor cannot be"):
        ORTModule(Function(scaled_by_an_element, l=nn.Linear(4, 4)))(torch.randn(3, 4))


def test_who_asks_for_dynamo_is_not_told_of_it() -> None:
    ours = ORTModule(Function(hooked, l=nn.Linear(4, 4)), DebugOptions(capture="dynamo"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("forward", [checkpointed, conditional])
def test_what_holds_functions_trains_as_in_pytorch(forward: Any) -> None:
    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in (3, 3, 2):
            for sign in (1, -1):
                assert_same_step(eager, ours, sign * torch.rand(n, 4))
    assert any("ortmodule_c" in str(w.message) for w in told)
    runs_in_pytorch = [r.name.split(" at ")[0] for r in ours.fallback_report()]
    assert runs_in_pytorch == (["cond"] if forward is conditional else [])


def test_only_what_no_graph_can_hold_runs_in_pytorch() -> None:
    ours = ORTModule(Function(through_8_bits, l=nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match="to at .* runs in PyTorch: there are no kernels for .*float8_e5m2"):
        ours(torch.randn(3, 4))
    assert {r.name.split(" at ")[0] for r in ours.fallback_report()} == {"to", "float"}
    assert ours.stats()["graphs"] == 2


BY_ITSELF = """
import torch
from ortmodule_c import DebugOptions, ORTModule
from wrapped import Branching
ORTModule(torch.nn.Linear(4, 2), DebugOptions(capture="dynamo"))(torch.ones(2, 4))
ours = ORTModule(Branching())
ours(torch.ones(2, 4))
print([r.cause for r in ours.fallback_report()])
"""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="TorchDynamo makes graphs for ORTModule from PyTorch 2.13 on")
def test_a_break_is_told_where_the_first_module_of_a_process_was_for_dynamo() -> None:
    script = [sys.executable, "-W", "ignore", "-c", BY_ITSELF]
    done = subprocess.run(script, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert done.stdout == "['graph break: Data-dependent branching']\n"
