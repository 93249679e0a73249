"""The kernels of the core give the same bits from run to run and for any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import hashlib, torch
from torch import nn
from torch.nn import functional as F
from ortmodule_c import ORTModule

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.MaxPool2d(2)
        self.embed, self.attend = nn.Embedding(50, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.last, self.drop = nn.Linear(32, 50), nn.Dropout(0.1)

    def forward(self, image, ids, target):
        a = self.pool(F.relu(self.norm(self.conv(image)))).flatten(1).sum(1)
        h = self.embed(ids)
        h = F.layer_norm(h + self.attend(h, h, h, need_weights=False)[0], (32,))
        return F.cross_entropy(self.last(self.drop(F.gelu(h))).flatten(0, 1), target.flatten()) + a.tanh().mean()

def bits(threads, dtype):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = ORTModule(Net())
    data = [(torch.randn(4, 3, 33, 31), torch.randint(50, (4, 65)), torch.randint(50, (4, 65))) for _ in range(2)]
    torch.manual_seed(1)
    digest = hashlib.sha256()
    for batch in data:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(*batch)
        loss.backward()
        digest.update(loss.detach().numpy().tobytes())
    for t in [p.grad for p in model.parameters()] + [b.double() for b in model.buffers()]:
        digest.update(t.numpy().tobytes())
    assert not model.fallback_report()
    return digest.hexdigest()

for dtype in (None, torch.bfloat16, torch.float16):
    print(len({bits(n, dtype) for n in (1, 2, 3, 5, 2, 1)}))
"""


def test_bits_do_not_depend_on_run_or_threads() -> None:
    env = {**os.environ, "OMC_GEMM": "own"}
    env.pop("OMP_NUM_THREADS", None)
    out = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, env=env).stdout
    assert out.split() == ["1"] * 3  # in float32, and under autocast
