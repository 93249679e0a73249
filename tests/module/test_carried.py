"""Tensors of dtypes that the core holds as others: complex numbers, unsigned integers, floats of 8 bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule, verify
from wrapped import Function, assert_same_step, assert_same_steps, close, graphs, n_graphs, pair

pytestmark = [pytest.mark.usefixtures("export_only"), pytest.mark.filterwarnings("ignore:ortmodule_c")]

COMPLEX = torch.complex64
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


def complex_weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=COMPLEX))


def in_a_graph(ours: ORTModule) -> bool:
    return all(g.runner is not None for g in graphs(ours))


def rotated(s: Function, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(s.l(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * s.turn[: x.shape[1]]).flatten(-2)


def spectral(s: Function, x: Tensor) -> Tensor:
    f = torch.fft.rfft2(s.c(x))
    low = torch.einsum("bixy,ioxy->boxy", f[:, :, :3, :3], s.w)
    out = torch.zeros(*f.shape, dtype=f.dtype)
    out[:, :, :3, :3] = low
    return torch.fft.irfft2(out, s=x.shape[-2:])


def of_frames(s: Function, x: Tensor) -> Tensor:
    z = torch.stft(s.l(x), 16, 4, window=torch.hann_window(16), return_complex=True)
    return (z.abs() + 1).log().mean() + (z + 3).angle().cos().mean()


MODULES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "rotary": (
        lambda: Function(rotated, l=nn.Linear(6, 8), turn=nn.Buffer(torch.polar(torch.ones(9, 4), torch.randn(9, 4)))),
        [(2, 7, 6), (3, 4, 6), (6, 6, 6), (1, 1, 6)],
    ),
    "spectral": (
        lambda: Function(spectral, c=nn.Conv2d(3, 5, 1), w=complex_weight(5, 5, 3, 3)),
        [(2, 3, 9, 7), (4, 3, 9, 7), (1, 3, 8, 8)],
    ),
    "mixing": (
        lambda: Function(lambda s, x: s.l(torch.fft.fftn(x, dim=(-2, -1)).real), l=nn.Linear(5, 3)),
        [(2, 4, 5)],
    ),
    "frames": (lambda: Function(of_frames, l=nn.Linear(40, 40)), [(3, 40), (2, 40)]),
}


@pytest.mark.parametrize("name", MODULES)
def test_models_with_complex_numbers_inside(name: str) -> None:
    make, sizes = MODULES[name]
    ours = assert_same_steps(make(), *[(torch.randn(*size),) for size in sizes])
    assert in_a_graph(ours)


COMPUTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sums": lambda z, w: (z + w, z - w, -z, z + z.conj(), z - w[:1]),
    "a sum of other ranks": lambda z, w: (z + w[0], w[0] - z, z[0, 0] + w),
    "scaled sums": lambda z, w: torch.add(z, w, alpha=2),
    "with reals": lambda z, w: (z + w.real, z * 2, 1j * z, z / w.abs(), z + 1),
    "parts": lambda z, w: (z.real, w.imag, torch.complex(z.real, w.imag[:1]), z.conj().imag, w.conj().real),
    "views": lambda z, w: (torch.view_as_real(z), torch.view_as_complex(torch.view_as_real(w) * 2)),
    "moved": lambda z, w: (
        z.t(),
        z.mT,
        z.permute(-1, 0),
        z.transpose(-2, -1),
        w.flip(-1),
        w.flip(0, -1),
        z.movedim(0, -1),
    ),
    "rolled": lambda z, w: (z.roll(1, -1), w.roll(2), z.roll((1, -1), (0, -1)), torch.fft.fftshift(w)),
    "shaped": lambda z, w: (z.flatten(), z.unsqueeze(-1), w[None].squeeze(0), w.reshape(-1, 1), z.view(1, *z.shape)),
    "repeated": lambda z, w: (z.expand(2, *z.shape), w.repeat(2, 1), z.tile(2), w.repeat_interleave(2, -1)),
    "taken": lambda z, w: (z[0], z[:, -1], w[:, 1:], z[..., ::2], w.narrow(-1, 0, 1), z.select(-1, 0)),
    "by index": lambda z, w: (
        z.index_select(-1, torch.tensor([1, 0])),
        z[torch.tensor([0, 1])],
        w[:, torch.tensor([0])],
    ),
    "parted": lambda z, w: (*z.split(1, -1), *w.unbind(0), *z.chunk(2, 0)),
    "joined": lambda z, w: (
        torch.cat([z, w], -1),
        torch.stack([z, w], -1),
        torch.hstack([z, w]),
        torch.cat([z, w.real]),
    ),
    "padded": lambda z, w: (nn.functional.pad(z, (1, 2)), nn.functional.pad(w, (0, 0, 1, -1))),
    "chosen": lambda z, w: (
        torch.where(z.real > 0, z, w),
        torch.where(z.imag[0] > 0, z, 0),
        z.masked_fill(w.real > 0, 1j),
    ),
    "products": lambda z, w: (z * w, z @ w.mH, torch.einsum("ij,kj->ik", z, w), (z * w.conj()).sum()),
    "conjugated": lambda z, w: (z.conj(), z.conj() * w, w.conj().t(), z.adjoint(), z.conj().conj()),
    "lengths": lambda z, w: (z.abs(), z.angle(), torch.polar(z.real.abs(), w.imag), z.sgn(), z.abs().square().sum()),
    "elementary": lambda z, w: (z.exp(), z.sin(), w.sqrt(), z.reciprocal(), z**2),
    "wider": lambda z, w: (z.to(torch.complex128) + w, z.real.to(COMPLEX), z.real.double().to(torch.complex128)),
    "transforms": lambda z, w: (torch.fft.fft(z), torch.fft.ifft2(w), torch.fft.irfft(z), torch.fft.hfft(w, 4)),
    "no gradient": lambda z, w: (z.detach() + w, z.isnan(), torch.is_complex(z), w.real > 0),
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("shape", [(2, 3), (2, 2), (3, 4)], ids=str)
def test_complex_numbers_in_and_out(name: str, shape: tuple[int, ...]) -> None:
    module = Function(lambda s, x: COMPUTED[name](x * s.scale, s.w), w=complex_weight(*shape), scale=complex_weight(1))
    eager, ours = pair(module)
    for x in (torch.randn(shape, dtype=COMPLEX), torch.randn(shape, dtype=COMPLEX).conj()):
        assert_same_step(eager, ours, x)
    assert in_a_graph(ours)


CORNERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda z, w: z + w,
    "difference": lambda z, w: z - w,
    "sum of scaled": lambda z, w: torch.add(z, w, alpha=2.5),
    "product": lambda z, w: z * w,
    "by a real": lambda z, w: z * w.real,
    "by a number": lambda z, w: z * 2.5,
    "by a complex number": lambda z, w: (1 - 2j) * z,
    "negative": lambda z, w: -z,
    "conjugate": lambda z, w: z.conj() * 1,
}


@pytest.mark.parametrize("name", CORNERS)
def test_complex_numbers_at_the_corners(name: str) -> None:
    """PyTorch multiplies what it adds by 1, and imaginary parts of reals too, which makes NaN of infinities."""
    parts = [0.0, -0.0, 1.0, -2.0, float("inf"), -float("inf"), float("nan"), 3e38, 1e-40]
    z = torch.tensor([complex(a, b) for a in parts for b in parts], dtype=COMPLEX)
    eager, ours = pair(Function(lambda s, z, w: CORNERS[name](z, w)))
    a, b = (torch.view_as_real(m(z[:, None], z).resolve_conj()) for m in (eager, ours))
    assert not ours.fallback_report()
    assert bool(((a.isnan() & b.isnan()) | ((a == b) & (a.signbit() == b.signbit()))).all())


def test_gradients_of_complex_inputs() -> None:
    eager, ours = pair(Function(lambda s, z: (z @ s.w).abs().sum(), w=complex_weight(3, 3)))
    z = torch.randn(3, 3, dtype=COMPLEX)
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    eager(a).backward()
    ours(b).backward()
    close(b.grad, a.grad)
    c = torch.randn(3, 3, 2, requires_grad=True)
    (ours(torch.view_as_complex(c).conj()),)
    for model in (eager, ours):
        model.zero_grad()
        c.grad = None
        model(torch.view_as_complex(c).conj().t()).backward()
        model.found = c.grad
    close(ours.found, eager.found)


def test_what_moves_adds_or_multiplies_complex_numbers_runs_in_c() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        z = torch.view_as_complex(s.l(x).unflatten(-1, (2, 2))).transpose(-2, -1)
        z = torch.cat([z[..., 1:], z[..., :1].conj()], -1) + z * s.w
        z = torch.einsum("bij,kj->bik", z @ s.w, s.w) * 1j
        return torch.view_as_real(z.sum(-1)).exp().sum()

    ours = assert_same_steps(Function(forward, l=nn.Linear(3, 4), w=complex_weight(2, 2)), (torch.randn(3, 2, 3),))
    assert not ours.fallback_report()


def test_a_buffer_of_complex_numbers_is_brought_up_to_date() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        z = torch.fft.fft(s.l(x))
        s.mean.mul_(0.9).add_(0.1 * z.detach().mean(0))
        return (z - s.mean).abs().sum()

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4), mean=nn.Buffer(torch.zeros(4, dtype=COMPLEX))))
    for _ in range(3):
        assert_same_step(eager, ours, torch.randn(3, 4))
    assert in_a_graph(ours)
    seen = ours.mean
    assert_same_step(eager, ours, torch.randn(3, 4))
    assert ours.mean is seen


def test_changes_in_place_of_complex_numbers() -> None:
    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.view_as_complex(s.l(x).unflatten(-1, (2, 2)))
        y = z * 2
        seen = y.conj()
        y += 1j
        y[0] = z[1]
        parts = torch.view_as_real(y)
        parts[..., 1].mul_(3)
        y.imag.add_(1)
        return seen, y.real, parts

    assert_same_steps(Function(forward, l=nn.Linear(3, 4)), (torch.randn(2, 3),), (torch.randn(4, 3),))


def test_a_result_that_is_an_input_conjugated_is_a_view_of_it() -> None:
    ours = ORTModule(Function(lambda s, z: (z.conj(), z.real, s.w * z), w=complex_weight(2)))
    z = torch.randn(2, dtype=COMPLEX)
    conjugate, real, _ = ours(z)
    z.mul_(2)
    torch.testing.assert_close(conjugate, z.conj())
    torch.testing.assert_close(real, z.real)


@pytest.mark.parametrize("outputs", [1, 2])
def test_hooks_and_parts_of_a_backward(outputs: int) -> None:
    def forward(s: Function, x: Tensor) -> Any:
        z = torch.fft.fft(s.l(x))
        return (z, (z.abs() ** 2).sum())[:outputs]

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    for model in (eager, ours):
        z = model(x)[0]
        z.retain_grad()
        (z * (1 + 2j)).real.sum().backward(retain_graph=True)
        model.seen = z.grad
        torch.view_as_real(z).pow(2).sum().backward()
    close(ours.seen, eager.seen)
    close(ours.l.weight.grad, eager.l.weight.grad)


def test_training_of_complex_weights() -> None:
    eager, ours = pair(Function(lambda s, x: (torch.fft.rfft(x) @ s.w).abs().mean(), w=complex_weight(4, 3)))
    steps = [torch.optim.AdamW(m.parameters(), lr=0.1).step for m in (eager, ours)]
    for _ in range(5):
        assert_same_step(eager, ours, torch.randn(3, 6))
        for step in steps:
            step()
    close(ours.w, eager.w)


def test_under_autocast_and_a_budget() -> None:
    module = MODULES["spectral"][0]()
    eager, ours = module, ORTModule(torch.nn.Sequential(module), memory_budget=0.0)
    x = torch.randn(2, 3, 8, 8)
    close(ours(x), eager(x))
    with torch.autocast("cpu", torch.bfloat16):
        close(ours(x), eager(x), rtol=2e-2)


def test_verify_compares_complex_numbers() -> None:
    module = Function(lambda s, x: (torch.fft.fft(s.l(x)), s.w), l=nn.Linear(4, 4), w=complex_weight(2))
    assert verify(module, torch.randn(2, 4)).ok


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_integers(dtype: torch.dtype) -> None:
    def forward(s: Function, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        steps = (s.l(x).detach() * 100).abs().to(dtype)
        return s.e(ids.to(torch.int64)), steps, torch.cat([ids, ids.flip(0)]), ids.t(), steps.float() * s.l(x)

    module = Function(forward, l=nn.Linear(3, 2), e=nn.Embedding(70000 if dtype != torch.uint16 else 65536, 4))
    ids = torch.tensor([[40000, 1], [65535, 2], [0, 3]]).to(dtype)
    ours = assert_same_steps(module, (torch.randn(3, 3), ids), (torch.randn(2, 3), ids[:2]))
    assert in_a_graph(ours)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_floats_of_8_bits(dtype: torch.dtype) -> None:
    """Rounded weights, through which no gradient goes."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = s.w.detach().to(dtype)
        back = rounded.to(x.dtype)
        return x @ (s.w + (back - s.w).detach()), rounded.t().float()

    module = Function(forward, w=nn.Parameter(torch.randn(4, 3)))
    ours = assert_same_steps(module, (torch.randn(2, 4),), (torch.randn(5, 4),))
    assert in_a_graph(ours)
    stored = Function(
        lambda s, x: s.l(x) @ s.w.to(x.dtype), l=nn.Linear(3, 4), w=nn.Buffer(torch.randn(4, 3).to(dtype))
    )
    eager, ours = pair(stored)
    x = torch.randn(2, 3)
    close(ours(x), eager(x))
    assert in_a_graph(ours)


