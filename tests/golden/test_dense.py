"""Logits and greedy ids of the smaller dense architectures against transformers, from folders and GGUF files.

Windows, training contexts and steps of Llama 4's attention scaling are shorter than half of the prompts.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends.base import OpByOp
from mlx_engine.backends.cpu.backend import CompiledProgram
from mlx_engine.cache import KVLayer
from mlx_engine.cache.pool import kv_layers
from mlx_engine.config.declared import is_same
from mlx_engine.config.rope import EVERY_RULE, Rotation, RotationSetting
from mlx_engine.config.settings import Settings
from mlx_engine.convert.requantize import requantize
from mlx_engine.errors import ContextLengthError, OptionError
from mlx_engine.weights.conversion import Conversion
from tests.contract.check import EMULATED
from tests.golden.goldens import BACKENDS, DATA, SAMPLED, Golden, check_close, engine, greedy, in_chunks
from tests.golden.test_prefix_bits import filled, logits, rests
from tests.unit.test_gguf_form import bytes_only

ARCHITECTURES = ("granite", "granite4", "ministral3", "olmo2", "olmo3", "phi3", "smollm3", *SAMPLED)
ROPES = json.loads((DATA / "rope-scaling.json").read_text())
Goldens = Callable[[str, str], Golden]


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    made = tmp_path_factory.mktemp("gguf")
    return cache(lambda name, file: golden(name, file, made))


def golden(name: str, file: str, made: Path) -> Golden:
    folder = DATA / f"{name}-micro"
    if file == "hf":
        return Golden(name, folder / "hf", folder / "golden.npz")
    path = made / f"{name}.gguf"
    requantize(with_tokenizer(folder / "hf", made / name), path, Conversion(file))
    return Golden(name, path, folder / "golden.npz", "_q8")


def with_tokenizer(folder: Path, copy: Path) -> Path:
    """Return a copy with a tokenizer.json of the 64 tokens of these models."""
    shutil.copytree(folder, copy)
    tokenizer = bytes_only("llama-bpe")
    tokenizer["model"]["vocab"] = {text: i for text, i in tokenizer["model"]["vocab"].items() if i < 64}  # type: ignore[index]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy


@pytest.mark.each_value
@pytest.mark.parametrize("file", ["hf", "q8_0"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_ids(goldens: Goldens, name: str, backend: str, file: str):
    of = goldens(name, file)
    for i in (1,) if backend in ("scalar", EMULATED) else (0, 1):
        check_close(of.logits(i), np.asarray(engine(of.checkpoint, backend).logits(of.prompt(i))))
    if backend not in ("scalar", EMULATED):
        assert greedy(of, 0, backend, kv=True) == of.greedy(0)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SAMPLED)) for name in ARCHITECTURES]
)
def test_bits_do_not_depend_on_chunks_and_pages(name: str):
    of = golden(name, "hf", Path())
    ids, of_one = of.prompt(1), engine(of.checkpoint, "simd").logits(of.prompt(1))
    for chunk, page in ((1, 64), (7, 5), (16, 16)):
        np.testing.assert_array_equal(in_chunks(of.checkpoint, "simd", ids, chunk, page=page), np.asarray(of_one))


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_layers_run_as_a_compiled_program_with_the_bits_of_single_operations(name: str):
    ids, loaded = golden(name, "hf", Path()).prompt(1), mlx_engine.load(DATA / f"{name}-micro" / "hf", "simd")
    assert isinstance(loaded.model.program, CompiledProgram)
    at_once = np.asarray(loaded.logits(ids))
    model: Any = loaded.model
    model.program = OpByOp(model.backend, model.definition)
    np.testing.assert_array_equal(np.asarray(loaded.logits(ids)), at_once)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Return Llama 4 with chunks of 21 tokens, which do not end with pages or blocks of keys, and a prompt of 60."""
    folder = tmp_path_factory.mktemp("chunked") / "hf"
    shutil.copytree(DATA / "llama4-micro" / "hf", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_chunk_size": 21}))
    return Golden("llama4", folder, DATA / "llama4-micro" / "golden.npz")


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[pytest.mark.slow] * (name == "scalar")) for name in BACKENDS]
)
def test_rotated_layers_of_llama_4_attend_within_chunks(chunked: Golden, backend: str):
    arrays = np.load(chunked.file)
    ids = arrays["long"].tolist()
    check_close(arrays["logits_long"], np.asarray(engine(chunked.checkpoint, backend).logits(ids)))
    check_close(arrays["logits_long"], in_chunks(chunked.checkpoint, backend, ids, 8, page=5))


