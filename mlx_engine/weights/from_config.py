"""A checkpoint of a config.json alone, to plan models that have not been downloaded: shapes and types, no values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlx_engine.checkpoint.hf_folder import has_safetensors, read_json
from mlx_engine.checkpoint.mlx_quantization import KEYS, WEIGHT, Quantization, read_quantization
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.groups import affine, fixed
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import model_file

CONFIG = "config.json"
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# The type of a config that names none: the one that most models are published in.
USUAL_DTYPE = "bfloat16"


def is_config_alone(path: Path) -> bool:
    """Return whether a path is a config.json, or a folder that has one and no weights."""
    if path.is_dir():
        return (path / CONFIG).is_file() and not has_safetensors(path) and not any(path.glob("*.gguf"))
    return path.name == CONFIG


def open_config(path: Path) -> Checkpoint:
    """Return the checkpoint that a config.json describes; all its values are zeros.

    Matrices that MLX quantises have the type that `quantization` names; all others have that of `torch_dtype`.

    Raises:
        SourceError, FormatError: the file cannot be read.
        ModelError: the architecture or a setting is not implemented, or the types of weights cannot be derived from the
            settings.
    """
    file = path / CONFIG if path.is_dir() else path
    config = read_json(file)
    draft = Checkpoint(str(file), "hf", str(config.get("model_type")), config, {}, {}, _no_weight)
    module, quantization = model_file(draft), read_quantization(config, str(file))
    if quantization is None and config.get(KEYS[1]):
        raise UnsupportedConfigError(
            where=str(file),
            key=KEYS[1],
            expected="absent, or that of MLX, whose types config.json has in full",
            found=config[KEYS[1]],
            hint="plan with the original model's config.json and --quant q4_0, or with a GGUF file",
        )
    settings = {key: value for key, value in config.items() if quantization is None or key not in KEYS}
    draft = replace(draft, settings=settings)
    shapes = {
        tensor.stored("hf").name: tensor.stored("hf").shape(tensor.shape)
        for tensor in module.plan(draft).tensors
        if tensor.required
    }
    dtype = _dtype(config, str(file))

    def weight(name: str) -> Weight:
        shape = shapes[name]
        type_ = BY_NAME[DTYPES[dtype]] if quantization is None else _type(quantization, name, shape, DTYPES[dtype])
        nbytes = type_.bytes_for(math.prod(shape))
        return Weight(name, shape, type_, np.broadcast_to(np.zeros(1, np.uint8), (nbytes,)))

    return replace(draft, shapes=shapes, weight=weight)


def _no_weight(name: str) -> Weight:
    raise KeyError(name)


def _dtype(config: Mapping[str, object], where: str) -> str:
    inner = config.get("text_config")
    places = [config, *([inner] if isinstance(inner, Mapping) else [])]
    found = [place[key] for place in places for key in ("torch_dtype", "dtype") if place.get(key) is not None]
    name = str(found[0] if found else USUAL_DTYPE).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedConfigError(where=where, key="torch_dtype", expected=" or ".join(DTYPES), found=name)
    return name


def _type(quantization: Quantization, name: str, shape: tuple[int, ...], scale: str) -> GGMLType:
    """Return the type of a tensor in a folder that MLX has quantised."""
    setting = quantization.of(name.removesuffix(WEIGHT))
    if setting is None or len(shape) < 2 or not name.endswith(WEIGHT) or shape[-1] % setting.group:
        return BY_NAME[scale]
    return affine(setting.bits, setting.group, scale) if setting.mode == "affine" else fixed(setting.mode)
