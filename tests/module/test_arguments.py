"""A call may be written in any way that Python takes: same results, same graph, right names."""

import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from wrapped import assert_same_step, close, n_graphs, pair


def plain(self: Any, x: Tensor, y: Tensor, scale: Tensor | None = None) -> Tensor:
    return self.l(x) * y if scale is None else self.l(x) * y * scale


def positional_only(self: Any, x: Tensor, y: Tensor, /, scale: Tensor) -> Tensor:
    return self.l(x) * y * scale


def keyword_only(self: Any, x: Tensor, *, y: Tensor, scale: Tensor) -> Tensor:
    return self.l(x) * y * scale


def rest(self: Any, x: Tensor, *more: Tensor, scale: Tensor) -> Tensor:
    return self.l(x) * more[0] * scale


def keywords(self: Any, x: Tensor, **named: Tensor) -> Tensor:
    return self.l(x) * named["y"] * named["scale"]


def walked(self: Any, x: Tensor, **named: Tensor) -> Tensor:
    y = self.l(x)
    for t in named.values():
        y = 2 * y + t
    return y


def one_name_twice(self: Any, x: Tensor, y: Tensor, /, **named: Tensor) -> Tensor:
    return self.l(x) * y * named["x"]


def anything(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
    x, y, scale = (*args, *[named[n] for n in ("x", "y", "scale")[len(args) :]])
    return self.l(x) * y * scale


FORWARDS = [plain, positional_only, keyword_only, rest, keywords, walked, one_name_twice, anything]
NAMES = ("x", "y", "scale")


def splits() -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """Each of three arguments by position or by keyword, the keywords in any order and under any name."""
    for n in range(4):
        for names in itertools.permutations(NAMES, 3 - n):
            for values in itertools.permutations(range(n, 3)):
                yield tuple(range(n)), dict(zip(names, values, strict=True))


def of(forward: Any) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)

    Net.forward = forward
    return Net()


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("fallback", [False, True], ids=["graph", "pytorch"])
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_every_split(forward: Any, fallback: bool) -> None:
    """Also where an argument makes PyTorch run the module."""
    eager, ours = pair(of(forward))
    tensors = [torch.randn(3, 4) for _ in NAMES]
    if fallback:
        tensors[1] = tensors[1].to(torch.complex32)
    taken = 0
    for positional, keyword in splits():
        args, kwargs = [tensors[i] for i in positional], {n: tensors[i] for n, i in keyword.items()}
        for m in (eager, ours):
            m.zero_grad()
        try:
            expected = eager(*args, **kwargs)
        except TypeError:
            with pytest.raises(TypeError):
                ours(*args, **kwargs)
        except Exception as error:
            with pytest.raises(type(error)):
                ours(*args, **kwargs)
        else:
            taken += 1
            if fallback:
                torch.testing.assert_close(ours(*args, **kwargs), expected)
            else:
                assert_same_step(eager, ours, *args, **kwargs)
    assert taken
    assert bool(ours.fallback_report()) == fallback


