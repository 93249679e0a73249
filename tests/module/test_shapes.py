"""New sizes need no action: the first call makes a graph for all, where one can be made."""

import copy
import gc
import math
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule
from wrapped import Function, assert_same_step, assert_same_steps, graphs, n_graphs, pair


def net() -> nn.Module:
    return Function(
        lambda s, x: s.b(s.a(x).reshape(x.shape[0], -1, 2).transpose(1, 2).softmax(-1).mean(2)),
        a=nn.Linear(6, 8),
        b=nn.Linear(2, 3),
    )


def n_open(ours: ORTModule) -> int:
    return sum(g.opened for g in graphs(ours))


def test_the_first_call_opens_all() -> None:
    sizes = [(3, 4), (5, 4), (7, 4), (2, 4), (9, 4), (4, 8), (4, 3), (6, 9)]
    ours = assert_same_steps(net(), *[(torch.randn(n, length, 6),) for n, length in sizes])
    assert n_graphs(ours) == 1


SLICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "without the first batch": lambda t: t[1:],
    "without the last of each length": lambda t: t[:, :-1],
    "each second of features": lambda t: torch.cat([t, t], -1)[..., ::2],
    "some of wider features": lambda t: torch.cat([t, t], -1)[..., :6],
    "in all dims": lambda t: torch.cat([t, t], -1)[1:, 1:-1, 2:8],
    "of the transposed": lambda t: t.transpose(0, 1).contiguous()[:, :-1].transpose(0, 1),
}


@pytest.mark.parametrize("way", ["auto", "dynamo"])
@pytest.mark.parametrize("cut", SLICES.values(), ids=SLICES)
def test_an_argument_that_is_a_slice_is_of_any_size(cut: Callable[[torch.Tensor], torch.Tensor], way: Any) -> None:
    module = Function(lambda s, x: s.b(s.a(x).relu() + x.flatten(0, 1).mean(0)), a=nn.Linear(6, 6), b=nn.Linear(6, 3))
    eager = copy.deepcopy(module)
    ours = ORTModule(module, DebugOptions(capture=way))
    for n, length in ((3, 4), (5, 4), (5, 9), (4, 4), (3, 7), (6, 6)):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, cut(torch.randn(n, length, 6)))
    assert ours.stats()["graphs"] <= (1 if way == "auto" else 2)


def test_crops_of_images_of_several_sizes_have_one_graph() -> None:
    images = [torch.randn(4, 3, 10 + n, 9 + n) for n in range(4)]
    ours = assert_same_steps(nn.Conv2d(3, 2, 3), *[(t[:, :, n : n + 8, 1:9],) for n, t in enumerate(images)])
    assert n_graphs(ours) == 1


def test_a_result_shares_memory_with_a_slice_where_it_does_in_pytorch() -> None:
    ours = ORTModule(Function(lambda s, x: (x.reshape(-1, x.shape[-1]), s.a(x)), a=nn.Linear(4, 4)))
    for n in (3, 5):
        t = torch.randn(n, 6, 8)
        for x in (t[..., :4], t[:, 1:, :4], t[:, 1:-1, :4], t[1:, :, 4:], t[:1, 1:, :4], t.transpose(0, 1)[..., :4]):
            assert (ours(x)[0].data_ptr() == x.data_ptr()) == (x.reshape(-1, 4).data_ptr() == x.data_ptr())


