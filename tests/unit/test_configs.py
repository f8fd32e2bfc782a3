"""Configs as declarations: both namings are read, GGUF is written, and a model file is found without a list."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from mlx_engine import models
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.config.declared import ConfigBase, Expected, divides, number, whole, whole_or_none
from mlx_engine.config.rope import Rotation
from mlx_engine.config.settings import Settings
from mlx_engine.errors import UnknownArchitectureError, UnsupportedConfigError
from mlx_engine.models import gemma2, gemma3, gpt2, llama, mistral, qwen2, qwen3
from mlx_engine.weights.model import architecture_of, architectures_of

DATA = Path(__file__).parents[1] / "data"
FILES = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
# What a file of each says in tensors, or not at all.
NOT_IN_KEYS = {"gemma2": {"attention_scale"}, "gemma3": {"attention_scale"}, "llama": {"rope"}}


def checkpoint(architecture: str) -> Checkpoint:
    return Checkpoint("here", "hf", architecture, {}, {}, {}, lambda name: pytest.fail(f"{name} was read"))


@dataclass(frozen=True)
class Config(ConfigBase):
    n_heads: int = whole("heads", "num_heads")
    n_kv_heads: int = whole(
        ("kv", lambda known: known.n_heads), ("num_kv", 1), repeated=("kv2",), condition=divides("n_heads")
    )
    eps: float = number("eps", ("norm_eps", 1e-6))
    window: int | None = whole_or_none(None, ("window", 9))

    expected = Expected(gguf={"causal": True}, hf={"act": ("silu", "swish")}, harmless=("seed",))


def from_gguf(**settings: object) -> Config:
    return Config.read(Settings(settings, where="here"), "gguf")


def from_hf(**settings: object) -> Config:
    return Config.read(Settings(settings, where="here"), "hf")


def test_each_naming_has_its_keys_and_defaults():
    assert from_gguf(heads=6, eps=1) == Config(6, 6, 1.0, None)
    assert from_hf(num_heads=6) == Config(6, 1, 1e-6, 9)
    assert from_hf(num_heads=6, num_kv=3, norm_eps=0.5, window=2, act="swish", seed=1) == Config(6, 3, 0.5, 2)


def test_null_is_no_window_and_absent_is_the_default():
    assert from_hf(num_heads=6, window=None).window is None
    assert from_hf(num_heads=6).window == 9


def test_what_is_written_is_read_again():
    config = Config(6, 2, 0.5, None)
    assert config.to_gguf() == {"heads": 6, "kv": 2, "kv2": 2, "eps": 0.5}
    assert from_gguf(**config.to_gguf()) == config


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"eps": 1.0}, "heads"),
        ({"heads": 6}, "eps"),
        ({"heads": 6, "eps": 1.0, "kv": 4}, "kv"),
        ({"heads": 6, "eps": 1.0, "kv": 3, "kv2": 6}, "kv2"),
        ({"heads": 6, "eps": 1.0, "causal": False}, "causal"),
        ({"heads": 6, "eps": 1.0, "window": 9}, "window"),
        ({"heads": 6, "eps": 1.0, "seed": 1}, "seed"),
    ],
    ids=str,
)
def test_what_does_not_hold_is_refused_under_the_file_s_own_key(settings: dict[str, object], key: str):
    with pytest.raises(UnsupportedConfigError) as caught:
        from_gguf(**settings)
    assert caught.value.key == key


def test_differences_are_named_and_a_field_that_is_lacking_is_none():
    one = Config(6, 2, 0.5, 9)
    assert one.differences(Config(6, 2, 0.5 * (1 + 1e-9), 9)) == []
    assert one.differences(Config(6, 3, 0.5, None)) == ["n_kv_heads", "window"]

    @dataclass(frozen=True)
    class Less(ConfigBase):
        n_heads: int = whole("heads", "num_heads")

    assert one.differences(Less(6)) == ["n_kv_heads", "eps", "window"]


@pytest.mark.parametrize("name", FILES)
def test_a_model_s_config_is_read_again_from_the_keys_that_it_writes(name: str):
    config = architecture_of(checkpoint(name)).plan(open_checkpoint(DATA / f"{name}-micro" / "hf")).config
    again = type(config).read(Settings(config.to_gguf(), where="here"), "gguf")
    assert set(config.differences(again)) <= NOT_IN_KEYS.get(name, set())


@pytest.mark.parametrize("name", FILES)
def test_no_two_fields_of_a_model_write_the_same_key(name: str):
    config = architecture_of(checkpoint(name)).plan(open_checkpoint(DATA / f"{name}-micro" / "hf")).config
    written = [
        key for f in fields(config) for key in f.metadata["setting"].to_gguf(getattr(config, f.name)) if key is not None
    ]
    assert sorted(written) == sorted(config.to_gguf())


@pytest.mark.parametrize(("name", "of"), [*FILES.items(), ("gemma3_text", gemma3)])
def test_a_model_file_is_found_by_what_it_says_of_itself(name: str, of: object):
    assert architecture_of(checkpoint(name)) in architectures_of(of)


@pytest.mark.parametrize("name", ["settings", "decoder", "__init__", "", "."])
def test_a_module_that_is_no_model_file_is_no_architecture(name: str):
    with pytest.raises(UnknownArchitectureError) as caught:
        architecture_of(checkpoint(name))
    assert {"gemma3", "gemma3_text", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3"} <= {*caught.value.supported}
    assert list(caught.value.supported) == sorted(caught.value.supported)


def test_a_new_file_is_found_without_another_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "invented.py").write_text(
        'ARCHITECTURES = ("invented", "invented_text")\nGGUF_ARCHITECTURE = "invented"\nConfig = Model = plan = None\n'
    )
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    for name in ("invented_text", "invented"):
        assert architecture_of(checkpoint(name)).gguf == "invented"


def test_a_rotation_says_by_what_its_rule_divides():
    slowed = Rotation(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert Rotation(5e5).divisors(8) == (1.0,) * 4
    assert slowed.divisors(64)[0] == 1.0
    assert slowed.divisors(64)[-1] == pytest.approx(8.0)
