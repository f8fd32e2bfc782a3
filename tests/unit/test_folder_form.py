"""GGUF files written as folders for MLX: the same model, the same ids, the rules that GGUF encodes in tensors."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.config.rope import Rotation
from mlx_engine.convert import mlx_folder, mlx_tensors
from mlx_engine.convert.gguf_form import from_folder
from mlx_engine.convert.mlx_folder import to_mlx_folder
from mlx_engine.convert.requantize import requantize
from mlx_engine.errors import ModelError, TokenizerError
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.tokenizer import from_gguf, load_tokenizer
from mlx_engine.weights.conversion import GROUPS, Conversion
from mlx_engine.weights.model import architecture_of
from mlx_engine.weights.rope_divisors import rule_of
from tests.golden.goldens import DATA, LATENT, SAMPLED, check_close, engine
from tests.golden.test_dense import with_tokenizer
from tests.golden.test_table import ARCHITECTURES, IDS
from tests.random_blocks import random_blocks

KEEP = dict.fromkeys((*GROUPS, "token_embd", "output"), "keep")
# The vocabulary of `with_tokenizer`: bytes from "!" on.
TEXTS = ["HE", "A,B;C:`", "", "0123456789", "<!>?"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the GGUF file of a small model, in float32."""
    made = tmp_path_factory.mktemp("gguf")

    @cache
    def write(name: str) -> Path:
        folder, path = with_tokenizer(DATA / f"{name}-micro" / "hf", made / name), made / f"{name}.gguf"
        requantize(folder, path, Conversion("f32"))
        return path

    return write


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set groups that the rows of small models fill, and let Mixtral have heads that mlx-lm's has not."""
    monkeypatch.setattr(mlx_tensors, "GROUP", 32)
    monkeypatch.setattr(mlx_folder, "HEADS_OF_SIZE", ())


def unlike(path: Path, out: Path, tensors: dict[str, Any], **metadata: object) -> Path:
    """Write a copy of a GGUF file with other tensors, by default float32, and metadata; None removes a key."""
    with open_gguf(path) as file:
        weights = {name: file.weight(name) for name in file.tensors}
        keys: dict[str, object] = {**file.typed_metadata(), **metadata}
        for name, of in tensors.items():
            weights[name] = of if isinstance(of, Weight) else Weight.pack(name, of, F32)
        write_gguf(out, {key: value for key, value in keys.items() if value is not None}, list(weights.values()))
    return out


# What sets the sampled models apart in a folder: names of experts, rotary_dim, layer norms, alpha in the base.
OFTEN = {"glm4moe", "minimaxm2", "cohere2", "hunyuan"}


@pytest.mark.some(3)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in {*SAMPLED} - OFTEN))
        for name in ARCHITECTURES
        if name not in LATENT
    ],
)
def test_the_folder_is_the_model_of_the_file(gguf: Callable[[str], Path], tmp_path: Path, name: str):
    source, out = gguf(name), tmp_path / "out"
    to_mlx_folder(source, out, "mlx-4bit", KEEP)
    want, found = (np.asarray(engine(path, "simd").logits(IDS)) for path in (source, out))
    check_close(want, found)
    np.testing.assert_array_equal(found.argmax(-1), want.argmax(-1))
    files = {file.name for file in out.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= files
    theirs, ours = load_tokenizer(source), load_tokenizer(out)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


@pytest.mark.usefixtures("small")
def test_latent_attention_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="latent attention"):
        to_mlx_folder(DATA / "deepseek3-micro" / "hf", tmp_path / "out", "mlx-4bit")


@pytest.mark.usefixtures("small")
def test_matrices_have_the_bits_of_mlx_from_dequantised_values(tmp_path: Path, gguf: Callable[[str], Path]):
    source, out = tmp_path / "source.gguf", tmp_path / "out"
    requantize(gguf("qwen3"), source, Conversion("q8_0"))
    to_mlx_folder(source, out, "mlx-4bit")
    before, after = open_checkpoint(source).weight("blk.1.ffn_up.weight"), open_checkpoint(out)
    parts = mx.quantize(mx.array(before.dequantize()), group_size=32, bits=4, stream=mx.cpu)
    expected = mx.dequantize(*parts, group_size=32, bits=4, dtype=mx.float32, stream=mx.cpu)
    found = after.weight("model.layers.1.mlp.up_proj.weight")
    assert (before.type.name, found.type.name) == ("Q8_0", "AFFINE4_G32_F32")
    np.testing.assert_array_equal(found.dequantize(), np.asarray(expected))


