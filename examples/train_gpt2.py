"""Train a GPT-2 to complete Python code, through PyTorch, through ORTModule, or through both.

The text is, unless ``--text`` names other files, the source of Python's own standard library. With
``--backend both`` each backend runs in its own process with the same seed, and one table compares
them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm

from corpus import encode, read_files, standard_library, train_tokenizer

PROMPTS = ["def __init__(self", "import os\n\ndef ", "class "]


@dataclass(frozen=True)
class Preset:
    """A model and the run that suits it; ``medium`` is GPT-2 medium."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    seq: int
    batch: int
    steps: int
    lr: float
    characters: int


PRESETS = {
    "tiny": Preset(4, 256, 4, 4096, 128, 8, 200, 1e-3, 4_000_000),
    "small": Preset(12, 768, 12, 16384, 256, 4, 200, 3e-4, 12_000_000),
    "medium": Preset(24, 1024, 16, 50257, 512, 2, 100, 2e-4, 40_000_000),
}


@dataclass
class Result:
    """What one backend's run leaves behind. Times in seconds, memory in bytes over the loaded model."""

    losses: list[float]
    first_step: float
    step: float
    tokens_per_second: float
    peak_memory: int
    sample: str


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--text", nargs="+", type=Path, metavar="PATH", help="files or folders of text (default: Python's library)"
    )
    p.add_argument("--preset", choices=PRESETS, default="tiny")
    p.add_argument("--steps", type=int, help="optimizer steps, those of a resumed run included")
    p.add_argument("--batch", type=int, help="sequences per step")
    p.add_argument("--seq", type=int, help="tokens per sequence")
    p.add_argument("--lr", type=float, help="learning rate of AdamW")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: torch.autocast")
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--backend", choices=["torch", "ortmodule", "both"], default="both")
    p.add_argument("--save-onnx", type=Path, metavar="DIR", help="write the exported, joint and final graphs there")
    p.add_argument("--checkpoint", type=Path, metavar="PATH", help="write model and optimizer there at the end")
    p.add_argument("--resume", type=Path, metavar="PATH", help="go on from such a file")
    p.add_argument(
        "--plot", type=Path, default=Path("loss.png"), metavar="PNG", help="where both loss curves are drawn"
    )
    p.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # folder that parent and child share
    a = p.parse_args(argv)
    preset = PRESETS[a.preset]
    for name in ("steps", "batch", "seq", "lr"):
        value = getattr(a, name)
        setattr(a, name, getattr(preset, name) if value is None else value)
        if getattr(a, name) <= 0:
            p.error(f"--{name}: {value} is not above 0")
    for path in a.text or []:
        if not path.exists():
            p.error(f"--text: there is no {path}")
    if a.resume and not a.resume.exists():
        p.error(f"--resume: there is no {a.resume}")
    if a.backend == "both" and (a.checkpoint or a.resume):
        p.error("--checkpoint and --resume go with --backend torch or ortmodule")
    return a


def prepare(a: argparse.Namespace, work: Path) -> None:
    """Tokenizer and token ids into the shared folder."""
    preset = PRESETS[a.preset]
    texts = list(read_files(a.text or [standard_library()], preset.characters))
    if not texts:
        raise SystemExit("--text: no text found")
    tokenizer = train_tokenizer(texts, preset.vocabulary)
    ids = encode(tokenizer, texts)
    if len(ids) <= a.seq + 1:
        raise SystemExit(f"--text: {len(ids)} tokens are too few for --seq {a.seq}")
    tokenizer.save(str(work / "tokenizer.json"))
    np.save(work / "ids.npy", ids)
    size = sum(map(len, texts))
    print(f"{size:,} characters in {len(texts)} files, {len(ids):,} tokens of {tokenizer.get_vocab_size()}")


