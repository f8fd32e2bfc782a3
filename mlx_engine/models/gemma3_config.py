"""The settings of a Gemma 3 in its three spellings: GGUF's, config.json's of transformers 4, and of transformers 5."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.models.settings import HF_HARMLESS, MOST_LAYERS, Settings

# One layer in so many sees everything, where the file does not say otherwise.
PATTERN = 6
# The base of local layers; GGUF files mostly leave it out.
LOCAL_THETA = 10_000.0
# The one size, 27B, whose scores are scaled by hidden_size / n_heads instead of head_dim, which GGUF leaves out too.
LAYERS_OF_27B = 62

HARMLESS = {*HF_HARMLESS, "_sliding_window_pattern", "cache_implementation"}
# Of a config.json whose `text_config` has the model: what belongs to images, and to text in general.
AROUND_TEXT = {
    *HF_HARMLESS,
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "tie_word_embeddings",
    "vision_config",
}


@dataclass(frozen=True)
class Config:
    """The sizes of a Gemma 3; a local layer's tokens see the last `window` tokens."""

    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_factor: float
    local_rope_theta: float
    attention_scale: float
    window: int
    is_local: tuple[bool, ...]

    @property
    def n_layers(self) -> int:
        """Local and global ones."""
        return len(self.is_local)


def config_from_gguf(s: Settings, vocab_size: int) -> Config:
    """From GGUF metadata.

    Raises:
        UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
    """
    n_layers = _layers(s, "block_count")
    hidden_size, n_heads = s.whole("embedding_length"), s.whole("attention.head_count")
    head_dim = s.whole("attention.key_length", 256)
    per_head = hidden_size / n_heads if n_layers == LAYERS_OF_27B else head_dim
    scaling, factor = s.choice("rope.scaling.type", "none", "linear"), s.number("rope.scaling.factor", 1.0)
    config = Config(
        hidden_size=hidden_size,
        intermediate_size=s.whole("feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=s.whole("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        vocab_size=s.whole("vocab_size", vocab_size),
        context_length=s.whole("context_length"),
        norm_eps=s.number("attention.layer_norm_rms_epsilon"),
        rope_theta=s.number("rope.freq_base", 1e6),
        rope_factor=factor if scaling == "linear" else 1.0,
        local_rope_theta=s.number("rope.freq_base_swa", LOCAL_THETA),
        attention_scale=s.number("attention.scale", per_head**-0.5),
        window=s.whole("attention.sliding_window"),
        is_local=_pattern(n_layers, s.whole("attention.sliding_window_pattern", PATTERN)),
    )
    s.expect("attention.value_length", head_dim)
    s.expect("rope.dimension_count", head_dim)
    s.expect("attention.causal", True)
    # Zero, or absent: none.
    s.expect("attn_logit_softcapping", 0.0)
    s.expect("final_logit_softcapping", 0.0)
    s.refuse_rest()
    return _sound(config, s)


def text_settings(s: Settings) -> Settings:
    """The settings of the text model, which a model of text and images keeps in a mapping of their own.

    Raises:
        UnsupportedConfigError: beside that mapping there is a setting that is not known.
    """
    text = s.mapping("text_config")
    if text is None:
        return s
    s.refuse_rest(AROUND_TEXT)
    return text


def config_from_hf(s: Settings) -> Config:
    """From config.json, whose text models of the larger sizes leave much to transformers' defaults.

    Raises:
        UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
    """
    n_layers = _layers(s, "num_hidden_layers", 26)
    theta, factor, local_theta = _rotation(s)
    config = Config(
        hidden_size=s.whole("hidden_size", 2304),
        intermediate_size=s.whole("intermediate_size", 9216),
        n_heads=s.whole("num_attention_heads", 8),
        n_kv_heads=s.whole("num_key_value_heads", 4),
        head_dim=s.whole("head_dim", 256),
        vocab_size=s.whole("vocab_size", 262_208),
        context_length=s.whole("max_position_embeddings", 131_072),
        norm_eps=s.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factor=factor,
        local_rope_theta=local_theta,
        attention_scale=s.number("query_pre_attn_scalar", 256) ** -0.5,
        window=s.whole("sliding_window", 4096),
        is_local=_layer_types(s, n_layers),
    )
    s.expect("hidden_activation", "gelu_pytorch_tanh")
    s.expect("attention_bias", False)
    s.expect("use_bidirectional_attention", False)
    s.expect("attn_logit_softcapping", None)
    s.expect("final_logit_softcapping", None)
    s.expect("tie_word_embeddings", True)
    s.refuse_rest(HARMLESS)
    return _sound(config, s)


def _rotation(s: Settings) -> tuple[float, float, float]:
    """The global base, by what its positions are divided, and the local base."""
    nested = s.mapping("rope_parameters")
    if nested is None:
        theta, factor = s.number("rope_theta", 1e6), _scaling(s.mapping("rope_scaling"))
        return theta, factor, s.number("rope_local_base_freq", LOCAL_THETA)
    everywhere, nearby = nested.mapping("full_attention"), nested.mapping("sliding_attention")
    nested.refuse_rest()
    theta, local_theta = 1e6, LOCAL_THETA
    if everywhere is not None:
        theta = everywhere.number("rope_theta", theta)
    if nearby is not None:
        local_theta = nearby.number("rope_theta", local_theta)
        nearby.expect("rope_type", "default")
        nearby.refuse_rest()
    return theta, _scaling(everywhere), local_theta


def _scaling(s: Settings | None) -> float:
    if s is None:
        return 1.0
    # The key had a shorter name once.
    kind = s.choice("rope_type", s.choice("type", "default", "linear"), "default", "linear")
    factor = s.number("factor", 1.0)
    s.refuse_rest({"rope_theta"})
    return factor if kind == "linear" else 1.0


def _layer_types(s: Settings, n_layers: int) -> tuple[bool, ...]:
    is_local = _pattern(n_layers, s.whole("sliding_window_pattern", PATTERN))
    named = s.words("layer_types", n_layers, "sliding_attention", "full_attention")
    return is_local if named is None else tuple(name == "sliding_attention" for name in named)


def _pattern(n_layers: int, pattern: int) -> tuple[bool, ...]:
    """Every `pattern`-th layer is global."""
    return tuple((i + 1) % pattern != 0 for i in range(n_layers))


def _layers(s: Settings, key: str, *default: int) -> int:
    n_layers = s.whole(key, *default)
    if n_layers > MOST_LAYERS:
        raise s.error("n_layers", f"at most {MOST_LAYERS:,}", n_layers)
    return n_layers


def _sound(config: Config, s: Settings) -> Config:
    if config.n_heads % config.n_kv_heads:
        raise s.error("n_heads", f"a multiple of the {config.n_kv_heads} key/value heads", config.n_heads)
    if config.head_dim % 2:
        raise s.error("head_dim", "an even number, for its halves are rotated against each other", config.head_dim)
    return config
