"""Bad input gives an exception that says what is wrong with which argument, and the next good call works."""

import copy
import gc
import itertools
import re
import warnings
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from wrapped import Branching, Function, assert_same_state, assert_same_step, close, graphs, mlp, pair


def embedding() -> nn.Module:
    return Function(
        lambda s, ids, labels=None: s.e(ids) if labels is None else F.cross_entropy(s.e(ids), labels),
        e=nn.Embedding(5, 3),
    )


@pytest.mark.parametrize(("ids", "labels"), [([0, 5], None), ([-1, 0], None), ([0, 1], [0, 3]), ([0, 1], [-1, 0])])
def test_index_out_of_range(ids: list[int], labels: list[int] | None) -> None:
    eager, ours = pair(embedding())
    good, good_labels = torch.tensor([4, 0]), None if labels is None else torch.tensor([2, -100])
    assert_same_step(eager, ours, good, good_labels)
    with pytest.raises(IndexError):
        ours(torch.tensor(ids), None if labels is None else torch.tensor(labels))
    for m in (eager, ours):
        m.zero_grad()
    assert_same_step(eager, ours, good, good_labels)


@pytest.mark.parametrize("bad", [-1, 5])
@pytest.mark.parametrize(
    "pick",
    [
        lambda x, i: x.gather(1, i[:, None]),
        lambda x, i: x.index_select(1, i),
        lambda x, i: x * F.one_hot(i, 5),
    ],
    ids=["gather", "index_select", "one_hot"],
)
def test_index_that_may_not_count_from_the_end(pick: Any, bad: int) -> None:
    eager, ours = pair(Function(lambda s, x, i: pick(s.l(x), i), l=nn.Linear(3, 5)))
    for n in (2, 3):
        good = torch.randn(n, 3), torch.arange(n)
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, *good)
        with pytest.raises((IndexError, RuntimeError)) as expected:
            eager(good[0], torch.full((n,), bad))
        with pytest.raises(type(expected.value)):
            ours(good[0], torch.full((n,), bad))


def test_a_graph_that_is_made_for_a_bad_index_serves_good_ones_and_tells_what_it_has_to() -> None:
    eager = Function(lambda s, ids: s.table(ids).cummax(-1).values, table=nn.Embedding(4, 3))
    ours = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for ids in ([1, 4], [5, 0], [4, 4]):
            with pytest.raises(IndexError, match="index out of range in self"):
                ours(torch.tensor([ids]))
    assert not told
    made = ours.stats()["export_seconds"]
    with pytest.warns(UserWarning, match=r"aten\.cummax\.default runs in PyTorch"):
        assert_same_step(eager, ours, torch.tensor([[1, 2]]))
    assert ours.stats()["export_seconds"] == made


