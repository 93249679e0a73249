"""Architectures of Hugging Face, made small: a configuration, and what a step of training is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, N_LABELS = 64, 3
Batch = Callable[[int, int], dict[str, Any]]


def text(batch: int, length: int) -> dict[str, Any]:
    """A padded batch whose every token is predicted."""
    ids = torch.randint(3, VOCABULARY, (batch, length))
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def whole_text(batch: int, length: int) -> dict[str, Any]:
    """Without padding, for those that take none."""
    return {k: v for k, v in text(batch, length).items() if k != "attention_mask"} | {
        "labels": torch.randint(3, VOCABULARY, (batch, length))
    }


def sentences(batch: int, length: int) -> dict[str, Any]:
    """A padded batch, a class for each row."""
    return {**text(batch, length), "labels": torch.randint(N_LABELS, (batch,))}


def questions(batch: int, length: int) -> dict[str, Any]:
    """A padded batch, and where the answers are."""
    given = {k: v for k, v in text(batch, length).items() if k != "labels"}
    return {
        **given,
        "start_positions": torch.randint(length, (batch,)),
        "end_positions": torch.randint(length, (batch,)),
    }


def images(batch: int, _length: int) -> dict[str, Any]:
    """Pictures, a class for each."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(N_LABELS, (batch,))}


def large_images(batch: int, _length: int) -> dict[str, Any]:
    """Larger ones: statistics of a batch need more than a few elements to be more than rounding."""
    return {"pixel_values": torch.randn(batch, 3, 128, 128), "labels": torch.randint(N_LABELS, (batch,))}


def segments(batch: int, _length: int) -> dict[str, Any]:
    """Pictures, a class for each pixel."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(N_LABELS, (batch, 32, 32))}


def pairs(batch: int, length: int) -> dict[str, Any]:
    """Pictures and their captions."""
    ids = text(batch, length)["input_ids"]
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 32, 32), "return_loss": True}


def waves(batch: int, length: int) -> dict[str, Any]:
    """Sound, a class for each row."""
    return {"input_values": torch.randn(batch, 100 * length), "labels": torch.randint(N_LABELS, (batch,))}


def speech(batch: int, length: int) -> dict[str, Any]:
    """Sound, and what is said."""
    return {"input_values": torch.randn(batch, 100 * length), "labels": torch.randint(1, VOCABULARY, (batch, 4))}


def spectrograms(batch: int, _length: int) -> dict[str, Any]:
    """Spectra over time, a class for each row."""
    return {"input_values": torch.randn(batch, 64, 16), "labels": torch.randint(N_LABELS, (batch,))}


def spoken(batch: int, length: int) -> dict[str, Any]:
    """Spectra over time, and what is said."""
    return {
        "input_features": torch.randn(batch, 16, 40),
        "labels": torch.randint(3, VOCABULARY, (batch, length)),
    }


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes
    ----------
    model
        Name of the class in transformers.
    batch
        Makes the arguments of a step of this batch size and length.
    config
        What is not as the configuration has it by itself.
    """

    model: str
    batch: Batch
    config: dict[str, Any]

    def build(self) -> nn.Module:
        """The model in train mode.

        Dropout, whose random numbers are others in C, is off; what else is drawn is drawn by PyTorch on both sides.
        """
        cls = getattr(transformers, self.model)
        torch.manual_seed(0)
        model = cls(cls.config_class(**self.config)).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in vars(module).items():
                if "drop" in name and name not in ("layerdrop", "drop_prob") and isinstance(value, float):
                    setattr(module, name, 0.0)
        return model


_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": N_LABELS,
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_GROUPED = {**_LLAMA, "num_key_value_heads": 1}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "dropout": 0.0,
}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": N_LABELS,
}
_WAVE = {
    **{k: v for k, v in _BERT.items() if k not in ("max_position_embeddings", "hidden_dropout_prob")},
    "conv_dim": [16, 16],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "pad_token_id": 0,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "dropout_rate": 0.0,
}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

