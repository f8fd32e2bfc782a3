"""A small Qwen3 of random blocks, mixed as in real files, against the same weights in float32."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import mlx_engine
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from mlx_engine.quant.weight import Weight
from tests.random_blocks import random_blocks

# Hidden size 256, so that K-quants have one block per row; two layers, 4 query heads of 64, 2 KV heads.
WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 2, 4, 2, 64, 300
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "ffn_up": "Q4_0", "attn_output": "Q4_1"}
FILES = {name: (name, {}) for name in ("Q4_0", "Q4_1", "Q4_K", "Q6_K")} | {
    "mixed": ("Q4_K", MIXED),
    "mixed K": ("Q3_K", {"attn_v": "Q5_K", "ffn_down": "Q2_K", "token_embd": "Q5_K", "ffn_up": "IQ4_XS"}),
    "mixed 32": ("Q5_0", {"attn_v": "Q5_1", "ffn_down": "IQ4_NL", "token_embd": "Q5_1", "ffn_up": "MXFP4"}),
}
IDS = [5, 9, 299, 17, 2, 44, 8, 100, 31, 7, 250]
pytestmark = pytest.mark.usefixtures("many_cores")


def shapes() -> dict[str, tuple[int, int]]:
    q, k = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "attn_q": (q, WIDTH), "attn_k": (k, WIDTH), "attn_v": (k, WIDTH), "attn_output": (WIDTH, q),
        "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
    }  # fmt: skip
    of = {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd": (VOCAB, WIDTH), **of}


def write(path: Path, weights: list[Weight], *, expanded: bool, context: int = 64) -> None:
    """Return the file, or the same with every matrix in float32."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    rng = np.random.default_rng(3)
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    heads = [f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_q_norm", "attn_k_norm")]
    for name in [*norms, *heads]:
        size = HEAD_DIM if name in heads else WIDTH
        writer.add_tensor(f"{name}.weight", (1 + 0.2 * rng.standard_normal(size)).astype(np.float32))
    for weight in weights:
        kind = gguf.GGMLQuantizationType[weight.type.name]
        stored = weight.data.reshape(weight.shape[0], -1)
        if expanded:
            writer.add_tensor(weight.name, gguf.quants.dequantize(stored, kind))
        else:
            writer.add_tensor(weight.name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_weights(file: str) -> list[Weight]:
    """Write all matrices of one of `FILES`."""
    usual, others = FILES[file]
    rng = np.random.default_rng(1)
    return [
        random_blocks(rng, f"{name}.weight", others.get(name.rpartition(".")[2], usual), *shape, shape[1] ** -0.5)
        for name, shape in shapes().items()
    ]


@pytest.fixture(scope="module", params=FILES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    weights, folder = random_weights(request.param), tmp_path_factory.mktemp(request.param)
    write(folder / "stored.gguf", weights, expanded=False)
    write(folder / "expanded.gguf", weights, expanded=True)
    return folder / "stored.gguf", folder / "expanded.gguf"


def logits(path: Path, backend: str, threads: int | None = None) -> np.ndarray:
    return np.asarray(mlx_engine.load(path, backend, threads=threads).logits(IDS))


@pytest.mark.some(len(FILES))
@pytest.mark.parametrize("backend", ["simd", "parallel"])
def test_logits_are_those_of_the_expanded_weights(files: tuple[Path, Path], backend: str):
    stored, expanded = files
    engine = mlx_engine.load(expanded, "simd", jit=False)
    want = np.asarray(engine.logits(IDS))
    assert np.linalg.norm(logits(stored, backend) - want) <= 2e-6 * np.linalg.norm(want)
    # In decode, rows are multiplied in their stored type.
    engine = mlx_engine.load(stored, backend)
    kv = engine.model.new_kv(16)
    with engine.backend.session():
        rows = [engine.backend.host(forward(engine.model, SequenceInput([token], kv))) for token in IDS]
    assert np.linalg.norm(np.concatenate(rows) - want) <= 2e-6 * np.linalg.norm(want)


@pytest.mark.some(2)
def test_any_number_of_threads_gives_the_same_bits(files: tuple[Path, Path]):
    one, two = (logits(files[0], "parallel", threads) for threads in (1, 2))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, logits(files[0], "simd"))


@pytest.mark.some(2)
def test_nothing_is_expanded(files: tuple[Path, Path]):
    engine = mlx_engine.load(files[0], "parallel")
    stored = mlx_engine.open_gguf(files[0])
    for tensor in stored.tensors.values():
        if len(tensor.shape) == 2:
            weight = stored.weight(tensor.name)
            assert np.shares_memory(engine.backend.prepare(weight).data, weight.data)
