"""PEFT: low-rank adapters of a model that is wrapped, before or after they are put in."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c import ORTModule
from side_by_side import assert_ran_in_core, close, gpt2, library

peft = library("peft")
IDS = torch.randint(1, 64, (4, 12), generator=torch.Generator().manual_seed(1))


def adapted(base: nn.Module) -> Any:
    torch.manual_seed(0)
    places = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    return peft.get_peft_model(base, peft.LoraConfig(r=4, **places, init_lora_weights=False, task_type="CAUSAL_LM"))


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_model_with_adapters(tmp_path: Path) -> None:
    plain = adapted(gpt2())
    ours = ORTModule(copy.deepcopy(plain))
    close(losses(ours), losses(plain))
    close(dict(ours.state_dict()), dict(plain.state_dict()))
    for model in (plain, ours):
        model.save_pretrained(tmp_path / type(model).__name__)
    saved = [peft.load_peft_weights(tmp_path / type(model).__name__) for model in (ours, plain)]
    close(*saved)
    with plain.disable_adapter(), ours.disable_adapter():
        close(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    close(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert_ran_in_core(ours)
    close(ours.merge_and_unload()(input_ids=IDS).logits, plain.merge_and_unload()(input_ids=IDS).logits)


def test_adapters_of_a_wrapped_model() -> None:
    base = ORTModule(gpt2())
    plain, ours = adapted(gpt2()), adapted(base)
    close(losses(ours), losses(plain))
    close(dict(ours.state_dict()), dict(plain.state_dict()))
    assert_ran_in_core(base)


@pytest.mark.parametrize("mode", [True, False])
def test_several_adapters(mode: bool) -> None:
    plain = adapted(gpt2()).train(mode)
    plain.add_adapter("other", plain.peft_config["default"])
    ours = ORTModule(copy.deepcopy(plain))
    for name in ("other", "default", "other"):
        for model in (plain, ours):
            model.set_adapter(name)
        close(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert_ran_in_core(ours)
