"""Read quantised matrices from folders that MLX has written: their settings in config.json, and their tensors.

A quantised matrix NAME (..., N, K), with N outputs and K inputs, is stored in two or three tensors:

- NAME.weight: the quants, uint32 (..., N, K * bits / 32)
- NAME.scales: (..., N, K / group size)
- NAME.biases: only in the mode "affine", of the same shape as the scales

The setting `quantization` (or `quantization_config`) has "bits", "group_size" and "mode" for all matrices. If it also
has a key NAME, the value of this key has the settings of the matrix NAME. The value false means that this matrix is not
quantised, and true that it has the settings of all matrices.

Source: `load_model` and `quantize_model` of mlx-lm 0.32, mlx_lm/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_engine.checkpoint.quantized import quant_method
from mlx_engine.checkpoint.safetensors import SafetensorsFile, TensorEntry
from mlx_engine.errors import FormatError, UnsupportedConfigError
from mlx_engine.quant.group_weight import GroupWeight, Parts
from mlx_engine.quant.groups import AFFINE_BITS, AFFINE_GROUPS, BYTE, FIXED, FLOATS, MODES, GroupType, affine, fixed

KEYS = ("quantization", "quantization_config")
WEIGHT, SCALES, BIASES = ".weight", ".scales", ".biases"
# Bits of a uint32 word, which holds several quants.
WORD_BITS = 32


@dataclass(frozen=True)
class Setting:
    """How matrices are quantised; `group` is the group size, in columns.

    Error messages use `where`, the path of config.json, and `key`, the key of this setting.
    """

    where: str
    key: str
    mode: str
    bits: int
    group: int


@dataclass(frozen=True)
class Quantization:
    """The quantisation settings of a folder.

    `by_name` maps names of single matrices to their settings, or to None if the matrix is not quantised. All other
    matrices have the setting `default`.
    """

    default: Setting
    by_name: Mapping[str, Setting | None]

    def of(self, name: str) -> Setting | None:
        """Return the setting of a matrix; None if it is not quantised."""
        return self.by_name.get(name, self.default)


@dataclass(frozen=True)
class GroupEntry:
    """A quantised matrix in a folder. `tensors` has the (file, name) of its quants, its scales and any biases."""

    shape: tuple[int, ...]
    type: GroupType
    tensors: tuple[tuple[SafetensorsFile, str], ...]

    def weight(self, name: str) -> GroupWeight:
        """Return the matrix as a weight; its bytes are read from the file when they are first used."""
        width = self.type.block_size * self.type.bits // 8
        (file, tensor), *others = self.tensors
        quants = file.stored_bytes(tensor).reshape(-1, width)
        scales, *biases = (file.stored_bytes(tensor).reshape(-1, self.type.scale_bytes) for file, tensor in others)
        return GroupWeight(name, self.shape, self.type, Parts(quants, scales, biases[0] if biases else None))


def read_quantization(config: Mapping[str, object], where: str) -> Quantization | None:
    """Return the settings of MLX's quantisation; None if the folder has none.

    Also return None if there is only a `quantization_config` with a "quant_method": this folder is quantised by another
    method, such as GPTQ.

    Raises:
        UnsupportedConfigError: a setting is unknown or invalid.
    """
    key = next((key for key in KEYS if config.get(key) is not None), None)
    if key is None:
        return None
    found = config[key]
    if not isinstance(found, Mapping):
        raise UnsupportedConfigError(where=where, key=key, expected="a mapping", found=found)
    if quant_method(found) is not None and key != KEYS[0]:
        return None
    by_name: dict[str, Setting | None] = {}
    for name, value in found.items():
        if name in ("group_size", "bits", "mode", "quant_method"):
            continue
        if value is False:
            by_name[name] = None
        elif isinstance(value, Mapping):
            by_name[name] = _setting(value, where, f"{key}.{name}")
        elif value is not True:
            expected = "a mapping with bits and group_size, true or false"
            raise UnsupportedConfigError(where=where, key=f"{key}.{name}", expected=expected, found=value)
    return Quantization(_setting(found, where, key), by_name)


def _setting(values: Mapping[str, object], where: str, key: str) -> Setting:
    mode = values.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        raise UnsupportedConfigError(where=where, key=f"{key}.mode", expected=" or ".join(MODES), found=mode)
    allowed = {"bits": AFFINE_BITS, "group_size": AFFINE_GROUPS}
    if mode in FIXED:
        allowed = dict(zip(allowed, ((n,) for n in FIXED[mode]), strict=True))
    for name, numbers in allowed.items():
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value not in numbers:
            expected = " or ".join(map(str, numbers))
            raise UnsupportedConfigError(where=where, key=f"{key}.{name}", expected=expected, found=value)
    return Setting(where, key, mode, int(str(values["bits"])), int(str(values["group_size"])))


def group_entries(files: Mapping[str, SafetensorsFile], quantization: Quantization) -> dict[str, GroupEntry]:
    """Return a map from the name of each quantised matrix's quants (NAME.weight) to its `GroupEntry`.

    `files` maps the name of each tensor to its file.

    Raises:
        FormatError: the tensors of a matrix do not fit together, or do not fit the settings.
    """
    stems = [name.removesuffix(SCALES) for name in files if name.endswith(SCALES)]
    return {stem + WEIGHT: _entry(files, stem, quantization.of(stem)) for stem in stems if stem + WEIGHT in files}


def _entry(files: Mapping[str, SafetensorsFile], stem: str, setting: Setting | None) -> GroupEntry:
    names = [stem + part for part in (WEIGHT, SCALES, BIASES) if stem + part in files]
    quants, scales, *biases = (files[name].tensors[name] for name in names)
    where = f"{files[names[0]].path}: {stem}"
    if setting is None:
        raise _mismatch(where, "no scales, as config.json says that the matrix is not quantised", f"{stem}{SCALES}")
    wanted = f"{setting.key} of config.json asks for {setting.bits} bits, groups of {setting.group}, {setting.mode}"
    if quants.dtype != "U32" or len(quants.shape) < 2:
        raise _mismatch(where, f"quants of type U32 in rows ({wanted})", f"{quants.dtype} {quants.shape}")
    types, n_biases = (FLOATS, 1) if setting.mode == "affine" else ((BYTE,), 0)
    if scales.dtype not in types or len(biases) != n_biases:
        found = f"{scales.dtype} and {'biases' if biases else 'no biases'}"
        expected = f"scales of type {' or '.join(types)} and {'biases' if n_biases else 'no biases'} ({wanted})"
        raise _mismatch(where, expected, found)
    _check_shapes(where, wanted, setting, quants, [scales, *biases])
    type_ = affine(setting.bits, setting.group, scales.dtype) if biases else fixed(setting.mode)
    shape = (*quants.shape[:-1], scales.shape[-1] * setting.group)
    return GroupEntry(shape, type_, tuple((files[name], name) for name in names))


def _check_shapes(where: str, wanted: str, setting: Setting, quants: TensorEntry, others: list[TensorEntry]) -> None:
    """Check that bits and group size fit the shapes, and that scales and biases have the same shape and type."""
    width = quants.shape[-1] * WORD_BITS
    expected = (*quants.shape[:-1], width // setting.bits // setting.group)
    fits = width == expected[-1] * setting.group * setting.bits
    if fits and all(entry.shape == expected and entry.dtype == others[0].dtype for entry in others):
        return
    found = ", ".join(f"{entry.dtype} {entry.shape}" for entry in others)
    if fits:
        raise _mismatch(where, f"scales and biases {expected} of one type for quants {quants.shape} ({wanted})", found)
    raise _mismatch(where, f"rows of whole groups ({wanted})", f"quants {quants.shape} with scales {found}")


def _mismatch(where: str, expected: str, found: str) -> FormatError:
    hint = "config.json does not belong to these tensors, or a file is damaged; download the folder again"
    return FormatError(where=where, expected=expected, found=found, hint=hint)
