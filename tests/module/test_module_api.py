"""A wrapped module is the module: same names, state, attributes, methods."""

import copy
import gc
import inspect
import io
import pickle
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from wrapped import assert_same_state, assert_same_step, close, mlp, pair


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_wrapper_inside_a_wrapper_is_told_once_and_runs_by_itself(capture: Any) -> None:
    inner = nn.Linear(4, 4)
    eager = nn.Sequential(copy.deepcopy(inner), nn.Tanh())
    ours = ORTModule(nn.Sequential(ORTModule(inner), nn.Tanh()), DebugOptions(capture=capture))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same_step(eager, ours, torch.randn(3, 4))
    (message,) = [str(w.message) for w in told]
    assert "its part 0 is an ORTModule by itself; wrap the outer module alone" in message
    assert ours.module[0].stats()["graphs"] == 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(1))
        self.tag = "net"
        self.calls = 0

    def forward(self, x: torch.Tensor, *, double: bool = False) -> torch.Tensor:
        """Doc of forward."""
        return self.linear(x) * self.scale * (2 if double else 1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()

    def kind(self) -> type:
        return type(self)

    def kinds(self) -> list[type]:
        return [type(self) for _ in range(2)]

    def fields(self) -> list[bool]:
        return ["tag" in self.__dict__, "tag" in vars(self)]

    def loss_of(self, batch: Any) -> torch.Tensor:
        return self(batch if type(batch) is torch.Tensor else batch[0]).sum()

    def described(self) -> str:
        return super().extra_repr() + self.tag

    @property
    def width(self) -> int:
        return self.linear.in_features


class Overriding(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["more"] = torch.ones(1)
        return state


def test_names_and_state() -> None:
    net = Net()
    ours = ORTModule(net)
    for listing in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [n for n, _ in getattr(ours, listing)()] == [n for n, _ in getattr(net, listing)()]
    assert list(ours.state_dict()) == list(net.state_dict())
    other = ORTModule(Net())
    other.load_state_dict(net.state_dict())
    close(other.linear.weight, net.linear.weight)
    Net().load_state_dict(ours.state_dict())
    assert "more" in ORTModule(Overriding(2, 2)).state_dict()


def test_a_part_called_module() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x).exp()

    eager, ours = pair(Around())
    assert_same_step(eager, ours, torch.randn(3, 4))
    assert isinstance(ours.module, Around) and ours.module.module is ours.get_submodule("module")
    assert [*ours.state_dict()] == ["module.weight", "module.bias"]
    ours.module = new = nn.Linear(4, 2)
    assert isinstance(ours.module, Around) and ours.module.module is new and ours(torch.ones(1, 4)).shape == (1, 2)


def test_what_the_class_of_the_module_overrides() -> None:
    class Watched(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def eval(self) -> "Watched":
            self.seen.append("eval")
            return super().eval()

        def to(self, *args: Any, **kwargs: Any) -> "Watched":
            self.seen.append("to")
            return super().to(*args, **kwargs)

        def train(self, mode: bool = True) -> "Watched":
            self.seen.append(f"train({mode})")
            return super().train(mode)

    ours = ORTModule(Watched())
    assert ours.eval() is ours and ours.to(torch.float64) is ours and ours.train() is ours
    assert ours.seen == ["eval", "train(False)", "to", "train(True)"]


def test_inside_another_module() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    plain, wrapped = Outer(Net()), Outer(ORTModule(Net()))
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    close(wrapped.inner.linear.weight, plain.inner.linear.weight)
    wrapped.train(False)
    assert not wrapped.inner.module.training
    wrapped.double()
    assert wrapped.inner.linear.weight.dtype == torch.float64


def test_attributes() -> None:
    net = Net()
    ours = ORTModule(net)
    assert (ours.tag, ours.width, ours.module) == ("net", 4, net)
    ours.tag = "other"
    ours.fresh = 1
    ours.linear = nn.Linear(4, 4, bias=False)
    assert (net.tag, net.fresh) == ("other", 1) and net.linear.bias is None
    del ours.fresh
    assert not hasattr(net, "fresh") and not hasattr(ours, "fresh")
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours.nothing
    assert "tag" in dir(ours) and "Net" in repr(ours)
    x = torch.randn(2, 4)
    close(ours(x), net(x))


def test_registries_are_shared_when_they_are_replaced() -> None:
    ours = ORTModule(Net())
    ours._parameters = dict(ours._parameters)
    ours._modules = dict(ours._modules)
    ours.linear = nn.Linear(4, 2)
    ours.register_parameter("more", nn.Parameter(torch.ones(1)))
    assert "more" in ours._parameters and ours._modules["linear"] is ours.module.linear
    assert list(ours.state_dict()) == list(ours.module.state_dict())


def test_methods_see_the_wrapper() -> None:
    ours = ORTModule(Net())
    assert ours.kind() is Net and ours.kinds() == [Net, Net], "code that asks for its type gets its own"
    assert ours.fields() == [True, True], "and so does code that looks into its dictionary"
    assert ours.described() == "net"
    ours.loss(torch.randn(2, 4)).backward()
    assert ours.stats()["graphs"] == 1
    assert ours.linear.weight.grad is not None
    ours.loss_of([torch.randn(2, 4)]).backward()
    assert ours.stats()["plan_hits"] == 1, "the type of something else is another matter"


class Holding(nn.Module):
    """A module with members that bear the names of the wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.register_buffer("stats", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * 2

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) + self.stats


def test_methods_find_what_the_module_calls_as_the_wrapper_does() -> None:
    eager, ours = pair(Holding())
    x = torch.randn(2, 3)
    close(ours.encode(x), eager.encode(x))
    assert_same_step(eager, ours, x)


def test_signature() -> None:
    ours = ORTModule(Net())
    assert inspect.signature(ours.forward) == inspect.signature(Net().forward)
    assert inspect.signature(ours.__class__.forward) == inspect.signature(Net.forward)
    assert list(inspect.signature(type(ours).forward).parameters) == ["self", "args", "kwargs"]
    assert ours.forward.__doc__ == "Doc of forward."
    assert inspect.ismethod(ours.forward) and ours.forward == ours.forward and inspect.isfunction(ORTModule.forward)
    x = torch.randn(2, 4)
    close(ORTModule.forward(ours, x, double=True), ours.module(x, double=True))
    ours.module.forward = lambda batch: batch * 3
    assert list(inspect.signature(ours.forward).parameters) == ["batch"]
    close(ours(x), x * 3)


def test_it_is_of_the_class_of_the_module() -> None:
    """... as `isinstance` tells, so that libraries save, load and train it as they do its module."""
    ours = ORTModule(Net())
    assert isinstance(ours, Net) and isinstance(ours, ORTModule) and isinstance(ours, nn.Module)
    assert ours.__class__ is Net and type(ours) is ORTModule and ours._get_name() == "Net"
    assert not isinstance(ours, nn.Linear)


def test_its_modules_are_those_of_the_module_and_itself() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())))
    assert list(ours.modules()) == [ours, *list(ours.module.modules())[1:]]
    assert next(ours.modules()) is ours and dict(ours.named_modules(prefix="net"))["net"] is ours
    assert ours.get_submodule("1.0") is ours.module[1][0]


def test_a_forward_that_is_wrapped_and_put_in_its_place() -> None:
    ours = ORTModule(Net())
    x = torch.randn(2, 4)
    inner = ours.forward

    def doubled(*args: Any, **kwargs: Any) -> torch.Tensor:
        return inner(*args, **kwargs) * 2

    ours.forward = doubled
    close(ours(x), ours.module(x) * 2)
    assert "forward" not in ours.module.__dict__ and ours.stats()["graphs"] == 1
    close(ours.loss(x), ours.module(x).sum() * 2, "a method that calls self sees it")
    del ours.forward
    close(ours(x), ours.module(x))
    with pytest.raises(AttributeError):
        del ours.forward
    assert ours.stats()["graphs"] == 1 and not ours.fallback_report()


def test_a_forward_that_is_wrapped_as_a_function_of_the_class() -> None:
    """A method taken apart and bound anew; what was kept of it beside the new one does not reach the module."""
    eager, ours = pair(mlp())
    x = torch.randn(2, 6)
    ours._original_forward = ours.forward
    ours.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(ours.forward.__func__), ours)
    assert ours(x).dtype == torch.bfloat16
    assert inspect.signature(ours.forward) == inspect.signature(eager.forward)
    assert not {"forward", "_original_forward"} & set(ours.module.__dict__)
    ours.forward = types.MethodType(inspect.unwrap(ours.forward.__func__), ours)
    close(ours(x), eager(x))
    assert ours.stats()["graphs"] == 2


def test_a_wrapped_forward_is_copied() -> None:
    ours = ORTModule(Net())
    ours.forward = types.MethodType(doubled_forward, ours)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.fill_(1)
    x = torch.randn(2, 4)
    close(twin(x), torch.full((2, 4), 2.0))
    close(ours(x), ours.module(x) * 2)


def doubled_forward(self: ORTModule, x: torch.Tensor) -> torch.Tensor:
    return ORTModule.forward(self, x) * 2


def test_a_subclass_may_override_forward() -> None:
    class Scaled(ORTModule):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * 3

    ours = Scaled(Net())
    x = torch.randn(2, 4)
    close(ours(x), ours.module(x) * 3)
    assert ours.stats()["graphs"] == 1


def test_modes_and_moves() -> None:
    ours = ORTModule(Net())
    assert ours.eval() is ours and not ours.training and not ours.linear.training
    assert ours.train() is ours and ours.module.training
    assert ours.to(torch.float64) is ours and ours.linear.weight.dtype == torch.float64
    assert ours.requires_grad_(False) is ours and not ours.linear.weight.requires_grad
    assert ours.apply(lambda m: None) is ours
    assert isinstance(ours.float(), ORTModule)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies(way: str) -> None:
    ours = ORTModule(mlp())
    x = torch.randn(2, 6)
    ours(x).sum().backward()
    if way == "deepcopy":
        twin = copy.deepcopy(ours)
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert isinstance(twin, ORTModule)
    with torch.no_grad():
        twin.get_parameter("0.weight").zero_()
    assert bool(ours.get_parameter("0.weight").any())
    for _ in range(2):
        assert_same_step(copy.deepcopy(twin.module), twin, x)
        twin.zero_grad()
    assert twin.stats()["graphs"] == 1 and not twin.stats()["dynamo_graphs"]


class Named(ORTModule):
    def __init__(self, name: str) -> None:
        super().__init__(mlp(), DebugOptions(max_graphs=3))
        self.name = name


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_subclass_do_not_begin_anew(copied: Any) -> None:
    ours = Named("mine")
    twin = copied(ours)
    assert type(twin) is Named and twin.name == "mine"
    assert_same_step(copy.deepcopy(twin.module), twin, torch.randn(2, 6))


def test_a_shallow_copy_shares_tensors_and_not_attributes() -> None:
    ours = ORTModule(mlp())
    twin = copy.copy(ours)
    twin.scale = 2
    assert isinstance(twin, ORTModule) and not hasattr(ours, "scale")
    assert twin.get_parameter("0.weight") is ours.get_parameter("0.weight")


def test_hooks_on_the_wrapper_run() -> None:
    ours = ORTModule(mlp())
    seen: list[str] = []
    ours.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    ours.register_forward_hook(lambda m, a, out: seen.append("post"))
    ours(torch.randn(2, 6))
    assert seen == ["pre", "post"] and not ours.fallback_report()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_hooks_on_the_wrapper_are_copied(copied: Any) -> None:
    ours = ORTModule(mlp())
    ours.register_forward_hook(doubled)
    x = torch.randn(2, 6)
    close(copied(ours)(x), ours.module(x) * 2)


def doubled(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def test_a_wrapper_that_is_wrapped_once_more_keeps_its_hooks() -> None:
    inner = ORTModule(mlp())
    x = torch.randn(2, 6)
    handle = inner.register_forward_hook(doubled)
    inner.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    inner.name = types.MethodType(type, inner)
    ours = ORTModule(inner, precision="fp32")
    assert_same_step(copy.deepcopy(inner), ours, x)
    assert ours.name() is ORTModule and ours.name.__self__ is ours
    close(ours(x), ours.module(x + 1) * 2)
    handle.remove()
    close(ours(x), ours.module(x + 1))


def test_a_forward_of_a_wrappers_own_is_not_wrapped_once_more() -> None:
    class Scaled(ORTModule):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * 3

    inner = ORTModule(Net())
    inner.forward = types.MethodType(doubled_forward, inner)
    for wrapper in (inner, Scaled(Net())):
        with pytest.raises(ORTModuleError, match="a wrapper with a forward of its own"):
            ORTModule(wrapper, precision="bf16")
    del inner.forward
    x = torch.randn(2, 4)
    close(ORTModule(inner)(x), inner.module(x))
    close(Scaled(Scaled(inner.module))(x), inner.module(x) * 3)


@pytest.mark.usefixtures("export_only")
def test_hooks_on_all_modules_run() -> None:
    ours = ORTModule(mlp())
    x = torch.randn(2, 6)
    ours(x)
    seen: list[type] = []
    hook = nn.modules.module.register_module_forward_hook(lambda m, _args, _out: seen.append(type(m)))
    try:
        with pytest.warns(UserWarning, match="hooks on all modules"):
            ours(x)
    finally:
        hook.remove()
    assert seen == [nn.Linear, nn.ReLU, nn.Linear, nn.Sequential]
    assert ours(x).grad_fn.name() == "_RunBackward"


def test_hooks_on_all_modules_and_on_the_wrapper_run_once() -> None:
    eager, ours = pair(mlp())
    x = torch.randn(2, 6)
    for m in (eager, ours):
        m.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
        m.register_forward_hook(doubled)
    hook = nn.modules.module.register_module_forward_hook(doubled)
    try:
        close(ours(x), eager(x))
    finally:
        hook.remove()
    close(ours(x), eager(x))


def test_parametrizations_are_those_of_the_module() -> None:
    """They change the class of the module, not the wrapper's."""
    eager, ours = pair(nn.Linear(2, 2))
    for module in (eager, ours):
        torch.nn.utils.parametrizations.weight_norm(module)
    assert type(ours) is ORTModule and list(ours.state_dict()) == list(eager.state_dict())
    assert_same_step(eager, ours, torch.randn(3, 2))
    assert ours.stats()["graphs"] == 1


def test_modules_that_torch_has_compiled() -> None:
    x = torch.randn(2, 6)
    assert_same_step(*pair(torch.compile(mlp(), backend="eager")), x)
    ours = ORTModule(torch.jit.script(mlp()))
    with pytest.warns(UserWarning, match="RecursiveScriptModule"):
        close(ours(x), ours.module(x))


def test_export_leaves_no_trace() -> None:
    class Caching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.last = x * 2
            return super().forward(x)

    net = Caching()
    net.linear.weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(net.state_dict())
    attributes = set(net.__dict__)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    ours = ORTModule(net)
    for _ in range(3):
        ours(torch.ones(2, 4))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(net.linear.weight.grad, torch.ones(4, 4))
    close(dict(net.state_dict()), dict(before))
    assert len(ours._ort_graphs._graphs) == 2, "without `last` and with it"
    assert set(net.__dict__) == {*attributes, "last"} and type(net.last) is torch.Tensor


def test_container_protocol() -> None:
    ours = ORTModule(mlp())
    assert len(ours) == 3 and ours[0] is ours.module[0] and list(ours) == list(ours.module) and bool(ours)
    ours[1] = nn.Tanh()
    del ours[2]
    assert [type(m) for m in ours.module] == [nn.Linear, nn.Tanh]
    named = ORTModule(nn.ModuleDict({"a": nn.Linear(1, 1)}))
    assert "a" in named and list(named) == ["a"]
    with pytest.raises(TypeError):
        len(ORTModule(Net()))
    assert ORTModule(Net()), "a module without a length is true"


def test_state_dict_hooks() -> None:
    ours = ORTModule(Net())
    seen: list[str] = []
    ours.register_state_dict_post_hook(lambda *_: seen.append("state"))
    ours.register_load_state_dict_post_hook(lambda *_: seen.append("load"))
    ours.load_state_dict(ours.state_dict())
    assert seen == ["state", "load"]


def test_dropping_the_wrapper_frees_the_module_at_once() -> None:
    ours = ORTModule(mlp())
    ours(torch.randn(2, 6)).sum().backward()
    gc.collect()
    weight = weakref.ref(ours.get_parameter("0.weight"))
    gc.disable()
    try:
        del ours
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_of_a_wrapper_is_that_of_its_module(strict: bool) -> None:
    ours = ORTModule(mlp())
    x = torch.randn(2, 6)
    close(torch.export.export(ours, (x,), strict=strict).module()(x), ours(x))
    close(torch.jit.trace(ours, (x,))(x), ours(x))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, call: Any) -> None:
        super().__init__()
        self.inner = inner
        self.call = call
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.call(self.inner, x * 2))


