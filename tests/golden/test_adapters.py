"""LoRA adapters against PEFT on transformers in float64, and the bits of their sequences alone and in batches.

`make_adapter_goldens.py` has made the adapters and their logits.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.checkpoint.safetensors import Entry, open_safetensors, write_safetensors
from mlx_engine.convert.requantize import requantize
from mlx_engine.engine import Engine
from mlx_engine.errors import ModelError, NotFiniteError, OptionError, SourceError
from mlx_engine.loop.stream import Generation
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights import adapters
from mlx_engine.weights.conversion import Conversion
from tests.contract.check import EMULATED, named
from tests.golden.goldens import DATA
from tests.golden.test_dense import with_tokenizer

OUT = DATA / "adapters"
BASES = {"llama": 3, "phi3": 1, "gpt2": 1, "gemma3": 1, "lfm2": 1}
LLAMA = [OUT / f"llama-{i}" for i in range(3)]
SLOW = pytest.mark.slow
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = tmp_path_factory.mktemp("bases")

    def of(base: str) -> Path:
        path = made / base
        return path if path.exists() else with_tokenizer(DATA / f"{base}-micro" / "hf", path)

    return of


def golden(base: str) -> dict[str, np.ndarray]:
    with np.load(OUT / f"{base}.npz") as file:
        return dict(file)


def error(found: object, expected: np.ndarray) -> float:
    return float(np.abs(np.array(found) - expected).max() / np.abs(expected).max())


@pytest.mark.some(3)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("backend", "most"),
    [("simd", 1e-5), pytest.param("scalar", 1e-5, marks=SLOW), ("mlx", 1e-5), pytest.param(EMULATED, 2e-5, marks=SLOW)],
)
def test_logits_are_those_of_peft(base, backend, most, folder):
    expected = golden(base)
    for i in range(BASES[base]):
        adapters = [OUT / f"{base}-{i}"]
        with named(backend) as (name, how), mlx_engine.load(folder(base), name, adapters=adapters, **how) as engine:
            assert error(engine.logits(expected["ids"].tolist()), expected[f"logits{i}"]) < most
            assert engine.model.program.reason is None


def test_a_gguf_file_takes_the_adapters_of_its_folder(folder, tmp_path):
    expected = golden("llama")
    requantize(folder("llama"), tmp_path / "llama.gguf", Conversion("f32"))
    with mlx_engine.load(tmp_path / "llama.gguf", backend="simd", adapters=LLAMA[:1]) as engine:
        assert error(engine.logits(expected["ids"].tolist()), expected["logits0"]) < 1e-5


def test_a_folder_of_mlx_lm_is_the_same_adapter(folder, tmp_path):
    write_for_mlx(LLAMA[0], tmp_path / "mlx")
    expected = golden("llama")
    with mlx_engine.load(folder("llama"), backend="simd", adapters=[tmp_path / "mlx"]) as engine:
        assert error(engine.logits(expected["ids"].tolist()), expected["logits0"]) < 1e-5


def write_for_mlx(source: Path, target: Path) -> None:
    """Write an adapter of PEFT as mlx-lm does: matrices transposed, the factor in the settings."""
    file = open_safetensors(source / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    weights = [
        Weight.pack(
            re.sub(r"^base_model\.model\.(.*)\.lora_(.)\.weight$", lambda m: f"{m[1]}.lora_{m[2].lower()}", name),
            np.ascontiguousarray(file.weight(name).dequantize().T), F32,
        )
        for name in file.tensors
    ]  # fmt: skip
    target.mkdir()
    entries = [Entry(weight.name, weight.shape, weight.type) for weight in weights]
    write_safetensors(target / "adapters.safetensors", entries, [weight.data for weight in weights])
    parameters = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "dropout": 0.0}
    settings = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (target / "adapter_config.json").write_text(json.dumps(settings))


# ---- bits ----

CHOICES = ["llama-0", "base", "llama-2", "llama-1", None]


def bits(generation: Generation) -> tuple[list[int], list[float]]:
    return generation.token_ids, [token.logprob for token in generation.logprobs or []]


def alone(folder: Path, name: str | None, **options: object) -> tuple[list[int], list[float]]:
    """Return what an engine with this adapter alone generates; without any for "base"."""
    adapters = [] if name == "base" else [OUT / (name or "llama-0")]
    with mlx_engine.load(folder, adapters=adapters, **options) as engine:  # type: ignore[arg-type]
        return bits(engine.generate(PROMPT, 10, logprobs=0, ignore_eos=True))


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("parallel", {}),
        pytest.param("simd", {"kv_type": "f16"}, marks=SLOW),
        pytest.param("simd", {"activations": "i16"}, marks=SLOW),
        pytest.param("simd", {"speculate": "lookup"}, marks=SLOW),
    ],
)
def test_a_batch_of_adapters_has_the_bits_of_each_alone(backend, options, folder):
    options = {"backend": backend, **options}
    with mlx_engine.load(folder("llama"), adapters=LLAMA, **options) as engine:
        batch = engine.generate_batch([PROMPT] * 5, 10, logprobs=0, ignore_eos=True, adapter=CHOICES)
        one = [bits(engine.generate(PROMPT, 10, logprobs=0, ignore_eos=True, adapter=name)) for name in CHOICES]
    assert [bits(generation) for generation in batch] == one
    assert one == [alone(folder("llama"), name, **options) for name in CHOICES]
    assert len({tuple(logprobs) for _, logprobs in one}) == 4  # the adapters change the answers


def test_prefixes_are_those_of_one_adapter(folder):
    """The same prompt with another adapter finds nothing in the prefix cache, with the same one all of it."""
    with mlx_engine.load(folder("llama"), backend="simd", adapters=LLAMA) as engine:
        scheduler = engine.scheduler(slots=2)
        found, cached = {}, []
        for name in (*CHOICES[:4], *CHOICES[:4]):
            run = mlx_engine.options.Options.of(6, adapter=name, logprobs=0, ignore_eos=True)
            stream = engine.run(PROMPT, run, scheduler=scheduler)
            list(stream)
            cached.append(stream.request.n_cached)
            assert found.setdefault(name, bits(stream.generation)) == bits(stream.generation)
    assert cached == [0] * 4 + [len(PROMPT) - 1] * 4


def test_other_uses_of_an_engine_have_the_first_adapter(folder):
    """Log-probabilities of a text, hidden states and sessions are computed with the default adapter."""
    expected = golden("llama")
    ids, logits = expected["ids"].tolist(), expected["logits0"].astype(np.float64)
    rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    with loaded(folder("llama"), *LLAMA) as engine, loaded(folder("llama"), LLAMA[0]) as one:
        assert error(engine.logprobs(ids), rows[np.arange(len(ids) - 1), ids[1:]]) < 1e-5
        assert error(engine.session(ids[:9]).logits(ids[9:]), expected["logits0"][-1]) < 1e-5
        found, same = (e.hidden_states(ids, "output_norm")["output_norm"] for e in (engine, one))
        assert np.array_equal(found, same)


# ---- errors ----


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LLAMA[0], tmp_path / "own"))


def loaded(base: Path, *adapters: object) -> Engine:
    return mlx_engine.load(base, backend="simd", adapters=adapters)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("init_lora_weights", "pissa"),
     ("peft_type", "IA3"), ("r", 8), ("r", "4"), ("lora_alpha", "8"), ("target_modules", ["q_proj"]),
     ("target_modules", {"q_proj": 1}), ("rank_pattern", {"(": 3}), ("alpha_pattern", {"(": 3}),
     ("use_of_tomorrow", True)],
)  # fmt: skip
def test_other_kinds_of_adapters_are_refused(key, value, adapter, folder):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=key):
        loaded(folder("llama"), adapter)


@pytest.mark.parametrize(
    ("key", "value"), [("rank", 8), ("alpha", 16.0), ("scale", "2"), ("scale", float("inf")), ("use_dora", True)]
)
def test_other_settings_of_mlx_lm_are_refused(key, value, folder, tmp_path):
    write_for_mlx(LLAMA[0], tmp_path / "mlx")
    config = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    config["lora_parameters"][key] = value
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"lora_parameters\.{key}"):
        loaded(folder("llama"), tmp_path / "mlx")


def test_harmless_settings_are_accepted(adapter, folder):
    """Unknown settings are accepted, too, if they are off."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    changes = {"lora_dropout": 0.1, "inference_mode": False, "task_type": "CAUSAL_LM", "use_of_tomorrow": False}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    loaded(folder("llama"), adapter).close()


