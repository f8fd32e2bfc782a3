"""Hugging Face folders written as GGUF files: the same model, the same ids, and who else can read them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.safetensors import Entry, open_safetensors, write_safetensors
from mlx_engine.commands import app
from mlx_engine.convert.requantize import requantize
from mlx_engine.convert.verify import Level, verify
from mlx_engine.errors import EngineError, SourceError, UnsupportedConfigError
from mlx_engine.quant.types import F32, Q8_0
from mlx_engine.tokenizer.bpe import SPLITS
from mlx_engine.tokenizer.vocabulary import BYTE_OF_CHARACTER
from mlx_engine.weights.conversion import Conversion

DATA = Path(__file__).parents[1] / "data"
MODELS = ("gpt2", "gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3")
# Of which GGUF has another name for the architecture.
ARCHITECTURES = {"mistral": "llama"}
TABLES = {"gpt2": "transformer.wte.weight"}
TEXTS = ["Once upon a time, there was 1 dog.", " I'LL  see\n\n\t2345 x ", "hé 😀 ▁", "", "<|im_start|>user"]
IDS = [1, 200, 3, 4, 77, 77, 5, 250, 9, 10, 11, 12]  # longer than Gemma's window


def bytes_only(pre: str) -> dict[str, object]:
    """A tokenizer.json of 256 tokens, for the folders whose models were made without one."""
    cut = {"type": "Split", "pattern": {"Regex": SPLITS[pre].patterns[0]}, "behavior": "Isolated", "invert": False}
    write = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, write]},
        "decoder": write,
        "model": {
            "type": "BPE",
            "ignore_merges": SPLITS[pre].whole_words,
            "vocab": {character: i for i, character in enumerate(BYTE_OF_CHARACTER)},
            "merges": [],
        },
    }


def folder_of(model: str, path: Path, **settings: object) -> Path:
    """A copy of a model's folder, with a tokenizer, and with other settings."""
    shutil.copytree(DATA / f"{model}-micro" / "hf", path)
    pre = {"gemma2": "llama-bpe", "llama": "llama-bpe", "mistral": "llama-bpe", "qwen2": "qwen2"}.get(model)
    if pre is not None:
        (path / "tokenizer.json").write_text(json.dumps(bytes_only(pre)))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


def with_rounded_table(model: str, path: Path) -> Path:
    """A folder whose embedding table has been Q8_0, as that of the written file is."""
    folder = folder_of(model, path)
    file = open_safetensors(folder / "model.safetensors")
    weights = [file.weight(name).as_type(F32) for name in file.tensors]
    table = TABLES.get(model, "model.embed_tokens.weight")
    assert table in file.tensors
    rounded = [w.as_type(Q8_0).as_type(F32) if w.name == table else w for w in weights]
    write_safetensors(folder / "new", [Entry(w.name, w.shape, F32) for w in rounded], [w.data for w in rounded])
    (folder / "new").replace(folder / "model.safetensors")
    return folder


def assert_same(found: object, expected: object) -> None:
    """To a millionth of the largest: a factor in the file is a float32."""
    atol = 1e-6 * np.abs(np.asarray(expected)).max()
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=atol)


@pytest.mark.some(2)
@pytest.mark.parametrize("model", MODELS)
def test_the_file_is_the_model_that_loading_makes_of_the_folder(tmp_path: Path, model: str):
    requantize(folder_of(model, tmp_path / "in"), tmp_path / "out.gguf", Conversion("q8_0"))
    written = mlx_engine.load(tmp_path / "out.gguf", "simd")
    loaded = mlx_engine.load(with_rounded_table(model, tmp_path / "rounded"), "simd", "q8_0")
    assert_same(written.logits(IDS), loaded.logits(IDS))
    assert not [finding for finding in verify(tmp_path / "out.gguf") if finding.level is Level.FAIL]


@pytest.mark.some(2)
@pytest.mark.parametrize("model", MODELS)
def test_ids_and_roles_stay_the_same(tmp_path: Path, model: str):
    folder = folder_of(model, tmp_path / "in")
    requantize(folder, tmp_path / "out.gguf", Conversion("q8_0"))
    ours, theirs = (mlx_engine.tokenizer.load_tokenizer(path) for path in (tmp_path / "out.gguf", folder))
    for text in TEXTS:
        for special in (False, True):
            assert ours.encode(text, special=special) == theirs.encode(text, special=special)
    for role in ("vocab_size", "bos_id", "eos_id", "eog_ids", "add_bos", "chat_template", "special_tokens"):
        assert getattr(ours, role) == getattr(theirs, role), role
    assert ours.decode(range(ours.vocab_size)) == theirs.decode(range(ours.vocab_size))


