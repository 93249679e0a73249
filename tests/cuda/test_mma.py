"""Products by a warp (cuda/gpu/mma.h) hold their operands where PTX has those of mma.m16n8k16.

The layouts are written here once more, as the PTX ISA states them ("Matrix Fragments for mma.m16n8k16 with floating
point type", "ldmatrix"), and as strides of a lane and its elements, as CUTLASS's traits of the instruction have them.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
LANES, SHARED_BYTES = 32, 16 * 24 * 2

UNIT = """
#include "cuda/gpu/mma.h"

struct product { const uint32_t *a, *b; float *sums; };
#define PRODUCT(E)                                                     \\
  OMC_KERNEL(multiply_##E, 32, product, p) {                           \\
    const uint32_t *const a = p.a + omc_lane() * 4;                    \\
    const uint32_t *const b = p.b + omc_lane() * 2;                    \\
    const uint32_t words[4] = {a[0], a[1], a[2], a[3]};                \\
    omc_multiply<E>(((float(*)[4])p.sums)[omc_lane()], words, b[0], b[1]); \\
  }
PRODUCT(bf16)
PRODUCT(f16)

struct loaded { const uint16_t *from; uint32_t *to; const int32_t *rows; };
OMC_INLINE uint16_t *shared_copy(const loaded &p, unsigned char *shared) {
  uint16_t *const to = (uint16_t *)shared;
  for (int i = (int)threadIdx.x; i < 16 * 24; i += 32) to[i] = p.from[i];
  __syncthreads();
  return to;
}
#define LOADED(name, call)                                             \\
  OMC_KERNEL(name, 32, loaded, p) {                                    \\
    OMC_SHARED_BYTES(shared);                                          \\
    const uint16_t *const at = shared_copy(p, shared);                 \\
    uint32_t(&to)[4] = ((uint32_t(*)[4])p.to)[omc_lane()];             \\
    call;                                                              \\
  }
LOADED(load_matrices, omc_load_matrices<false>(to, at + p.rows[omc_lane()]))
LOADED(load_across, omc_load_matrices<true>(to, at + p.rows[omc_lane()]))
LOADED(load_a, omc_load_a(to, at, 24))
LOADED(load_b, omc_load_b<false>(to, at, 24))
LOADED(load_b_across, omc_load_b<true>(to, at, 24))