@pytest.mark.parametrize("way", ["itself", "inside", "method", "of the module"])
def test_torch_compile_runs_the_wrapper_through_the_core(way: str) -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _example: Any) -> Any:
        seen.extend(str(n.target) for n in graph.graph.nodes)
        return graph.forward

    eager = mlp()
    ours = ORTModule(copy.deepcopy(eager))
    if way == "of the module":
        ours.compile(backend=backend)
        assert_same_step(eager, ours, torch.randn(2, 6))
        assert not seen and ours.module._compiled_call_impl is None
    elif way == "itself":
        close(torch.compile(ours, backend=backend)(torch.ones(2, 6)), eager(torch.ones(2, 6)))
        assert not seen
    else:
        call = (lambda m, x: m(x)) if way == "inside" else (lambda m, x: m.forward(x))
        both = [Outer(eager, call), Outer(ours, call)]
        both[1].head.load_state_dict(both[0].head.state_dict())
        x = torch.randn(2, 6)
        expected, got = both[0](x), torch.compile(both[1], backend=backend)(x)
        close(got, expected)
        for loss in (expected, got):
            loss.sum().backward()
        assert_same_state(both[1], both[0])
        assert "relu" not in " ".join(seen), "the wrapped part is not in PyTorch's graphs"
    assert ours.stats()["graphs"] == 1 and not ours.fallback_report()


def test_moving_average() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    eager = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    models = [eager, ORTModule(copy.deepcopy(eager))]
    averages = []
    for model in models:
        torch.manual_seed(0)
        averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(4, 6)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            averages[-1].update_parameters(model)
    assert list(averages[0].state_dict()) == list(averages[1].state_dict())
    x = torch.randn(4, 6)
    torch.testing.assert_close(averages[1](x), averages[0](x), rtol=1e-3, atol=1e-4)


class OfNoHash(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other

    __hash__ = None  # type: ignore[assignment]


class Unhashable(nn.Linear, metaclass=OfNoHash):  # type: ignore[misc]
    """A layer whose class cannot be hashed."""


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_class_that_cannot_be_hashed() -> None:
    eager = nn.Sequential(Unhashable(4, 4))
    x = torch.randn(2, 4)
    close(ORTModule(eager)(x), eager(x))
