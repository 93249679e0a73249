"""What a training step should take on a GPU, predicted from its plan; no GPU is needed, and none is asked.

The plan is the one that the provider makes of a model (its kernels are written, and compiled by NVRTC for
their registers, shared memory and instructions; nothing is run). Operations and bytes of each step are those of the
core's records, as ``OMC_DUMP`` prints them. A step takes the longer of moving its bytes and of its operations, at the
rates of a GPU's data sheet times the parts of them that `ASSUMED` says, and launches. ``--write`` writes
docs/gpu-model.md.

How fast bytes move: what a thread reads is under way from when it asks until it is there, so that by Little's law no
more is read in that time than all threads ask for before they wait. A thread of a program asks for its elements of all
inputs that are not broadcast, one of lines for several packs (AHEAD of cuda/gpu/lines.h), and nobody waits for what is
written. Programs have no loops: a thread issues each of its instructions once. Those for the end of a tensor are
counted too, as the schedulers do not issue one at every clock.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "cuda"))

from check import Numbers, Nvrtc, find_nvrtc, wait_for_sources

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: bytes and dense operations a second, multiprocessors, bytes shared in each, clock.

    `rates` has those of matrix units by what they multiply, and of ordinary ones: "fma".
    """

    name: str
    bandwidth: float
    rates: dict[str, float]
    multiprocessors: int
    shared_bytes: int
    clock: float


_HOPPER = {"bf16": 989e12, "f16": 989e12, "tf32": 495e12, "fma": 67e12}
GPUS = (
    Gpu("A100", 2.04e12, {"bf16": 312e12, "f16": 312e12, "tf32": 156e12, "fma": 19.5e12}, 108, 164 << 10, 1.41e9),
    Gpu("H100", 3.35e12, _HOPPER, 132, 228 << 10, 1.98e9),
    Gpu("H200", 4.8e12, _HOPPER, 132, 228 << 10, 1.98e9),
)
ARCHITECTURE = "sm_90"  # that kernels are compiled for
REGISTERS, WARPS, BLOCKS, SCHEDULERS, WARP = 65536, 64, 32, 4, 32  # of a multiprocessor; threads of a warp


@dataclass(frozen=True)
class Assumed:
    """What no data sheet says.

    Attributes
    ----------
    bandwidth
        Part of it that copies reach: 4.3 of 4.8 TB/s were measured on an H200.
    product
        Part of the matrix units' rate that products reach: 790 of 989 TFLOP/s were measured there, of large ones.
    attention
        The same of attention's kernels, whose heads are short.
    fma
        Part of the ordinary units' rate that arithmetic reaches, of which half are no multiply-adds.
    tile, terms
        Rows and columns that a block of a product makes, and the fewest terms of its sums that pay.
    latency
        Seconds from a load to its data, in which other loads have to be under way.
    load_bytes
        Of a pack that a thread asks for.
    replayed, launched
        Seconds from one kernel to the next within a graph, and one by one while the host keeps ahead.
    host
        Seconds of the host's for one launch.
    """

    bandwidth: float = 0.9
    product: float = 0.8
    attention: float = 0.4
    fma: float = 0.5
    tile: tuple[int, int] = (128, 128)
    terms: int = 2048
    latency: float = 700e-9
    load_bytes: int = 16
    replayed: float = 1.3e-6
    launched: float = 2.5e-6
    host: float = 4e-6


ASSUMED = Assumed()

# ---- the plan ----

SIZES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1}


@dataclass(frozen=True)
class Value:
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Step:
    """A step of a plan: its op, its operands, and what the core says that it costs."""

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    flops: float
    bytes: float


_VALUE = re.compile(r"\d+:(\w+)\[([\d,]*)\]@")
_STEP = re.compile(r"^\d+ (\w+)[^:]*?:(.*) ->(.*?)(?: scratch \S+ \S+)? flops (\S+) moves (\S+)$", re.M)