def test_cached_prefixes_end_anywhere_in_chunks_and_pages_of_earlier_chunks_are_freed(chunked: Golden):
    of, ids = engine(chunked.checkpoint, "parallel").model, np.load(chunked.file)["long"].tolist()
    assert [layer.window for layer in kv_layers(of.kv_layers)] == [-21, -21, -21, None]
    want = logits(of, of.new_kv(60), ids)
    found = {n: rest for n, rest in rests(of, filled(of, 4, ids), ids, range(1, 60)) if n}
    assert [n for n, rest in found.items() if not np.array_equal(rest, want[n:])] == []
    kv = of.new_kv(60, page=4, longest_pass=8)
    logits(of, kv, ids[:43], 8)
    assert [kv.pool.used_pages(group) for group in (0, 1)] == [1, 11]
    kv.truncate(42)
    with pytest.raises(ValueError, match="window of 21"):
        kv.truncate(41)


def test_a_latent_is_stored_once():
    loaded = mlx_engine.load(DATA / "deepseek2lite-micro" / "hf", "simd")
    (layer, _) = loaded.model.kv_layers
    assert layer.token_nbytes == 4 * (32 + 16)
    paper = KVLayer(1, 512 + 64, None, "f16", n_arrays=1)
    assert paper.token_nbytes == 2 * 576


def test_longrope_has_the_divisors_of_the_context_that_it_is_loaded_for(tmp_path: Path):
    """The context of the training is 64 tokens. llama.cpp chooses the divisors in the same way."""
    of, arrays = golden("phi3", "hf", Path()), np.load(DATA / "phi3-micro" / "golden.npz")
    ids, short = arrays["long"].tolist(), engine(of.checkpoint, "simd")
    assert short.config.context_length == 64
    assert "--context" in short.notes[-1]
    with pytest.raises(ContextLengthError):
        short.logits(ids)
    requantize(with_tokenizer(of.checkpoint, tmp_path / "hf"), tmp_path / "out.gguf", Conversion("f32"))
    for path in (of.checkpoint, tmp_path / "out.gguf"):
        long = mlx_engine.load(path, "simd", context=65)
        assert long.config.context_length == 512
        check_close(arrays["logits_long"], np.asarray(long.logits(ids)))


@pytest.mark.parametrize("context", [513, 0, True, 1.5])
def test_a_context_that_the_model_does_not_have_is_refused(context: object):
    with pytest.raises(OptionError, match="context"):
        mlx_engine.load(DATA / "phi3-micro" / "hf", "simd", context=context)  # type: ignore[arg-type]


def rotation(settings: dict[str, object]) -> Rotation:
    """Return the rotation of a model with a context of 131,072 tokens and heads of 64."""
    known = SimpleNamespace(context_length=131_072, head_dim=64)
    setting = RotationSetting("rope.freq_base", "rope_theta", 1e4, EVERY_RULE, layers=None, always=True)
    return setting.read(Settings({"rope_parameters": settings}, where="here"), "hf", known)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_of_every_scaling_rule(name: str):
    of = ROPES[name]
    for kind, context in (("usual", 4096), ("long", 262_144 if name == "dynamic" else 131_072)):
        if kind in of:
            rope = rotation(of["settings"]).within(context).for_heads(64)
            np.testing.assert_allclose(rope.frequencies, of[kind]["frequencies"], rtol=1e-12)
            factor = of[kind]["attention_factor"]
            np.testing.assert_allclose(rope.lengths or (1.0,) * 32, (factor,) * 32, rtol=1e-12)


@pytest.mark.parametrize("name", ["linear", "yarn", "yarn mscale", "yarn attention_factor"])
def test_gguf_keys_of_a_rule_give_the_same_rotation(name: str):
    setting = RotationSetting("rope.freq_base", "rope_theta", 1e4, EVERY_RULE, layers=None, always=True)
    there = rotation(ROPES[name]["settings"])
    keys = {key: float(np.float32(v)) if isinstance(v, float) else v for key, v in setting.to_gguf(there).items()}
    back = setting.read(Settings(keys, where="here"), "gguf", SimpleNamespace(context_length=131_072, head_dim=64))
    assert is_same(back, there)
