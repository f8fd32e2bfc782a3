"""The public contract, used as a user would: load, logits, generate, stream, and what each error says."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_engine
from mlx_engine.engine import open_source
from mlx_engine.errors import (
    EngineError,
    OptionError,
)
from mlx_engine.loop.logprobs import TokenLogprobs, digest
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.stream import Generation
from mlx_engine.options import Options
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "qwen3-micro"
F32, Q8, HF = DATA / "model-f32.gguf", DATA / "model-q8_0.gguf", DATA / "hf"


def relative(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


# ---- what a user writes ----


def test_logits_are_a_float32_mx_array_of_every_position(engine):
    logits = engine.logits([1, 2, 3])
    assert type(logits) is mx.array
    assert logits.dtype == mx.float32
    assert logits.shape == (3, 512)
    assert mlx_engine.Tensor is mx.array


@pytest.mark.some(2)
@pytest.mark.parametrize("source", [str(F32), F32, str(HF), HF], ids=["file", "path", "folder", "folder-path"])
def test_every_source_gives_the_golden_logits(golden, source):
    engine = mlx_engine.load(source, backend="simd")
    for i in range(3):
        assert relative(engine.logits(golden[f"prompt{i}"].tolist()), golden[f"logits{i}"]) <= 1e-5


def test_stored_q8_0_gives_its_own_golden_logits(golden):
    engine = mlx_engine.load(Q8, backend="simd")
    assert relative(engine.logits(golden["prompt2"].tolist()), golden["logits2_q8"]) <= 1e-5


def test_scalar_gives_the_golden_logits_too(golden):
    engine = mlx_engine.load(F32, backend="scalar")
    assert relative(engine.logits(golden["prompt0"].tolist()), golden["logits0"]) <= 1e-5
    assert engine.backend.name == "scalar"


def test_a_row_of_logits_depends_on_no_later_token(engine):
    assert relative(engine.logits([5, 6, 7, 8])[:3], np.asarray(engine.logits([5, 6, 7]))) <= 1e-6


def test_the_contract_as_it_is_written(engine):
    result = engine.generate("Once upon a time", max_tokens=8, temperature=0.0, kv=True)
    assert isinstance(result.text, str)
    assert 1 <= len(result.token_ids) <= 8
    assert result.finish_reason in ("stop", "length")
    assert result.metrics.time_to_first_token_ms > 0
    assert result.metrics.decode_tokens_per_second > 0
    assert "".join(engine.stream("Once upon a time", max_tokens=8)) == result.text
    ids = engine.tokenizer.encode("text", special=False)
    assert engine.tokenizer.decode(ids) == "text"
    assert engine.tokenizer is engine.tokenizer
    assert result.prompt_ids == engine.tokenizer.encode("Once upon a time")
    assert engine.config.vocab_size == 512
    assert engine.backend.name == "simd"
    assert mlx_engine.load_tokenizer(F32).encode("text") == ids
    assert mlx_engine.open_gguf(F32).metadata["general.architecture"] == "qwen3"
    assert mlx_engine.create_backend("simd").name == "simd"


def test_the_time_that_building_a_tokenizer_took_is_kept_whoever_asked_for_it_first(monkeypatch):
    opened = mlx_engine.load(F32, backend="simd")
    build = opened.prompts._build_tokenizer
    monkeypatch.setattr(opened.prompts, "_build_tokenizer", lambda checkpoint: (time.sleep(0.05), build(checkpoint))[1])
    assert "build_tokenizer" not in opened.phases
    assert opened.tokenizer.vocab_size == 512
    phases = opened.generate("a", max_tokens=1).metrics.phases
    assert phases["build_tokenizer"] >= 0.05
    assert list(phases) == ["load", "warm_up", "build_tokenizer", "tokenize"]


def test_a_request_that_was_made_before_the_weights_were_loaded_has_the_time_of_loading():
    opened = open_source(F32, "simd")
    request = opened.prompts.request("a", Options.of(1))
    assert list(request.metrics.phases) == ["build_tokenizer", "tokenize"]
    (stream,) = mlx_engine.Engine(opened).run_requests([request])
    list(stream)
    assert set(stream.generation.metrics.phases) == {"load", "warm_up", "build_tokenizer", "tokenize"}


def test_one_token_has_no_decode_rate(engine):
    metrics = engine.generate([1, 2], max_tokens=1).metrics
    assert metrics.decode_tokens_per_second is None
    assert metrics.time_to_first_token_ms > 0


def test_generate_takes_ids_as_they_are(engine, golden):
    result = engine.generate(golden["prompt0"].tolist(), max_tokens=24)
    assert result.token_ids == golden["greedy0"].tolist()
    assert result.prompt_ids == golden["prompt0"].tolist()


@pytest.mark.parametrize("make", [tuple, np.array, mx.array], ids=["tuple", "numpy", "mx"])
def test_ids_may_be_any_sequence_of_whole_numbers(engine, make):
    want = engine.generate([1, 2, 3], max_tokens=4)
    assert relative(engine.logits(make([1, 2, 3])), np.asarray(engine.logits([1, 2, 3]))) == 0
    result = engine.generate(make([1, 2, 3]), max_tokens=4)
    assert result.token_ids == want.token_ids
    assert json.dumps(result.prompt_ids) == "[1, 2, 3]"


@pytest.mark.parametrize("ids", [[], [-1], [512], [0, 2**40]], ids=repr)
def test_ids_that_the_vocabulary_lacks_are_refused(engine, ids):
    for call in (engine.logits, engine.generate, engine.stream):
        with pytest.raises(OptionError) as caught:
            call(ids)
        assert caught.value.option == "prompt"


@pytest.mark.parametrize("ids", [[1.5], ["a"], [None], [float("nan")], [[1, 2]]], ids=repr)
def test_ids_that_are_no_whole_numbers_are_refused(engine, ids):
    with pytest.raises(OptionError):
        engine.logits(ids)


def test_an_unknown_option_is_a_type_error_that_names_it(engine):
    with pytest.raises(TypeError, match="temprature"):
        engine.generate([1], temprature=1.0)


def test_a_bad_option_of_generate_is_refused_by_name(engine):
    for option, value in {"temperature": -1, "top_p": 2, "max_tokens": -2, "stop": ""}.items():
        with pytest.raises(OptionError) as caught:
            engine.generate([1], **{option: value})
        assert caught.value.option == option


def test_loading_reports_its_progress():
    seen = []
    mlx_engine.load(F32, backend="simd", progress=lambda done, total: seen.append((done, total)))
    totals = {total for _, total in seen}
    assert len(totals) == 1
    assert [done for done, _ in seen] == list(range(1, totals.pop() + 1))


# ---- quantising on load ----


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("quant", "least", "most"),
    [("keep", 0.0, 1e-5), ("f32", 0.0, 1e-5), ("q8_0", 1e-4, 0.02), ("q4_0", 0.02, 0.4), ("q4_1", 0.02, 0.4)],
)
def test_quantizing_on_load_costs_what_its_bits_cost(golden, quant, least, most):
    error = relative(
        mlx_engine.load(F32, backend="simd", quant=quant).logits(golden["prompt2"].tolist()), golden["logits2"]
    )
    assert least <= error <= most


def test_quantizing_to_what_is_stored_changes_no_bit():
    stored, again = (mlx_engine.load(Q8, backend="simd", quant=quant) for quant in ("keep", "q8_0"))
    assert np.array_equal(np.asarray(stored.logits([1, 2])), np.asarray(again.logits([1, 2])))


def test_expanding_q8_0_to_f32_changes_no_value():
    stored, again = (mlx_engine.load(Q8, backend="simd", quant=quant) for quant in ("keep", "f32"))
    assert relative(again.logits([1, 2]), np.asarray(stored.logits([1, 2]))) <= 1e-6


# ---- the package ----


def test_all_public_names_can_be_imported():
    for name in mlx_engine.__all__:
        assert getattr(mlx_engine, name) is not None
        assert name in dir(mlx_engine)
    exec(f"from mlx_engine import {', '.join(mlx_engine.__all__)}", {})
    assert set(mlx_engine.__all__) >= {
        "load", "Engine", "Tensor", "create_backend", "errors", "open_gguf", "load_tokenizer",
    }  # fmt: skip


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="lod"):
        mlx_engine.lod  # noqa: B018


def test_every_exception_has_the_one_root():
    errors = importlib.import_module("mlx_engine.errors")
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert len(classes) > 10
    assert all(issubclass(c, EngineError) for c in classes)
    assert all(c.__name__ in errors.__doc__ for c in classes)


def modules_after(code):
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE,
    )  # fmt: skip
    return {name.partition(".")[0] for name in run.stdout.split()} | set(run.stdout.split())


def test_importing_the_package_imports_nothing_heavy():
    heavy = {"numpy", "mlx", "typer", "rich", "tokenizers", "huggingface_hub", "jinja2", "numba", "threadpoolctl"}
    assert not modules_after("import mlx_engine; mlx_engine.errors") & heavy


@pytest.mark.slow
def test_only_a_plot_waits_for_matplotlib():
    arguments = ["bench", "-m", str(F32), "-b", "simd", "--no-jit", "-p", "2", "-n", "1", "-r", "1"]
    run_benchmark = f"""
