"""Mixtures of experts: the forms in which files store them, what is converted, and which bytes count as read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends.cpu.descriptors import Matrix
from mlx_engine.backends.experts import share_read
from mlx_engine.bench.work import pass_work, sizes
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.shapes import Qwen3MoeShape
from mlx_engine.convert.requantize import requantize
from mlx_engine.errors import TensorMismatchError, UnsupportedConfigError
from mlx_engine.loop.memory import Traffic
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import architecture_of
from tests.golden.convert import convert, read_safetensors, stacked, write_safetensors
from tests.unit.test_gguf_form import bytes_only

DATA = Path(__file__).parents[1] / "data"
FOLDERS = {name: DATA / f"{name}-micro" / "hf" for name in ("qwen3moe", "mixtral")}
IDS = [1, 20, 3, 4, 77, 77, 5, 100]
TINY = Qwen3MoeShape(2, 64, 96, 4, 2, 32, 700, 128, 1e4, 8, 2, 32)


def logits(path: Path, backend: str = "simd", **options: object) -> np.ndarray:
    return np.asarray(mlx_engine.load(path, backend, **options).logits(IDS))


def folder_of(name: str, path: Path, tensors: dict[str, np.ndarray] | None = None, **settings: object) -> Path:
    """A copy of a model's folder with other tensors or settings."""
    shutil.copytree(FOLDERS[name], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    if tensors is not None:
        write_safetensors(path / "model.safetensors", tensors)
    return path


def with_tokenizer(name: str, path: Path, **settings: object) -> Path:
    """A copy of a model's folder with a tokenizer of 256 tokens, and as many rows in the table and in the head."""
    tensors = read_safetensors(FOLDERS[name] / "model.safetensors")
    wider = {k: np.concatenate([v, v]) if len(v) == 128 and v.ndim == 2 else v for k, v in tensors.items()}
    folder = folder_of(name, path, wider, vocab_size=256, **settings)
    (folder / "tokenizer.json").write_text(json.dumps(bytes_only("qwen2" if name == "qwen3moe" else "llama-bpe")))
    return folder


def renamed(name: str, form: str) -> dict[str, np.ndarray]:
    """The tensors of a folder as mlx-community or transformers 5 store them."""
    made = {}
    tensors = stacked(read_safetensors(FOLDERS[name] / "model.safetensors"))
    for key, values in tensors.items():
        stem, is_expert, part = key.removesuffix(".weight").partition(".experts.")
        if form == "mlx":
            made[f"{stem}.switch_mlp.{part}_proj.weight" if is_expert else key] = values
            continue
        stem = stem.replace("block_sparse_moe", "mlp")
        if not is_expert:
            made[key.replace("block_sparse_moe", "mlp")] = values
        elif part == "down":
            made[f"{stem}.experts.down_proj"] = values
        elif part == "gate":
            up = tensors[key.replace("experts.gate", "experts.up")]
            made[f"{stem}.experts.gate_up_proj"] = np.concatenate([values, up], axis=1)
    return made


@pytest.mark.some(2)
@pytest.mark.parametrize("form", ["mlx", "fused"])
@pytest.mark.parametrize("name", FOLDERS)
def test_other_names_of_the_same_experts(tmp_path: Path, name: str, form: str):
    made = folder_of(name, tmp_path / "hf", renamed(name, form))
    np.testing.assert_array_equal(logits(made), logits(FOLDERS[name]))


def test_a_gguf_file_with_a_tensor_for_each_expert(tmp_path: Path):
    """As llama.cpp wrote Mixtral before April 2024."""
    convert(FOLDERS["mixtral"], tmp_path / "new.gguf", "F32")
    with open_gguf(tmp_path / "new.gguf") as file:
        weights = [file.weight(name) for name in file.tensors]
        old = [
            replace(w, name=w.name.replace("_exps", f".{e}"), shape=w.shape[1:], data=w.data.reshape(4, -1)[e])
            for w in weights
            if len(w.shape) == 3
            for e in range(4)
        ]
        rest = [w for w in weights if len(w.shape) < 3]
        write_gguf(tmp_path / "old.gguf", file.typed_metadata(), [*rest, *old])
    np.testing.assert_array_equal(logits(tmp_path / "old.gguf"), logits(tmp_path / "new.gguf"))


def test_an_expert_is_a_view_of_the_file_that_is_not_read_ahead(tmp_path: Path):
    convert(FOLDERS["qwen3moe"], tmp_path / "q8.gguf", "Q8_0")
    engine = mlx_engine.load(tmp_path / "q8.gguf", "parallel")
    experts = engine.model.layers[1].ffn.experts
    for part in (experts.gate, experts.up, experts.down):
        matrices = [linear.weight for linear in part.weights]
        assert all(isinstance(m, Matrix) and not m.data.flags.owndata for m in matrices)
        ends = [m.data.ctypes.data + m.data.nbytes for m in matrices]
        assert ends[:-1] == [m.data.ctypes.data for m in matrices[1:]]
    backend = engine.backend
    linear = experts.gate.weights[0]
    other = engine.model.layers[0].mix.q
    backend._mapped = [other.weight.data, linear.weight.data]
    backend.stack([linear])
    assert [data is other.weight.data for data in backend._mapped] == [True]
    backend._mapped = []


@pytest.mark.parametrize("backend", ["parallel", "mlx"])
def test_experts_are_converted_on_load_and_routers_are_not(backend: str):
    engine = mlx_engine.load(FOLDERS["qwen3moe"], backend, quant="q8_0")
    # q, k, v and output and 8 experts of three matrices in two layers, and the head.
    assert "quantised 57 linear layers to q8_0" in engine.notes
    experts = engine.model.layers[0].ffn.experts
    assert experts.router.weight.nbytes == 8 * 32 * 4
    assert experts.nbytes < 8 * 3 * 32 * 32 * 4 / 2
    kept = mlx_engine.load(FOLDERS["qwen3moe"], backend, quant="q8_0", quant_layers={"ffn_up_exps": "keep"})
    assert kept.model.layers[0].ffn.experts.up.nbytes == 8 * 32 * 32 * 4


@pytest.mark.some(1)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_as_gguf(tmp_path: Path, name: str):
    folder = with_tokenizer(name, tmp_path / "hf")
    requantize(folder, tmp_path / "f32.gguf", Conversion("f32"))
    np.testing.assert_array_equal(logits(tmp_path / "f32.gguf"), logits(folder))
    requantize(tmp_path / "f32.gguf", tmp_path / "q8.gguf", Conversion("q8_0"))
    with open_gguf(tmp_path / "q8.gguf") as file:
        types = {name: (info.type.name, info.shape) for name, info in file.tensors.items() if "ffn" in name}
    n, width = (8, 32) if name == "qwen3moe" else (4, 64)
    assert types["blk.1.ffn_up_exps.weight"] == ("Q8_0", (n, width, 32))
    assert types["blk.1.ffn_down_exps.weight"] == ("Q8_0", (n, 32, width))
    assert types["blk.1.ffn_gate_inp.weight"] == ("F32", (n, 32))
    options = {"quant": "q8_0", "jit": False}
    assert np.abs(logits(tmp_path / "q8.gguf", jit=False) - logits(folder, **options)).max() < 0.2


def test_weights_that_are_not_normalised_have_no_gguf_form(tmp_path: Path):
    folder = folder_of("qwen3moe", tmp_path / "hf", norm_topk_prob=False)
    assert np.abs(logits(folder) - logits(FOLDERS["qwen3moe"])).max() > 0.01
    np.testing.assert_allclose(logits(folder), logits(folder, "scalar"), atol=1e-4)
    folder = with_tokenizer("qwen3moe", tmp_path / "both", norm_topk_prob=False)
    with pytest.raises(UnsupportedConfigError, match="normalize"):
        requantize(folder, tmp_path / "out.gguf", Conversion("f32"))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_local_experts": 10**9},
        {"num_local_experts": None, "num_experts": None},
        {"num_experts_per_tok": 9},
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
    ],
    ids=str,
)
def test_what_is_wrong_with_the_numbers_of_experts(tmp_path: Path, settings: dict[str, object]):
    with pytest.raises(UnsupportedConfigError, match=next(iter(settings)).removeprefix("num_local_")):
        mlx_engine.load(folder_of("qwen3moe", tmp_path / "hf", **settings), "simd")


