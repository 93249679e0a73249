"""transformers.Trainer, given a wrapped model instead of a plain one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c import ORTModule
from side_by_side import assert_ran_in_core, close, gpt2, library

transformers = library("transformers")
library("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Texts(torch.utils.data.Dataset[Any]):
    """Sixteen sequences, each with a column that no forward takes."""

    def __init__(self) -> None:
        self.ids = torch.randint(1, 64, (16, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.ids[i], "labels": self.ids[i], "source": "a file"}


def train(model: nn.Module, folder: Path, resume: Path | None = None, **settings: Any) -> dict[str, list[float]]:
    """Four steps, an evaluation and a checkpoint after each second; the losses by name."""
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        optim="sgd",  # Adam makes steps of what is zero but for rounding
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    history = trainer.state.log_history
    return {name: [entry[name] for entry in history if name in entry] for name in ("loss", "grad_norm", "eval_loss")}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, torch.float32),
        ({"load_best_model_at_end": True, "torch_compile": True, "torch_compile_backend": "eager"}, torch.float32),
    ],
    ids=["fp32", "bf16", "label smoothing and accumulation", "best model and torch.compile"],
)
def test_training(settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    plain, ours = gpt2(), ORTModule(gpt2())
    expected = train(plain, tmp_path / "plain", **settings)
    got = train(ours, tmp_path / "ours", **settings)
    assert [len(losses) for losses in expected.values()] == [4, 4, 2]
    for name, losses in expected.items():
        close(got[name], losses, dtype)
    close(dict(ours.state_dict()), dict(plain.state_dict()), dtype)
    assert_ran_in_core(ours)


def test_checkpoints_are_those_of_the_plain_model(tmp_path: Path) -> None:
    """The same files, and either goes on from those of the other."""
    folders = tmp_path / "plain", tmp_path / "ours"
    expected = train(gpt2(), folders[0])
    train(ORTModule(gpt2()), folders[1])
    plain, ours = (folder / "checkpoint-2" for folder in folders)
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in plain.iterdir())
    assert type(transformers.AutoModelForCausalLM.from_pretrained(ours)) is type(gpt2())
    for model, start in ((ORTModule(gpt2()), plain), (gpt2(), ours)):
        again = train(model, tmp_path / "again", resume=start)
        close(again["eval_loss"][-1], expected["eval_loss"][-1])