def test_index_that_counts_from_the_end() -> None:
    eager, ours = pair(Function(lambda s, x, i: s.l(x)[:, i], l=nn.Linear(3, 5)))
    assert_same_step(eager, ours, torch.randn(2, 3), torch.tensor([-1, -5, 4]))
    with pytest.raises(IndexError, match="index -6 is out of bounds"):
        ours(torch.randn(2, 3), torch.tensor([0, -6, 1]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: torch.eye(6).to_sparse(), r"batch has layout torch.sparse_coo"),
        (lambda: torch.randn(2, 6, dtype=torch.complex32), r"batch has dtype torch.complex32"),
        (lambda: torch.randn(2, 6, device="meta"), r"batch is on the meta device"),
        (
            lambda: torch.masked.as_masked_tensor(torch.ones(2, 6), torch.ones(2, 6, dtype=torch.bool)),
            r"batch is a MaskedTensor",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(2, 6)]), r"batch is a nested tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2, 6), 0.1, 0, torch.qint8), r"batch has .* torch.qint8"),
    ],
)
@pytest.mark.parametrize("forward", [nn.Linear.forward, lambda _, x: x * 2], ids=["linear", "doubled"])
@pytest.mark.filterwarnings("ignore")
def test_unusual_tensors_are_left_to_pytorch(bad: Any, message: str, forward: Any) -> None:
    """It takes them or raises; in no case does it matter for the next good call."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(6, 2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return forward(self.l, batch)

    eager, ours = pair(Named())
    x = bad()
    try:
        expected = eager(x)
    except Exception as error:
        with pytest.raises(type(error)):
            ours(x)
        assert not ours.fallback_report()
    else:
        with pytest.warns(UserWarning, match=message):
            got = ours(x)
        assert (type(got), got.dtype, got.layout) == (type(expected), expected.dtype, expected.layout)
    assert_same_step(eager, ours, torch.randn(2, 6))
    assert any(g.runner is not None for g in graphs(ours))


def test_the_name_of_a_nested_argument() -> None:
    ours = ORTModule(Function(lambda s, batch: s.l(batch["x"][0]), l=nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match=r"args\[0\]\['x'\]\[1\] has dtype torch.complex32"):
        ours({"x": [torch.ones(1, 2), torch.ones(1, dtype=torch.complex32)]})


def test_wrong_shape_or_dtype_gives_the_error_of_eager() -> None:
    eager, ours = pair(mlp())
    assert_same_step(eager, ours, torch.randn(2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="2x5 and 6x8"):
            ours(torch.randn(2, 5))
        with pytest.raises(RuntimeError, match="dtype"):
            ours(torch.randn(2, 6, dtype=torch.float64))
    assert not ours.fallback_report()
    for m in (eager, ours):
        m.zero_grad()
    for n in (2, 3, 4):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 6))
    assert all(g.runner is not None for g in graphs(ours)), "bad input says nothing against the module"


class Asserting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 2:
            raise ValueError("need 2d")
        return super().forward(x)


def wrong_calls() -> dict[str, tuple[nn.Module, Any]]:
    """A module and arguments that it cannot take; all take a float32 tensor of two rows of 6."""
    return {
        "shape": (mlp(), (torch.ones(2, 5),)),
        "rank": (Asserting(6, 3), (torch.ones(2, 2, 6),)),
        "dtype": (mlp(), (torch.ones(2, 6).double(),)),
        "16 bits": (nn.Linear(6, 3, bias=False), (torch.ones(2, 6).bfloat16(),)),
        "integers": (mlp(), (torch.ones(2, 6).long(),)),
        "none": (mlp(), (None,)),
        "nothing": (mlp(), ()),
        "more": (mlp(), (torch.ones(2, 6), 1)),
        "list": (mlp(), ([1.0] * 6,)),
        "array": (mlp(), (numpy.ones((2, 6), "float32"),)),
        "meta": (mlp(), (torch.ones(2, 6, device="meta"),)),
        "index": (nn.Sequential(nn.Embedding(3, 4)), (torch.tensor([3]),)),
        "branching": (Branching(), (torch.ones(2, 5),)),
    }


@pytest.mark.usefixtures("fresh_dynamo", "users")
@pytest.mark.parametrize("fallback", ["warn", "error"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("which", wrong_calls())
def test_a_wrong_call_raises_what_eager_raises_and_leaves_nothing_behind(which: str, warm: bool, fallback: Any) -> None:
    eager, bad = wrong_calls()[which]
    good = {"index": torch.tensor([1]), "branching": torch.ones(2, 4)}.get(which, torch.ones(2, 6))
    breaks = which == "branching"
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(fallback="warn" if breaks else fallback))
    if warm:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if breaks else "error")
            close(ours(good), eager(good))
    told, made = ours.fallback_report(), ours.stats()["graphs"]
    with pytest.raises(Exception) as expected:
        eager(*bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(type(expected.value)) as raised:
                ours(*bad)
            assert str(raised.value) == str(expected.value) and type(raised.value) is type(expected.value)
            assert raised.value.__cause__ is None and raised.value.__context__ is None
    kept = not warm and which == "index"  # the graph is as good as any
    assert ours.fallback_report() == told and ours.stats()["graphs"] == made + kept
    if breaks and not warm:  # is told when it counts
        with pytest.warns(UserWarning, match="graph break"):
            close(ours(good), eager(good))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(ours(good), eager(good))


def test_what_only_pytorch_could_run_is_an_error_and_leaves_the_module_as_it_was() -> None:
    """Falling back is off: whether the call is a mistake is tried in PyTorch."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(6), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.histc(self.norm(x)) + torch.rand(100)

    ours = ORTModule(Counting(), DebugOptions(fallback="error"))
    before, state = copy.deepcopy(ours.state_dict()), torch.get_rng_state()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ORTModuleError, match="falling back to PyTorch is off"):
        ours(x)
    close(dict(ours.state_dict()), dict(before))
    assert torch.equal(torch.get_rng_state(), state) and ours.calls == 0 and not ours.fallback_report()