def test_patterns_match_names_within_the_model(folder, tmp_path):
    """PEFT's documentation anchors them: `^model.layers...`."""
    adapter = Path(shutil.copytree(LLAMA[2], tmp_path / "own"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["alpha_pattern"] = {f"^model.{pattern}": value for pattern, value in config["alpha_pattern"].items()}
    assert config["alpha_pattern"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with loaded(folder("llama"), adapter) as one, loaded(folder("llama"), LLAMA[2]) as other:
        assert np.array_equal(one.logprobs([5, 6, 7, 8]), other.logprobs([5, 6, 7, 8]))


def test_the_first_value_that_is_not_finite_is_that_of_the_adapter(adapter, folder):
    """The search for it runs the tokens with the request's adapter: the model alone has finite values."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3e38}))
    with loaded(folder("llama"), LLAMA[0], adapter) as engine:
        with pytest.raises(NotFiniteError) as raised:
            engine.generate(PROMPT, 3, adapter="own")
        assert len(engine.generate(PROMPT, 3, ignore_eos=True).token_ids) == 3
    assert raised.value.layer == 0
    assert raised.value.first is not None


def test_a_folder_of_the_home_may_have_an_equals_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lr=1e-4").mkdir()
    assert adapters.named(["~/lr=1e-4", "b=~/lr=1e-4"]) == dict.fromkeys(("lr=1e-4", "b"), tmp_path / "lr=1e-4")


def test_an_adapter_of_another_model_is_refused(folder):
    with pytest.raises(ModelError, match="_proj, but adapters are implemented only for"):
        loaded(folder("phi3"), LLAMA[1])
    with pytest.raises(ModelError, match="the adapter is of another model"):
        loaded(folder("phi3"), OUT / "gemma3-0")


def test_adapters_that_cannot_be_chosen_are_refused(folder, tmp_path):
    with pytest.raises(SourceError, match=r"adapter_config\.json"):
        loaded(folder("llama"), tmp_path)
    with pytest.raises(OptionError, match="is given twice"):
        loaded(folder("llama"), LLAMA[0], LLAMA[0])
    with pytest.raises(OptionError, match="cannot be a name"):
        loaded(folder("llama"), f"base={LLAMA[0]}")
    with (
        loaded(folder("llama"), f"x={LLAMA[0]}") as engine,
        pytest.raises(OptionError, match="adapter must be x or base"),
    ):
        engine.generate(PROMPT, 1, adapter="y")
    with loaded(folder("llama")) as engine, pytest.raises(OptionError, match="loaded without adapters"):
        engine.generate(PROMPT, 1, adapter="y")


def test_adapters_are_no_part_of_files_of_keys_and_values(folder, tmp_path):
    with loaded(folder("llama"), LLAMA[0]) as engine, pytest.raises(OptionError, match="a model without adapters"):
        engine.keep_prefixes(tmp_path)
