"""Replace the tensors of quantised layers in a folder by the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_engine.checkpoint import awq, compressed_tensors, fp8, gptq, mxfp4
from mlx_engine.checkpoint.quantized import CONFIG, Files, Layer, QuantConfig, quant_method
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.quant.weight import Weight

if TYPE_CHECKING:
    from mlx_engine.checkpoint.model_files import Checkpoint

_READERS: dict[str, Callable[[QuantConfig, Files], Mapping[str, Layer]]] = {
    "gptq": gptq.layers,
    "awq": awq.layers,
    "fp8": fp8.layers,
    "compressed-tensors": compressed_tensors.layers,
    "mxfp4": mxfp4.layers,
}


def expanded(checkpoint: Checkpoint, files: Files) -> Checkpoint:
    """Return the checkpoint with one weight per quantised layer, and without `quantization_config`.

    A folder that is not quantised is returned unchanged.

    Raises:
        UnsupportedConfigError: the method or one of its settings is not implemented.
        FormatError: the tensors of a layer do not fit each other.
    """
    values = checkpoint.settings.get(CONFIG)
    if not isinstance(values, Mapping) or (method := quant_method(values)) is None:
        return checkpoint
    config = QuantConfig(checkpoint.where, values)
    if method not in _READERS:
        raise UnsupportedConfigError(
            where=config.where,
            key=f"{CONFIG}.quant_method",
            expected=" or ".join(map(repr, _READERS)),
            found=method,
            hint="download the original model, which is not quantised, and quantise it with --quant q8_0 or q4_0, or "
            "download a GGUF file of the model",
        )
    layers = _READERS[method](config, files)
    parts = {name for layer in layers.values() for name in layer.parts}
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name not in parts}

    def weight(name: str) -> Weight:
        return layers[name].read() if name in layers else checkpoint.weight(name)

    return replace(
        checkpoint,
        settings={key: value for key, value in checkpoint.settings.items() if key != CONFIG},
        shapes={**shapes, **{name: layer.shape for name, layer in layers.items()}},
        weight=weight,
        is_converted=True,
    )
