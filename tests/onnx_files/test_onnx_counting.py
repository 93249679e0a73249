"""What there is in a tensor and how often, and what is put into a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_onnx_layers import compare, made
from torch import Tensor

import ortmodule_c
from ortmodule_c import NotExportable


@pytest.mark.parametrize("axis", [None, 0, -1])
def test_what_there_is_once(axis: int | None) -> None:
    said = "" if axis is None else f"axis = {axis}, "
    text = f"net (float[4, 3] x) => (y, i, j, n) {{ y, i, j, n = Unique<{said}sorted = SORTED>(x) }}"
    x = torch.tensor([[2.0, 0, 2], [1, 1, 1], [2, 0, 2], [0, 5, 0]])
    y, firsts, which, counts = ortmodule_c.onnx.load(made(text.replace("SORTED", "1"), {}))(x)
    results = np.unique(x.numpy(), True, True, True, axis)
    for ours, theirs in zip((y, firsts, which, counts), results, strict=True):
        assert ours.tolist() == theirs.reshape(ours.shape).tolist()
    y, firsts, which, counts = ortmodule_c.onnx.load(made(text.replace("SORTED", "0"), {}))(x)
    assert firsts.tolist() == sorted(firsts.tolist())
    whole, along = (x.flatten(), 0) if axis is None else (x, axis)
    assert torch.equal(whole.index_select(along, firsts), y) and torch.equal(y.index_select(along, which), whole)
    assert torch.equal(counts, which.bincount())


def test_what_there_is_must_be_known() -> None:
    module = ortmodule_c.onnx.load(made("net (float[N] x) => (y) { y = Unique(x) }", {}))
    with pytest.raises(NotExportable, match=r"Unique of domain ai.onnx, .*: the operand must be known"):
        module(torch.ones(1000))
    with pytest.raises(NotExportable, match=r"Unique of domain ai.onnx, .*: elements that are not equal to themselves"):
        module(torch.tensor([torch.nan, 1]))


RUNS = "ngram_counts = [0, 2], ngram_indexes = [0, 1, 2, 3], pool_int64s = [7, 3, 7, 3, 3, 7]"
WEIGHTS = "weights = [0.5, 2.0, 3.0, 4.0]"


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
def test_runs_are_counted_with_gaps(mode: str) -> None:
    said = f'mode = "{mode}", min_gram_length = 1, max_gram_length = 2, max_skip_count = 1, {RUNS}, {WEIGHTS}'
    module = ortmodule_c.onnx.load(
        made(f"net (int64[N, C] x) => (float[N, 4] y) {{ y = TfIdfVectorizer<{said}>(x) }}", {})
    )
    x = torch.tensor([[7, 3, 7, 3], [3, 3, 3, 3], [7, 1, 3, 7]])
    counts = torch.tensor([[2.0, 2, 2, 1], [0, 4, 0, 0], [2, 1, 1, 1]])
    weights = torch.tensor([0.5, 2, 3, 4])
    expected = {"TF": counts, "IDF": counts.clamp(max=1) * weights, "TFIDF": counts * weights}[mode]
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(module(torch.zeros(1, 1).long()), torch.zeros(1, 4))


def test_which_count_a_weight_is_of_must_be_plain() -> None:
    said = f'mode = "IDF", min_gram_length = 1, max_gram_length = 2, max_skip_count = 1, {RUNS}, {WEIGHTS}'
    text = f"net (int64[C] x) => (float[4] y) {{ y = TfIdfVectorizer<{said}>(x) }}"
    module = ortmodule_c.onnx.load(made(text.replace("[0, 1, 2, 3]", "[1, 0, 2, 3]"), {}))
    with pytest.raises(
        NotExportable, match=r"TfIdfVectorizer of domain ai.onnx, .*: weights of what is counted in another"
    ):
        module(torch.tensor([7, 3]))


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_a_cache_takes_what_is_new(mode: str) -> None:
    node = f'y = TensorScatter<mode = "{mode}">(past, new, at)'
    text = f"net (float[2, 3, 6, 4] past, float[2, 3, 2, 4] new, int64[2] at) => (float[2, 3, 6, 4] y) {{ {node} }}"
    at = torch.tensor([4, 1] if mode == "linear" else [5, 8])

    def eager(past: Tensor, new: Tensor, at: Tensor) -> Tensor:
        y = past.clone()
        for i, start in enumerate(at.tolist()):
            y[i, :, [start % 6, (start + 1) % 6]] = new[i]
        return y

    inputs = {"past": torch.randn(2, 3, 6, 4), "new": torch.randn(2, 3, 2, 4), "at": at}
    compare(made(text, {}, opset=24), eager, inputs)
