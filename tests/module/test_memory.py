"""What a run may hold: memory that stays flat, caches that are bounded, a peak that was predicted."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from ortmodule_c import _C, ORTModule

MIB = 1 << 20


def resident() -> int:
    """Bytes this process holds in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(37, 65), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(65), nn.Linear(65, 11))
    model = ORTModule(net)
    return model, torch.optim.AdamW(model.parameters())


def test_memory_is_flat_over_500_steps() -> None:
    model, optimizer = small()
    x = torch.randn(29, 37)
    for _ in range(100):
        train(model, x, optimizer)
    gc.collect()
    before = resident()
    for _ in range(500):
        train(model, x, optimizer)
    gc.collect()
    assert resident() - before <= MIB


def test_memory_is_bounded_over_200_shapes() -> None:
    """The second time around the same shapes nothing grows, and the pool keeps its bound."""
    model, optimizer = small()
    sizes = range(102, 302)
    for n in sizes:
        train(model, torch.randn(n, 37), optimizer)
    gc.collect()
    before = resident()
    for n in sizes:
        train(model, torch.randn(n, 37), optimizer)
    gc.collect()
    assert resident() - before <= 2 * MIB
    pool = _C.pool_stats()
    assert pool["cached_bytes"] <= max(16 * MIB, pool["peak_bytes"])
    stats = model.stats()
    assert stats["plans_cached"] <= 2 * 16
    assert stats["plans_built"] >= 2 * len(sizes)


def test_peak_is_as_predicted() -> None:
    text = "input %x : f32[?,301] grad\n%a = Gelu(%x)\n%b = Softmax(%a)\n%y = Mul(%b, %x)\nreturn %y\n"
    session = _C.Session(text, {})
    x = torch.randn(997, 301)
    plan = session.plan([x], [True], [True])
    gc.collect()
    _C.pool_trim()
    base = _C.pool_stats()["used_bytes"]
    outputs, token = plan.forward([x], 0)
    held = _C.pool_stats()["used_bytes"] - base
    predicted = plan.arena_bytes + outputs[0].numel() * 4
    assert abs(held - predicted) <= 0.02 * predicted
    grads = plan.backward(token, [x], outputs, [torch.ones_like(x)])
    held = _C.pool_stats()["used_bytes"] - base
    predicted += grads[0].numel() * 4
    assert abs(held - predicted) <= 0.02 * predicted


PEAK = """
import gc, resource, torch
from torch import nn
from ortmodule_c import _C, ORTModule

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024))])

    def forward(self, x):
        return self.net(x).square().mean()

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

model, x = ORTModule(Loss()), torch.randn(8192, 1024)
for n in (2, 3, 3):  # what comes once: exports, code, stacks of threads
    model(x[:n]).backward()
    model.zero_grad()
gc.collect()
_C.pool_trim()
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
base = resident("VmRSS")
model(x).backward()
gradients = sum(p.numel() * 4 for p in model.parameters())
print(resident("VmHWM") - base, model.stats()["arena_bytes"] + gradients)
"""


def test_peak_of_the_process_is_as_predicted() -> None:
    """What the kernel counts for a step beyond the loaded model: the arena and the gradients."""
    out = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True).stdout
    measured, predicted = map(float, out.split())
    assert predicted > 200 * MIB
    assert abs(measured - predicted) <= 0.02 * predicted


OUT_OF_MEMORY = """
import gc, resource, torch
from torch import nn
from ortmodule_c import _C, ORTModule

def reduces_batch_size(e):
    # As accelerate, transformers and Lightning decide it.
    text = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(e, RuntimeError) and len(e.args) == 1 and text in e.args[0]

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
model, batch = ORTModule(net), torch.randn(1 << 18, 16)

def step(n):
    model.zero_grad()
    model(batch[:n]).square().mean().backward()

for n in (2, 3, 5):
    step(n)
model.zero_grad()
gc.collect()
_C.pool_trim()
used = _C.pool_stats()["used_bytes"]
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (600 << 20), resource.RLIM_INFINITY))
n, refused = len(batch), []
while True:
    try:
        step(n)
        break
    except Exception as e:
        assert reduces_batch_size(e), repr(e)
        refused.append(str(e))
    n //= 2
assert "you tried to allocate" in refused[0] and len(refused) >= 2, refused
grads = [p.grad.clone() for p in net.parameters()]
model.zero_grad()
for rows in batch[:n].split(512):
    net(rows).square().sum().div(n).backward()
for ours, p in zip(grads, net.parameters()):
    torch.testing.assert_close(ours, p.grad, rtol=1e-3, atol=1e-5)
model.zero_grad()
del grads, ours
gc.collect()
assert _C.pool_stats()["used_bytes"] == used, (_C.pool_stats(), used)
assert _C.pool_stats()["peak_bytes"] < 600 << 20, _C.pool_stats()
print(model.fallback_report())
"""


def test_a_batch_too_large_raises_as_pytorch_does_and_a_smaller_one_trains() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    assert "Sequential" not in out.stdout


def test_dropping_everything_gives_everything_back() -> None:
    gc.collect()
    base = _C.pool_stats()["used_bytes"]
    model, optimizer = small()
    for _ in range(3):
        train(model, torch.randn(29, 37), optimizer)
    loss = model(torch.randn(29, 37)).sum()
    del model, optimizer, loss
    gc.collect()
    assert _C.pool_stats()["used_bytes"] == base
