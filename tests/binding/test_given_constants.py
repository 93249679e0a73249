"""Constants that are given beside a text, in a mapping of any kind."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from ortmodule_c import _C

N, SIZE = 4, 64  # of more elements than a text has
TEXT = "".join(f"const %c{k} : f32[{SIZE}] = @\n" for k in range(N)) + f"input %x : f32[{SIZE}]\n%a0 = Add(%x, %c0)\n"
TEXT += "".join(f"%a{k} = Add(%a{k - 1}, %c{k})\n" for k in range(1, N)) + f"return %a{N - 1}\n"


class Made(Mapping):
    """Makes its tensors when it is asked for them, and has none of them itself."""

    def __getitem__(self, name: str) -> Tensor:
        return torch.full((SIZE,), 1.0 + int(name[1:]))

    def __iter__(self) -> Iterator[str]:
        return iter([f"c{k}" for k in range(N)])

    def __len__(self) -> int:
        return N


def test_a_graph_keeps_what_a_mapping_makes() -> None:
    """Else each constant would lie where the one before it was freed."""
    found = [
        torch.frombuffer(bytearray(data), dtype=torch.float32)
        for _, _, data in _C.describe(TEXT, "parse", constants=Made())[2]
    ]
    assert [c.tolist() for c in found] == [[1.0 + k] * SIZE for k in range(N)]
    assert "%c3 : f32[64] = @" in _C.transform(TEXT, "parse", constants=Made())


def test_a_session_keeps_what_a_mapping_makes() -> None:
    session, given = _C.Session(TEXT, Made()), [torch.ones(SIZE)]
    gc.collect()
    torch.zeros(N * SIZE)
    [out], _ = session.plan(given, [False], [False]).forward(given, 0)
    assert out.tolist() == [11.0] * SIZE


def test_a_mapping_may_initialise_the_session_that_reads_it() -> None:
    class Again(Made):
        def __iter__(self) -> Iterator[str]:
            session.__init__(TEXT, Made())
            return super().__iter__()

    session, given = _C.Session.__new__(_C.Session), [torch.ones(SIZE)]
    with pytest.raises(RuntimeError, match="a Session is initialised once"):
        session.__init__(TEXT, Again())
    [out], _ = session.plan(given, [False], [False]).forward(given, 0)
    assert out.tolist() == [11.0] * SIZE


@pytest.mark.parametrize("what", [_C.transform, _C.describe])
def test_what_is_no_mapping(what) -> None:
    with pytest.raises((TypeError, AttributeError)):
        what(TEXT, "parse", constants=3)
    with pytest.raises(ValueError, match="no constant named 'c0'"):
        what(TEXT, "parse", constants={})
