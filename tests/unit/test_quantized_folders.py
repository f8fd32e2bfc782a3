"""Folders of other quantisers: each weight is `scale * (q - zero)` bit for bit, and models compute with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine.checkpoint.listing import open_listing
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.safetensors import open_safetensors
from mlx_engine.errors import FormatError, UnsupportedConfigError
from tests.packed_folders import Packer, Tensors, awq, fp8, gptq, int8, pack, tensor, write_folder

HF = Path(__file__).parents[1] / "data" / "qwen3-micro" / "hf"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "dynamic": {}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(form: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "strategy": strategy, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


INT8, PACKED = compressed("int-quantized", 8, "channel"), compressed("pack-quantized", 4, "group", group_size=32)
# By name: the packer, the config, and the type of the weight that is read.
CASES: dict[str, tuple[Packer, dict[str, Any], str]] = {
    "gptq": (partial(gptq, zero=8), GPTQ, "Q4_0"),
    "gptq asymmetric": (gptq, GPTQ | {"sym": False}, "Q8_0"),
    "gptq v2": (partial(gptq, v2=True), GPTQ | {"checkpoint_format": "gptq_v2"}, "Q8_0"),
    "gptq act-order": (partial(gptq, shuffled=True), GPTQ | {"desc_act": True}, "F32"),
    "gptq of float32 scales": (partial(gptq, scale_type=np.float32), GPTQ, "F32"),
    "gptq 8 bits": (partial(gptq, bits=8, zero=128), GPTQ | {"bits": 8}, "Q8_0"),
    "gptq 8 bits asymmetric": (partial(gptq, bits=8, v2=True), GPTQ | {"bits": 8, "format": "gptq_v2"}, "F32"),
    "gptq small groups": (partial(gptq, size=16), GPTQ | {"group_size": 16}, "F32"),
    "gptq one group": (partial(gptq, size=10**6), GPTQ | {"group_size": -1}, "Q8_0"),
    "awq": (awq, AWQ, "Q8_0"),
    "int8": (int8, INT8, "Q8_0"),
    "int8 of float32 scales": (partial(int8, exact=False), INT8, "F32"),
    "int8 asymmetric": (partial(int8, zeros=True), INT8, "F32"),
    "packed": (pack, PACKED, "Q4_0"),
    "packed asymmetric": (partial(pack, zeros=True), PACKED, "Q8_0"),
    "fp8": (fp8, FP8, "F32"),
    "fp8 of BF16 scales": (partial(fp8, scale="BF16"), FP8, "F32"),
    "fp8 of powers of two": (partial(fp8, scale="F8_E8M0"), FP8 | {"scale_fmt": "ue8m0"}, "F32"),
    "fp8 of one scale": (partial(fp8, block=(10**3, 10**3)), FP8 | {"weight_block_size": None}, "F32"),
    "fp8 of small blocks": (partial(fp8, block=(32, 16)), FP8 | {"weight_block_size": [32, 16]}, "F32"),
}  # fmt: skip


def folders(tmp_path: Path, case: str) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """Write the micro checkpoint with packed linear layers, and the same with their values in float32."""
    packer, config, _ = CASES[case]
    rng, stored = np.random.default_rng(1), open_safetensors(HF / "model.safetensors")
    packed: Tensors = {}
    plain: Tensors = {}
    wanted: dict[str, np.ndarray] = {}
    for name, entry in stored.tensors.items():
        values = stored.weight(name).dequantize().reshape(entry.shape)
        if name.endswith("_proj.weight"):
            tensors, wanted[name] = packer(rng, name.removesuffix(".weight"), *entry.shape)
            packed |= tensors
            plain[name] = tensor(wanted[name])
        else:
            packed[name] = plain[name] = tensor(values)
    return (
        write_folder(tmp_path / "packed", HF, packed, config),
        write_folder(tmp_path / "plain", HF, plain, None),
        wanted,
    )


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_formula_bit_for_bit(tmp_path: Path, case: str):
    packed, _, wanted = folders(tmp_path, case)
    checkpoint = open_checkpoint(packed)
    assert "quantization_config" not in checkpoint.settings
    for name, values in wanted.items():
        weight = checkpoint.weight(name)
        assert (weight.shape, weight.type.name) == (checkpoint.shapes[name], CASES[case][2])
        np.testing.assert_array_equal(weight.dequantize().view(np.uint32), np.ascontiguousarray(values).view(np.uint32))


@pytest.mark.some(2)
@pytest.mark.parametrize("case", ["gptq act-order", "awq", "int8", "packed", "fp8"])
def test_a_model_computes_with_these_weights(tmp_path: Path, case: str):
    packed, plain, _ = folders(tmp_path, case)
    ids = [5, 9, 300, 17, 2]
    found, want = (np.asarray(mlx_engine.load(path, "simd").logits(ids)) for path in (packed, plain))
    assert np.linalg.norm(found - want) <= 2e-6 * np.linalg.norm(want)


def test_pieces_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pieces of 7 rows: words of AWQ have 8 rows."""
    from mlx_engine.checkpoint import quantized

    monkeypatch.setattr(quantized, "_PIECE", 7 * 64)
    for case in ("gptq", "awq", "int8", "packed", "fp8"):
        (tmp_path / case).mkdir()
        packed, _, wanted = folders(tmp_path / case, case)
        checkpoint = open_checkpoint(packed)
        for name, values in wanted.items():
            np.testing.assert_array_equal(checkpoint.weight(name).dequantize(), values)