def test_a_last_smaller_batch_and_then_other_lengths() -> None:
    module = Function(
        lambda m, x, mask: m.head((m.embed(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)),
        embed=nn.Embedding(11, 6),
        head=nn.Linear(6, 3),
    )
    sizes = [(8, 5), (8, 5), (3, 5), (8, 7), (3, 7), (5, 5), (4, 11), (2, 2)]
    ours = assert_same_steps(module, *[(torch.randint(0, 11, s), torch.ones(s)) for s in sizes])
    assert n_graphs(ours) == 1


def test_beside_a_size_of_one_the_others_are_open() -> None:
    sizes = [(4, 11), (3, 10), (1, 11), (1, 8), (1, 9), (5, 1), (3, 1), (1, 1), (2, 7)]
    ours = assert_same_steps(net(), *[(torch.randn(n, length, 6),) for n, length in sizes])
    assert n_graphs(ours) == 4  # of neither, of one, of the other, and of both


def test_what_python_raises_and_catches_by_itself_depends_on_no_size() -> None:
    def forward(m: Function, x: torch.Tensor) -> torch.Tensor:
        return m.a(x) * (2.0 if os.environ.get("A_NAME_THAT_IS_NOT_SET", "0") == "1" else 1.0)

    ours = assert_same_steps(Function(forward, a=nn.Linear(6, 4)), *[(torch.randn(n, 6),) for n in (3, 5, 2)])
    assert n_graphs(ours) == 1


def test_lengths_of_encoder_and_decoder_are_two() -> None:
    module = Function(
        lambda m, x, y: m.encoder(x).mean(1, keepdim=True) + m.decoder(y),
        encoder=nn.Embedding(11, 6),
        decoder=nn.Embedding(11, 6),
    )
    sizes = [(4, 5, 3), (4, 6, 3), (4, 5, 9), (3, 2, 5), (5, 7, 7)]
    calls = [(torch.randint(0, 11, (b, s)), torch.randint(0, 11, (b, t))) for b, s, t in sizes]
    assert n_graphs(assert_same_steps(module, *calls)) == 1


def test_what_moves_with_a_length_is_opened_with_it() -> None:
    def forward(m: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = m.embed(x)
        return ((h @ h.transpose(1, 2) + mask[:, 0]).softmax(-1) @ h).sum(1)

    sizes = [(4, 5), (3, 5), (3, 7), (2, 9)]
    calls = [(torch.randint(0, 11, s), torch.randn(s[0], 1, s[1], s[1])) for s in sizes]
    assert n_graphs(assert_same_steps(Function(forward, embed=nn.Embedding(11, 6)), *calls)) == 1


def test_a_size_that_comes_to_one_is_squeezed() -> None:
    module = Function(lambda s, x: s.a(x)[:, : x.shape[1] - 3].squeeze(1).sum(0), a=nn.Linear(6, 3))
    ours = assert_same_steps(module, *[(torch.randn(n, length, 6),) for n, length in ((4, 4), (5, 4), (5, 6), (3, 4))])
    assert not ours.fallback_report()


def test_images_of_another_batch_keep_their_height_and_width() -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    ours = assert_same_steps(module, *[(torch.randn(n, 2, 7, 7),) for n in (4, 3, 5, 2)])
    assert n_graphs(ours) == 1


def test_sizes_that_coincide_at_first_may_differ_later() -> None:
    """Batch, length and features are 6 in the call that opens them, and are not taken for one another."""
    module = Function(lambda m, x: m.a(x) + x.transpose(0, 1).sum() + x.sum(0, keepdim=True), a=nn.Linear(6, 6))
    sizes = [(5, 6), (6, 6), (4, 6), (6, 3), (2, 5), (7, 4)]
    ours = assert_same_steps(module, *[(torch.randn(n, length, 6),) for n, length in sizes])
    assert n_graphs(ours) == 1


def test_a_pinned_size_is_found_out_with_the_others() -> None:
    module = Function(lambda m, x: m.a(x) * sum(range(x.shape[1])), a=nn.Linear(6, 4))
    ours = assert_same_steps(module, *[(torch.randn(n, 3, 6),) for n in (4, 5, 2, 7)])
    assert n_graphs(ours) == 1
    assert n_open(ours) == 1


def test_a_graph_for_each_range_of_sizes_that_the_forward_tells_apart() -> None:
    module = Function(lambda m, x: m.a(x) * 2 if x.shape[0] > 4 else m.a(x), a=nn.Linear(6, 4))
    ours = assert_same_steps(module, *[(torch.randn(n, 6),) for n in (2, 3, 6, 9, 4, 5, 8)])
    assert n_graphs(ours) == 2
    assert n_open(ours) == 2


def test_a_forward_that_takes_each_size_apart_has_no_open_graph_and_says_so() -> None:
    module = Function(lambda m, x: m.a(x) * len([0 for _ in range(x.shape[0])]), a=nn.Linear(6, 4))
    with pytest.warns(UserWarning, match=r"exported anew each time the size of .* in dim 0 changes") as told:
        ours = assert_same_steps(module, *[(torch.randn(n, 6),) for n in range(2, 12)])
    assert len([w for w in told if "exported anew" in str(w.message)]) == 1
    assert n_open(ours) == 0
    assert n_graphs(ours) <= 10


def test_the_size_that_is_not_open_is_said_beside_those_that_are() -> None:
    module = Function(lambda m, x: m.a(x) * len(x), a=nn.Linear(6, 4))
    with pytest.warns(UserWarning, match="anew each time the size of .* in dim 0 changes; .* takes it apart in Python"):
        ours = assert_same_steps(module, *[(torch.randn(n, n + n % 2, 6),) for n in range(2, 8)])
    assert n_open(ours) == 4


POOLS: dict[str, Callable[[], nn.Module]] = {
    "pairs": lambda: nn.MaxPool1d(2),
    "overlapping": lambda: nn.MaxPool1d(3, stride=1, padding=1),
    "with gaps": lambda: nn.MaxPool1d(3, stride=2, padding=1, dilation=2, ceil_mode=True),
    "of averages": lambda: nn.AvgPool1d(3, stride=2, padding=1),
}


@pytest.mark.parametrize("name", POOLS)
def test_the_length_of_what_is_pooled_is_open(name: str) -> None:
    module = Function(lambda m, x: m.pool(m.conv(x)).sum(-1), conv=nn.Conv1d(3, 5, 3), pool=POOLS[name]())
    ours = assert_same_steps(module, *[(torch.randn(n, 3, length),) for n, length in ((3, 9), (9, 9), (2, 14), (5, 8))])
    # Older PyTorch asks whether the length is a multiple of the stride: a graph for those that are, and one for others.
    assert n_graphs(ours) in ((1,) if torch.__version__ >= "2.13" else (1, 2)) and not ours.fallback_report()


def test_graphs_for_sizes_of_one_and_for_ranks_are_no_export_each_time() -> None:
    eager, ours = pair(Function(lambda m, x: m.a(x), a=nn.Linear(6, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(16):
            for m in (eager, ours):
                m.zero_grad()
            n, k = step % 5 + 1, step % 4 + 1
            assert_same_step(eager, ours, torch.randn(*((n, 6) if step % 2 else (n, k, 6))))


def test_why_a_size_is_not_open_is_said_where_it_is_asked_for_its_type() -> None:
    module = Function(lambda m, x: m.a(x) * len(type(x.shape[0]).__name__), a=nn.Linear(6, 4))
    with pytest.warns(
        UserWarning, match=r"in dim 0 changes; it cannot be left open: .* may ask for the type of a size"
    ):
        assert_same_steps(module, *[(torch.randn(n, 6),) for n in range(2, 8)])


def _kind_of(n: int) -> str:
    return type(n).__name__


def _with_a_memo(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if m.memo is None:
        m.memo = _kind_of(x.shape[0])
    return m.a(x) * len(m.memo)


def test_sizes_that_only_the_first_call_asks_for_are_open_from_the_second_on() -> None:
    module = Function(_with_a_memo, a=nn.Linear(6, 4), memo=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = assert_same_steps(
            module, *[(torch.randn(n, k, 6),) for n, k in ((4, 5), (3, 7), (6, 2), (5, 5), (2, 9))]
        )
    assert n_graphs(ours) == 2
    ours.memo = None
    ours(torch.randn(3, 5, 6))
    assert ours.memo == "int"


def test_all_values_of_an_attribute_have_one_graph_for_all_sizes() -> None:
    eager, ours = pair(Function(lambda m, x: m.a(x) * m.scale, a=nn.Linear(6, 4), scale=0.0))
    for scale in range(6):
        for n in (4, 3, 7):
            for m in (eager, ours):
                m.zero_grad()
                m.scale = float(scale)
            assert_same_step(eager, ours, torch.randn(n, 6))
    assert n_graphs(ours) == 2


def test_more_sizes_than_graphs_end_in_pytorch_and_not_in_an_export_per_call() -> None:
    module = Function(lambda m, x: m.a(x) * len([0 for _ in range(x.shape[0])]), a=nn.Linear(6, 4))
    eager, ours = module, ORTModule(copy.deepcopy(module), DebugOptions(max_graphs=3))
    sizes = [2, 3, 4, 5, 6] * 4
    with pytest.warns(
        UserWarning, match="more than max_graphs=3 graphs .* each time the size of .* in dim 0 changes; the"
    ):
        for n in sizes:
            for m in (eager, ours):
                m.zero_grad()
            assert_same_step(eager, ours, torch.randn(n, 6))
    assert ours.stats()["graphs"] == 3
    exported = ours.stats()["export_seconds"]
    for n in sizes:
        ours(torch.randn(n, 6))
    assert ours.stats()["export_seconds"] == exported


def test_a_graph_that_nobody_needs_any_more_makes_room() -> None:
    module = Function(lambda m, x: m.a(x) * len([0 for _ in range(x.shape[0])]), a=nn.Linear(6, 4))
    ours = ORTModule(module, DebugOptions(max_graphs=2))
    for n in (2, 3, 4):
        for _ in range(120):
            ours(torch.randn(n, 6))
    assert ours.stats()["graphs"] == 2
    assert not ours.fallback_report()


RECURRENT = {
    "lstm": lambda: nn.LSTM(6, 4, 2, dropout=0.0),
    "batch first": lambda: nn.LSTM(6, 4, batch_first=True),
    "both ways": lambda: nn.LSTM(6, 4, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(6, 4, proj_size=2),
    "gru": lambda: nn.GRU(6, 4, batch_first=True),
    "rnn": lambda: nn.RNN(6, 4, 2, nonlinearity="relu", batch_first=True),
}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.filterwarnings("ignore:ortmodule_c. aten")
def test_recurrent_layers_have_one_graph_for_all_lengths(kind: str) -> None:
    module = Function(lambda m, x: m.layer(x)[0].sum(-1), layer=RECURRENT[kind]())
    ours = assert_same_steps(module, *[(torch.randn(n, length, 6),) for n, length in ((4, 5), (3, 9), (7, 2), (5, 5))])
    assert n_graphs(ours) == 1


def test_what_runs_in_pytorch_for_open_sizes_alone_is_native_until_they_change() -> None:
    module = Function(lambda m, x: F.interpolate(m.a(x), size=7), a=nn.Linear(6, 6))
    ours = ORTModule(module)
    ours(torch.randn(3, 4, 6)).sum().backward()
    assert not ours.fallback_report()


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)], ids=str)
def test_group_norms_of_any_batch(norm: nn.Module) -> None:
    # A bias that a norm takes away has a gradient of rounding errors alone.
    eager, ours = pair(nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), norm))
    for n, side in ((3, 5), (2, 5), (4, 7), (5, 6)):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 2, side, side))
    assert n_graphs(ours) == 2


def test_an_empty_batch_leaves_running_statistics() -> None:
    eager, ours = pair(nn.BatchNorm2d(3))
    for n in (4, 0):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 3, 2, 2))


