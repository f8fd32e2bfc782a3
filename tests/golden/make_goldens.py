"""Make the Qwen3 checkpoints of tests/data and their golden files with transformers. The tests never run this.

Tiny models with random weights; between them they cover what may differ from one Qwen3 to the next. For each: the
logits of a prompt, 24 greedy ids, and the value at every named place of the forward pass, under this project's names.
Everything is computed by transformers' own code in float64 and rounded to float32 only when it is saved.

    python tests/golden/make_goldens.py            all variants
    python tests/golden/make_goldens.py mqa wide   some
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

DATA = Path(__file__).parents[1] / "data"
N_GREEDY = 24
# The least margin of the best logit, as a share of the spread of all: rounding must not change a greedy step.
CLEAR_LEAD = 3e-3


@dataclass(frozen=True)
class Variant:
    """A small Qwen3. All input widths are multiples of 32, so that Q8_0 can store every matrix."""

    seed: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    theta: float
    eps: float = 1e-6
    dtype: torch.dtype = torch.float32
    shard_size: str = "5GB"
    q8_0: bool = False
    n_prompt: int = 10


VARIANTS = {
    # As many KV heads as query heads; every matrix of a layer is square, so that no shape error reveals a wrong matrix.
    "mha": Variant(3, 32, 32, 2, 2, 2, 16, 97, tied=False, theta=1e4, n_prompt=11),
    # Heads together twice as wide as the model; two files.
    "wide": Variant(2, 32, 32, 2, 4, 2, 16, 101, tied=True, theta=1e6, shard_size="60KB", n_prompt=8),
    # One key/value head for all; heads together half as wide as the model; a larger epsilon; also as Q8_0.
    "mqa": Variant(4, 64, 32, 1, 4, 1, 8, 61, tied=False, theta=1e4, eps=1e-5, q8_0=True, n_prompt=12),
    # Four query heads to a key/value head; three layers; stored as bfloat16.
    "gqa": Variant(5, 32, 64, 3, 8, 2, 8, 67, tied=True, theta=1e6, dtype=torch.bfloat16, n_prompt=7),
}


class DoubleTorch:
    """The torch module with float32 replaced by float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Make transformers compute norms, RoPE and softmax in float64; by default they are float32 for any weights."""
    with (
        mock.patch.object(modeling_qwen3, "torch", DoubleTorch()),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def build(v: Variant) -> Qwen3ForCausalLM:
    """Return a model in which every part matters: sharp attention, varied norm weights, a small embedding."""
    config = Qwen3Config(
        hidden_size=v.hidden,
        intermediate_size=v.ffn,
        num_hidden_layers=v.layers,
        num_attention_heads=v.heads,
        num_key_value_heads=v.kv_heads,
        head_dim=v.head_dim,
        vocab_size=v.vocab,
        tie_word_embeddings=v.tied,
        rope_parameters={"rope_type": "default", "rope_theta": v.theta},
        rms_norm_eps=v.eps,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).eval()
    random = np.random.default_rng(v.seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            # Head norms: scores spread over several units. Other norms: all weights different.
            low, high = (1.0, 2.5) if "q_norm" in name or "k_norm" in name else (0.5, 2.0)
            values = random.uniform(low, high, parameter.shape)
        else:
            # Inputs of norms are small, about 0.1, so that an epsilon wrong by a factor of ten shows in every norm.
            small = 0.1 if name.split(".")[-2] in ("q_proj", "k_proj", "o_proj", "down_proj") else 1.0
            scale = 0.03 if "embed" in name else small * parameter.shape[1] ** -0.5
            values = random.normal(0, scale, parameter.shape)
        parameter.data = torch.from_numpy(values).to(v.dtype)
    return model


@contextmanager
def watched(model: Qwen3ForCausalLM) -> Iterator[dict[str, np.ndarray]]:
    """Collect all taps of the one pass in this block, in the order of computation."""
    taps: dict[str, np.ndarray] = {}
    hooks = []

    def keep(name: str, x: torch.Tensor) -> None:
        if name in taps:
            raise ValueError(f"{name} was computed twice")
        taps[name] = x[0].detach().numpy().copy()

    def output_of(module: torch.nn.Module, name: str) -> None:
        hooks.append(module.register_forward_hook(lambda _module, _inputs, output: keep(name, output)))

    def input_of(module: torch.nn.Module, name: str) -> None:
        hooks.append(module.register_forward_pre_hook(lambda _module, inputs: keep(name, inputs[0])))

    output_of(model.model.embed_tokens, "embed")
    for i, layer in enumerate(model.model.layers):
        blk, attention, mlp = f"blk.{i}.", layer.self_attn, layer.mlp
        output_of(layer.input_layernorm, blk + "attn_norm")
        output_of(attention.q_proj, blk + "attn_q")
        output_of(attention.k_proj, blk + "attn_k")
        output_of(attention.v_proj, blk + "attn_v")
        output_of(attention.q_norm, blk + "attn_q_norm")
        output_of(attention.k_norm, blk + "attn_k_norm")
        input_of(attention.o_proj, blk + "attn_out")
        output_of(attention.o_proj, blk + "attn_output")
        input_of(layer.post_attention_layernorm, blk + "attn_residual")
        output_of(layer.post_attention_layernorm, blk + "ffn_norm")
        output_of(mlp.gate_proj, blk + "ffn_gate")
        output_of(mlp.up_proj, blk + "ffn_up")
        output_of(mlp.down_proj, blk + "ffn_down")
        output_of(layer, blk + "layer_out")
    output_of(model.model.norm, "output_norm")

    # RoPE is a function, not a module: it is called once per layer, in order.
    rotate, calls = modeling_qwen3.apply_rotary_pos_emb, iter(range(len(model.model.layers)))

    def rotate_and_keep(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rotate(*args)
        i = next(calls)
        keep(f"blk.{i}.q_rope", q.transpose(1, 2))
        keep(f"blk.{i}.k_rope", k.transpose(1, 2))
        return q, k

    with mock.patch.object(modeling_qwen3, "apply_rotary_pos_emb", rotate_and_keep):
        yield taps
    for hook in hooks:
        hook.remove()


def logits_of(model: Qwen3ForCausalLM, ids: list[int]) -> np.ndarray:
    """Return logits (T, V) in float64, without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    if logits.dtype != np.float64:
        raise TypeError(f"computed in {logits.dtype}, not in float64")
    return logits