def test_both_names_of_the_number_of_experts(tmp_path: Path):
    folder = folder_of("qwen3moe", tmp_path / "hf", num_local_experts=None, num_experts=8)
    assert mlx_engine.load(folder, "simd").config.n_experts == 8


def test_a_missing_expert_is_named(tmp_path: Path):
    tensors = read_safetensors(FOLDERS["mixtral"] / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(TensorMismatchError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w3"):
        mlx_engine.load(folder_of("mixtral", tmp_path / "hf", tensors), "simd")


def test_a_llama_file_with_experts_is_a_mixtral(tmp_path: Path):
    convert(FOLDERS["mixtral"], tmp_path / "model.gguf", "F32")
    assert architecture_of(open_checkpoint(tmp_path / "model.gguf")).names == ("mixtral",)


def test_the_expected_share_of_experts():
    assert share_read(0.25, 1) == 0.25
    assert share_read(0.25, 2) == pytest.approx(0.4375)
    assert share_read(1.0, 7) == 1.0


def test_only_the_chosen_experts_count_as_read(tmp_path: Path):
    TINY.write(tmp_path / "tiny.gguf", "tiny")
    engine = mlx_engine.load(tmp_path / "tiny.gguf", "parallel")
    traffic = Traffic.of(engine.model, engine.model.new_pool(64))
    experts = 2 * 8 * 3 * 64 * 32 * 34 / 32
    assert traffic.experts == {0.25: experts}
    attention, routers, head = 2 * (2 * 128 * 64 + 2 * 64 * 64) * 34 / 32, 2 * 8 * 64 * 4, 700 * 64 * 34 / 32
    assert traffic.weights == attention + routers + head
    of = sizes(open_checkpoint(tmp_path / "tiny.gguf"), lambda type_: 4.0 if type_.name == "F32" else 34 / 32)
    assert (of.nbytes, of.expert_nbytes, of.expert_share) == (traffic.weights, experts, 0.25)
    one, two = (pass_work(of, [(n, 0, n)]) for n in (1, 2))
    cached = of.cached
    assert one.nbytes == of.nbytes + experts / 4 + cached
    assert two.nbytes == of.nbytes + experts * 0.4375 + 2 * cached
    assert of.layers == attention * 32 / 34 + routers / 4 + 2 * 2 * 3 * 64 * 32