@pytest.mark.some(2)
@pytest.mark.parametrize("model", MODELS)
def test_names_and_types_are_those_that_the_gguf_package_knows(tmp_path: Path, model: str):
    gguf = pytest.importorskip("gguf")
    requantize(folder_of(model, tmp_path / "in"), tmp_path / "out.gguf", Conversion("q8_0"))
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    prefix = ARCHITECTURES.get(model, model)
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == prefix)
    known = gguf.get_tensor_name_map(architecture, 8).mapping
    names = {name for _, name in known.values()} | {"output", "rope_freqs", "position_embd"}
    for tensor in reader.tensors:
        assert tensor.name.rsplit(".", 1)[0] in names, tensor.name
        is_matrix = len(tensor.shape) == 2 and tensor.name != "position_embd.weight"
        assert tensor.tensor_type.name == ("Q8_0" if is_matrix else "F32"), tensor.name
    keys = {key.replace(f"{prefix}.", "{arch}.", 1) for key in reader.fields if key.startswith(f"{prefix}.")}
    words = [*vars(gguf.Keys.LLM).values(), *vars(gguf.Keys.Attention).values(), *vars(gguf.Keys.Rope).values()]
    assert keys <= {word for word in words if isinstance(word, str)}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {"rope.scaling.type": "linear"}),
        ({"rope_local_base_freq": 20_000.0}, {"rope.freq_base_swa": 20_000.0}),
        ({"sliding_window_pattern": 3}, {"attention.sliding_window_pattern": 3}),
        ({"query_pre_attn_scalar": 32}, {"attention.sliding_window": 8}),
    ],
    ids=str,
)
def test_what_differs_from_the_usual_is_said(tmp_path: Path, settings: dict[str, object], read: dict[str, object]):
    folder = folder_of("gemma3", tmp_path / "in", **settings)
    keep = {"quant_layers": {"output": "keep"}}
    requantize(folder, tmp_path / "out.gguf", Conversion("q8_0", layers={"output": "keep"}))
    with open_gguf(tmp_path / "out.gguf") as file:
        assert {key: file.metadata[f"gemma3.{key}"] for key in read} == read
    written, loaded = (mlx_engine.load(path, "simd", "q8_0", **keep) for path in (tmp_path / "out.gguf", folder))
    assert_same(written.logits(IDS), loaded.logits(IDS))


def test_what_gguf_has_no_word_for_is_refused(tmp_path: Path):
    kinds = ["sliding_attention", "full_attention", "full_attention", *["sliding_attention"] * 5]
    folder = folder_of("gemma3", tmp_path / "in", layer_types=kinds)
    with pytest.raises(UnsupportedConfigError, match="is_local"):
        requantize(folder, tmp_path / "out.gguf", Conversion("q8_0"))
    llama3 = json.loads((DATA / "llama-micro" / "hf" / "config.json").read_text())["rope_parameters"]
    folder = folder_of("qwen2", tmp_path / "qwen2", rope_parameters=llama3)
    with pytest.raises(UnsupportedConfigError, match="llama3"):
        requantize(folder, tmp_path / "out.gguf", Conversion("q8_0"))
    folder = folder_of("mistral", tmp_path / "mistral", sliding_window=8)
    with pytest.raises(UnsupportedConfigError, match="window to be a value that GGUF can store, None, found 8"):
        requantize(folder, tmp_path / "out.gguf", Conversion("q8_0"))
    assert not (tmp_path / "out.gguf").exists()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        requantize(DATA / "llama-micro" / "hf", tmp_path / "out.gguf", Conversion("q8_0"))
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_folders(tmp_path: Path):
    out = tmp_path / "out.gguf"
    result = CliRunner().invoke(app, ["quantize", str(DATA / "gpt2-micro" / "hf"), str(out), "--to", "q4_0"])
    assert result.exit_code == 0
    assert result.stdout.strip() == str(out)
    assert "attn_qkv" in result.stderr
    with open_gguf(out) as file:
        assert file.metadata["general.name"] == "hf"
        assert file.tensors["blk.0.attn_qkv.weight"].type.name == "Q4_0"


@pytest.mark.parametrize("to", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("model", MODELS)
def test_llama_cpp_reads_the_file_and_prefers_the_same_tokens(tmp_path: Path, model: str, to: str):
    """Its activations have 8 bits, so where two tokens are near each other it may take the other."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = tmp_path / "out.gguf"
    requantize(folder_of(model, tmp_path / "in"), path, Conversion(to))
    ours = mlx_engine.load(path, "simd")
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 250, 64)]
    logits = np.asarray(ours.logits(ids))
    theirs = llama_cpp.Llama(str(path), n_ctx=len(ids), logits_all=True, verbose=False)
    theirs.eval(ids)
    found = theirs.scores[: len(ids)]
    best, second = np.sort(logits, axis=1)[:, :-3:-1].T
    clear = best - second > 0.1 * logits.std()
    assert clear.sum() > len(ids) / 2
    assert np.corrcoef(found.ravel(), logits.ravel())[0, 1] > 0.999
    np.testing.assert_array_equal(found.argmax(axis=1)[clear], logits.argmax(axis=1)[clear])
    for text in TEXTS:
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == ours.tokenizer.encode(text)


def test_a_file_that_is_not_a_checkpoint_leaves_nothing(tmp_path: Path):
    with pytest.raises(EngineError):
        requantize(tmp_path, tmp_path / "out.gguf", Conversion("q8_0"))
    assert list(tmp_path.iterdir()) == []