@pytest.mark.parametrize("sizes", [(3, 1, 5, 1), (1, 4, 2), (4, 0, 3)])
def test_sizes_zero_and_one(sizes: tuple[int, ...]) -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(6, 4), nn.Tanh()))
    for n in sizes:
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 6))


def test_relations_between_sizes_are_checked() -> None:
    eager, ours = pair(Function(lambda s, x, y: s.l(x) + y, l=nn.Linear(4, 4)))
    for a, b in ((2, 2), (3, 3), (5, 5), (6, 1), (7, 7)):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(a, 4), torch.randn(b, 4))


def test_sizes_that_steer_the_module() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x) * 2 if x.shape[0] > 4 else s.l(x) + x.shape[0], l=nn.Linear(4, 4)))
    for n in (2, 3, 6, 9, 4, 5):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 4))


def test_sizes_as_outputs_and_operands() -> None:
    eager, ours = pair(
        Function(lambda s, x: (s.l(x) / x.shape[0], x.shape[0] * 2, torch.arange(x.shape[0])), l=nn.Linear(4, 4))
    )
    for n in (2, 3, 6):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 4))


def test_cache_of_graphs_is_bounded() -> None:
    ours = ORTModule(nn.Linear(2, 2), DebugOptions(max_graphs=3))
    for rank in range(1, 8):
        ours(torch.randn(*[2] * rank))
    assert n_graphs(ours) == 3


