"""Training with all tensors on a GPU, beside eager there: ``pytest tests/cuda/hardware.py``; without a GPU, on the CPU.

What the emulated GPU cannot show: PyTorch's own tensors, streams, allocator and flags around the provider.
"""

from __future__ import annotations

import ast
import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from ortmodule_c import _C, ORTModule
from ortmodule_c.optim import FusedAdam

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative distance of a loss from eager's over ten steps.
LOSSES = {None: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no GPU")


@pytest.fixture(autouse=True)
def no_mistakes() -> None:
    """No stand-in takes part, nor is it built."""


class Block(nn.Module):
    """What a transformer has of every kind of kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(32, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(F.gelu(x + self.out(y))).flatten(0, 1), ids.flatten())


class Images(nn.Module):
    """Convolutions, statistics of a batch, a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), torch.arange(len(x), device=x.device) % 10)


class OfTransformers(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def gpt2(p: float = 0.0) -> nn.Module:
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=32, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p
    )
    config.use_cache, config.loss_type = False, "ForCausalLM"
    return OfTransformers(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**sizes, vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return OfTransformers(BertForMaskedLM(config))


def words(n: int = 7) -> Tensor:
    return torch.randint(0, 50, (3, n), generator=torch.Generator().manual_seed(n)).to(DEVICE)


def pictures() -> Tensor:
    return torch.randn(5, 3, 13, 11, generator=torch.Generator().manual_seed(0)).to(DEVICE)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "block": (Block, words),
    "images": (Images, pictures),
    "gpt2": (gpt2, words),
    "bert": (bert, words),
}