def test_a_parameter_of_8_bits_that_is_trained_is_left_to_pytorch() -> None:
    module = Function(lambda s, x: x * s.w.float() * s.v, v=nn.Parameter(torch.ones(2)))
    module.w = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))
    eager, ours = pair(module)
    with pytest.warns(UserWarning, match="a gradient would go through torch.float8_e4m3fn"):
        ours(torch.ones(2)).sum().backward()
    eager(torch.ones(2)).sum().backward()
    assert torch.equal(ours.w.grad.float(), eager.w.grad.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, COMPLEX], ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_pads(dtype: torch.dtype, value: int) -> None:
    eager, ours = pair(Function(lambda s, x: nn.functional.pad(x, (1, 2), value=value)))
    x = torch.tensor([[2, 3], [4, 5]]).to(dtype)
    wide = COMPLEX if dtype.is_complex else torch.float32
    assert torch.equal(ours(x).to(wide), eager(x).to(wide))


NEGATED: dict[str, Callable[[Tensor], Any]] = {
    "added to": lambda y: y.conj().imag.add_(1),
    "copied to": lambda y: y.conj().imag.copy_(torch.ones(y.shape)),
    "multiplied": lambda y: y.conj().imag.mul_(3),
    "conjugated": lambda y: y.conj().add_(1j),
    "negated": lambda y: torch._neg_view(y.real).add_(1),
}


