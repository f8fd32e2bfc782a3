"""`Settings` reads a checkpoint's settings with their types and defaults, and refuses settings that no config reads.

The lists below name the settings that are ignored for every architecture.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mlx_engine.errors import UnsupportedConfigError

# Settings about the origin of the file, and names of classes and programs.
_BOOKKEEPING = (
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation", "_flash_attn_2_enabled", "_name_or_path", "_num_labels", "_output_attentions",
    "architectures", "attn_implementation", "auto_map", "custom_pipelines", "dtype", "is_composition", "is_decoder",
    "language", "license", "mlx_lm_version", "model_name", "model_type", "name_or_path", "processor_class",
    "return_dict", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_return_dict", "xla_device",
)  # fmt: skip
# Settings of training: initial values, dropout and losses.
_TRAINING = (
    "attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout", "gradient_checkpointing", "hidden_dropout",
    "initializer_factor", "initializer_range", "loss_type", "resid_pdrop", "residual_dropout", "tf_legacy_loss",
    "use_unpadded_lm_head_loss",
)  # fmt: skip
# Settings of how transformers runs: additional outputs, and the cache of keys and values.
_EXECUTION = (
    "cache_implementation", "chunk_size_feed_forward", "flash_attn", "output_attentions", "output_hidden_states",
    "output_past", "use_cache", "use_flash_attention", "use_flash_attn", "use_fused_rms_norm",
)  # fmt: skip
# Defaults of text generation, which older files have in config.json. They are ignored: `generate` has options for them.
_GENERATION = (
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "pad_token",
    "pad_token_id", "prefix", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id",
)  # fmt: skip
# Settings in files of the first Llama models: a flag, and the degree of tensor parallelism in training.
_OLD_LLAMA = ("is_llama_config", "pretraining_tp")
# Settings of layers of multi-token prediction (MTP). If the layers are unused, `weights/plan.py` ignores their tensors.
MTP = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
_MTP = (*MTP, "mtp_transformer_layers", "mtp_use_dedicated_embeddings", "use_mtp")
# Settings of tasks other than predicting the next token.
_OTHER_TASKS = (
    "classifier_dropout", "classifier_from_token", "finetuning_task", "id2label", "is_original_qwen3_reranker",
    "label2id", "num_labels", "problem_type", "task_specific_params",
)  # fmt: skip

HARMLESS = frozenset((*_BOOKKEEPING, *_TRAINING, *_EXECUTION, *_GENERATION, *_MTP, *_OLD_LLAMA, *_OTHER_TASKS))

# Keys of GGUF files that no config reads, because `checkpoint/pooling.py` reads them.
HARMLESS_IN_GGUF = frozenset(("classifier.output_labels", "pooling_type"))

# Maps settings to the values that switch their features off. Even if an architecture's config does not read such
# a setting, these values are accepted.
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


# Passed as the default of a setting that must be present.
REQUIRED: Any = object()

# The largest accepted number of layers, far more than any model has. Without this bound, a damaged number would cause
# an error that lists millions of missing tensors.
MOST_LAYERS = 10_000

# The largest accepted whole number, because some kernels keep sizes and positions in 32 bits.
LARGEST = 2**31 - 1


# Types whose values can be compared with `value in allowed`. A NumPy array cannot: `==` compares its elements.
_COMPARABLE = (str, int, float, list, dict, type(None))


class Settings:
    """Reads a mapping of settings and remembers which keys were read; raises UnsupportedConfigError for wrong values.

    Call `refuse_rest` last. It raises an error for a setting that was not read, because results could be wrong if the
    setting were ignored.
    """

    def __init__(self, values: Mapping[str, object], *, where: str, path: str = "") -> None:
        """Make a reader of settings; `where` names the file in errors.

        For nested settings, `path` is the beginning of their names, such as "rope_scaling.".
        """
        self._values, self._where, self._path = values, where, path
        self._read, self._required = set[str](), set[str]()

    def whole(self, key: str, default: Any = REQUIRED) -> int:
        """Return a whole number from 1 to `LARGEST`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise self.error(key, f"a whole number from 1 to {LARGEST:,}", value)
        return value

    def whole_or_none(self, key: str, default: Any = REQUIRED) -> int | None:
        """Return a whole number from 1 to `LARGEST`; None for null, `default` for an absent key."""
        self._read.add(key)
        return None if self._values.get(key, default) is None else self.whole(key, default)

    def whole_or_zero(self, key: str, default: Any = 0) -> int:
        """Return a whole number from 0 to `LARGEST`; `default` if the key is absent or null."""
        return 0 if self._get(key, default) == 0 else self.whole(key, default)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """Return a finite number > 0."""
        value = self._get(key, default)
        # The upper bound also excludes ints that are too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < sys.float_info.max:
            raise self.error(key, "a finite number > 0", value)
        return float(value)

    def number_or_none(self, key: str, default: Any = REQUIRED) -> float | None:
        """Return a finite number > 0; None for null, `default` for an absent key."""
        self._read.add(key)
        return None if self._values.get(key, default) is None else self.number(key, default)

    def number_or_zero(self, key: str) -> float:
        """Return a finite number >= 0; 0 if the key is absent or null."""
        return 0.0 if self._get(key, 0) in (0, 0.0) else self.number(key)

    def numbers(self, key: str, n: int, default: Any = REQUIRED) -> list[float]:
        """Return a list of n finite numbers > 0."""
        values = self._get(key, default)
        if not isinstance(values, list) or len(values) != n:
            raise self.error(key, f"a list of {n} numbers", values)
        each = Settings({str(i): value for i, value in enumerate(values)}, where=f"{self._where}: {key}")
        return [each.number(str(i)) for i in range(n)]

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """Return True or False."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def mapping(self, key: str) -> Settings | None:
        """Return nested settings; None if the key is absent or null."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "a mapping", value)
        return Settings(value, where=f"{self._where}: {key}", path=f"{self._path}{key}.")

    def choice(self, key: str, default: Any, *others: str) -> str:
        """Return a string among `default` and `others`; `default` if the key is absent.

        If `default` is REQUIRED, the key must be present, and have one of `others`.
        """
        value = self._get(key, default)
        words = others if default is REQUIRED else tuple(dict.fromkeys((default, *others)))
        if not isinstance(value, str) or value not in words:
            raise self.error(key, " or ".join(map(repr, words)), value)
        return value

    def words(self, key: str, n: int, *allowed: str) -> list[str] | None:
        """Return a list of n words, each among `allowed`; None if the key is absent."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != n or not all(word in allowed for word in value):
            raise self.error(key, f"{n} words among {', '.join(allowed)}", value)
        return value

    def some_words(self, key: str, *allowed: str) -> list[str] | None:
        """Return a list of one or more words, each among `allowed`; None if the key is absent."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(word in allowed for word in value):
            raise self.error(key, f"words among {', '.join(allowed)}", value)
        return value

    def pattern(self, key: str, letters: str) -> str | None:
        """Return a string of characters among `letters`, read from a string or a list; None if the key is absent."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, str | list) or not value or not all(of in tuple(letters) for of in value):
            raise self.error(key, f"letters among {letters}", value)
        return "".join(value)

    def flags(self, key: str, n: int) -> tuple[bool, ...] | None:
        """Return n flags; the file has booleans, or 0 and 1. None if the key is absent or the list is empty."""
        value = self._get(key, None)
        if value is None or (isinstance(value, list) and not value):
            return None
        flags = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(flags, list) or len(flags) != n or not all(flag in (0, 1) for flag in flags):
            raise self.error(key, f"{n} flags", value)
        return tuple(map(bool, flags))

    def counts(self, key: str, n: int) -> list[int] | None:
        """Return n whole numbers from 0 to `LARGEST`; a single number is repeated. None if the key is absent."""
        value = self._get(key, None)
        if value is None:
            return None
        found = [value] * n if isinstance(value, int) else list(value) if isinstance(value, Collection) else []
        if len(found) != n or not all(
            isinstance(i, int | np.integer) and not isinstance(i, bool) and 0 <= i <= LARGEST for i in found
        ):
            raise self.error(key, f"{n} whole numbers from 0 to {LARGEST:,}", value)
        return [int(i) for i in found]

    def indices(self, key: str, n: int) -> list[int]:
        """Return a list of indices below n; all indices if the key is absent."""
        value = self._get(key, list(range(n)))
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < n for i in value):
            raise self.error(key, f"a list of whole numbers below {n}", value)
        return value

    def expect(self, key: str, *allowed: object) -> None:
        """Check that the setting is absent, null or one of the allowed values."""
        value = self._get(key, allowed[0])
        if not isinstance(value, _COMPARABLE) or value not in allowed:
            raise self.error(key, " or ".join(map(repr, allowed)), value)

    def refuse_rest(self, harmless: Collection[str] = ()) -> None:
        """Raise an error for the first key that was not read and is not harmless, unless `OFF` lists its value."""
        for key, value in self._values.items():
            if key in self._read or key in harmless:
                continue
            off = OFF.get(key, ())
            if not isinstance(value, _COMPARABLE) or value not in off:
                raise self.error(key, " or ".join(["absent", *map(repr, off)]), value)

    def _get(self, key: str, default: object) -> object:
        self._read.add(key)
        if default is REQUIRED:
            self._required.add(key)
        if key not in self._values and default is REQUIRED:
            raise self.error(key, "present", "nothing")
        value = self._values.get(key, default)
        # In config.json, null means the default.
        return default if value is None and default is not REQUIRED else value

    def error(self, key: str, expected: str, found: object) -> UnsupportedConfigError:
        """Return the error about one setting, for the caller to raise."""
        # The error suggests `--allow-setting NAME`, except for a setting that must be present.
        name = None if key in self._required else self._path + key
        return UnsupportedConfigError(where=self._where, key=key, expected=expected, found=found, name=name)