def held() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def losses(
    model: nn.Module, x: Tensor, dtype: torch.dtype | None = None, steps: int = 10, optimizer: Any = torch.optim.AdamW
) -> list[float]:
    """Losses of training on one batch."""
    optimizer = optimizer(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        with torch.autocast(DEVICE.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("dtype", LOSSES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_eagers(name: str, dtype: torch.dtype | None) -> None:
    build, data = MODELS[name]
    eager = build().to(DEVICE)
    ours = ORTModule(copy.deepcopy(eager))
    want, got = losses(eager, data(), dtype), losses(ours, data(), dtype)
    for a, b in zip(got, want, strict=True):
        assert abs(a - b) <= LOSSES[dtype] * abs(b), (got, want)


def test_the_fused_optimizer_trains_there() -> None:
    eager = Block().to(DEVICE)
    ours = ORTModule(copy.deepcopy(eager))
    want, got = (
        losses(eager, words()),
        losses(ours, words(), optimizer=lambda p, lr: FusedAdam(p, lr=lr, weight_decay=1e-2)),
    )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)


@needs_gpu
def test_steps_that_repeat_are_replayed() -> None:
    model = ORTModule(gpt2(0.1).to(DEVICE))
    losses(model, words(), steps=12, optimizer=torch.optim.SGD)
    assert model.stats()["replays"] > 0


@pytest.mark.parametrize("told_by", ["forward", "optimizer"])
def test_an_index_out_of_range_is_told_and_the_next_step_is_right(told_by: str) -> None:
    """The CPU tells at once, a GPU when the host next comes to it; nothing is learned of that step then."""
    model = ORTModule(Block().to(DEVICE))
    optimizer, bad = FusedAdam(model.parameters(), lr=1e-3), words()
    bad[0, 0] = 50
    want = model(words()).item()
    with pytest.raises((IndexError, _C.DeviceError), match=r"index (50 is )?out of range"):
        loss = model(bad)
        loss.backward()
        loss.item()
        optimizer.step() if told_by == "optimizer" else model(words())
    model.zero_grad()
    assert model(words()).item() == want


@needs_gpu
def test_a_smaller_step_runs_after_one_that_had_no_memory() -> None:
    linear = nn.Linear(1024, 1024, bias=False).to(DEVICE)
    model, whole = ORTModule(linear), torch.cuda.get_device_properties(DEVICE).total_memory
    share = 2**31  # of bytes; the input takes it, the result as much again
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((held() + 1.5 * share) / whole)
    try:
        x = torch.ones(share // 4096, 1024, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
            model(x)
        torch.testing.assert_close(model(x[:8]), linear(x[:8]), rtol=1e-3, atol=1e-3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not model.fallback_report()


def test_attention_of_heads_that_are_too_long_is_pytorchs() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True)

    results, model = [], ORTModule(Attention())
    for m in (model, model.module):
        x = torch.linspace(-1, 1, 2 * 3 * 5 * 320, device=DEVICE).view(2, 3, 5, 320).requires_grad_()
        y = m(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert len(model.fallback_report()) == (DEVICE.type == "cuda")  # the CPU's kernel takes any


def test_the_fused_optimizer_trains_with_a_loss_that_is_scaled() -> None:
    eager = Block().to(DEVICE)
    found = []
    for model, optimizer in (
        (eager, torch.optim.AdamW),
        (ORTModule(copy.deepcopy(eager)), lambda p, lr: FusedAdam(p, lr=lr, weight_decay=1e-2)),
    ):
        of_model = optimizer(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
        for _ in range(10):
            with torch.autocast(DEVICE.type, torch.float16):
                loss = model(words())
            scaler.scale(loss).backward()
            scaler.step(of_model)
            scaler.update()
            of_model.zero_grad()
        found.append([loss.item(), scaler.get_scale()])
    (want, scale), got = found
    assert abs(got[0] - want) <= LOSSES[torch.float16] * abs(want) and got[1] == scale


@needs_gpu
def test_a_graph_of_the_users_own_gives_what_eager_gives() -> None:
    eager = bert().to(DEVICE).eval()
    model, ids, other = ORTModule(eager), words(9), words(9).flip(0)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is lazy is done before
            for _ in range(3):
                model(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(ids)
        for x in (other, words(9)):
            ids.copy_(x)
            graph.replay()
            torch.testing.assert_close(y, eager(x), rtol=1e-3, atol=1e-4)


def test_another_size_takes_another_plan_of_the_same_graph() -> None:
    eager = Block().to(DEVICE)
    ours = ORTModule(copy.deepcopy(eager))
    for n in (7, 9, 7, 12, 5, 9):
        results = []
        for model in (eager, ours):
            model.zero_grad()
            loss = model(words(n))
            loss.backward()
            results.append([loss.detach(), *[p.grad for p in model.parameters()]])
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


def test_a_loss_is_scaled_and_a_step_that_overflows_is_skipped() -> None:
    model = ORTModule(Block().to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**15)
    with torch.autocast(DEVICE.type, torch.float16):
        scaler.scale(model(words())).backward()
    next(model.parameters()).grad.fill_(float("inf"))
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**14
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_steps_are_the_same_bits_each_time() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = ORTModule(gpt2(0.1).to(DEVICE))
        return [torch.tensor(losses(model, words(), steps=3)), *[p.detach() for p in model.parameters()]]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@needs_gpu
def test_dropout_drops_what_the_cpu_drops() -> None:
    x, masks = torch.ones(37, 65), []
    for device in ("cpu", DEVICE):
        torch.manual_seed(3)
        masks.append(ORTModule(nn.Dropout(0.3).to(device))(x.to(device)).cpu())
    assert torch.equal(*masks)


@needs_gpu
def test_float32_is_rounded_to_tf32_where_pytorch_says_so() -> None:
    x = torch.full((16, 16), 1 + 2**-12, device=DEVICE)
    linear = nn.Linear(16, 16, bias=False).to(DEVICE)
    nn.init.eye_(linear.weight)
    model, seen = ORTModule(linear), []
    for allow in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = allow
        try:
            seen.append(model(x)[0, 0].item())
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
    assert seen == [1 + 2**-12, 1, 1 + 2**-12]


@needs_gpu
def test_a_result_is_kept_for_the_stream_that_it_is_recorded_for() -> None:
    model, side = ORTModule(nn.Linear(512, 512).to(DEVICE)), torch.cuda.Stream()
    x = torch.randn(1024, 512, device=DEVICE)
    with torch.no_grad():
        want = model(x).clone()
        y = model(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            read = y.clone()
        y.record_stream(side)
        del y
        others = [model(x * 2) for _ in range(4)]
    torch.cuda.synchronize()
    assert torch.equal(read, want) and len(others) == 4


@needs_gpu
def test_two_streams_give_what_one_gives() -> None:
    """Each step in the other stream, which waits for the last, as PyTorch wants it; memory goes between them."""
    found = []
    for streams in ([torch.cuda.current_stream()] * 2, [torch.cuda.Stream(), torch.cuda.Stream()]):
        torch.manual_seed(0)
        model = ORTModule(gpt2().to(DEVICE))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), words()
        last = torch.cuda.current_stream()
        for step in range(8):
            stream = streams[step % 2]
            stream.wait_stream(last)
            with torch.cuda.stream(stream):
                loss = model(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            last = stream
        torch.cuda.current_stream().wait_stream(last)
        torch.cuda.synchronize()
        found.append([loss.detach(), *[p.detach() for p in model.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_threads_give_what_one_gives() -> None:
    torch.manual_seed(0)
    models = [gpt2().to(DEVICE), Block().to(DEVICE)]
    want = [losses(ORTModule(copy.deepcopy(m)), words(), steps=5) for m in models]
    got: list[list[float]] = [[], []]
    wrapped = [ORTModule(m) for m in models]
    for model in wrapped:  # before the threads: where one exports, PyTorch's optimizers in all take another path
        model(words())

    def train(i: int) -> None:
        got[i] = losses(wrapped[i], words(), steps=5)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


def life() -> list[int]:
    """Memory held after each step of a model's training."""
    model = ORTModule(gpt2(0.1).to(DEVICE))
    optimizer, seen = torch.optim.AdamW(model.parameters()), []
    for step in range(60):
        model(words(7 if step % 3 else 9)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(held())
    return seen


def lives() -> tuple[int, list[int], int]:
    """Memory held before a model's life, while it has all its graphs, and after."""
    life()  # of what PyTorch and libraries keep for the process
    gc.collect()
    before, seen = held(), life()
    gc.collect()
    return before, seen[40:], held()


def test_memory_is_flat_and_goes_with_the_model() -> None:
    """Once there is a graph of launches, which has its seed, for all places where tensors come to lie.

    In a process of its own: one that has used several streams keeps what constants of dropped models had.
    """
    command = [sys.executable, "-c", "import hardware; print(hardware.lives())"]
    ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    before, during, after = ast.literal_eval(ran.stdout.splitlines()[-1])
    assert len(set(during)) == 1
    assert after == before


@needs_gpu
def test_a_step_takes_less_memory_than_eagers() -> None:
    peaks, ids = [], torch.randint(0, 50, (16, 32), device=DEVICE)
    for wrap in (lambda m: m, ORTModule):
        model = wrap(gpt2(0.1).to(DEVICE))
        model(ids).backward()
        model.zero_grad()
        loaded = held()
        torch.cuda.reset_peak_memory_stats()
        model(ids).backward()
        peaks.append(torch.cuda.max_memory_allocated() - loaded)
        del model
    assert peaks[1] < peaks[0]
