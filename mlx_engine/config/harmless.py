"""Settings of config.json that do not affect a forward pass, reviewed one by one.

Sources: the attributes that transformers' PretrainedConfig has had from version 1 to 5, which old files keep, and
configs of published models. A list for one architecture is in its model file (`Expected.harmless`).
"""

from __future__ import annotations

from collections.abc import Mapping

# How and with what the file was made, and names of classes and programs.
_BOOKKEEPING = (
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation", "_flash_attn_2_enabled", "_name_or_path", "_num_labels", "_output_attentions",
    "architectures", "attn_implementation", "auto_map", "custom_pipelines", "dtype", "is_composition", "is_decoder",
    "language", "license", "mlx_lm_version", "model_name", "model_type", "name_or_path", "processor_class",
    "return_dict", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_return_dict", "xla_device",
)  # fmt: skip
# Initial values, dropout and losses: training alone.
_TRAINING = (
    "attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout", "gradient_checkpointing", "hidden_dropout",
    "initializer_factor", "initializer_range", "loss_type", "resid_pdrop", "residual_dropout", "tf_legacy_loss",
    "use_unpadded_lm_head_loss",
)  # fmt: skip
# What an implementation does beside the logits, and whether it caches keys and values.
_EXECUTION = (
    "cache_implementation", "chunk_size_feed_forward", "flash_attn", "output_attentions", "output_hidden_states",
    "output_past", "use_cache", "use_flash_attention", "use_flash_attn", "use_fused_rms_norm",
)  # fmt: skip
# Defaults of text generation, which older files have in config.json. The caller of `generate` gives these options.
_GENERATION = (
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "pad_token",
    "pad_token_id", "prefix", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id",
)  # fmt: skip
# Other tasks than the next token.
_OTHER_TASKS = (
    "classifier_dropout", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params",
)  # fmt: skip

HARMLESS = frozenset((*_BOOKKEEPING, *_TRAINING, *_EXECUTION, *_GENERATION, *_OTHER_TASKS))

# Values that switch a feature off, in every architecture; the setting may be absent too. A model file that implements
# the feature reads the setting, and its own rule applies.
OFF: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "attention_bias": (False, None),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None, 0),
    "audio_config": (None,),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "cross_attention_hidden_size": (None,),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (None, 0),
    "is_encoder_decoder": (False, None),
    "lm_head_bias": (False,),
    "logits_scaling": (1,),
    "mlp_bias": (False, None),
    "no_rope_layers": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "num_nextn_predict_layers": (None, 0),
    "partial_rotary_factor": (None, 1),
    "pruned_heads": (None, {}),
    "qk_layernorm": (False, None),
    "quantization": (None,),
    "quantization_config": (None,),
    "residual_multiplier": (1,),
    "rope_interleaved": (False, None),
    "rope_parameters": (None,),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False, None),
    "use_qk_norm": (False, None),
    "use_sliding_window": (False, None),
    "vision_config": (None,),
}
