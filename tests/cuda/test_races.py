"""Threads of attention's kernels are kept in order: ThreadSanitizer finds no race in shared memory, where it would.

Each thread of an emulated block is one to it, in such order as a GPU keeps alone (see emulator.h): a warp is not in
lockstep there, and a copy may come as soon as it has been asked for.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MMA, TILES = "attention_mma", "attention"
# Some ThreadSanitizers want addresses that are not at random.
FIXED = ("setarch", "-R") if subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0 else ()

# Several tiles each way, none of the last whole; causal, the last keys are seen by no query.
STEP = """
#include <stdio.h>

#ifdef OMC_CUDA_OPS_ATTENTION_BAND_H
enum { THREADS = OMC_BAND_THREADS };
#define ROWS(bands) OMC_BAND_ROWS(bands)
#else
enum { THREADS = OMC_ATTENTION_THREADS };
#define ROWS(bands) OMC_TILE
#endif
enum { HEADS = 2, KV_HEADS = 1, QUERIES = 70, KEYS = 140, SHARED_BYTES = 100 << 10 };

struct operand {
  std::vector<storage_t> elements;
  omc_attention_strides at;
  operand(int heads, int tokens, int dim)
      : elements(heads * tokens * dim, element<storage_t>(0.5f)), at{heads * tokens * dim, tokens * dim, dim} {}
  storage_t *data() { return elements.data(); }
};

static void launch(bool (*kernel)(const void *, emulated_grid), omc_attention &p, int heads, int tokens, int rows) {
  p.tiles = (tokens + rows - 1) / rows;
  if (!kernel(&p, {unsigned(heads * p.tiles), THREADS, SHARED_BYTES})) puts("a launch has failed");
}

int main() {
  operand q(HEADS, QUERIES, OMC_DIM), k(KV_HEADS, KEYS, OMC_DIM), v(KV_HEADS, KEYS, OMC_VALUE_DIM);
  operand y(HEADS, QUERIES, OMC_VALUE_DIM), dy = y, dq = q, dk = k, dv = v;
  std::vector<acc_t> lse(HEADS * QUERIES), share = lse, delta = lse;
  omc_attention p = {};
  p.q = q.data(), p.k = k.data(), p.v = v.data(), p.dy = dy.data(), p.y = y.data();
  p.dq = dq.data(), p.dk = dk.data(), p.dv = dv.data();
  p.lse = lse.data(), p.share = share.data(), p.delta = delta.data();
  p.q_at = q.at, p.k_at = k.at, p.v_at = v.at, p.y_at = y.at;
  p.queries = QUERIES, p.keys = KEYS, p.heads = HEADS, p.kv_heads = KV_HEADS;
  p.scale = 1, p.keep_scale = 2, p.drop_below = 1u << 31;
  launch(attention, p, HEADS, QUERIES, ROWS(OMC_FORWARD_BANDS(DEEPEST, PLAIN)));
  launch(attention_rows, p, HEADS, QUERIES, ROWS(OMC_DQ_BANDS(DEEPEST, PLAIN)));
  launch(attention_dq, p, HEADS, QUERIES, ROWS(OMC_DQ_BANDS(DEEPEST, PLAIN)));
  launch(attention_dkv, p, KV_HEADS, KEYS, ROWS(OMC_DKV_BANDS));
}
"""


def said(folder: Path, file: str, dim: int, causal: int, drops: int, lacks: str = "", nth: int = 0) -> str:
    """What is said of a step, from whose kernels a statement has been taken away, that which comes the n-th time."""
    parts = (ROOT / "cuda" / "ops" / f"{file}.h").read_text().split(lacks or "\0")
    changed = folder / "cuda" / "ops" / f"{file}.h"
    changed.parent.mkdir(parents=True)
    changed.write_text(lacks.join(parts[: nth + 1]) + lacks.join(parts[nth + 1 :]))
    storage = "bf16" if file == MMA else "float"
    names = {"COMPUTE_F32": "", "STORAGE": storage, "DIM": dim, "VALUE_DIM": dim, "MASK": 0}
    defines = "".join(f"#define OMC_{n} {v}\n" for n, v in {**names, "CAUSAL": causal, "DROPS": drops}.items())
    (folder / "step.cpp").write_text(f'{defines}#include "cuda/ops/{file}.h"\n{STEP}')
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fsanitize=thread", "-DOMC_EMULATED"]
    includes = [f"-I{at}" for at in (folder, ROOT / "tests" / "cuda", ROOT)]
    subprocess.run(["g++", *flags, *includes, folder / "step.cpp", "-o", folder / "step"], check=True)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    ran = subprocess.run([*FIXED, folder / "step"], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 66), ran.stderr[-3000:]  # 66: something is said
    return ran.stdout + ran.stderr


@pytest.mark.parametrize(("file", "dim", "causal", "drops"), [(MMA, 16, 0, 0), (MMA, 20, 1, 1), (TILES, 20, 1, 1)])
def test_threads_are_in_order(tmp_path: Path, file: str, dim: int, causal: int, drops: int) -> None:
    assert said(tmp_path, file, dim, causal, drops) == ""


@pytest.mark.parametrize(
    ("file", "lacks", "nth"),
    [
        (MMA, "__syncthreads();", 1),
        (MMA, "omc_wait_for_copies();", 0),
        (TILES, "__syncthreads();", 0),
        (TILES, "__syncthreads();", 5),
    ],
)
def test_where_a_barrier_lacks_it_is_told(tmp_path: Path, file: str, lacks: str, nth: int) -> None:
    assert "data race" in said(tmp_path, file, 16, 0, 0, lacks, nth)
