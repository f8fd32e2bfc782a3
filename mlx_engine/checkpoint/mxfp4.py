"""MXFP4 folders, as gpt-oss is published: the experts of a layer, quantised together.

NAME_blocks (..., N, K / 32, 16) has the quants of groups of 32 weights, two to a byte, the even one in the low half.
NAME_scales (..., N, K / 32) has the exponent of each group's power of two, plus 127. The weight (..., N, K) keeps the
name NAME_blocks, because NAME alone is that of a tensor with other axes in folders that are not quantised.

Source: `convert_moe_packed_tensors`, Hugging Face transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

from mlx_engine.checkpoint.quantized import Files, Layer, QuantConfig, check_shape, named, part
from mlx_engine.quant.group_weight import GroupWeight, Parts
from mlx_engine.quant.regroup import MLX

BLOCKS, SCALES = "_blocks", "_scales"


def layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Return the quantised weights of a folder by the names of their blocks.

    Raises:
        UnsupportedConfigError: the config asks for what is not implemented.
        FormatError: blocks and scales do not fit each other.
    """
    config.refuse_others(("quant_method", "modules_to_not_convert", "dequantize"))
    return {stem + BLOCKS: _layer(files, stem) for stem in named(files, BLOCKS)}


def _layer(files: Files, stem: str) -> Layer:
    blocks, scales = part(files, stem + BLOCKS, "U8"), part(files, stem + SCALES, "U8")
    n_bytes = MLX.block_bytes - MLX.scale_bytes
    check_shape(stem + BLOCKS, blocks.shape, (*blocks.shape[:3], n_bytes))  # four axes
    check_shape(stem + SCALES, scales.shape, blocks.shape[:-1])
    shape = (*scales.shape[:-1], scales.shape[-1] * MLX.block_size)

    def read() -> GroupWeight:
        return GroupWeight(stem + BLOCKS, shape, MLX, Parts(blocks.reshape(-1, n_bytes), scales.reshape(-1, 1), None))

    return Layer(shape, (stem + BLOCKS, stem + SCALES), read)
