"""`--allow-setting`: has no setting is not implemented is ignored if the user says so, and everything shows it."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_values import Value, ValueType
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.commands import app
from mlx_engine.errors import OptionError, UnsupportedConfigError

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro"
NOTE = "--allow-setting logit_scale: 0.5 is not implemented and was ignored; results may be wrong"


@pytest.fixture
def folder(tmp_path):
    """Makes a copy of the micro model's folder with further settings."""

    def make(**settings):
        copy = shutil.copytree(MICRO / "hf", tmp_path / "hf")
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | settings))
        return copy

    return make


def load(path, *names):
    return mlx_engine.load(path, "simd", allow_settings=names, jit=False)


def cli(*args):
    result = CliRunner().invoke(app, list(map(str, args)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_refusal_names_the_flag_and_the_flag_loads_the_model(folder):
    path = folder(logit_scale=0.5)
    with pytest.raises(UnsupportedConfigError, match="--allow-setting logit_scale ignores the setting"):
        load(path)
    engine = load(path, "logit_scale")
    assert engine.notes == (NOTE,)
    assert (engine.logits([1, 2]) == load(MICRO / "hf").logits([1, 2])).all()


def test_a_nested_setting_is_named_with_those_around_it(folder):
    path = folder(rope_parameters={"rope_theta": 1e6, "rope_type": "default", "wobble": {"a": 1}})
    with pytest.raises(UnsupportedConfigError) as caught:
        load(path)
    assert caught.value.name == "rope_parameters.wobble"
    assert "'a': 1" in load(path, "rope_parameters.wobble").notes[0]


def test_a_whole_mapping_may_be_allowed(folder):
    path = folder(rope_scaling={"type": "unheard-of", "factor": 4.0})
    assert load(path, "rope_scaling").config == load(MICRO / "hf").config


def test_an_implemented_setting_keeps_its_meaning(folder):
    engine = load(folder(), "rms_norm_eps")
    assert engine.config == load(MICRO / "hf").config
    assert engine.notes == ("--allow-setting rms_norm_eps: not needed, the setting is implemented or changes nothing",)


def test_only_what_is_refused_is_ignored(folder):
    engine = load(folder(logit_scale=0.5, rms_norm_eps=1e-3), "rms_norm_eps", "logit_scale")
    assert engine.config.norm_eps == 1e-3
    assert [("not needed" in note) for note in engine.notes] == [True, False]


@pytest.mark.parametrize("name", ["missing", "rope_theta.factor", "", "."])
def test_a_name_that_the_file_lacks_is_an_error(folder, name):
    with pytest.raises(OptionError, match="has no setting"):
        load(folder(), name)


@pytest.mark.parametrize("names", ["rms_norm_eps", None, [3]])
def test_the_option_is_a_list_of_names(names):
    with pytest.raises(OptionError, match="allow_settings must be a list of names"):
        mlx_engine.load(MICRO / "hf", "simd", allow_settings=names)


def test_a_setting_that_is_needed_has_no_flag(folder):
    with pytest.raises(UnsupportedConfigError) as caught:
        load(folder(hidden_size="wide"), "hidden_size")
    assert "--allow-setting" not in str(caught.value)


@pytest.mark.parametrize("name", ["attention.wobble", "qwen3.attention.wobble"])
def test_a_gguf_key_has_the_prefix_of_the_architecture_or_not(tmp_path, name):
    path = tmp_path / "model.gguf"
    with open_gguf(MICRO / "model-f32.gguf") as file:
        metadata = {**file.typed_metadata(), "qwen3.attention.wobble": Value(ValueType.FLOAT32, 2.0)}
        write_gguf(path, metadata, [file.weight(n) for n in file.tensors])
    with pytest.raises(UnsupportedConfigError, match=r"--allow-setting attention\.wobble ignores"):
        load(path)
    assert "2.0 is not implemented" in load(path, name).notes[0]


@pytest.mark.slow
def test_a_report_has_the_notes(folder, tmp_path):
    path, flag = folder(logit_scale=0.5), ("--allow-setting", "logit_scale")
    how = ("-b", "simd", "-p", 2, "-n", 1, "-r", 1, "--budget", 0.1, "--out", tmp_path / "out")
    assert cli("report", "-m", path, *how, *flag).exit_code == 0
    (page,) = (tmp_path / "out").glob("*.md")
    assert NOTE in page.read_text()
    assert "--allow-setting logit_scale" in page.read_text().replace("\n", " ")


@pytest.mark.slow
def test_every_command_that_loads_takes_the_flag_and_shows_it(folder, tmp_path):
    path, flag = folder(logit_scale=0.5), ("--allow-setting", "logit_scale")
    shown = cli("generate", "a", "-m", path, "-n", 1, "-b", "simd", "--no-jit", *flag)
    assert (shown.exit_code, NOTE in shown.stderr) == (0, True)
    assert cli("generate", "a", "-m", path).exit_code == 1
    found = cli("inspect", path, "--verify", *flag)
    assert (found.exit_code, f"WARN  settings   {NOTE}" in found.stdout) == (0, True)
    assert NOTE in cli("quantize", path, tmp_path / "out.gguf", *flag).stderr
    row = cli("bench", "-m", path, "-b", "simd", "-p", 1, "-n", 0, "-r", 1, "--no-jit", "-o", "json", *flag)
    assert json.loads(row.stdout)[0]["notes"] == [NOTE]
    assert NOTE in row.stderr
    refused = cli("inspect", path, *flag)
    assert "--allow-setting needs --verify" in refused.stderr
    assert NOTE in cli("backends", "-m", path, *flag).stdout
    refused = cli("quantize", MICRO / "model-f32.gguf", tmp_path / "again.gguf", *flag)
    assert "all settings of a GGUF file are copied" in refused.stderr
