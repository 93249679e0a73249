"""Lightning: a LightningModule that holds a wrapped model, and one that is wrapped itself."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from side_by_side import assert_ran_in_core, batches, classifier, close, library, loss_of

lightning = library("lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

pytestmark = pytest.mark.filterwarnings("ignore")


class Task(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _index: int) -> Tensor:
        loss = loss_of(self, *batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _index: int) -> None:
        self.log("val_loss", loss_of(self, *batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(task: nn.Module, precision: str, folder: Path) -> dict[str, float]:
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        precision=precision,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, batches(), batches())
    state = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    assert list(state) == [f"net.{name}" for name in classifier().state_dict()]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_training(place: str, precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = Task(classifier())
    ours = Task(ORTModule(classifier())) if place == "inside" else ORTModule(Task(classifier()))
    expected, got = (fit(task, precision, tmp_path) for task in (plain, ours))
    close(got, expected, dtype)
    close(ours.losses, plain.losses, dtype)
    close(dict(ours.state_dict()), dict(plain.state_dict()), dtype)
    wrapper = ours.net if place == "inside" else ours
    assert_ran_in_core(wrapper)
