"""What stands for a module's tensors while it is traced is seen by the thread that traces, and by no other."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c import ORTModule
from ortmodule_c.capture import trace
from ortmodule_c.capture.private import in_place_of
from wrapped import Function, assert_same_step, n_graphs, pair


def elsewhere(function: Callable[[], Any]) -> Any:
    """What a function gives in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def made() -> tuple[nn.Module, ORTModule, Any]:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.tied = module[0]
    parameters, buffers = list(module.parameters()), list(module.buffers())
    instead = in_place_of(
        module,
        (parameters, [nn.Parameter(torch.zeros_like(p)) for p in parameters]),
        (buffers, [torch.zeros_like(b) for b in buffers]),
    )
    return module, ORTModule(module), instead


LOOKS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: m.get_parameter("0.weight"),
    "tied": lambda m: m.get_parameter("tied.weight"),
    "parameters": lambda m: next(m.parameters()),
    "state": lambda m: m.state_dict(keep_vars=True)["0.weight"],
    "registry": lambda m: getattr(m, "0")._parameters["weight"],
    "registries": lambda m: list(getattr(m, "0")._parameters.values())[0],  # noqa: RUF015
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_thread_sees_its_own(look: Callable[[Any], Any]) -> None:
    module, wrapper, instead = made()
    real = look(module)
    with instead:
        assert look(module) is not real and not bool(look(module).any())
        assert elsewhere(lambda: look(module)) is real and elsewhere(lambda: look(wrapper)) is real
    assert look(module) is real and type(module[0]._parameters) is dict


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_that_another_thread_makes_is_a_plain_module(copied: Callable[[Any], Any]) -> None:
    module, _, instead = made()
    with instead:
        twin = elsewhere(lambda: copied(module[1]))
    if copied is not copy.copy:
        assert type(twin._buffers) is dict
    else:  # it shares what its original has
        assert [*map(id, twin.parameters())] == [*map(id, module[1].parameters())]
    for name, b in module[1].named_buffers():
        assert torch.equal(dict(copied(module[1]).named_buffers())[name], b)


def test_what_another_thread_changes_stays_changed() -> None:
    module, wrapper, instead = made()
    new = nn.Parameter(torch.ones(3))

    def change() -> None:
        module[0].bias = new
        wrapper.zero_grad()
        module[1].register_buffer("more", torch.ones(1))

    for p in module.parameters():
        p.grad = torch.ones_like(p)
    with instead:
        elsewhere(change)
        assert module[0].bias is not new
    assert module[0].bias is new and "more" in dict(module[1].named_buffers())
    assert all(p.grad is None for p in module.parameters())


def test_what_the_tracing_thread_changes_is_its_own() -> None:
    module, _, instead = made()
    mean = module[1].running_mean
    with instead:
        module[1].running_mean = torch.ones(3)
        del module[0].bias
        assert elsewhere(lambda: module[1].running_mean) is mean
    assert module[1].running_mean is mean and module[0].bias is not None


@pytest.mark.parametrize("changing", [False, True], ids=["known", "open"])
def test_what_another_thread_sets_meanwhile_is_no_doing_of_the_forward(
    changing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x) * s.beta, l=nn.Linear(4, 2), beta=1.0))
    x = torch.randn(3, 4)
    if changing:  # the next graph leaves it open
        assert_same_step(eager, ours, x)
        eager.beta = ours.beta = 2.0
    check = trace.check_attributes

    def set_meanwhile(*args: Any) -> None:
        elsewhere(lambda: setattr(ours.module, "beta", 9.0))
        check(*args)

    monkeypatch.setattr(trace, "check_attributes", set_meanwhile)
    ours(x)
    assert ours.beta == 9.0
    monkeypatch.undo()
    for beta in (9.0, 5.0, 7.0):
        eager.beta = ours.beta = beta
        eager.zero_grad()
        ours.zero_grad()
        assert_same_step(eager, ours, x)
        assert ours.beta == beta
    assert n_graphs(ours) <= 3 and not ours.fallback_report()
