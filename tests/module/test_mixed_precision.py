"""Modules whose parameters and inputs are stored in 16 bits, natively: what they compute is that of float32.

Each is held against float32 of the very same numbers. It may be as far from it as the type's own steps, or as twice
what eager PyTorch is in that type.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import test_huggingface as huggingface
import test_translations as catalogue
from ortmodule_c import ORTModule
from ortmodule_c.flatten import flatten
from wrapped import Function

pytestmark = pytest.mark.filterwarnings("ignore:ortmodule_c")  # what runs in PyTorch is in the report
HALVES = [torch.bfloat16, torch.float16]
STEPS = 4  # of the type at the largest number of a tensor
Made = tuple[Callable[[], nn.Module], tuple[int, ...]]


def on_rows(function: Callable[[Tensor], Any]) -> Made:
    return lambda: catalogue.projected(function), (4, 6)


def with_loss(loss: Callable[..., Any]) -> Made:
    return lambda: Function(lambda s, x: loss(s.l(x), x.detach(), "mean"), l=nn.Linear(6, 6)), (4, 6)


def with_activation(activation: nn.Module) -> Made:
    return lambda: nn.Sequential(nn.Linear(6, 6), activation), (4, 6)


def attention(**options: Any) -> Made:
    def forward(s: Function, x: Tensor) -> Tensor:
        q, k, v = s.l(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **options)

    return lambda: Function(forward, l=nn.Linear(16, 48)), (2, 70, 16)


def images(*layers: nn.Module) -> Made:
    return lambda: nn.Sequential(*layers), (2, 3, 9, 9)


UNKNOWN = {"average pool 3d", "average pool 3d, divisor"}  # PyTorch does not compute them
FUNCTIONS = {**catalogue.ELEMENTWISE, **catalogue.REDUCTIONS, **catalogue.SHAPES}
# PyTorch has no kernels of these for 16 bits, and nor have we.
NO_HALVES = {"multi margin", "squared multi margin", "multilabel margin"}
MODULES: dict[str, Made] = {
    **{name: on_rows(function) for name, function in FUNCTIONS.items()},
    **{f"{name}, mean": with_loss(loss) for name, loss in catalogue.LOSSES.items() if name not in NO_HALVES},
    **{repr(activation): with_activation(activation) for activation in catalogue.ACTIVATIONS},
    **{name: layer for name, layer in catalogue.LAYERS.items() if name not in UNKNOWN},
    "matrix of many blocks": (lambda: nn.Linear(1600, 1100), (70, 1600)),
    "convolution by its transform": (lambda: nn.Conv2d(32, 33, 3, padding=1), (2, 32, 17, 17)),
    "depthwise convolution": (lambda: nn.Conv2d(6, 6, 5, padding=2, groups=6), (2, 6, 12, 12)),
    "pointwise convolution": (lambda: nn.Conv2d(20, 40, 1), (2, 20, 7, 7)),
    "overlapping windows": images(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 1), nn.AvgPool2d(3, 1)),
    "attention": attention(),
    "causal attention": attention(is_causal=True),
    "softmax of columns": on_rows(lambda y: (y.softmax(0), y.log_softmax(0))),
    "gradients of many uses": on_rows(lambda y: sum(torch.sin(y * k) for k in range(1, 9))),
    "embedding": (lambda: Function(lambda s, x: s.e(IDS) + x.mean(), e=nn.Embedding(7, 20)), (1,)),
    "gather": on_rows(lambda y: (y.gather(1, torch.zeros(4, 300, dtype=torch.int64)), y[[0] * 300])),
}
IDS = torch.arange(400).remainder(3)
# Of these PyTorch rounds every step to float16, and runs them itself.
STEPPED = {"division", "smooth l1, mean", "huber, mean"}
# And what PyTorch computes in several ops, rounding in between.
ROUNDED_WITHIN = {"fractions", "quotients rounded to zero", "with logarithms"}
ROUNDED_WITHIN |= {"soft margin, mean", "kl of a trained target, mean"}

# float32 affine parameters with activations of 16 bits, as autocast and mixed training have them
MIXED: dict[str, Made] = {
    "layer norm": (lambda: nn.LayerNorm(8), (3, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3)),
    "batch norm in eval": (lambda: nn.BatchNorm2d(4).eval(), (2, 4, 3, 3)),
}


def step(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Outputs that are floats, the gradients of parameters and of x, buffers that are floats."""
    x = x.clone().requires_grad_()
    outputs = [y for y in flatten(module(x))[0] if isinstance(y, Tensor) and y.is_floating_point()]
    sum((y.double() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum() for y in outputs).backward()
    buffers = [b.detach() for b in module.buffers() if b.is_floating_point()]
    return [*(y.detach() for y in outputs), *(p.grad for p in module.parameters()), x.grad, *buffers]


def assert_as_exact(ours: list[Tensor | None], eager: list[Tensor | None], truth: list[Tensor | None]) -> None:
    """Types as of eager; numbers as near to the truth as those of eager, or as the type can tell."""
    for i, (got, other, want) in enumerate(zip(ours, eager, truth, strict=True)):
        assert (got is None) == (other is None), i
        if got is None or other is None or want is None:
            continue
        assert got.dtype == other.dtype, i
        exact = want.to(got.dtype).double()  # what is too large for the type is infinite in it
        finite = other.isfinite() & exact.isfinite()
        if not finite.any():
            continue
        off, theirs = ((t.double() - exact)[finite].abs() for t in (got, other))
        eps, peak = torch.finfo(got.dtype).eps, float(exact[finite].abs().max())
        allowed = STEPS * eps * max(peak, eps) + 2 * float(theirs.max())
        assert bool((off <= allowed).all()), f"{i}: {float(off.max())} from float32, {allowed} allowed"


@contextmanager
def in_type(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Iterator[None]:
    """The catalogue's own tensors in a type."""
    with monkeypatch.context() as patch:
        for name in ("WEIGHTS", "BIAS"):
            patch.setattr(catalogue, name, getattr(catalogue, name).to(dtype))
        yield


def compared(
    make: Callable[[], nn.Module], x: Tensor, monkeypatch: pytest.MonkeyPatch, params: torch.dtype
) -> ORTModule:
    torch.manual_seed(1)
    eager = copy.deepcopy(make()).to(params)  # the catalogue has modules that are made once
    ours, exact = ORTModule(copy.deepcopy(eager)), copy.deepcopy(eager).float()
    with in_type(monkeypatch, torch.float32):
        truth = step(exact, x.float())
    with in_type(monkeypatch, params):
        expected, got = step(eager, x), step(ours, x)
    assert_as_exact(got, expected, truth)
    return ours


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_16_bits_is_as_exact_as_its_type(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    ours = compared(make, torch.randn(shape).to(dtype), monkeypatch, dtype)
    assert bool(ours.fallback_report()) == (name in ROUNDED_WITHIN or (dtype == torch.float16 and name in STEPPED))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_parameters_of_a_norm_may_be_wider_than_its_input(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = MIXED[name]
    torch.manual_seed(0)
    assert not compared(make, torch.randn(shape).to(dtype), monkeypatch, torch.float32).fallback_report()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 5))


def resnet() -> nn.Module:
    def block(x: nn.Module) -> Function:
        return Function(lambda s, x: (x + s.body(x)).relu(), body=x)

    def body() -> nn.Module:
        layers = [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))

    stem = [nn.Conv2d(3, 8, 5, 2, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, block(body()), block(body()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


Net = tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]


def classified(make: Callable[[], nn.Module], *shape: int) -> Net:
    def loss(s: Function, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(s.net(x), labels)

    return lambda: Function(loss, net=make()), lambda: {"x": torch.randn(shape), "labels": torch.arange(shape[0]) % 5}


def language_model(make: Callable[[], nn.Module]) -> Net:
    def loss(s: Function, **batch: Tensor) -> Tensor:
        out: Tensor = s.net(**batch).loss
        return out

    return lambda: Function(loss, net=make().train()), lambda: huggingface.of_text(2, 12)


NETS: dict[str, Net] = {
    "mlp": classified(mlp, 6, 24),
    "resnet": classified(resnet, 4, 3, 32, 32),
    "bert": language_model(huggingface.bert),
    "gpt2": language_model(huggingface.gpt2),
}


def loss_and_gradients(net: nn.Module, batch: dict[str, Tensor]) -> list[Tensor | None]:
    loss = net(**batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NETS)
def test_a_net_in_mixed_precision_runs_without_pytorch(name: str, how: str) -> None:
    make, draw = NETS[name]
    torch.manual_seed(0)
    eager, batch = make(), draw()
    exact = copy.deepcopy(eager)
    if how != "autocast":
        dtype = getattr(torch, how)
        eager = eager.to(dtype)
        exact = copy.deepcopy(eager).float()
        batch = {k: t.to(dtype) if t.is_floating_point() else t for k, t in batch.items()}
    ours = ORTModule(copy.deepcopy(eager))
    truth = loss_and_gradients(exact, {k: t.float() if t.is_floating_point() else t for k, t in batch.items()})
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        expected, got = loss_and_gradients(eager, batch), loss_and_gradients(ours, batch)
    assert not ours.fallback_report()
    for i, (mine, other, want) in enumerate(zip(got, expected, truth, strict=True)):
        assert (mine is None) == (other is None), i
        if mine is None or other is None or want is None:
            continue
        assert mine.dtype == other.dtype, i
        off, theirs = (float((t.double() - want.double()).norm()) for t in (mine, other))
        assert off <= 1.5 * theirs + 0.02 * float(want.norm()), f"{i}: {off} from float32, eager {theirs}"


@pytest.mark.parametrize(
    "form", [lambda y: y, Tensor.detach, lambda y: y.view(-1)], ids=["itself", "detached", "a view"]
)
def test_a_result_that_is_changed_is_not_what_backward_widens_again(form: Callable[[Tensor], Tensor]) -> None:
    def both(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = s.l(x)
        wide = y.float()
        return form(y), wide.sin() * wide

    eager = Function(both, l=nn.Linear(8, 8, dtype=torch.bfloat16))
    grads = []
    for model in (eager, ORTModule(copy.deepcopy(eager))):
        given, z = model(torch.linspace(-1, 1, 32).view(4, 8).bfloat16())
        given.data.add_(100)
        z.sum().backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)