@pytest.mark.some(2)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("type_", "new"),
    [("q8_0", "AFFINE8_G32_F32"), ("q4_0", "AFFINE4_G32_F32"), ("q4_1", "AFFINE4_G32_F32"), ("Q5_0", "F32")],
)
def test_types_of_gguf_that_are_kept_keep_their_values(
    tmp_path: Path, gguf: Callable[[str], Path], type_: str, new: str
):
    source, out = gguf("qwen3"), tmp_path / "out"
    if type_ == "Q5_0":
        with open_gguf(source) as file:
            shape = file.weight("blk.0.attn_v.weight").shape
        blocks = random_blocks(np.random.default_rng(1), "blk.0.attn_v.weight", type_, *shape)
        source = unlike(source, tmp_path / "source.gguf", {blocks.name: blocks})
    else:
        requantize(source, tmp_path / "source.gguf", Conversion(type_))
        source = tmp_path / "source.gguf"
    to_mlx_folder(source, out, "mlx-8bit", {"attention": "keep"})
    before = open_checkpoint(source).weight("blk.0.attn_v.weight")
    found = open_checkpoint(out).weight("model.layers.0.self_attn.v_proj.weight")
    assert (before.type.name, found.type.name) == (type_.upper(), new)
    np.testing.assert_array_equal(found.dequantize(), before.dequantize())


@pytest.mark.usefixtures("small")
def test_experts_in_mxfp4_keep_their_quants(tmp_path: Path):
    source = with_tokenizer(DATA / "gptoss-micro" / "hf", tmp_path / "hf")
    parts = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    requantize(source, tmp_path / "of.gguf", Conversion("f32", layers=dict.fromkeys(parts, "keep")))
    folders = {}
    for name in ("hf", "of.gguf"):
        folders[name] = tmp_path / f"{name}-mlx"
        to_mlx_folder(tmp_path / name, folders[name], "mlx-4bit")
    one, other = (open_checkpoint(folder) for folder in folders.values())
    assert one.shapes == other.shapes
    experts = [name for name in one.shapes if ".experts." in name]
    assert len(experts) == 3 * 2 * 3  # layers, weights and biases, parts
    for name in experts:
        np.testing.assert_array_equal(one.weight(name).dequantize(), other.weight(name).dequantize())
        if name.endswith(".weight"):
            assert one.weight(name).type.name == other.weight(name).type.name == "MLX_MXFP4"
            np.testing.assert_array_equal(one.weight(name).data, other.weight(name).data)
    to_mlx_folder(source, tmp_path / "asked", "mlx-4bit", {"ffn": "mlx-8bit"})
    assert open_checkpoint(tmp_path / "asked").weight(experts[0]).type.name.startswith("AFFINE8")


def test_config_json_has_every_setting(gguf: Callable[[str], Path], tmp_path: Path):
    to_mlx_folder(gguf("llama"), tmp_path / "out", "mlx-4bit")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert (config["rope_theta"], config["rms_norm_eps"], config["head_dim"]) == (500.0, 1e-5, 16)
    assert (config["tie_word_embeddings"], config["hidden_act"]) == (False, "silu")


@pytest.mark.some(19)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_that_is_written_is_read_again(name: str):
    checkpoint = open_checkpoint(DATA / f"{name}-micro" / "hf")
    config = architecture_of(checkpoint).plan(checkpoint).config
    again = replace(checkpoint, settings=config.to_hf())
    assert config.differences(architecture_of(again).plan(again).config) == []


def checkpoint_of(divisors: Any) -> Checkpoint:
    """A GGUF file that has nothing but divisors."""
    weight = Weight.pack("rope_freqs.weight", divisors, F32)
    return Checkpoint("made", "gguf", "llama", {}, {}, {weight.name: weight.shape}, lambda name: weight)


