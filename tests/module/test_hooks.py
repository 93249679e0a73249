"""Hooks that a forward calls are part of it, and guarded as all else that it calls."""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from wrapped import Function, assert_same_step, n_graphs, pair

SCALE = [2.0]
Register = Callable[[nn.Module], Any]


def scaled(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    return out * SCALE[0]


def shifted(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] + 1, *args[1:]), kwargs


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4))


HOOKS: dict[str, Register] = {
    "after": lambda m: m[0].register_forward_hook(scaled),
    "before": lambda m: m[1].register_forward_pre_hook(lambda _m, args: args[0] * 3),
    "with keywords": lambda m: m[2].register_forward_pre_hook(shifted, with_kwargs=True),
    "always": lambda m: m[0].register_forward_hook(scaled, always_call=True),
    "of the module itself": lambda m: m.register_forward_hook(scaled),
    "a method": lambda m: m[0].register_forward_hook(Times(2.0).times),
}


class Times:
    def __init__(self, by: float) -> None:
        self.by = by

    def times(self, _module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        return out * self.by


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_a_hook_is_part_of_the_graph_while_it_is_there(register: Register) -> None:
    eager, ours = pair(mlp())
    assert_same_step(eager, ours, torch.randn(3, 6))
    handles = [register(eager), register(ours.module)]
    for rows in (3, 3, 5):
        assert_same_step(eager, ours, torch.randn(rows, 6))
    assert n_graphs(ours) == 2
    for handle in handles:
        handle.remove()
    assert_same_step(eager, ours, torch.randn(3, 6))
    assert n_graphs(ours) == 2


def test_what_a_hook_reads_is_guarded() -> None:
    eager, ours = pair(mlp())
    times = Times(2.0)
    for m in (eager, ours.module):
        m[0].register_forward_hook(times.times)
    for by in (2.0, -1.0, 0.5):
        times.by = by
        assert_same_step(eager, ours, torch.randn(3, 6))


def test_another_hook_in_the_place_of_one_is_another_graph() -> None:
    eager, ours = pair(mlp())
    for by in (2.0, 3.0):
        handles = [m[0].register_forward_hook(Times(by).times) for m in (eager, ours.module)]
        assert_same_step(eager, ours, torch.randn(3, 6))
        for handle in handles:
            handle.remove()


def test_a_hook_that_does_more_than_compute_runs_each_time() -> None:
    seen: list[tuple[int, ...]] = []
    ours = ORTModule(mlp())
    ours.module[0].register_forward_hook(lambda _m, _args, out: seen.append(tuple(out.shape)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(1, 4):
            ours(torch.randn(3, 6))
            assert seen == [(3, 4)] * n


def test_hooks_that_apply_registers_are_given_the_modules_of_named_modules() -> None:
    """As transformers' DebugUnderflowOverflow, which looks up the name of each module that calls it."""
    ours = ORTModule(mlp())
    names = {module: name for name, module in ours.named_modules()}
    called: list[str] = []
    assert ours.apply(lambda m: m.register_forward_hook(lambda m, *_: called.append(names[m]))) is ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            called.clear()
            ours(torch.randn(3, 6))
            assert called == ["0", "1", "2", ""]


def test_an_apply_of_the_module_is_the_one_that_is_called() -> None:
    class Some(nn.Sequential):
        def apply(self, fn: Callable[[nn.Module], object], only: type = nn.Module) -> nn.Module:
            for m in self.modules():
                if isinstance(m, only):
                    fn(m)
            return self

    ours = ORTModule(Some(nn.Linear(2, 3), nn.ReLU()))
    seen: list[nn.Module] = []
    assert ours.apply(seen.append, only=nn.Linear) is ours
    assert seen == [ours[0]]


def test_hooks_of_a_backward_run() -> None:
    eager, ours = pair(mlp())
    for m in (eager, ours.module):
        m[0].register_full_backward_hook(lambda _m, grads, _out: tuple(None if g is None else g * 2 for g in grads))
    x = torch.randn(3, 6, requires_grad=True)
    with pytest.warns(UserWarning, match="hooks of its backward"):
        assert_same_step(eager, ours, x)


LOCK = threading.Lock()


def hooks_itself(s: Function, x: Tensor) -> Tensor:
    """As transformers does where hidden states are asked for."""
    if not s.is_hooked:
        with LOCK:
            s.l.register_forward_hook(scaled)
            s.is_hooked = True
    return s.l(x)


def test_a_module_that_hooks_itself_once_needs_pytorch_once(recwarn: pytest.WarningsRecorder) -> None:
    eager, ours = pair(Function(hooks_itself, l=nn.Linear(4, 2), is_hooked=False))
    for rows in (3, 3, 5):
        assert_same_step(eager, ours, torch.randn(rows, 4))
    assert n_graphs(ours) == 1 and not ours.fallback_report() and not list(recwarn)
    assert len(ours.module.l._forward_hooks) == 1 and not LOCK.locked()


def test_a_module_that_hooks_itself_again_and_again_is_as_in_eager() -> None:
    def hooks(s: Function, x: Tensor) -> Tensor:
        s.l.register_forward_hook(lambda _m, _args, out: out + 1)
        return s.l(x)

    eager, ours = pair(Function(hooks, l=nn.Linear(4, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(1, 5):
            assert_same_step(eager, ours, torch.randn(3, 4))
            assert len(ours.module.l._forward_hooks) == n


def test_a_module_that_makes_a_buffer_at_its_first_call_needs_pytorch_once() -> None:
    def makes(s: Function, x: Tensor) -> Tensor:
        if "made" not in s._buffers:
            s.register_buffer("made", torch.ones(2) * 3)
        return s.l(x) * s.made

    eager = Function(makes, l=nn.Linear(4, 2))
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (3, 3, 5):
        assert_same_step(eager, ours, torch.randn(rows, 4))
    assert n_graphs(ours) == 1 and not ours.fallback_report()


def asks_for_gradients(_module: nn.Module, _args: Any, out: Tensor) -> None:
    """As the hook that transformers puts on embeddings for checkpoints."""
    out.requires_grad_(True)


def test_what_is_set_to_require_grad_where_gradients_are_off_stays_in_a_graph() -> None:
    eager, ours = pair(mlp())
    for module in (eager, ours.module):
        module[0].requires_grad_(False)
        module[0].register_forward_hook(asks_for_gradients)
    x = torch.randn(3, 6)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), warnings.catch_warnings(action="error"):
            out = ours(x)
            torch.testing.assert_close(out, eager(x))
            assert not out.requires_grad
    assert ours.stats()["dynamo_graphs"] == 0 and not ours.fallback_report()
    with warnings.catch_warnings(action="ignore"):
        assert_same_step(eager, ours, x)


G = torch.ones(4)


def given(self: nn.Module, x: Tensor) -> Tensor:
    return self.linear(x.requires_grad_())


def of_its_own(self: nn.Module, x: Tensor) -> Tensor:
    self.linear.weight.requires_grad_(not self.linear.weight.requires_grad)
    return self.linear(x)


def outside(self: nn.Module, x: Tensor) -> Tensor:
    G.requires_grad = not G.requires_grad
    return self.linear(x) * G


def returned(self: nn.Module, x: Tensor) -> list[Tensor]:
    h = self.linear(x)
    h.requires_grad_()
    return [self.linear(x), h]


def returned_view(self: nn.Module, x: Tensor) -> list[Tensor]:
    h = self.linear(x)
    h.requires_grad_()
    return [self.linear(x), h.t(), h.detach()]


def kept(self: nn.Module, x: Tensor) -> Tensor:
    self.last = self.linear(x)
    self.last.requires_grad_()
    return self.last * 2


def turned_on(self: nn.Module, x: Tensor) -> Tensor:
    h = self.linear(x)
    h.requires_grad_()
    with torch.enable_grad():
        return h * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [given, of_its_own, outside, returned, returned_view, kept, turned_on])
def test_who_requires_grad_is_seen_from_outside(function: Callable[..., Any]) -> None:
    def seen(module: nn.Module) -> list[Any]:
        G.requires_grad_(False)
        x = torch.ones(3, 4)
        with torch.no_grad():
            out = module(x)
        tensors = [*(out if isinstance(out, list) else [out]), x, *module.parameters(), G]
        return [t.requires_grad for t in [*tensors, getattr(module, "last", x)]]

    eager, ours = pair(Function(function, linear=nn.Linear(4, 4)))
    for _ in range(2):
        assert seen(ours) == seen(eager)