def test_cache_of_plans_is_bounded() -> None:
    ours = ORTModule(nn.Linear(2, 2))
    for n in range(2, 60):
        ours(torch.randn(n, 2)).sum().backward()
    assert n_graphs(ours) == 1
    assert all(g.runner.session.stats()["plans_cached"] <= 16 for g in graphs(ours))


def test_backward_of_what_has_no_elements() -> None:
    def forward(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, x.argmax(1, keepdim=True)).split(1, -1)[0]

    assert_same_step(*pair(Function(forward)), torch.empty(0, 1, requires_grad=True))


def test_several_tensors_of_one_changing_size_have_one_open_graph() -> None:
    eager, ours = pair(Function(lambda m, x, y, z: (m.layer(x) * y).sum(1) * z, layer=nn.Linear(6, 6)))
    for n in (4, 3, 5, 6):
        assert_same_step(eager, ours, torch.randn(n, 6), torch.randn(n, 6), torch.randn(n))
    assert n_graphs(ours) == 1


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, -2:] = y[:, :2] * 3
    return y


OPEN = {
    "std": lambda x: x.std(1),
    "std with a correction": lambda x: x.std((0, 1), correction=1.5),
    "var_mean": lambda x: torch.var_mean(x, 1, keepdim=True)[0],
    "roll": lambda x: x.roll((2, -7), (1, 0)),
    "roll by a size": lambda x: x.roll(x.shape[1] // 2, 1),
    "glu": lambda x: F.glu(x.repeat(1, 2, 1), 1),
    "instance_norm": F.instance_norm,
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "select_scatter": lambda x: x.select_scatter(x[:, 0] * 2, 1, -1),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :2] * 2, 1, -3, -1),
    "slice_scatter with a step": lambda x: x.slice_scatter(x[:, 1::2] * 2, 1, 1, None, 2),
    "written part": _written,
    "narrow": lambda x: x.narrow(1, -2, 2),
    "pad to whole windows": lambda x: F.pad(x, (0, -x.shape[2] % 4, x.shape[1] % 3, 1)),
    "smoothed": lambda x: F.cross_entropy(x, x.softmax(1), label_smoothing=0.1),
    "a size as the label that does not count": lambda x: F.cross_entropy(
        x[:, :, 0], torch.arange(x.shape[0]) % 2 + x.shape[1] - 1, ignore_index=x.shape[1]
    ),
    "counting down in reals": lambda x: x * torch.arange(x.shape[2], 0, -1.0),
    "real of sizes": lambda x: x * (x.shape[1] ** 0.5 / (1 + x.shape[0])) + 1 / x.shape[1],
    "size rounded": lambda x: x[:, : math.floor(x.shape[1] * 0.7)],
    "a view is the result": lambda x: x.reshape(x.shape[0], -1)[:, x.shape[1] :],
    "in PyTorch": lambda x: x.kthvalue(x.shape[2] - 1).values.logcumsumexp(1),
}