class Sizes:
    """A config with a plain rotation."""

    def __init__(self, theta: float, context_length: int) -> None:
        self.rope, self.context_length = Rotation(theta), context_length


@given(
    st.sampled_from([64, 128]), st.sampled_from([1e4, 5e5]), st.sampled_from([4.0, 8.0, 32.0]),
    st.sampled_from([2048, 4096, 8192]),
)  # fmt: skip
def test_llama_3_is_found_from_its_divisors(head_dim: int, theta: float, factor: float, context: int):
    rope = Rotation(theta, "llama3", factor=factor, low=1.0, high=4.0, context=context)
    found = rule_of(checkpoint_of(rope.divisors(head_dim)), Sizes(theta, 131_072))
    assert found == {"rope": rope}


def test_gemma_4_is_found_from_its_divisors():
    found = rule_of(checkpoint_of([1.0] * 16 + [1e30] * 48), Sizes(1e6, 4096))["rope"]
    assert (found.rule, found.part, found.factor) == ("proportional", 0.25, 1.0)


def test_divisors_that_are_all_1_are_no_rule():
    assert rule_of(checkpoint_of([1.0] * 32), Sizes(1e6, 4096)) == {}


@pytest.mark.parametrize(
    "divisors",
    [
        [1.0, 2.0, 1.5, 3.0], [1.0, 1e30, 1.0, 1e30], [1e30] * 4, [2.0, 3.0, 1e30, 1e30], [0.0, 0.0, 1e30, 1e30],
        [1.0, 1.0, -8.0, 8.0], [1.0, 1.0, np.nan, 8.0], [1.0, 1.0, np.inf, np.inf], [0.5] * 4,
    ],
)  # fmt: skip
def test_divisors_of_no_known_rule_are_refused(divisors: list[float]):
    with pytest.raises(ModelError, match=r"rope_freqs.weight: expected the divisors of Llama 3's rule or of Gemma 4's"):
        rule_of(checkpoint_of(divisors), Sizes(1e4, 4096))


def test_divisors_beside_another_rule_are_refused():
    sizes = Sizes(1e4, 4096)
    sizes.rope = replace(sizes.rope, rule="linear", factor=2.0)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        rule_of(checkpoint_of([1.0, 1.0, 1.0, 8.0]), sizes)


def test_what_a_folder_cannot_hold_is_refused(gguf: Callable[[str], Path], tmp_path: Path):
    path = unlike(gguf("llama"), tmp_path / "no.gguf", {}, **{"tokenizer.ggml.model": None})
    with pytest.raises(TokenizerError, match="the file has no tokenizer"):
        to_mlx_folder(path, tmp_path / "out", "mlx-4bit")
    path = unlike(gguf("llama"), tmp_path / "odd.gguf", {"rope_freqs.weight": np.linspace(1, 9, 8)})
    with pytest.raises(ModelError, match=r"rope_freqs.weight: .*write a GGUF file, with --to q8_0 or --to q4_0"):
        to_mlx_folder(path, tmp_path / "out", "mlx-4bit")
    assert not (tmp_path / "out").exists()


def test_roles_and_template_of_a_tokenizer(gguf: Callable[[str], Path], tmp_path: Path):
    roles = {f"tokenizer.ggml.{role}_token_id": i for role, i in (("bos", 1), ("eos", 2), ("eot", 3))}
    keys = {**roles, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ 'ä' }}\n"}
    types = np.array([1, 3, 3, 3, *[1] * 252], np.int32)
    path = unlike(gguf("llama"), tmp_path / "of.gguf", {}, **keys, **{"tokenizer.ggml.token_type": types})
    to_mlx_folder(path, tmp_path / "out", "mlx-4bit")
    with open_gguf(path) as file:
        theirs = from_gguf(file.metadata, where="of.gguf")
    ours = load_tokenizer(tmp_path / "out")
    for role in ("bos_id", "eos_id", "eog_ids", "add_bos", "special_tokens", "chat_template"):
        assert getattr(ours, role) == getattr(theirs, role), role
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2, 3])
    assert from_folder(tmp_path / "out").metadata["tokenizer.ggml.bos_token_id"] == 1
