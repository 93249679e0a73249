"""Accelerate, which puts a wrapper of its own in place of the model's forward."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule_c import ORTModule
from side_by_side import assert_ran_in_core, batches, classifier, close, library, loss_of

accelerate = library("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def train(model: nn.Module, precision: str, save: Path | None = None, load: Path | None = None) -> list[float]:
    """Six batches, a step of the optimizer after each second."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    prepared, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches())
    assert prepared is model
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
    if save:
        accelerator.save_state(str(save))
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    return losses


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_training(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, ours = classifier(), ORTModule(classifier())
    expected = train(plain, precision, save=tmp_path / "plain")
    close(train(ours, precision, save=tmp_path / "ours"), expected, dtype)
    close(dict(ours.state_dict()), dict(plain.state_dict()), dtype)
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {p.name for p in (tmp_path / "plain").iterdir()}
    expected = train(classifier(), precision, load=tmp_path / "ours")
    close(train(ours, precision, load=tmp_path / "plain"), expected, dtype)
    assert_ran_in_core(ours)


def test_the_mixed_precision_is_taken_off_again() -> None:
    plain, ours = classifier(), ORTModule(classifier())
    for model in (plain, ours):
        train(model, "bf16")
        assert "_original_forward" not in {**model.__dict__, **ours.module.__dict__}
    graphs = ours.stats()["graphs"]
    close(ours(torch.ones(2, 6)), plain(torch.ones(2, 6)), torch.bfloat16)
    assert ours.stats()["graphs"] == graphs + 1
