"""The fused optimizers in the libraries that people train by, beside PyTorch's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ortmodule_c import ORTModule
from ortmodule_c.optim import FusedAdam, FusedLamb
from side_by_side import batches, classifier, close, gpt2, library, loss_of, one_of

pytestmark = pytest.mark.filterwarnings("ignore")

# A large eps: else Adam makes steps of what is zero but for rounding.
NUMBERS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **NUMBERS)


def fused(params: Any, **options: Any) -> torch.optim.Optimizer:
    return FusedAdam(params, **NUMBERS, **options)


def test_trainer(tmp_path: Path) -> None:
    transformers = library("transformers")
    library("accelerate")
    ids = torch.randint(1, 64, (16, 12), generator=torch.Generator().manual_seed(1))
    texts = [{"input_ids": row, "labels": row} for row in ids]

    def train(model: nn.Module, make: Any, folder: Path, resume: Path | None = None) -> list[float]:
        args = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            logging_steps=1,
            save_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        trainer = transformers.Trainer(model=model, args=args, train_dataset=texts, optimizers=(optimizer, schedule))
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = train(gpt2(), plain, tmp_path / "plain")
    close(train(ORTModule(gpt2()), fused, tmp_path / "ours"), expected)
    close(train(gpt2(), fused, tmp_path / "on", tmp_path / "plain/checkpoint-2")[-1:], expected[-1:])
    close(train(gpt2(), plain, tmp_path / "on", tmp_path / "ours/checkpoint-2")[-1:], expected[-1:])


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, tmp_path: Path) -> None:
    accelerate = library("accelerate")

    def train(model: nn.Module, make: Any, save: Path, load: Path | None = None) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        prepared, optimizer, loader = accelerator.prepare(model, make(model.parameters()), batches())
        if load:
            accelerator.load_state(str(load))
        losses = []
        for x, y in loader:
            with accelerator.accumulate(prepared):
                loss = loss_of(prepared, x, y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.save_state(str(save))
        return losses

    dtype = {"no": torch.float32, "bf16": torch.bfloat16}[precision]
    close(
        train(ORTModule(classifier()), fused, tmp_path / "ours"), train(classifier(), plain, tmp_path / "plain"), dtype
    )
    expected = train(classifier(), plain, tmp_path / "again", tmp_path / "plain")
    close(train(classifier(), fused, tmp_path / "again", tmp_path / "plain"), expected, dtype)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(precision: str, tmp_path: Path) -> None:
    lightning = library("lightning")

    class Task(lightning.LightningModule):
        def __init__(self, net: nn.Module, make: Any) -> None:
            super().__init__()
            self.net, self.make = net, make
            self.losses: list[float] = []

        def training_step(self, batch: Any, _index: int) -> Tensor:
            loss = loss_of(self.net, *batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = self.make(self.net.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    # In mixed precision Lightning does not clip for optimizers that divide by the scale themselves, as those with
    # fused=True.
    clips = precision == "32-true"
    ours = fused if clips else lambda params: fused(params, max_grad_norm=1.0)
    tasks = Task(ORTModule(classifier()), ours), Task(classifier(), plain)
    for task in tasks:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            precision=precision,
            gradient_clip_val=1.0 if clips or task is tasks[1] else None,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, batches())
    close(tasks[0].losses, tasks[1].losses, torch.float32 if precision == "32-true" else torch.bfloat16)


def sharded_steps(rank: int, world: int, meeting: str) -> None:
    with one_of(world, rank, meeting):
        ends = []
        for make in (fused, plain):
            model = fully_shard(classifier(), mesh=dist.init_device_mesh("cpu", (world,)))
            optimizer = make(model.parameters())
            for step in range(3):
                g = torch.Generator().manual_seed(10 * step + rank)
                loss_of(model, torch.randn(4, 6, generator=g), torch.randint(3, (4,), generator=g)).backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append({name: t.full_tensor() for name, t in model.state_dict().items()})
            state = optimizer.state[next(iter(model.parameters()))]["exp_avg"]
            assert state.shape == next(iter(model.parameters())).shape
        close(ends[0], ends[1])
        for optimizer in (FusedLamb(model.parameters()), FusedAdam(model.parameters(), max_grad_norm=1.0)):
            loss_of(model, torch.randn(4, 6), torch.zeros(4, dtype=torch.long)).backward()
            with pytest.raises(ValueError, match="is sharded"):
                optimizer.step()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch is built without gloo")
def test_fully_shard(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sharded_steps, (2, str(tmp_path / "meeting")), nprocs=2)
