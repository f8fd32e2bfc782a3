"""The settings and tensors of MLX's quantised folders: what is read, and every way in which they may not fit."""

import json
import re
import shutil

import numpy as np
import pytest

from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.errors import EngineError, FormatError, UnsupportedConfigError
from mlx_engine.weights.model import architecture_of
from mlx_engine.weights.plan import check
from tests.golden.goldens import DATA

PLAIN, MIXED = DATA / "mlx-4bit" / "hf", DATA / "mlx-mixed" / "hf"
NAME = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path):
    """Copy a folder, with its config and its tensors' header changed by functions."""

    def make(change=lambda config: None, rename=lambda header: None):
        made = tmp_path / "folder"
        shutil.copytree(PLAIN, made)
        (made / "model.safetensors.index.json").unlink()
        config = json.loads((made / "config.json").read_text())
        change(config)
        (made / "config.json").write_text(json.dumps(config))
        data = (made / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        rename(header)
        header, body = without_holes(header, data[start:])
        text = json.dumps(header).encode()
        (made / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
        return made

    return make


def without_holes(header, data):
    """Return the header and the bytes of its tensors alone, one after the other."""
    packed, body = {}, b""
    for name, row in header.items():
        first, last = row.get("data_offsets", (0, 0))
        offsets = {"data_offsets": [len(body), len(body) + last - first]} if "data_offsets" in row else {}
        packed[name], body = {**row, **offsets}, body + data[first:last]
    return packed, body


def quantization(**settings):
    def change(config):
        config["quantization"] = config["quantization_config"] = {**config["quantization"], **settings}

    return change


def test_each_matrix_has_the_type_that_the_settings_name():
    checkpoint = open_checkpoint(MIXED)
    types = {name: checkpoint.weight(name).type.name for name in checkpoint.shapes}
    assert types["model.embed_tokens.weight"] == "AFFINE8_G128_F16"
    assert types["model.layers.0.mlp.down_proj.weight"] == "AFFINE3_G64_F16"
    assert types["model.layers.0.self_attn.k_proj.weight"] == "F16"
    assert types["model.layers.1.self_attn.k_proj.weight"] == "AFFINE4_G32_F16"
    assert checkpoint.shapes["lm_head.weight"] == (96, 128)
    assert not any(name.endswith(("scales", "biases")) for name in checkpoint.shapes)
    assert "quantization" not in checkpoint.settings
    check(checkpoint, architecture_of(checkpoint).plan(checkpoint))


def test_weights_are_read_only_when_they_are_needed():
    checkpoint = open_checkpoint(PLAIN)
    weight = checkpoint.weight(f"{NAME}.weight")
    assert weight.nbytes == weight.type.bytes_for(128 * 128)
    assert "data" not in vars(weight)


def test_the_settings_may_stand_under_either_key(folder):
    def move(config):
        del config["quantization"]

    assert open_checkpoint(folder(move)).weight(f"{NAME}.weight").type.name == "AFFINE4_G64_BF16"


def test_another_programs_quantization_is_not_mlxs(folder):
    def change(config):
        del config["quantization"]
        config["quantization_config"]["quant_method"] = "gptq"

    with pytest.raises(UnsupportedConfigError, match="quantization_config"):
        open_checkpoint(folder(change))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"mode": "int7"}, r"quantization.mode to be affine or mxfp4 .* found 'int7'"),
        ({"mode": 4}, "quantization.mode"),
        ({"bits": 7}, r"quantization.bits to be 2 or 3 .* found 7"),
        ({"bits": True}, "quantization.bits"),
        ({"bits": None}, "quantization.bits"),
        ({"bits": "4"}, "quantization.bits"),
        ({"group_size": 16}, "quantization.group_size to be 32 or 64 or 128, found 16"),
        ({"mode": "mxfp4"}, "quantization.group_size to be 32, found 64"),
        ({"mode": "nvfp4"}, "quantization.group_size to be 16, found 64"),
        ({NAME: {"group_size": 64}}, f"quantization.{NAME}.bits"),
        ({NAME: {"group_size": 64, "bits": 4, "mode": "fp2"}}, f"quantization.{NAME}.mode"),
        ({NAME: "4bit"}, f"quantization.{NAME} to be a mapping"),
        ({"global_scale": 2.0}, "quantization.global_scale"),
    ],
)
def test_settings_that_are_not_understood_are_named(folder, settings, found):
    with pytest.raises(UnsupportedConfigError, match=found):
        open_checkpoint(folder(quantization(**settings)))