def test_a_warning_that_is_an_error_comes_before_anything_has_changed() -> None:
    ours = ORTModule(nn.Sequential(nn.BatchNorm1d(6), Function(lambda s, x: torch.cdist(x, x))))
    before, x = copy.deepcopy(ours.state_dict()), torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cdist")
        with pytest.raises(UserWarning, match="cdist"):
            ours(x)
    close(dict(ours.state_dict()), dict(before))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(x)  # it was told
    assert ours.fallback_report()


def test_arrays_are_left_to_pytorch_and_told_once() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(torch.from_numpy(x)), l=nn.Linear(6, 2)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in (2, 3, 3):
            x = numpy.random.default_rng(n).standard_normal((n, 6)).astype("float32")
            close(ours(x), eager(x))
    assert len(told) == 1 and "array of NumPy" in str(told[0].message)
    assert [r.count for r in ours.fallback_report()] == [1] and not ours.stats()["graphs"]


def test_an_error_the_module_raises_for_some_sizes() -> None:
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 5:
                raise ValueError(f"{x.shape[0]} rows")
            return super().forward(x)

    eager, ours = pair(Picky(4, 4))
    for n in (2, 7, 3, 7, 4):
        if n > 5:
            with pytest.raises(ValueError, match="7 rows"):
                ours(torch.randn(n, 4))
        else:
            assert_same_step(eager, ours, torch.randn(n, 4))
    assert not ours.fallback_report()


@pytest.mark.parametrize("change", [torch._neg_view, lambda t: t.t().contiguous().t(), lambda t: t[:1].expand(2, 6)])
def test_views_with_pending_work(change: Any) -> None:
    """A pending sign, other strides, repeated elements: what counts is the tensor's value."""
    eager, ours = pair(nn.Linear(6, 2))
    for m in (eager, ours):
        m.weight = nn.Parameter(change(m.weight.detach()))
    assert_same_step(eager, ours, change(torch.randn(2, 6)))
    grad = change(torch.randn(2, 6))[:, :2]
    for m in (eager, ours):
        m.zero_grad()
        m(torch.ones(2, 6)).backward(grad)
    assert_same_state(ours, eager)


def test_inference_tensor() -> None:
    """Where backward does not read it, it serves as in PyTorch; else PyTorch's own error comes."""
    with torch.inference_mode():
        x = torch.randn(2, 6)
    bias = nn.Parameter(torch.ones(6))
    assert_same_step(*pair(Function(lambda s, x: x + s.bias, bias=bias)), x)
    ours = ORTModule(mlp())
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        ours(x)
    ours(x.clone()).sum().backward()


@pytest.mark.parametrize("capture", ["export", "dynamo"])
def test_an_inference_tensor_leaves_the_graph_to_others(capture: Any) -> None:
    with torch.inference_mode():
        x = torch.randn(2, 6)
    eager = Function(lambda s, x: x + s.bias, bias=nn.Parameter(torch.ones(6)))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    with pytest.warns(UserWarning, match="an inference tensor is given to what trains") as told:
        for given in (x.clone(), x, x, x.clone()):
            native = assert_same_step(eager, ours, given).grad_fn.name() == "_RunBackward"
            assert native == (given is not x)
    assert len(told) == 1


