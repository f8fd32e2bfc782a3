"""GGUF files by gguf-py's tensor map hold the folder's model: the same config, and the values of all tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.commands.models import architectures
from mlx_engine.weights.model import architecture_of
from mlx_engine.weights.plan import check
from tests.golden.goldens import DATA, check_close, engine
from tests.golden.independent import ARCHITECTURES, ELSEWHERE, config_of, settings, write

FOLDERS = {path.parent.name.removesuffix("-micro"): path for path in DATA.glob("*-micro/hf")}
KINDS = {name: json.loads((path / "config.json").read_text())["model_type"] for name, path in FOLDERS.items()}


def planned(checkpoint: Checkpoint) -> tuple[object, dict[str, np.ndarray]]:
    plan = architecture_of(checkpoint).plan(checkpoint)
    found = check(checkpoint, plan)
    return plan.config, {name: tensor.weight(checkpoint).dequantize() for name, tensor in found.items()}


# Keys that converters write and llama.cpp does not need: what has the same default, is of no use, or is zero.
UNNEEDED = {
    "attention.scale", "expert_count", "expert_used_count", "feed_forward_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type",
}  # fmt: skip
# Settings of these folders are values of tensors in GGUF files.
BY_LOGITS = ("falconh1", "llama")


@pytest.mark.parametrize(
    "name", sorted(name for name, kind in KINDS.items() if kind in ARCHITECTURES and name not in BY_LOGITS[:1])
)
def test_a_gguf_by_the_tensor_map_of_gguf_py_has_the_folder_s_config_and_tensors(name: str, tmp_path: Path):
    write(FOLDERS[name], tmp_path / "model.gguf")
    of_folder, expected = planned(open_checkpoint(FOLDERS[name]))
    keys = of_folder.to_gguf()  # type: ignore[attr-defined]
    assert set(settings(config_of(FOLDERS[name]))) - set(keys) <= UNNEEDED
    of_file, found = planned(open_checkpoint(tmp_path / "model.gguf"))
    # GGUF files of Llama 3 have divisors of frequencies in place of the rule.
    encoded = {"rope", "beyond_chunk"} if "rope_freqs.weight" in found else set()
    assert set(of_folder.differences(of_file)) <= encoded  # type: ignore[attr-defined]
    found.pop("rope_freqs.weight", None)
    assert expected.keys() == found.keys()
    for tensor, values in expected.items():
        np.testing.assert_array_equal(found[tensor], values, err_msg=tensor)


@pytest.mark.parametrize("name", BY_LOGITS)
def test_settings_that_gguf_files_have_as_tensors_give_the_same_logits(name: str, tmp_path: Path):
    write(FOLDERS[name], tmp_path / "model.gguf")
    want, found = (engine(path, "simd").logits([5, 9, 3, 7]) for path in (FOLDERS[name], tmp_path / "model.gguf"))
    check_close(np.asarray(want), np.asarray(found))


def test_every_architecture_is_written_or_it_is_said_where():
    files = {kind: next(of for of in architectures() if kind in of.names).file for kind in {*ARCHITECTURES, *ELSEWHERE}}
    assert {of.file for of in architectures()} == set(files.values()), "add it to tests/golden/independent.py"