def test_settings_that_are_no_mapping_are_refused(folder):
    def change(config):
        config["quantization"] = 4

    with pytest.raises(UnsupportedConfigError, match="quantization to be a mapping, found 4"):
        open_checkpoint(folder(change))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"bits": 8}, "8 bits, groups of 64, affine"),
        ({"group_size": 32}, "4 bits, groups of 32, affine"),
        ({"group_size": 32, "mode": "mxfp4"}, "expected scales of type U8 and no biases"),
        ({NAME: {"bits": 3, "group_size": 64}}, f"{NAME}: expected .*quantization.{NAME} of config.json asks for 3"),
        ({NAME: False}, f"{NAME}: expected no scales, as config.json"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(folder, settings, found):
    with pytest.raises(FormatError, match=found):
        open_checkpoint(folder(quantization(**settings)))


def test_bits_and_group_that_fit_another_width_are_misshapen(folder):
    checkpoint = open_checkpoint(folder(quantization(bits=8, group_size=32)))
    with pytest.raises(EngineError, match=re.escape("expected (128, 128), found (128, 64)")):
        check(checkpoint, architecture_of(checkpoint).plan(checkpoint))


def swap(name, **row):
    def change(header):
        header[name] = {**header[name], **row}

    return change


DAMAGED = {
    "quants of another type": swap(f"{NAME}.weight", dtype="I32"),
    "quants without rows": swap(f"{NAME}.weight", shape=[128 * 16]),
    "scales of another type": swap(f"{NAME}.scales", dtype="I16"),
    "scales and biases of two types": swap(f"{NAME}.biases", dtype="F16"),
    "scales of another shape": swap(f"{NAME}.scales", shape=[64, 4]),
    "biases of another shape": swap(f"{NAME}.biases", shape=[256]),
    "no biases": lambda header: header.pop(f"{NAME}.biases"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_tensors_that_do_not_fit_each_other_are_refused(folder, how):
    with pytest.raises(FormatError, match=NAME):
        open_checkpoint(folder(rename=DAMAGED[how]))


def test_scales_without_quants_are_unexpected_tensors(folder):
    checkpoint = open_checkpoint(folder(rename=lambda header: header.pop(f"{NAME}.weight")))
    with pytest.raises(EngineError, match=f"unexpected .*{NAME}.biases"):
        check(checkpoint, architecture_of(checkpoint).plan(checkpoint))


def test_tensors_at_any_offset_are_read(folder):
    """safetensors does not align tensors."""
    made = folder()
    path = made / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 3).to_bytes(8, "little") + data[8 : 8 + length] + b"   " + data[8 + length :])
    one, other = (open_checkpoint(at).weight(f"{NAME}.weight") for at in (made, PLAIN))
    np.testing.assert_array_equal(one.dequantize(), other.dequantize())
    from mlx_engine.backends.mlx.weights import group_matrix

    np.testing.assert_array_equal(
        np.asarray(group_matrix(one, one.type).wq), np.asarray(group_matrix(other, other.type).wq)
    )


def test_a_matrix_without_rows_is_read(folder):
    empty = {"shape": [0, 16], "data_offsets": [0, 0]}

    def change(header):
        header[f"{NAME}.weight"] |= empty
        for part in ("scales", "biases"):
            header[f"{NAME}.{part}"] |= {**empty, "shape": [0, 2]}

    assert open_checkpoint(folder(rename=change)).weight(f"{NAME}.weight").dequantize().shape == (0, 128)