@pytest.mark.parametrize("kind", ["subclass", "sparse"])
def test_parameter_replaced_by_an_unusual_one(kind: str) -> None:
    class Mine(torch.Tensor): ...

    eager, ours = pair(Function(lambda s, x: torch.mm(s.w, x), w=nn.Parameter(torch.eye(6))))
    assert_same_step(eager, ours, torch.randn(6, 2))
    for m in (eager, ours):
        plain = m.w.detach()
        m.w = nn.Parameter(plain.as_subclass(Mine) if kind == "subclass" else plain.to_sparse())
    x = torch.randn(6, 2)
    with pytest.warns(UserWarning, match="a parameter or buffer is a"):
        close(ours(x).detach().as_subclass(torch.Tensor), eager(x).detach().as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (mlp(), (0, 6)),
        (nn.Conv2d(3, 4, 3), (0, 3, 8, 8)),
        (nn.BatchNorm2d(3).eval(), (0, 3, 8, 8)),
        (nn.LayerNorm(3), (0, 3)),
        (nn.GroupNorm(2, 4), (0, 4, 5)),
        (nn.InstanceNorm1d(3), (0, 3, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (0, 5, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 0, 8)),
        (nn.MaxPool2d(2), (0, 3, 8, 8)),
    ],
)
def test_empty_batch(module: nn.Module, shape: tuple[int, ...]) -> None:
    eager, ours = pair(module)
    for full in (2, 3):
        for m in (eager, ours):
            m.zero_grad()
        ours(torch.randn([full if n == 0 else n for n in shape]))
    assert assert_same_step(eager, ours, torch.randn(shape)).numel() == 0
    ours(torch.randn(shape, requires_grad=True)).sum().backward()  # a gradient with strides of 0