def greedy(model: Qwen3ForCausalLM, prompt: list[int]) -> list[int]:
    """Return greedy ids; stop if one is nearly a tie."""
    ids = list(prompt)
    for _ in range(N_GREEDY):
        row = logits_of(model, ids)[-1]
        second, first = np.sort(row)[-2:]
        if first - second < CLEAR_LEAD * row.std():
            raise ValueError("two logits are nearly equal: choose another seed")
        ids.append(int(row.argmax()))
    return ids[len(prompt) :]


def to_q8_0(model: Qwen3ForCausalLM, path: Path, v: Variant) -> None:
    """Write a GGUF whose matrices are Q8_0, and give the model those weights. The gguf package does both."""
    stems = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(v.layers):
        names |= {f"model.layers.{i}.{hf}": f"blk.{i}.{stem}" for hf, stem in stems.items()}
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(v.layers)
    writer.add_context_length(512)
    writer.add_embedding_length(v.hidden)
    writer.add_feed_forward_length(v.ffn)
    writer.add_head_count(v.heads)
    writer.add_head_count_kv(v.kv_heads)
    writer.add_key_length(v.head_dim)
    writer.add_value_length(v.head_dim)
    writer.add_layer_norm_rms_eps(v.eps)
    writer.add_rope_freq_base(v.theta)
    for name, parameter in model.named_parameters():
        values, stored = parameter.detach().numpy().astype(np.float32), names[name.removesuffix(".weight")] + ".weight"
        if values.ndim == 1:
            writer.add_tensor(stored, values)
            continue
        blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(stored, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        parameter.data = torch.from_numpy(values.astype(np.float64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(name: str, v: Variant) -> None:
    """Write a folder of tests/data."""
    folder = DATA / f"qwen3-{name}"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    prompt = np.random.default_rng(v.seed + 1000).integers(0, v.vocab, v.n_prompt).tolist()
    with everything_in_float64():
        model = build(v)
        model.save_pretrained(folder, max_shard_size=v.shard_size)
        model = model.double()
        golden = {"prompt0": prompt, "greedy0": greedy(model, prompt)}
        with watched(model) as taps:
            golden["logits0"] = logits_of(model, prompt)
        golden |= {f"taps/{tap}": values for tap, values in taps.items()}
        if v.q8_0:
            to_q8_0(model, folder / "model-q8_0.gguf", v)
            golden |= {"logits0_q8": logits_of(model, prompt), "greedy0_q8": greedy(model, prompt)}
    arrays = {key: np.asarray(values) for key, values in golden.items()}
    small = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}
    np.savez_compressed(folder / "golden.npz", **{key: x.astype(small[x.dtype]) for key, x in arrays.items()})
    (folder / "generation_config.json").unlink()
    (folder / "golden.json").write_text(json.dumps(record(name, v), indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name}: {size / 1024:.0f} KB, {len(taps)} taps, greedy {golden['greedy0']}")


def record(name: str, v: Variant) -> dict[str, object]:
    """Return tool, versions, command and seed that made a folder."""
    return {
        "tool": "transformers, Qwen3ForCausalLM, eager attention; float64 throughout, saved as float32",
        "versions": {package: version(package) for package in ("transformers", "torch", "numpy", "gguf")},
        "command": f"python tests/golden/make_goldens.py {name}",
        "seed": v.seed,
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or VARIANTS:
        make(chosen, VARIANTS[chosen])
