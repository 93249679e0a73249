"""Hugging Face models as their configs make them: train mode, caches returned, a new batch shape at every step."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from wrapped import close, pair

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
SHAPES = [(4, 12), (4, 16), (3, 12), (1, 7), (4, 12)]  # the last batch of an epoch is short


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, 64, (batch, length))


def padding(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[:, length - length // 3 :] = 0
    return mask


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **SMALL, num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def bert_for_classes() -> nn.Module:
    config = transformers.BertConfig(
        **SMALL, num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3
    )
    return transformers.BertForSequenceClassification(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2)
    )


def vit() -> nn.Module:
    sizes = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    config = transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=16, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def qwen2_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **SMALL, **experts, num_attention_heads=2, num_key_value_heads=2, shared_expert_intermediate_size=32
        )
    )


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, **experts, num_attention_heads=2, num_key_value_heads=2)
    )


def of_text(batch: int, length: int) -> dict[str, Tensor]:
    ids = tokens(batch, length)
    return {"input_ids": ids, "attention_mask": padding(batch, length), "labels": ids}


def of_pairs(batch: int, length: int) -> dict[str, Tensor]:
    types = (torch.arange(length) > length // 2).long().expand(batch, length)
    return {**of_text(batch, length), "token_type_ids": types}


def of_classes(batch: int, length: int) -> dict[str, Tensor]:
    return {**of_text(batch, length), "labels": torch.arange(batch) % 3}


def of_images(batch: int, _length: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(5, (batch,))}


def of_translation(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(batch, length), "labels": tokens(batch, length - 2)}


def assert_same_training(
    model: Callable[[], nn.Module], batch: Callable[[int, int], Any], shapes: list[Any]
) -> ORTModule:
    """Steps of AdamW of both, whose losses and gradients are compared; returns ours."""
    torch.manual_seed(0)
    eager, ours = pair(model().train())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (eager, ours)]
    for shape in shapes:
        inputs = batch(*shape)
        outputs = []
        for m, optimizer in zip((eager, ours), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(m(**inputs))
            outputs[-1].loss.backward()
        assert type(outputs[1]) is type(outputs[0]) and list(outputs[1]) == list(outputs[0])
        close(outputs[1].loss, outputs[0].loss, f"loss for {shape}")
        for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert float((p.grad - q.grad).abs().max()) <= 1e-3 * float(p.grad.abs().max()) + 1e-7, name
        for m, optimizer in zip((eager, ours), optimizers, strict=True):
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
    return ours


@pytest.mark.parametrize(
    ("model", "batch", "shapes"),
    [
        (gpt2, of_text, SHAPES),
        (bert, of_pairs, SHAPES),
        (llama, of_text, SHAPES),
        (vit, of_images, SHAPES),
        (t5, of_translation, SHAPES[:1]),
    ],
)
def test_training(model: Callable[[], nn.Module], batch: Callable[[int, int], Any], shapes: list[Any]) -> None:
    ours = assert_same_training(model, batch, shapes)
    assert not ours.fallback_report() and ours.stats()["dynamo_graphs"] == 0


def test_classifiers_have_one_graph_for_all_sizes_once_the_first_call_has_told_the_kind_of_problem() -> None:
    sizes = [(4, 11), (4, 10), (3, 9), (5, 8), (6, 7), (7, 12), (2, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = assert_same_training(bert_for_classes, of_classes, sizes)
    assert ours.config.problem_type == "single_label_classification"
    assert ours.stats()["graphs"] == 2 and ours.stats()["dynamo_graphs"] == 0


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("model", [qwen2_moe, mixtral])
def test_mixtures_of_experts_train(model: Callable[[], nn.Module]) -> None:
    assert_same_training(model, of_text, SHAPES[:3])


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_cache_of_the_caller_is_extended() -> None:
    eager, ours = pair(gpt2().eval())
    ids = tokens(2, 5)
    lengths = []
    with torch.no_grad():
        for m in (eager, ours):
            cache = transformers.DynamicCache(config=m.config)
            m(ids, past_key_values=cache)
            lengths.append((cache.get_seq_length(), m(ids[:, :1], past_key_values=cache).logits))
    assert lengths[0][0] == lengths[1][0] == 5
    close(lengths[1][1], lengths[0][1])


def test_generation() -> None:
    eager, ours = pair(gpt2().eval())
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = tokens(2, 5)
    assert torch.equal(ours.generate(ids, **settings), eager.generate(ids, **settings))


@pytest.mark.parametrize("make", [gpt2, bert])
def test_saving_a_checkpoint_is_no_new_graph(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """It writes into the config what no forward reads."""
    ours = ORTModule(make())
    ids = tokens(2, 8)
    for _ in range(2):
        ours(input_ids=ids, labels=ids).loss.backward()
        ours.save_pretrained(tmp_path)
        ours.config.task_specific_params = {"a": 1}
    ours(input_ids=ids, labels=ids)
    assert ours.stats()["graphs"] == 1