def values_in(text: str) -> tuple[Value, ...]:
    return tuple(Value(dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _VALUE.findall(text))


def steps_of(text: str) -> list[Step]:
    """The steps of a plan as OMC_DUMP writes it."""
    return [
        Step(op, values_in(inputs), values_in(outputs), float(flops), float(moved))
        for op, inputs, outputs, flops, moved in _STEP.findall(text)
    ]


class Planned(BaseException):
    """A plan has been made, and nothing is to be run. No reason to fall back, as an Exception would be."""


def write_plan(model: str, dtype: str, folder: str, scale: str) -> None:
    """Leave the plan of a model's training step, and the sources of its kernels. In a process of its own."""
    os.environ |= {"OMC_DUMP": folder, "EMULATED_SOURCES": folder, "XDG_CACHE_HOME": folder}
    sys.path.append(str(ROOT / "tests" / "device"))
    import on_device

    on_device.build()
    on_device.install("gpu")
    plan = on_device.Session.plan

    def plan_alone(*given: object, **how: bool) -> None:
        plan(*given, **how)  # type: ignore[arg-type]
        raise Planned

    on_device.Session.plan = plan_alone  # type: ignore[method-assign, assignment]
    import torch

    from gpu_models import SCALES
    from worker import ARMS, Training

    try:
        training = Training(SCALES[scale][model], ARMS["ours"], dtype, 0.1, torch.device("cpu"))
        training.forward_and_backward()
    except Planned:
        wait_for_sources(folder)
        return
    raise SystemExit(f"{model} has made no plan")


def plan_of(model: str, dtype: str, scale: str) -> tuple[list[Step], Numbers]:
    """The steps of a model's training step on the provider for CUDA, and numbers of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--only-plan", folder, "--models", model, "--dtype", dtype]
        subprocess.run([*command, "--scale", scale], check=True, cwd=ROOT)
        plans = sorted(Path(folder).glob("plan*-plan.txt"))
        library = find_nvrtc()
        kernels: Numbers = {}
        if library:
            nvrtc = Nvrtc(library)
            for source in sorted(Path(folder).glob("*.cu")):
                for kernel, numbers in nvrtc.compiled(source, ARCHITECTURE)[1].items():
                    name = name_of(kernel, source.read_text())
                    worst = kernels.setdefault(name, numbers)
                    kernels[name] = {k: max(v, worst[k]) for k, v in numbers.items()}
        return steps_of(plans[-1].read_text()), kernels


STORED = {"float": "f32", "double": "f64", "boolean": "bool"} | {
    f"{'u' * u}int{b}_t": f"{'ui'[not u]}{b}" for u in (0, 1) for b in (8, 16, 32, 64)
}


def name_of(kernel: str, source: str) -> str:
    """A kernel's; of a program with its lanes, its ops and what it reads and writes."""
    if kernel != "program":
        return kernel
    lanes = re.search(r"OMC_LANES_OF_THREAD (\d)", source)
    ops = sorted({*re.findall(r"omc_ew_(\w+)\(", source)})
    ins, outs = (
        " ".join(STORED.get(c, c) for c in re.findall(rf"^  {of}(\w+) \*{to}\d+;", source, re.M))
        for of, to in (("const ", "x"), ("", "y"))
    )
    return f"program {lanes and lanes[1]} {' '.join(ops)}: {ins} -> {outs}"


# ---- what a step takes ----


@dataclass(frozen=True)
class Kind:
    """What steps of some ops have in common.

    Parameters
    ----------
    name
        In tables.
    ops
        Pattern of their names.
    unit
        What computes: "matrix", "fma".
    kernels
        Pattern of the names of their kernels, of {op}; "": a library's.
    packs
        That a thread of theirs asks for before it waits.
    launches
        Kernels of a step.
    work
        Operations that our kernels do for each that the core counts.
    apart_bytes
        That kernels of their own move, beside inputs and outputs.
    replays
        Whether a phase with such a step may be a CUDA graph.
    """

    name: str
    ops: str
    unit: str = "fma"
    kernels: str = ""
    launches: Callable[[Step], int] = lambda _: 1
    work: float = 1.0
    apart_bytes: Callable[[Step], float] = lambda _: 0.0
    replays: bool = True
    packs: int = 1


def logit_bytes(step: Step) -> int:
    """Of one, which is of what it is computed in but for bf16."""
    return {"bf16": 2, "f64": 8}.get(step.inputs[0].dtype, 4)


def chunks_of_head(step: Step) -> int:
    """Of rows, by cuda/ops/linear_loss.c."""
    return math.ceil(rows_of(step) * logit_bytes(step) / 8192)


def bytes_of_head(step: Step) -> float:
    """Logits are read for the loss and for the gradient, which is written; chunks add to the gradient of the weight."""
    classes, features = step.inputs[1].shape
    logits = 3 * logit_bytes(step) * rows_of(step) * classes
    return logits + chunks_of_head(step) * 2 * 4 * classes * features


def is_channels_last(step: Step) -> bool:
    """Whether a convolution's images lie as cuDNN wants them: of 16 bits (csrc/passes/channels_last.c)."""
    return SIZES[step.inputs[0].dtype] == 2


def copied_bytes(step: Step) -> float:
    """Of PyTorch's results to where the plan has them, and of layouts where cuDNN has to change them."""
    inputs, outputs = (sum(v.numel * SIZES[v.dtype] for v in those) for those in (step.inputs, step.outputs))
    return 2 * outputs + (0 if is_channels_last(step) else 2 * (inputs + outputs))


def launches_of_convolution(step: Step) -> int:
    """The library's for each result, a copy of each, and a change of layout where cuDNN has to make it."""
    results = len(step.outputs)
    return 2 * results + (0 if is_channels_last(step) else results + len(step.inputs))


def summed_bytes(step: Step) -> float:
    """What statistics of channels, and the gradients of parameters, are made of is read again for the elements.

    But for rows that stay in registers meanwhile (omc_cuda_walk_of).
    """
    row, size = step.inputs[0].shape[-1], SIZES[step.inputs[0].dtype]
    if step.op in ("LayerNormGrad", "RmsNormGrad") and 8 < row <= 1024 and row * size % 16 == 0:
        return 0.0
    if not step.op.endswith("Grad") and step.op != "BatchNorm":
        return 0.0
    summed = step.inputs[: 1 if step.op == "BatchNorm" else 2]
    return sum(v.numel * SIZES[v.dtype] for v in summed)


def launches_of_reduction(step: Step) -> int:
    """Another joins parts, where there are more rows than one goes along (columns_of of cuda/teams.c)."""
    return 1 if step.inputs[0].numel <= 2048 * step.outputs[0].numel else 2


def rows_of(step: Step) -> int:
    """Of a matrix on the left."""
    return step.inputs[0].numel // step.inputs[0].shape[-1]


def launches_of_head(step: Step) -> int:
    """For each chunk of rows three products and what is between them."""
    return 8 * chunks_of_head(step)


KINDS = (
    Kind("products", r"(Fused)?MatMul", "matrix"),
    Kind("convolutions", r"Conv\w*", "matrix", "", launches_of_convolution, 1.0, copied_bytes, replays=False),
    Kind("head and loss", r"LinearCrossEntropy", "matrix", launches=launches_of_head, apart_bytes=bytes_of_head),
    # Of 16 bits, after one that draws what dropout keeps; two kernels of backward make scores and gradients of
    # probabilities: 7 products, of which 5 are counted.
    Kind("attention", r"Attention", "attention", r"attention(_kept)?", launches=lambda _: 2),
    Kind("attention", r"AttentionGrad", "attention", r"attention_[dr]\w+", launches=lambda _: 4, work=7 / 5),
    Kind("PyTorch", r"TorchCall(Grad)?", replays=False),
    Kind("sums of picks", r"(Gather\w*|Embedding)Grad", kernels=r"scatter_\w+", launches=lambda _: 6),
    Kind("casts of weights", r"Casts", "fma", r"cast_each", lambda s: math.ceil(len(s.inputs) / 128), packs=4),
    Kind("norms", r"\w*Norm\w*", "fma", r"(sums_of_)?{op}_\w+", lambda _: 2, apart_bytes=summed_bytes, packs=4),
    Kind("reductions", r"Reduce\w+", kernels=r"reduce\w*", launches=launches_of_reduction, packs=4),
    Kind("picks", r"Gather\w*|Embedding", kernels=r"rows_\w+"),
    Kind("copies", r"Transpose|Concat|Split|Slice\w*|Expand|Pad|Tile", kernels=r"copy_\w+|transpose_\w+"),
    Kind("losses", r"\w*CrossEntropy\w*|\w*Loss\w*", kernels=r"\w*CrossEntropy\w*|\w*Loss\w*", launches=lambda _: 2),
    Kind("softmax", r"\w*Softmax\w*", kernels=r"\w*Softmax\w*"),
    Kind("pools", r"\w*Pool\w*", kernels=r"\w*Pool\w*"),
    Kind("elementwise", r"\w+", kernels=r"program .*"),
)  # fmt: skip


def kind_of(step: Step) -> Kind:
    return next(kind for kind in KINDS if re.fullmatch(kind.ops, step.op))


def occupancy(numbers: dict[str, int], threads: int, gpu: Gpu) -> float:
    """Part of a multiprocessor's warps that a kernel of so many registers and bytes shared fills."""
    warps = math.ceil(threads / WARP)
    by_registers = REGISTERS // (math.ceil(max(numbers["registers"], 1) * WARP / 256) * 256 * warps)
    by_shared = gpu.shared_bytes // (numbers["shared"] + 1024)
    return min(by_registers, by_shared, WARPS // warps, BLOCKS) * warps / WARPS


def reached_bandwidth(filled: float, gpu: Gpu, asked: float = ASSUMED.load_bytes, read: float = 1.0) -> float:
    """Bytes a second, where so many warps are filled, whose threads ask for so many bytes; `read`: part of them all."""
    under_way = filled * WARPS * WARP * asked * gpu.multiprocessors
    return min(ASSUMED.bandwidth * gpu.bandwidth, under_way / ASSUMED.latency / max(read, 1e-9))


def rate_of(step: Step, kind: Kind, gpu: Gpu, tf32: bool) -> float:
    """Operations a second."""
    if kind.unit == "fma":
        return ASSUMED.fma * gpu.rates["fma"]
    dtype = step.inputs[0].dtype
    unit = dtype if dtype in gpu.rates else "tf32" if tf32 and dtype == "f32" and kind.unit == "matrix" else "fma"
    part = ASSUMED.attention if kind.unit == "attention" else ASSUMED.product
    return part * gpu.rates[unit] * (waves(step, gpu) if kind.name == "products" else 1)


def waves(step: Step, gpu: Gpu) -> float:
    """Part of the multiprocessors that are busy on average, each making one tile of the result, or of its terms."""
    *batch, rows, columns = (1, 1, *step.outputs[0].shape)
    tiles = math.prod(batch) * math.ceil(rows / ASSUMED.tile[0]) * math.ceil(columns / ASSUMED.tile[1])
    tiles *= max(1, int(step.flops / (2 * step.outputs[0].numel)) // ASSUMED.terms)
    return tiles / (math.ceil(tiles / gpu.multiprocessors) * gpu.multiprocessors)


THREADS = 256  # of a block, of most kernels


def kernels_of(step: Step, kind: Kind, kernels: Numbers) -> Iterable[tuple[str, dict[str, int]]]:
    """Those that may be a step's: by name, programs by what they read and write and, where there is one, their op."""
    ins, outs = (" ".join(v.dtype for v in those) for those in (step.inputs, step.outputs))
    for name, numbers in kernels.items():
        if not kind.kernels or not re.fullmatch(kind.kernels.replace("{op}", step.op), name):
            continue
        ops, _, signature = name.partition(": ")
        named = {op for op in ops.split()[2:] if op == step.op}
        if kind.name != "elementwise" or (signature == f"{ins} -> {outs}" and (named or step.op in UNNAMED)):
            yield name, numbers


UNNAMED = {"FusedElementwise", "Cast", "Dropout"}  # whose programs do not tell their op


def moving_seconds(step: Step, kind: Kind, gpu: Gpu, name: str, numbers: dict[str, int]) -> float:
    """What a kernel takes to move a step's bytes, or to issue the instructions of a program."""
    filled = occupancy(numbers, THREADS, gpu)
    read = min(1.0, sum(v.numel * SIZES[v.dtype] for v in step.inputs) / step.bytes) if step.bytes else 1.0
    if not name.startswith("program "):
        asked = kind.packs * ASSUMED.load_bytes
        return step.bytes / reached_bandwidth(filled, gpu, asked, read)
    lanes, numel = int(name.split()[1]), max(v.numel for v in (*step.inputs, *step.outputs))
    asked = lanes * sum(SIZES[v.dtype] for v in step.inputs if v.numel == numel) or ASSUMED.load_bytes
    issued = numel / lanes / WARP * numbers["instructions"] / issue_rate(gpu)
    return max(step.bytes / reached_bandwidth(filled, gpu, asked, read), issued)


def issue_rate(gpu: Gpu) -> float:
    """Instructions of warps a second: one of each scheduler at each clock."""
    return gpu.multiprocessors * SCHEDULERS * gpu.clock


def seconds_of(step: Step, gpu: Gpu, kernels: Numbers, tf32: bool = False) -> float:
    """What a step takes, launches apart."""
    kind = kind_of(step)
    found = (moving_seconds(step, kind, gpu, *those) for those in kernels_of(step, kind, kernels))
    moving = max(found, default=step.bytes / reached_bandwidth(1.0, gpu, kind.packs * ASSUMED.load_bytes))
    apart = kind.apart_bytes(step) / reached_bandwidth(1.0, gpu)
    return apart + max(moving, kind.work * step.flops / rate_of(step, kind, gpu, tf32))


@dataclass(frozen=True)
class Prediction:
    """Seconds of a training step: by kind of step, of the optimizer, and with launches one by one or replayed.

    `replayed` is None where no phase is a CUDA graph.
    """

    kinds: dict[str, float]
    optimizer: float
    launches: int
    replayed: float | None
    launched: float

    @property
    def best(self) -> float:
        return self.launched if self.replayed is None else min(self.replayed, self.launched)


def optimizer_seconds(parameters: float, gpu: Gpu) -> float:
    """AdamW reads gradient, weight and two moments and writes three of them, of 4 bytes each."""
    return 28 * parameters / (ASSUMED.bandwidth * gpu.bandwidth)


def predicted(steps: Iterable[Step], kernels: Numbers, parameters: float, gpu: Gpu, tf32: bool = False) -> Prediction:
    """The step's time on a GPU; `parameters` are those that an optimizer updates."""
    kinds: dict[str, float] = {}
    launches, replays = 10, True  # of the optimizer
    for step in steps:
        kind = kind_of(step)
        kinds[kind.name] = kinds.get(kind.name, 0.0) + seconds_of(step, gpu, kernels, tf32)
        launches += kind.launches(step)
        replays &= kind.replays
    optimizer = optimizer_seconds(parameters, gpu)
    busy = sum(kinds.values()) + optimizer
    one_by_one = max(busy + launches * ASSUMED.launched, launches * ASSUMED.host)
    replayed = busy + launches * ASSUMED.replayed if replays else None
    return Prediction(kinds, optimizer, launches, replayed, one_by_one)


# ---- the page ----

MODELS = ("gpt2", "bert", "resnet18", "mlp")
HEAD = """# Predicted steps on GPUs

Written by `benchmarks/gpu_model.py --write`, on a machine without a GPU. **These are predictions, not measurements**:
what was measured is in [gpu.md](gpu.md). Each step of the plan that the provider makes takes the longer of moving its
bytes and of its operations. Of the data sheet's bandwidth {bandwidth:.0%} are reached, less where registers and shared
memory of a kernel, as compiled for {architecture}, leave too few warps for as many bytes to be under way (of kernels
that may be a step's the worst counts), or where a program of elementwise ops has more instructions than are issued
meanwhile; of the matrix units' rate {product:.0%} in products, times
how evenly tiles of {tile[0]}x{tile[1]} fill the multiprocessors, and {attention:.0%} in attention. A kernel follows the
last after {replayed:.1f} us in a graph that is replayed; launched by itself after {launched:.1f} us, if the host, which
takes {host:.0f} us for each, keeps ahead. Steps with convolutions are never replayed. AdamW is counted; so are the
seven products of attention's backward and, beside the GB of the table, passes over logits, copies of convolutions'
results and, but for images of 16 bits, changes of their layout. Not counted are caches, in which tensors of small
models stay, and the host's work outside of launches. Not known to the model are blocks of other than {threads} threads
and shared memory that is asked for at a launch, as attention's is, so that its warps are fewer than assumed here.

"""

# By model: milliseconds that are wanted of a step in bf16 on an H200, and what else is wanted of it.
GOALS = {
    "gpt2": (54.6, "1.25x `torch.compile`, 2.5x eager of Hugging Face under AMP"),
    "bert": (2.8, "1.6x `torch.compile`"),
}

PUBLISHED = """What is known of `torch.compile` elsewhere: on an A100 it took a step of nanoGPT (GPT-2 124M) from about
250 ms to about 135 ms (1.85x; its README); on an H100 llm.c was 1.42x as fast as PyTorch compiled (the figures below);
for Llama 3.1 8B it was 1.16x eager (torchtitan, 8 H100).

Published figures of others, for GPT-2 124M and 1024 tokens in bf16, on as many tokens (32,768), by their
own counts of tokens a second for each of 8 GPUs: without dropout, with a padded vocabulary. None were found of
`torch.compile` for the other three models in these shapes.

| GPU | system | tokens a second | ms | source |
|---|---|---:|---:|---|
| H100 | PyTorch with `torch.compile`, June 2024 | 332,000 | 99 | modded-nanogpt, records/060624: 5e9 in 31.4 min |
| H100 | llm.c, October 2024 | 471,000 | 70 | modded-nanogpt, records/101324_llmc: 139 ms for 524,288 tokens |
| A100 | llm.c | 218,000 | 150 | llm.c, scripts/run_gpt2_124M.sh: 300 ms for 524,288 tokens |
"""


def goals(found: dict[str, tuple[list[Step], Numbers]], scale: str) -> Iterable[str]:
    """A line for each model of which a time is wanted."""
    from gpu_models import SCALES

    for model in (name for name in GOALS if name in found and scale == "gpu"):
        steps, kernels = found[model]
        work, (wanted, also) = SCALES[scale][model], GOALS[model]
        best = 1e3 * predicted(steps, kernels, work.parameters, GPUS[-1]).best
        verdict = "**missed**" if best > wanted else "met"
        yield (
            f"Goal for {work.title} on an H200: {wanted} ms, {also}. Predicted: {best:.1f} ms, {best / wanted:.2f} of "
            f"it: {verdict}, if what is assumed holds; the ratios can only be measured.\n"
        )


def page(found: dict[str, tuple[list[Step], Numbers]], dtype: str, scale: str) -> str:
    """The tables in Markdown."""
    from gpu_models import SCALES

    in_us = {name: getattr(ASSUMED, name) * 1e6 for name in ("replayed", "launched", "host")}
    lines = [HEAD.format(**{**vars(ASSUMED), **in_us, "architecture": ARCHITECTURE, "threads": THREADS})]
    lines += [
        f"| {dtype} | GPU | TFLOP | GB moved | kernels | launched, ms | replayed, ms |",
        "|---|---|" + "---:|" * 5,
    ]
    for model, (steps, kernels) in found.items():
        work = SCALES[scale][model]
        for gpu in GPUS:
            p = predicted(steps, kernels, work.parameters, gpu, dtype == "tf32")
            flops, moved = (sum(getattr(s, name) for s in steps) for name in ("flops", "bytes"))
            replayed = "never" if p.replayed is None else f"{p.replayed * 1e3:.2f}"
            lines.append(
                f"| {work.title} | {gpu.name} | {flops / 1e12:.2f} | {moved / 1e9 + 28e-9 * work.parameters:.1f} | "
                f"{p.launches} | {p.launched * 1e3:.2f} | {replayed} |"
            )
    if dtype == "bf16":
        lines += ["", *goals(found, scale)]
    lines += ["", "Where the time of a step goes, in ms, launches apart:", ""]
    for model, (steps, kernels) in found.items():
        each = [predicted(steps, kernels, SCALES[scale][model].parameters, gpu, dtype == "tf32") for gpu in GPUS]
        lines += [
            f"| {SCALES[scale][model].title} | " + " | ".join(g.name for g in GPUS) + " |",
            "|---|---:|---:|---:|",
        ]
        for name in sorted(each[-1].kinds, key=each[-1].kinds.__getitem__, reverse=True):
            lines.append(f"| {name} | " + " | ".join(f"{p.kinds[name] * 1e3:.3f}" for p in each) + " |")
        lines += ["| AdamW | " + " | ".join(f"{p.optimizer * 1e3:.3f}" for p in each) + " |", ""]
    return "\n".join([*lines, PUBLISHED])


def main() -> None:
    from gpu_models import GPU, SCALES
    from worker import DTYPES

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=GPU, default=[*MODELS])
    p.add_argument("--dtype", choices=DTYPES, default="bf16")
    p.add_argument("--scale", choices=SCALES, default="gpu")
    p.add_argument("--write", action="store_true", help="docs/gpu-model.md")
    p.add_argument("--only-plan", metavar="FOLDER", help="leave the plan of one model there")
    a = p.parse_args()
    if a.only_plan:
        write_plan(a.models[0], a.dtype, a.only_plan, a.scale)
        return
    text = page({model: plan_of(model, a.dtype, a.scale) for model in a.models}, a.dtype, a.scale)
    print(text)
    if a.write:
        (ROOT / "docs" / "gpu-model.md").write_text(text)


if __name__ == "__main__":
    main()