@pytest.mark.parametrize("what", OPEN)
def test_ops_that_reckon_with_sizes_are_open(what: str) -> None:
    ours = assert_same_steps(
        Function(lambda m, x: OPEN[what](x * m.weight), weight=nn.Parameter(torch.tensor(0.7))),
        *[(torch.randn(shape),) for shape in ((4, 5, 6), (3, 6, 5), (3, 7, 8), (5, 4, 4), (6, 6, 6))],
    )
    assert n_graphs(ours) == 1
    assert not [r for r in ours.fallback_report() if what != "in PyTorch"]


def _with_views(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return h, h.view(h.shape[0], -1), h[:, -1], h[:, h.shape[1] // 2 :]


VIEWS = {
    "of an input": lambda m, x: (m.a(x).sum(), x.view(x.shape[0], -1), x[:, : x.shape[1] // 2]),
    "of another result": lambda m, x: _with_views(m.a(x)),
    "like another tensor": lambda m, x: (m.a(x).mean((0, 1)), x.view_as(x.new_empty(x.shape[0], x.shape[1] * 6))),
}


@pytest.mark.parametrize("what", VIEWS)
def test_results_that_are_views_by_sizes(what: str) -> None:
    sizes = ((3, 4), (2, 4), (5, 6), (4, 4), (2, 9))
    calls = [torch.randn(*s, 6) for s in sizes]
    ours = assert_same_steps(Function(VIEWS[what], a=nn.Linear(6, 6)), *[(x,) for x in calls])
    assert n_graphs(ours) == 1
    if what != "of another result":
        assert ours(calls[-1])[1].data_ptr() == calls[-1].data_ptr()


def test_threads_that_meet_new_sizes_at_once() -> None:
    eager, ours = pair(net())
    calls = [torch.randn(n, length, 6) for n, length in ((3, 4), (5, 4), (4, 6), (2, 8), (7, 5), (3, 9))]
    expected = [eager(x) for x in calls]
    with ThreadPoolExecutor(3) as pool:
        for got, want in zip(pool.map(ours, calls), expected, strict=True):
            torch.testing.assert_close(got, want)
    assert n_graphs(ours) == 1


def test_a_user_who_collects_no_garbage_finds_it_so() -> None:
    gc.disable()
    try:
        ORTModule(nn.Linear(2, 2))(torch.randn(3, 2))
        assert not gc.isenabled()
    finally:
        gc.enable()
    ORTModule(nn.Linear(2, 2))(torch.randn(3, 2))
    assert gc.isenabled()


def test_symbols_are_as_they_were_after_an_export() -> None:
    before = [dict(vars(s)) for s in (torch.SymInt, torch.SymFloat, torch.SymBool)]
    assert_same_steps(net(), (torch.randn(3, 4, 6),), (torch.randn(5, 4, 6),))
    assert [dict(vars(s)) for s in (torch.SymInt, torch.SymFloat, torch.SymBool)] == before
