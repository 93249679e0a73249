"""Architectures of Hugging Face, made small: a configuration, and what makes a step of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from batches import (
    N_LABELS,
    PICTURE,
    VOCABULARY,
    Batch,
    among_text,
    answers,
    bytes_,
    captions,
    images,
    large_images,
    one_of_several_pictures,
    pages,
    pairs,
    patches,
    questions,
    segments,
    sentences,
    series,
    spectra,
    spectrograms,
    speech,
    spoken,
    text,
    unlabelled_images,
    videos,
    waves,
    whole_text,
)
from torch import nn


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
_SERIES = {
    "num_input_channels": 2,
    "context_length": 32,
    "prediction_length": 8,
    "patch_length": 8,
    "patch_stride": 8,
    "d_model": 16,
    "dropout": 0.0,
    "head_dropout": 0.0,
}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_SEEN = {"image_token_id": PICTURE, "image_token_index": PICTURE}

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
    "DeBERTa": Architecture("DebertaForMaskedLM", text, _BERT),
    "BigBird": Architecture("BigBirdForMaskedLM", text, {**_BERT, "attention_type": "original_full"}),
    "CANINE": Architecture(
        "CanineForSequenceClassification",
        sentences,
        {**_BERT, "local_transformer_stride": 2, "num_hash_buckets": 16},
    ),
    "LayoutLMv3": Architecture(
        "LayoutLMv3ForTokenClassification",
        pages,
        {
            **_BERT,
            "coordinate_size": 2,
            "shape_size": 4,
            "visual_embed": False,
            "max_2d_position_embeddings": 64,
            "rel_pos_bins": 8,
            "max_rel_pos": 16,
            "rel_2d_pos_bins": 8,
            "max_rel_2d_pos": 16,
        },
    ),
    "LiLT": Architecture(
        "LiltForTokenClassification",
        pages,
        {**_BERT, "hidden_size": 24, "max_2d_position_embeddings": 64, "channel_shrink_ratio": 2},
    ),
    "Perceiver": Architecture(
        "PerceiverForMaskedLM",
        bytes_,
        {
            "vocab_size": VOCABULARY,
            "d_latents": 16,
            "d_model": 16,
            "num_latents": 4,
            "num_blocks": 1,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "max_position_embeddings": 16,
            "qk_channels": 16,
            "v_channels": 16,
            "attention_probs_dropout_prob": 0.0,
        },
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
    "Phi-3": Architecture("Phi3ForCausalLM", text, {**_GROUPED, "resid_pdrop": 0.0}),
    "Granite": Architecture("GraniteForCausalLM", text, _GROUPED),
    "Cohere": Architecture("CohereForCausalLM", text, _GROUPED),
    "LFM2": Architecture("Lfm2ForCausalLM", text, {**_GROUPED, "layer_types": ["conv", "full_attention"]}),
    "StableLM": Architecture("StableLmForCausalLM", text, _GROUPED),
    "OLMo 2": Architecture("Olmo2ForCausalLM", text, _GROUPED),
    "Mamba": Architecture(
        "MambaForCausalLM",
        whole_text,
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    ),
    "Mamba 2": Architecture(
        "Mamba2ForCausalLM",
        whole_text,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_heads": 4,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
            "pad_token_id": 0,
        },
    ),
    "Jamba": Architecture(
        "JambaForCausalLM",
        whole_text,
        {
            **_GROUPED,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "RWKV": Architecture(
        "RwkvForCausalLM", whole_text, {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    ),
    "Mixtral": Architecture("MixtralForCausalLM", text, {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": Architecture(
        "Qwen2MoeForCausalLM", text, {**_GROUPED, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
    ),
    # From text to text
    "Qwen3-MoE": Architecture("Qwen3MoeForCausalLM", text, {**_GROUPED, **_EXPERTS, "head_dim": 8, "num_experts": 4}),
    "GPT-OSS": Architecture(
        "GptOssForCausalLM",
        text,
        {**_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3ForCausalLM",
        text,
        {
            **_LLAMA,
            **_EXPERTS,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "T5": Architecture("T5ForConditionalGeneration", text, _T5),
    "mT5": Architecture("MT5ForConditionalGeneration", text, _T5),
    "Marian": Architecture("MarianMTModel", text, _BART),
    "M2M100": Architecture("M2M100ForConditionalGeneration", text, _BART),
    "LED": Architecture(
        "LEDForConditionalGeneration",
        text,
        {
            **_BART,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
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
    "MobileViT": Architecture(
        "MobileViTForImageClassification",
        large_images,
        {
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 16],
            "num_attention_heads": 2,
            "image_size": 64,
            "num_labels": N_LABELS,
            "hidden_dropout_prob": 0.0,
        },
    ),
    "PoolFormer": Architecture(
        "PoolFormerForImageClassification",
        large_images,
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": N_LABELS, "drop_path_rate": 0.0},
    ),
    "Hiera": Architecture(
        "HieraForImageClassification",
        images,
        {
            "image_size": [32, 32],
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "masked_unit_size": [2, 2],
            "num_query_pool": 1,
            "num_labels": N_LABELS,
            "drop_path_rate": 0.0,
        },
    ),
    "ViT-MAE": Architecture(
        "ViTMAEForPreTraining",
        unlabelled_images,
        {
            **_VIT,
            "decoder_num_attention_heads": 2,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_intermediate_size": 32,
        },
    ),
    "VideoMAE": Architecture("VideoMAEForVideoClassification", videos, {**_VIT, "num_frames": 4}),
    "UperNet": Architecture(
        "UperNetForSemanticSegmentation",
        segments,
        {
            "backbone_config": _RESNET,
            "hidden_size": 8,
            "auxiliary_in_channels": 16,
            "auxiliary_channels": 8,
            "num_labels": N_LABELS,
        },
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
    "WavLM": Architecture(
        "WavLMForSequenceClassification", waves, {**_WAVE, "num_buckets": 8, "max_bucket_distance": 16}
    ),
    "AST": Architecture("ASTForAudioClassification", spectrograms, {**_VIT, "num_mel_bins": 16, "max_length": 64}),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        spoken,
        {**_BART, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32, "suppress_tokens": []},
    ),
    "Speech2Text": Architecture(
        "Speech2TextForConditionalGeneration",
        spectra,
        {
            **_BART,
            "input_feat_per_channel": 16,
            "conv_channels": 16,
            "conv_kernel_sizes": [3, 3],
            "max_source_positions": 60,
            "max_target_positions": 40,
        },
    ),
    # Series
    "PatchTST": Architecture(
        "PatchTSTForPrediction",
        series,
        {
            **_SERIES,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "attention_dropout": 0.0,
            "ff_dropout": 0.0,
            "path_dropout": 0.0,
            "positional_dropout": 0.0,
        },
    ),
    "PatchTSMixer": Architecture("PatchTSMixerForPrediction", series, {**_SERIES, "num_layers": 1}),
    # Pictures and text
    "CLIP": Architecture(
        "CLIPModel",
        pairs,
        {"text_config": {**_BERT, "eos_token_id": 2}, "vision_config": _VIT, "projection_dim": 16},
    ),
    "SigLIP": Architecture(
        "SiglipModel", pairs, {"text_config": {**_BERT, "projection_size": 16}, "vision_config": _VIT}
    ),
    "BLIP": Architecture(
        "BlipForConditionalGeneration",
        captions,
        {
            "text_config": {
                **_BERT,
                "encoder_hidden_size": 16,
                "bos_token_id": 1,
                "sep_token_id": 2,
                "pad_token_id": 0,
            },
            "vision_config": _VIT,
            "projection_dim": 16,
        },
    ),
    "ViLT": Architecture("ViltForQuestionAnswering", answers, {**_BERT, **_VIT}),
    "LLaVA": Architecture(
        "LlavaForConditionalGeneration",
        among_text(16),
        {
            **_SEEN,
            "text_config": {**_GROUPED, "model_type": "llama"},
            "vision_config": {**_VIT, "model_type": "clip_vision_model", "projection_dim": 16},
        },
    ),
    "PaliGemma": Architecture(
        "PaliGemmaForConditionalGeneration",
        among_text(16),
        {
            **_SEEN,
            "text_config": {**_GROUPED, "model_type": "gemma", "head_dim": 8},
            "vision_config": {**_VIT, "model_type": "siglip_vision_model", "projection_dim": 16},
            "projection_dim": 16,
        },
    ),
    "SmolVLM": Architecture(
        "SmolVLMForConditionalGeneration",
        one_of_several_pictures,
        {**_SEEN, "text_config": {**_GROUPED, "model_type": "llama"}, "vision_config": _VIT, "scale_factor": 2},
    ),
    "Qwen2-VL": Architecture(
        "Qwen2VLForConditionalGeneration",
        patches,
        {
            "text_config": {**_GROUPED, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            "vision_config": {
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "patch_size": 8,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "mlp_ratio": 2,
            },
            "image_token_id": PICTURE,
            "video_token_id": 4,
            "vision_start_token_id": 3,
            "vision_end_token_id": 2,
        },
    ),
}