def build(a: argparse.Namespace, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    preset = PRESETS[a.preset]
    torch.manual_seed(a.seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=max(a.seq, 256),
        n_embd=preset.width,
        n_layer=preset.layers,
        n_head=preset.heads,
        resid_pdrop=a.dropout,
        embd_pdrop=a.dropout,
        attn_pdrop=a.dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


def batch(ids: np.ndarray, a: argparse.Namespace, step: int) -> torch.Tensor:
    """The batch of a step: the same for every backend and for a resumed run."""
    rng = np.random.default_rng((a.seed, step))
    starts = rng.integers(0, len(ids) - a.seq, a.batch)
    return torch.from_numpy(np.stack([ids[s : s + a.seq] for s in starts]).astype(np.int64))


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def train(a: argparse.Namespace, work: Path) -> Result:
    """One backend's run."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    ids = np.load(work / "ids.npy")
    model = build(a, tokenizer.get_vocab_size())
    model.train()
    loaded = memory("VmRSS")
    if a.backend == "ortmodule":
        from ortmodule_c import DebugOptions, ORTModule

        options = None
        if a.save_onnx:
            a.save_onnx.mkdir(parents=True, exist_ok=True)
            options = DebugOptions(save_onnx=True, onnx_prefix="gpt2", save_path=str(a.save_onnx))
        model = ORTModule(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.01)
    start, losses, times = 0, [], []
    if a.resume:
        state = torch.load(a.resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        start, losses = state["step"], state["losses"]
        if start >= a.steps:
            raise SystemExit(f"--steps: {a.resume} has taken {start} steps, which leaves none of {a.steps}")
    autocast = torch.autocast("cpu", torch.bfloat16) if a.dtype == "bfloat16" else contextlib.nullcontext()
    with tqdm(total=a.steps, initial=start, desc=f"{a.backend:9}", unit="step") as bar:
        for step in range(start, a.steps):
            begin = time.perf_counter()
            x = batch(ids, a, step)
            for group in optimizer.param_groups:
                group["lr"] = a.lr * min(1.0, (step + 1) / 20)
            with autocast:
                loss = model(input_ids=x, labels=x).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - begin)
            if not math.isfinite(losses[-1]):
                raise SystemExit(f"step {step}: the loss is {losses[-1]}")
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            bar.update()
    peak = memory("VmHWM") - loaded
    if a.checkpoint:
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "step": a.steps,
                "losses": losses,
            },
            a.checkpoint,
        )
    steady = sorted(times[1:] or times)
    median = steady[len(steady) // 2] if steady else 0.0
    rate = a.batch * a.seq / median if median else 0.0
    return Result(losses, times[0] if times else 0.0, median, rate, peak, sample(model, tokenizer, a))


def sample(model: nn.Module, tokenizer: Tokenizer, a: argparse.Namespace) -> str:
    """A completion of the first prompt."""
    model.eval()
    torch.manual_seed(a.seed)
    x = torch.tensor([tokenizer.encode(PROMPTS[0]).ids])
    with torch.no_grad():
        y = model.generate(
            input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=60, do_sample=True, temperature=0.7, top_k=40
        )
    return tokenizer.decode(y[0].tolist())


def smooth(losses: list[float], weight: float = 0.95) -> list[float]:
    """Exponential moving average with its start corrected."""
    out, mean = [], 0.0
    for i, loss in enumerate(losses):
        mean = weight * mean + (1 - weight) * loss
        out.append(mean / (1 - weight ** (i + 1)))
    return out


def compare(a: argparse.Namespace, results: dict[str, Result]) -> None:
    """The table, the picture and the sample."""
    from rich.console import Console
    from rich.table import Table

    names = list(results)
    table = Table(
        title=f"GPT-2 {a.preset}, batch {a.batch}, {a.seq} tokens, {a.dtype}, {torch.get_num_threads()} threads"
    )
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    if len(names) == 2:
        table.add_column("ratio", justify="right")

    def row(label: str, values: list[float], form: str) -> None:
        cells = [form.format(v) for v in values]
        if len(values) == 2:
            cells.append(f"{values[1] / values[0]:.3f}" if values[0] else "")
        table.add_row(label, *cells)

    n = min(len(r.losses) for r in results.values())
    for step in sorted({*range(0, n, max(1, n // 8)), n - 1}):
        row(f"loss, step {step}", [r.losses[step] for r in results.values()], "{:.4f}")
    row("loss, smoothed, last step", [smooth(r.losses)[-1] for r in results.values()], "{:.4f}")
    row("step, ms", [r.step * 1e3 for r in results.values()], "{:.1f}")
    row("first step, s", [r.first_step for r in results.values()], "{:.2f}")
    row("tokens/s", [r.tokens_per_second for r in results.values()], "{:,.0f}")
    row("peak memory over the model, MiB", [r.peak_memory / 2**20 for r in results.values()], "{:,.0f}")
    Console().print(table)
    plot(a, results)
    for name, r in results.items():
        print(f"\ncompletion by {name}:\n{r.sample}")


def plot(a: argparse.Namespace, results: dict[str, Result]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for (name, r), style in zip(results.items(), ["-", "--"], strict=False):
        axes.plot(smooth(r.losses), style, label=f"{name}, {r.step * 1e3:.0f} ms a step")
    axes.set(xlabel="step", ylabel="loss (smoothed)", title=f"GPT-2 {a.preset} on Python source")
    axes.legend()
    figure.tight_layout()
    figure.savefig(a.plot, dpi=120)
    plt.close(figure)
    print(f"loss curves: {a.plot}")


def run_child(argv: list[str], backend: str, work: Path) -> Result:
    """One backend in its own process, so that its memory is its own."""
    command = [sys.executable, __file__, *argv, "--backend", backend, "--work", str(work)]
    code = subprocess.run(command, check=False, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}).returncode
    if code:
        raise SystemExit(code)
    return Result(**json.loads((work / f"{backend}.json").read_text()))


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    a = parse(argv)
    if a.work:
        (a.work / f"{a.backend}.json").write_text(json.dumps(asdict(train(a, a.work))))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(a, work)
        if a.backend == "both":
            rest = [x for i, x in enumerate(argv) if x != "--backend" and (i == 0 or argv[i - 1] != "--backend")]
            results = {name: run_child(rest, name, work) for name in ("torch", "ortmodule")}
        else:
            results = {a.backend: train(a, work)}
    compare(a, results)


if __name__ == "__main__":
    main()