ARCHITECTURES = {
    # Encoders of text
    "BERT": Architecture("BertForMaskedLM", text, _BERT),
    "BERT, classes": Architecture("BertForSequenceClassification", sentences, _BERT),
    "BERT, answers": Architecture("BertForQuestionAnswering", questions, {**_BERT, "num_labels": 2}),
    "RoBERTa": Architecture("RobertaForMaskedLM", text, {**_BERT, "pad_token_id": 1}),
    "DistilBERT": Architecture(
        "DistilBertForMaskedLM",
        text,
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "dropout": 0.0},
    ),
    "ALBERT": Architecture("AlbertForMaskedLM", text, {**_BERT, "embedding_size": 8}),
    "ELECTRA": Architecture("ElectraForMaskedLM", text, {**_BERT, "embedding_size": 8}),
    "DeBERTa-v2": Architecture(
        "DebertaV2ForMaskedLM",
        text,
        {**_BERT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    "MPNet": Architecture("MPNetForMaskedLM", text, _BERT),
    "MobileBERT": Architecture(
        "MobileBertForMaskedLM",
        text,
        {**_BERT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "RemBERT": Architecture(
        "RemBertForMaskedLM", text, {**_BERT, "input_embedding_size": 8, "output_embedding_size": 8}
    ),
    "SqueezeBERT": Architecture("SqueezeBertForMaskedLM", text, {**_BERT, "embedding_size": 16}),
    "LayoutLM": Architecture("LayoutLMForMaskedLM", text, _BERT),
    "Nystromformer": Architecture(
        "NystromformerForMaskedLM", text, {**_BERT, "num_landmarks": 64, "segment_means_seq_len": 64}
    ),
    "RoFormer": Architecture("RoFormerForMaskedLM", text, {**_BERT, "embedding_size": 16}),
    "ModernBERT": Architecture(
        "ModernBertForMaskedLM",
        text,
        {**_LLAMA, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    ),
    "FNet": Architecture("FNetForMaskedLM", whole_text, _BERT),
    "Funnel": Architecture(
        "FunnelForMaskedLM",
        text,
        {
            "vocab_size": VOCABULARY,
            "block_sizes": [1, 1],
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 32,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "Longformer": Architecture("LongformerForMaskedLM", text, {**_BERT, "attention_window": 4}),
    "XLNet": Architecture(
        "XLNetLMHeadModel",
        text,
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "dropout": 0.0},
    ),
    "XLM": Architecture(
        "XLMWithLMHeadModel",
        text,
        {
            "vocab_size": VOCABULARY,
            "emb_dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    # Decoders of text
    "GPT-2": Architecture("GPT2LMHeadModel", text, {**_GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "GPT-Neo": Architecture(
        "GPTNeoForCausalLM",
        text,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 32,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 64,
        },
    ),
    "GPT-J": Architecture(
        "GPTJForCausalLM", text, {**_GPT, "rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ),
    "GPT-NeoX": Architecture("GPTNeoXForCausalLM", text, _LLAMA),
    "OPT": Architecture("OPTForCausalLM", text, {**_LLAMA, "ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "BLOOM": Architecture(
        "BloomForCausalLM", text, {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    ),
    "Falcon": Architecture("FalconForCausalLM", text, {**_LLAMA, "alibi": True}),
    "LLaMA": Architecture("LlamaForCausalLM", text, _GROUPED),
    "Mistral": Architecture("MistralForCausalLM", text, {**_GROUPED, "sliding_window": 8}),
    "Qwen2": Architecture("Qwen2ForCausalLM", text, _GROUPED),
    "Qwen3": Architecture("Qwen3ForCausalLM", text, {**_GROUPED, "head_dim": 8}),
    "Gemma 2": Architecture("Gemma2ForCausalLM", text, {**_GROUPED, "head_dim": 8}),
    "Gemma 3": Architecture("Gemma3ForCausalLM", text, {**_GROUPED, "head_dim": 8, "sliding_window": 8}),
    "Phi": Architecture("PhiForCausalLM", text, {**_LLAMA, "resid_pdrop": 0.0}),
    "StableLM": Architecture("StableLmForCausalLM", text, _GROUPED),
    "OLMo 2": Architecture("Olmo2ForCausalLM", text, _GROUPED),
    "Mamba": Architecture(
        "MambaForCausalLM",
        whole_text,
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    ),
    "RWKV": Architecture(
        "RwkvForCausalLM", whole_text, {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    ),
    "Mixtral": Architecture("MixtralForCausalLM", text, {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": Architecture(
        "Qwen2MoeForCausalLM", text, {**_GROUPED, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
    ),
    # From text to text
    "T5": Architecture("T5ForConditionalGeneration", text, _T5),
    "BART": Architecture("BartForConditionalGeneration", text, _BART),
    "Pegasus": Architecture("PegasusForConditionalGeneration", text, _BART),
    # Pictures
    "ViT": Architecture("ViTForImageClassification", images, _VIT),
    "DeiT": Architecture("DeiTForImageClassification", images, _VIT),
    "BEiT": Architecture("BeitForImageClassification", images, _VIT),
    "DINOv2": Architecture("Dinov2ForImageClassification", images, _VIT),
    "Swin": Architecture(
        "SwinForImageClassification",
        images,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": N_LABELS,
        },
    ),
    "ConvNeXt": Architecture(
        "ConvNextForImageClassification",
        images,
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": N_LABELS},
    ),
    "ResNet": Architecture(
        "ResNetForImageClassification",
        images,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": N_LABELS},
    ),
    "RegNet": Architecture(
        "RegNetForImageClassification",
        images,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "num_labels": N_LABELS},
    ),
    "MobileNetV2": Architecture(
        "MobileNetV2ForImageClassification",
        large_images,
        {"image_size": 128, "depth_multiplier": 0.25, "num_labels": N_LABELS},
    ),
    "SegFormer": Architecture(
        "SegformerForSemanticSegmentation",
        segments,
        {
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": N_LABELS,
        },
    ),
    # Sound
    "Wav2Vec2": Architecture("Wav2Vec2ForSequenceClassification", waves, _WAVE),
    "Wav2Vec2, CTC": Architecture("Wav2Vec2ForCTC", speech, {**_WAVE, "ctc_zero_infinity": True}),
    "HuBERT": Architecture("HubertForSequenceClassification", waves, _WAVE),
    "AST": Architecture("ASTForAudioClassification", spectrograms, {**_VIT, "num_mel_bins": 16, "max_length": 64}),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        spoken,
        {**_BART, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32, "suppress_tokens": []},
    ),
    # Pictures and text
    "CLIP": Architecture(
        "CLIPModel",
        pairs,
        {"text_config": {**_BERT, "eos_token_id": 2}, "vision_config": _VIT, "projection_dim": 16},
    ),
}
