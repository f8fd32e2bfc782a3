"""`models`: the list from the model files, the keys of their settings, and the tables of docs/models.md."""

import json
from pathlib import Path

import gguf
import pytest

from mlx_engine import models
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.commands.models import architectures, keys_of
from mlx_engine.config.known import LACKS, LLAMA_CPP, MLX_LM
from mlx_engine.errors import UnknownArchitectureError
from mlx_engine.weights.model import architecture_of
from tests.unit.test_command_generate import cli
from tools import models_page

FILES = {path.stem for path in Path(models.__file__).parent.glob("*.py") if "\nARCHITECTURES" in path.read_text()}


def test_every_model_file_is_listed_with_a_title():
    found = architectures()
    assert {each.file for each in found} == FILES
    assert all(each.title and each.names and each.gguf for each in found)
    listed = cli("models").out
    assert all(each.title in listed and ", ".join(each.names) in listed for each in found)


def test_every_architecture_of_mlx_lm_and_llama_cpp_is_supported_or_lacks_something():
    supported = {name for each in architectures() for name in each.names}
    assert set(gguf.MODEL_ARCH_NAMES.values()) <= {*LLAMA_CPP}
    assert {*MLX_LM, *LLAMA_CPP} - supported == set(LACKS)
    assert len(MLX_LM) == len({*MLX_LM}) == 110
    with pytest.raises(UnknownArchitectureError, match="'mamba' is not implemented; it would need Mamba 1;"):
        architecture_of(Checkpoint("here", "gguf", "mamba", {}, {}, {}, None))  # type: ignore[arg-type]


def test_readme_has_the_tables_of_the_code():
    text = models_page.PAGE.read_text(encoding="utf-8")
    assert text == models_page.written(text), "run: python -m tools.models_page"


def test_types_say_what_a_backend_multiplies_as_stored():
    types = json.loads(cli("models", "--json").out)["types"]
    assert types["Q8_0"] == {**types["Q8_0"], "scalar": False, "parallel": True, "mlx": True}
    assert types["F32"]["parallel"] is True
    assert types["BF16"]["parallel"] is False


@pytest.mark.parametrize("name", sorted(name for each in architectures() for name in each.names))
def test_every_field_of_a_config_has_its_keys(name):
    keys = keys_of(name)
    assert all(field.hf or field.gguf for field in keys.fields)
    assert "block_count" in {key for field in keys.fields for key in field.gguf}
    assert cli("models", "--keys", name).code == 0


def test_keys_include_those_that_a_setting_asks_for_itself():
    keys = {field.field: field for field in keys_of("llama").fields}
    assert "rope_parameters.original_max_position_embeddings" in keys["rope"].hf
    assert keys["head_dim"].gguf == ("attention.key_length", "attention.value_length", "rope.dimension_count")
    found = json.loads(cli("models", "--keys", "llama", "--json").out)
    assert found["architecture"]["names"] == ["llama"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    run = cli("models", "--keys", "lama")
    assert run.code == 2
    assert "llama" in run.err