@pytest.mark.parametrize(
    ("forward", "names"),
    [
        (plain, {"y"}),
        (positional_only, {"y"}),
        (keyword_only, {"y"}),
        (rest, {"more[0]"}),
        (keywords, {"y"}),
        (anything, {"args[1]", "y"}),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_names_in_messages(forward: Any, names: set[str]) -> None:
    eager, ours = pair(of(forward))
    given = {"x": torch.randn(3, 4), "y": torch.randn(3, 4, dtype=torch.complex32), "scale": torch.randn(3, 4)}
    for n in range(4):
        args, kwargs = list(given.values())[:n], dict(list(given.items())[n:])
        try:
            eager(*args, **kwargs)
        except TypeError:
            continue
        ours(*args, **kwargs)
    assert {r.cause.split(" has dtype")[0] for r in ours.fallback_report()} == names


def test_ways_to_write_one_call_share_a_graph() -> None:
    _, ours = pair(of(plain))
    x, y, scale = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    ours(x, y, scale)
    ours(x, y, scale=scale)
    ours(x, scale=scale, y=y)
    ours(scale=scale, y=y, x=x)
    assert n_graphs(ours) == 1
    ours(x, y=y)
    ours(y=y, x=x)
    assert n_graphs(ours) == 2


def test_a_decorator_gets_the_keywords_that_were_written() -> None:
    def popping(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            doubled = kwargs.pop("doubled", False)
            return function(self, *args, **kwargs) * (2 if doubled else 1)

        return wrapper

    @popping
    def forward(self: Any, x: Tensor, doubled: bool = False) -> Tensor:
        return self.l(x) + (100 if doubled else 0)

    eager, ours = pair(of(forward))
    x = torch.randn(3, 4)
    assert_same_step(eager, ours, x, doubled=True)
    assert_same_step(eager, ours, x, True)


def test_a_forward_without_a_signature() -> None:
    class Opaque:
        __signature__ = "none"

        def __init__(self, layer: nn.Module) -> None:
            self.l = layer

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            return plain(self, *args, **kwargs)

    module = of(plain)
    module.forward = Opaque(module.l)
    ours = ORTModule(module)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(ours(x, y=y), module(x, y))
    torch.testing.assert_close(ours(x, y), module(x, y))
    with pytest.warns(UserWarning, match=r"args\[1\] has dtype torch.complex32"):
        ours(x, y.to(torch.complex32))


class CalledOtherwise(nn.Module):
    """Looks at what it is called with before its forward does, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, flag: int = 1) -> Tensor:
        return self.layer(x)


class ByCall(CalledOtherwise):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * (kwargs.get("flag") or 5) * len(args)


class ByCallImpl(CalledOtherwise):
    def _call_impl(self, x: Tensor, flag: int = 1) -> Any:
        return super()._call_impl(x, flag) * (flag or 7)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("cls", [ByCall, ByCallImpl])
def test_a_module_that_is_called_otherwise_gets_what_was_written(cls: type[nn.Module]) -> None:
    eager, ours = pair(cls())
    x = torch.randn(4, 3)
    for args, kwargs in (((x, 2), {}), ((x,), {"flag": 2}), ((x,), {"flag": 0}), ((x,), {})):
        close(ours(*args, **kwargs), eager(*args, **kwargs))


def test_one_argument_too_many_is_pythons_error() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, args: Any) -> Tensor:
            return 2 * x

    model = ORTModule(Named())
    model(torch.ones(2), 1)
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        model(torch.ones(2), 1, 2)


def reload(function: Any, new: Any) -> None:
    """What a notebook's reload does to a function: whoever has it has the new one."""
    for part in ("__code__", "__defaults__", "__kwdefaults__"):
        setattr(function, part, getattr(new, part))


def without_mask(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return self.l(x)


def with_mask(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return self.l(x) if mask is None else self.l(x) * mask


def other_order(self: Any, x: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    return self.l(x) * y - scale


def other_default(self: Any, x: Tensor, mask: Any = 3) -> Tensor:
    return self.l(x) * mask


@pytest.mark.parametrize(
    ("old", "new", "calls"),
    [
        (without_mask, with_mask, [("mask",)]),
        (plain, other_order, [("scale", "y"), ("y", "scale")]),
        (without_mask, other_default, [(), ("mask",)]),
    ],
    ids=["reads more", "other order", "other default"],
)
def test_a_forward_that_is_reloaded_is_read_anew(old: Any, new: Any, calls: list[tuple[str, ...]]) -> None:
    """The function is the same object then."""
    forward = types.FunctionType(old.__code__, globals(), "forward", old.__defaults__)
    eager, ours = pair(of(forward))
    x, named = torch.randn(3, 4), {name: torch.randn(3, 4) for name in ("mask", "y", "scale")}
    for function in (old, new):
        reload(forward, function)
        for names in calls:
            assert_same_step(eager, ours, x, **{name: named[name] for name in names})
            if names:
                assert_same_step(eager, ours, x, *[named[name] for name in names])
        assert inspect.signature(ours.forward) == inspect.signature(eager.forward)
    assert not ours.fallback_report() and not ours.stats()["dynamo_graphs"]


def test_the_signature_of_a_decorated_forward_that_is_reloaded() -> None:
    inner = types.FunctionType(without_mask.__code__, globals(), "forward", without_mask.__defaults__)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return inner(*args, **kwargs)

    eager, ours = pair(of(forward))
    for function in (without_mask, plain):
        reload(inner, function)
        assert inspect.signature(ours.forward) == inspect.signature(eager.forward)
    forward.__wrapped__ = of(keyword_only).forward
    assert [*inspect.signature(ours.forward).parameters] == [*inspect.signature(eager.forward).parameters]