def test_a_listing_shows_the_tensors_as_they_are_stored(tmp_path: Path):
    packed, _, _ = folders(tmp_path, "gptq")
    types = {row.name.rpartition(".")[2]: row.type for row in open_listing(packed).tensors}
    assert (types["qweight"], types["scales"]) == ("I32", "F16")


CHANGED = {
    "bits": ("gptq", {"bits": 3}),
    "dynamic": ("gptq", {"dynamic": {"-:mlp": {}}}),
    "checkpoint_format": ("gptq", {"checkpoint_format": "marlin"}),
    "pack_dtype": ("gptq", {"pack_dtype": "int16"}),
    "group_size": ("gptq", {"group_size": 48}),
    "version": ("awq", {"version": "gemv"}),
    "quant_method": ("awq", {"quant_method": "bitsandbytes"}),
    "fmt": ("fp8", {"fmt": "e5m2"}),
    "weight_block_size": ("fp8", {"weight_block_size": [0, 128]}),
    "format": ("int8", {"format": "marlin-24"}),
    "kv_cache_scheme": ("int8", {"kv_cache_scheme": {"num_bits": 8}}),
    "transform_config": ("int8", {"transform_config": {"config_groups": {"R1": {}}}}),
    "sparsity_config": ("int8", {"sparsity_config": {"format": "sparse-bitmask"}}),
    "config_groups": ("int8", {"config_groups": {"group_0": {"weights": {"num_bits": 3}}}}),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("key", CHANGED)
def test_a_setting_that_is_not_implemented_is_refused_by_name(tmp_path: Path, key: str):
    case, change = CHANGED[key]
    CASES["changed"] = (CASES[case][0], CASES[case][1] | change, "")
    try:
        packed, _, _ = folders(tmp_path, "changed")
    finally:
        del CASES["changed"]
    with pytest.raises(UnsupportedConfigError) as caught:
        open_checkpoint(packed)
    assert caught.value.key == f"quantization_config.{key}"


def damaged(tensors: Tensors) -> Iterator[Tensors]:
    """Yield a layer's tensors with each in turn missing, cut by a row, of another type, or flat."""
    for name, (dtype, shape, data) in tensors.items():
        others = {key: value for key, value in tensors.items() if key != name}
        yield others
        yield others | {name: (dtype, (shape[0] - 1, *shape[1:]), data[: len(data) // shape[0] * (shape[0] - 1)])}
        yield others | {name: ("U8", (len(data),), data)}
        yield others | {name: (dtype, (math.prod(shape), 1), data)}


@pytest.mark.parametrize("case", ["gptq", "awq", "int8", "packed", "fp8"])
def test_a_layer_with_damaged_tensors_is_refused(tmp_path: Path, case: str):
    """If not here, then by the shapes that the architecture expects; without `g_idx` columns are in equal groups."""
    packer, config, _ = CASES[case]
    tensors, values = packer(np.random.default_rng(1), "layer", 160, 64)
    n_refused = 0
    for number, changed in enumerate(damaged(tensors)):
        packed = write_folder(tmp_path / str(number), HF, changed, config)
        try:
            checkpoint = open_checkpoint(packed)
            if checkpoint.shapes.get("layer.weight") == (160, 64):
                np.testing.assert_array_equal(checkpoint.weight("layer.weight").dequantize(), values)
        except FormatError:
            n_refused += 1
    assert n_refused > len(tensors)


def test_a_column_outside_all_groups_is_refused(tmp_path: Path):
    tensors, _ = gptq(np.random.default_rng(1), "layer", 32, 64)
    tensors["layer.g_idx"] = tensor(np.full(64, 2, np.int32))
    packed = write_folder(tmp_path / "packed", HF, tensors, GPTQ)
    with pytest.raises(FormatError, match="groups 0 to 1"):
        open_checkpoint(packed).weight("layer.weight")
