"""The training model must be the Qwen3 that everybody else means."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training extra is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tools.qwen3_torch import Config, Qwen3  # noqa: E402

SMALL = Config(vocab=96, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=96, context=40)
NAMES = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.output": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def reference_name(name: str) -> str:
    """Translate our name for a weight into that of transformers."""
    outer = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    _, index, inner = name.split(".", 2)
    return f"model.layers.{index}.{NAMES[inner.removesuffix('.weight')]}.weight"


def test_logits_agree_with_transformers() -> None:
    torch.manual_seed(3)
    ours = Qwen3(SMALL)
    for weight in ours.parameters():  # norms that are all ones would hide a missing norm
        torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.3)
    config = transformers.Qwen3Config(
        vocab_size=SMALL.vocab, hidden_size=SMALL.hidden, intermediate_size=SMALL.ffn,
        num_hidden_layers=SMALL.layers, num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads, head_dim=SMALL.head_dim, rms_norm_eps=SMALL.eps,
        rope_theta=SMALL.theta, tie_word_embeddings=True, max_position_embeddings=SMALL.context,
    )  # fmt: skip
    reference = transformers.Qwen3ForCausalLM(config).eval()
    state = {reference_name(name): weight for name, weight in ours.state_dict().items()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert unexpected == []
    tokens = torch.randint(0, SMALL.vocab, (2, 33))
    with torch.no_grad():
        expected, got = reference(tokens).logits, ours(tokens)
    assert expected.std() > 1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
