"""A model's sizes as its files state them, for any architecture: what is known is named, the rest left out."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_engine.checkpoint.listing import Listing

# Our name of a size; GGUF's keys for it, below the architecture's prefix; the keys of config.json. The first
# key that a file has counts.
_SIZES = {
    "n_layers": (("block_count",), ("num_hidden_layers", "n_layer")),
    "hidden_size": (("embedding_length",), ("hidden_size", "n_embd")),
    "n_heads": (("attention.head_count",), ("num_attention_heads", "n_head")),
    "n_kv_heads": (("attention.head_count_kv",), ("num_key_value_heads",)),
    "head_dim": (("attention.key_length",), ("head_dim",)),
    "intermediate_size": (("feed_forward_length",), ("intermediate_size", "n_inner")),
    "vocab_size": (("vocab_size",), ("vocab_size",)),
    "context_length": (("context_length",), ("max_position_embeddings", "n_positions")),
    "rope_theta": (("rope.freq_base",), ("rope_theta",)),
    "norm_eps": (
        ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ),
    "sliding_window": (("attention.sliding_window",), ("sliding_window",)),
}


def summary(listing: Listing) -> dict[str, object]:
    """Architecture, number of parameters and sizes, each present only where the files tell."""
    is_gguf = listing.format == "GGUF"
    architecture = listing.metadata.get("general.architecture" if is_gguf else "model_type")
    settings = listing.metadata if is_gguf else _flat(listing.metadata)
    prefix = f"{architecture}." if is_gguf else ""
    known: dict[str, object] = {}
    for name, (gguf_keys, hf_keys) in _SIZES.items():
        keys = [prefix + key for key in (gguf_keys if is_gguf else hf_keys)]
        known[name] = next((settings[key] for key in keys if settings.get(key) is not None), None)
    if is_gguf:
        _add_defaults(known, listing)
    n_parameters = sum(row.n_elements for row in listing.tensors)
    known = {"architecture": architecture, "n_parameters": n_parameters or None, **known}
    return {name: value for name, value in known.items() if value is not None}


def _flat(config: Mapping[str, object]) -> Mapping[str, object]:
    """config.json, with what it nests on one level: a text model beside one of images, and its rotation.

    Transformers 5 moved that into `rope_parameters`, where layers that rotate differently have a mapping each.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    rope = config.get("rope_parameters")
    rope = rope.get("full_attention", rope) if isinstance(rope, Mapping) else None
    return {**rope, **config} if isinstance(rope, Mapping) else config


def _add_defaults(known: dict[str, object], listing: Listing) -> None:
    """GGUF leaves out what follows from the rest."""
    hidden, heads = known["hidden_size"], known["n_heads"]
    if known["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        known["head_dim"] = hidden // heads
    if known["vocab_size"] is None:
        tokens = listing.metadata.get("tokenizer.ggml.tokens")
        known["vocab_size"] = len(tokens) if isinstance(tokens, list) else None