@pytest.mark.parametrize("name", NEGATED)
@pytest.mark.parametrize("shape", [(3,), (1,), (1, 1), ()], ids=str)
def test_changes_through_views_whose_sign_is_pending(name: str, shape: tuple[int, ...]) -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        y = x * s.w
        NEGATED[name](y)
        return y * 2

    assert_same_steps(Function(forward, w=complex_weight(1)), (torch.randn(shape, dtype=COMPLEX),))


class Pending(torch.autograd.Function):
    """Gives a view whose sign is pending, forward and backward."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch._neg_view(x.clone())

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return torch._neg_view(grad * 1)


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 1), ()], ids=str)
def test_a_function_whose_results_wait_for_their_sign(shape: tuple[int, ...]) -> None:
    module = Function(lambda s, x: Pending.apply(x * s.w) * 1, w=nn.Parameter(torch.tensor(2.0)))
    assert_same_steps(module, (torch.randn(shape),))


def test_a_gradient_through_8_bits_is_left_to_pytorch() -> None:
    module = Function(lambda s, x: (s.l(x).to(torch.float8_e4m3fn).float() * 2).sum(), l=nn.Linear(3, 3))
    eager, ours = pair(module)
    with pytest.warns(UserWarning, match=r"runs in PyTorch"):
        assert_same_step(eager, ours, torch.randn(2, 3))


def test_one_graph_serves_all_sizes() -> None:
    ours = assert_same_steps(
        MODULES["mixing"][0](), *[(torch.randn(n, m, 5),) for n, m in ((2, 3), (4, 7), (5, 5), (7, 2))]
    )
    assert n_graphs(ours) <= 2