from typer.testing import CliRunner
from mlx_engine.commands import app
assert CliRunner().invoke(app, {arguments}).exit_code == 0
"""
    assert "matplotlib" not in modules_after(run_benchmark)


def test_listing_a_file_does_not_import_mlx():
    loaded = modules_after(f"import mlx_engine; mlx_engine.open_gguf({str(F32)!r}).tensors")
    assert not loaded & {"mlx.core", "typer", "tokenizers", "huggingface_hub"}


def test_importing_kernels_does_not_import_the_package():
    assert "mlx_engine" not in modules_after("import kernels, kernels.blocks")


def test_tf32_is_switched_off_before_mlx_is_imported():
    code = "import os; os.environ.pop('MLX_ENABLE_TF32', None); import mlx_engine; print(os.environ['MLX_ENABLE_TF32'])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert run.stdout == "0\n"


def test_the_repr_of_a_generation_is_one_short_line():
    metrics = Metrics(passes=[0.5, *[0.01] * 181])
    story = Generation("Once\nupon a time " * 60, list(range(182)), metrics, "stop", [1, 2])
    assert repr(story) == (
        "<Generation 'Once\\nupon a time Once\\nupon a time Once\\nupon a time Once\\nupo…': "
        "182 tokens, ended by stop, 100.0 tokens/s>"
    )
    assert repr(Generation("a", [1], Metrics(), None, [1])) == "<Generation 'a': 1 token, not ended>"


def test_a_generation_shows_itself_in_a_notebook():
    metrics = Metrics(passes=[1.0, 0.25, 0.25])
    found = Generation("one\n\ntwo", [1, 2, 3], metrics, "stop", [1], [TokenLogprobs(1, -0.5)] * 3)
    assert found._repr_markdown_() == "> one\n> \n> two\n\n*3 tokens, ended by stop, 4.0 tokens/s*"
    assert found.tokens_per_second == metrics.decode_tokens_per_second == 4.0
    assert found.digest == digest([1, 2, 3], [-0.5] * 3)
    assert Generation("a", [1], Metrics(), None, [1]).digest is None