struct copied { const uint32_t *from; uint32_t *before, *after; };
OMC_KERNEL(copy_later, 32, copied, p) {
  OMC_SHARED_BYTES(shared);
  uint32_t *const to = (uint32_t *)shared + omc_lane() * 4;
  for (int i = 0; i < 4; i++) to[i] = 7;
  omc_copy_later<16>(to, p.from + omc_lane() * 4, omc_lane() != 5);
  for (int i = 0; i < 4; i++) p.before[omc_lane() * 4 + i] = to[i];
  omc_wait_for_copies();
  for (int i = 0; i < 4; i++) p.after[omc_lane() * 4 + i] = to[i];
}
"""


class Grid(ctypes.Structure):
    _fields_ = [("blocks", ctypes.c_uint), ("threads", ctypes.c_uint), ("shared_bytes", ctypes.c_uint)]


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("mma")
    (folder / "unit.cpp").write_text(UNIT)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-DOMC_EMULATED", "-Wall"]
    includes = [f"-I{ROOT / 'tests' / 'cuda'}", f"-I{ROOT}"]
    subprocess.run(["g++", *flags, *includes, folder / "unit.cpp", "-o", folder / "unit.so"], check=True)
    return ctypes.CDLL(str(folder / "unit.so"))


def launch(unit: ctypes.CDLL, name: str, *tensors: Tensor | None) -> None:
    """Runs a warp with a struct of the addresses of tensors."""
    addresses = (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])
    kernel = getattr(unit, name)
    kernel.restype = ctypes.c_bool
    assert kernel(addresses, Grid(1, LANES, SHARED_BYTES))


# Of each lane and its element i: where it is in A (row, depth), in B (depth, column) and among the sums (row, column).


def of_a(lane: int, i: int) -> tuple[int, int]:
    row = lane >> 2 if 0 <= i < 2 or 4 <= i < 6 else (lane >> 2) + 8
    return row, lane % 4 * 2 + (i & 1) + (0 if i < 4 else 8)


def of_b(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 2 + (i & 1) + (0 if i < 2 else 8), lane >> 2


def of_sums(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (0 if i < 2 else 8), lane % 4 * 2 + (i & 1)


# A layout, its elements of a lane, the rows that a column-major index counts, whether it is of the transpose, and
# strides of that index: of lane % 4, of lane / 4, and of the bits of i.
Layout = Callable[[int, int], tuple[int, int]]
STRIDES: list[tuple[Layout, int, int, bool, tuple[int, ...]]] = [
    (of_a, 8, 16, False, (32, 1, 16, 8, 128)),
    (of_b, 4, 8, True, (16, 1, 8, 64)),
    (of_sums, 4, 16, False, (32, 1, 16, 8)),
]


@pytest.mark.parametrize(("layout", "n", "rows", "transposed", "strides"), STRIDES)
def test_both_statements_of_a_layout_agree(
    layout: Layout, n: int, rows: int, transposed: bool, strides: tuple[int, ...]
) -> None:
    for lane, i in itertools.product(range(LANES), range(n)):
        row, column = reversed(layout(lane, i)) if transposed else layout(lane, i)
        bits = [i >> k & 1 for k in range(len(strides) - 2)]
        digits = lane % 4, lane // 4, *bits
        assert row + rows * column == sum(d * s for d, s in zip(digits, strides, strict=True))


def spread(matrix: Tensor, layout: Layout, n: int) -> Tensor:
    """[lane, i] of a matrix."""
    rows, columns = zip(*[layout(lane, i) for lane in range(LANES) for i in range(n)], strict=True)
    return matrix[list(rows), list(columns)].reshape(LANES, n).contiguous()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_products_of_integers_are_exact(unit: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        a = torch.randint(-99, 100, (16, 16), generator=g).to(dtype)
        b = torch.randint(-99, 100, (16, 8), generator=g).to(dtype)
        c = torch.randint(-999, 1000, (16, 8), generator=g).float()
        sums = spread(c, of_sums, 4)
        launch(unit, f"multiply_{name}", spread(a, of_a, 8), spread(b, of_b, 4), sums)
        assert torch.equal(sums, spread(a.float() @ b.float() + c, of_sums, 4))


MEMORY = torch.arange(16 * 24, dtype=torch.int16).reshape(16, 24)


def load(unit: ctypes.CDLL, name: str, rows: Tensor | None = None) -> Tensor:
    """The elements that each lane has got, [lane, 8]."""
    to = torch.zeros(LANES, 8, dtype=torch.int16)
    launch(unit, name, MEMORY, to, rows)
    return to


@pytest.mark.parametrize("across", [False, True])
def test_lanes_say_where_rows_are_and_get_two_elements_of_each_matrix(unit: ctypes.CDLL, across: bool) -> None:
    """Lane l has the address of row l % 8 of matrix l / 8, and gets elements l % 4 * 2 and the next of row l / 4."""
    starts = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:LANES].to(torch.int32) * 8
    found = load(unit, "load_across" if across else "load_matrices", starts)
    matrices = MEMORY.flatten()[starts.long()[:, None] + torch.arange(8)].reshape(4, 8, 8)
    for lane, m, i in itertools.product(range(LANES), range(4), range(2)):
        row, element = lane // 4, lane % 4 * 2 + i
        assert found[lane, 2 * m + i] == (matrices[m][element, row] if across else matrices[m][row, element])


def test_operands_are_loaded_from_rows_as_products_take_them(unit: ctypes.CDLL) -> None:
    a = MEMORY[:16, :16]
    assert torch.equal(load(unit, "load_a"), spread(a, of_a, 8))
    for name, b in (("load_b", a.T), ("load_b_across", a)):
        found = load(unit, name)
        assert torch.equal(found[:, :4], spread(b[:, :8], of_b, 4))
        assert torch.equal(found[:, 4:], spread(b[:, 8:], of_b, 4))


def test_sums_side_by_side_are_an_operand() -> None:
    """Words of A are pairs of sums: of the left product, rows and then those 8 below, and of the right."""
    c = torch.arange(256).reshape(16, 16)
    left, right = spread(c[:, :8], of_sums, 4), spread(c[:, 8:], of_sums, 4)
    assert torch.equal(torch.cat([left, right], 1), spread(c, of_a, 8))


def test_a_copy_is_there_once_it_has_been_waited_for(unit: ctypes.CDLL) -> None:
    given = torch.arange(1, 1 + LANES * 4, dtype=torch.int32).reshape(LANES, 4)
    before, after = torch.zeros_like(given), torch.zeros_like(given)
    launch(unit, "copy_later", given, before, after)
    given[5] = 0  # nothing was there
    assert (before == 7).all() and torch.equal(after, given)