def test_empty_batch_leaves_running_statistics() -> None:
    for shape in ((0, 3), (0, 3, 4, 4)):
        eager, ours = pair(nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3))
        assert_same_step(eager, ours, torch.randn([2, *shape[1:]]))
        assert_same_step(eager, ours, torch.randn(shape))


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(4), (2, 3, 4)),
        (nn.BatchNorm1d(4), (2, 4, 3)),
        (nn.GroupNorm(2, 4), (2, 4, 3)),
        (nn.InstanceNorm1d(4, affine=True), (2, 4, 3)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_norm_with_parameters_of_another_dtype(norm: nn.Module, shape: tuple[int, ...]) -> None:
    """PyTorch takes float32 beside 16 bits, and nothing else."""
    for dtype, of_norm in itertools.product((torch.float32, torch.bfloat16, torch.float64), repeat=2):
        eager, ours = pair(copy.deepcopy(norm).to(of_norm))
        x = torch.randn(shape, dtype=dtype)
        if dtype == of_norm or (dtype, of_norm) == (torch.bfloat16, torch.float32):
            assert ours(x).dtype == eager(x).dtype == dtype
        else:
            with pytest.raises(RuntimeError) as expected:
                eager(x)
            with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
                ours(x)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_labels(reduction: str) -> None:
    """Of an empty batch, or all ignored."""
    eager, ours = pair(Function(lambda s, x, t: F.cross_entropy(s.l(x), t, reduction=reduction), l=nn.Linear(3, 5)))
    for x, labels in (
        (torch.randn(0, 3), torch.zeros(0, dtype=torch.int64)),
        (torch.randn(2, 3), torch.full((2,), -100)),
    ):
        expected, got = eager(x, labels), ours(x, labels)
        torch.testing.assert_close(got, expected, equal_nan=True)
        for m, loss in ((eager, expected), (ours, got)):
            m.zero_grad()
            loss.sum().backward()
        torch.testing.assert_close(
            [p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()], equal_nan=True
        )


def test_module_without_parameters() -> None:
    eager, ours = pair(nn.ReLU())
    assert_same_step(eager, ours, torch.randn(3))
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    eager(x).sum().backward()
    ours(y).sum().backward()
    close(y.grad, x.grad)


def test_backward_twice() -> None:
    ours = ORTModule(mlp())
    loss = ours(torch.randn(2, 6)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("which", ["input", "parameter"])
def test_change_in_place_between_forward_and_backward(which: str) -> None:
    ours = ORTModule(mlp())
    x = torch.randn(2, 6)
    loss = ours(x).pow(2).sum()
    with torch.no_grad():
        (x if which == "input" else ours.get_parameter("2.weight")).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("twice", ["backward", "grad", "unused"])
def test_double_backward_is_refused(power: int, twice: str) -> None:
    """However the gradient is used, and also where only the input connects it to the module, as in a penalty."""
    ours = ORTModule(mlp())
    x = torch.randn(2, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(ours(x).pow(power).sum(), x, create_graph=True)
    with pytest.raises(ORTModuleError, match="double backward"):
        if twice == "backward":
            (ours(x).sum() + grad.norm()).backward()
        else:
            torch.autograd.grad(grad.sum(), x, allow_unused=twice == "unused")
    with pytest.raises(ORTModuleError, match="double backward"):
        torch.autograd.functional.hessian(lambda x: ours(x).pow(power).sum(), x.detach())


def test_create_graph_alone_is_no_double_backward() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(2, 6)
    for m in (eager, ours):
        for p, g in zip(
            m.parameters(), torch.autograd.grad(m(x).sum(), list(m.parameters()), create_graph=True), strict=True
        ):
            p.grad = g.detach()
    assert_same_state(ours, eager)


def _dual(model: nn.Module, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize(
    "transform",
    [
        lambda m, x: torch.func.grad(lambda x: m(x).sum())(x),
        lambda m, x: torch.func.vmap(m)(x),
        lambda m, x: torch.func.jvp(m, (x,), (x,)),
        torch.func.vjp,
        lambda m, x: torch.func.jacrev(m)(x),
        _dual,
        lambda m, x: torch.autograd.functional.jacobian(m, x, vectorize=True),
    ],
)
def test_functional_transforms_are_refused(transform: Any) -> None:
    eager, ours = pair(mlp())
    x = torch.randn(2, 6)
    assert_same_step(eager, ours, x)
    with pytest.raises(ORTModuleError, match=r"torch\.func|vmap"):
        transform(ours, x)
    for m in (eager, ours):
        m.zero_grad()
    assert_same_step(eager, ours, x)


def test_functional_call() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(2, 6)
    other = {name: torch.randn_like(p, requires_grad=True) for name, p in eager.named_parameters()}
    expected, got = (torch.func.functional_call(m, other, (x,)) for m in (eager, ours))
    close(got, expected)
    close(
        torch.autograd.grad(got.sum(), list(other.values())), torch.autograd.grad(expected.sum(), list(other.values()))
    )
    assert_same_step(eager, ours, x)


def test_wrapping_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"expected torch\.nn\.Module"):
        ORTModule(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ORTModuleError, match="DataParallel"):
        ORTModule(nn.DataParallel(mlp()))


def test_no_state_is_left_behind_by_failures() -> None:
    ours = ORTModule(embedding())
    ours(torch.tensor([1]))
    session = next(iter(ours._ort_graphs._graphs.values())).runner.session
    for _ in range(3):
        with pytest.raises(IndexError):
            ours(torch.tensor([7]))
    gc.collect()
    assert session.stats()["runs_live"] == 0


@pytest.mark.filterwarnings("ignore")
def test_wrong_calls_again_and_again_keep_nothing_in_memory() -> None:
    ours = ORTModule(nn.Linear(4, 4))
    ours(torch.randn(2, 4))

    def kept() -> Counter[str]:
        for _ in range(5):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                ours(torch.randn(3, 5))
        gc.collect()
        return Counter(f"{type(v).__module__}.{type(v).__qualname__}" for v in gc.get_objects())

    kept()
    before = kept()
    grown = {kind for kind, n in (kept() - before).items() if n >= 5}
    assert not {k for k in grown if k.startswith("ortmodule_c")} | grown & {
        "torch._TorchCompileWrapper",
        "functools.partial",
    }
