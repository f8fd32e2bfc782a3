"""GPTQ: layers with `qweight`, `qzeros`, `scales` and `g_idx`. `weight[n, k] = scale[n, g] * (q[n, k] - zero[n, g])`.

g is the group of column k, `g_idx[k]`. `qweight` (K * bits / 32, N) int32 packs the quants of 32 / bits columns into a
word, the first in the lowest bits; `scales` is (G, N); `qzeros` (G, N * bits / 32) packs zero points in the same way,
along N. The format "gptq" stores every zero point less one, "gptq_v2" stores the zero point itself. The one that was
subtracted is added to whole words, as GPTQModel does: a zero point of 0 borrows from its neighbour.

Source: `QuantLinear.pack` and `forward`, github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py;
`convert_gptq_v1_to_v2_format_module`, github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.groups import Groups, equal_groups, fields
from mlx_engine.checkpoint.quantized import Files, Layer, QuantConfig, check_shape, floats, named, part
from mlx_engine.quant.weight import Weight

# Settings of the quantiser and of its kernels, which do not change what the stored tensors mean.
_HARMLESS = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "desc_act", "disable_exllama", "exllama_config", "lm_head", "max_input_length", "meta",
    "method", "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "pad_token_id", "quant_method", "static_groups", "sym", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip
_V1 = ("gptq", None)


def layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Return the quantised layers of a folder by the names of their weights.

    Raises:
        UnsupportedConfigError: the config asks for what is not implemented.
        FormatError: the tensors of a layer do not fit each other.
    """
    bits = config.expect("bits", 4, 8)
    size = config.expect("group_size", 128, -1, 16, 32, 64, 256, 512, 1024)
    config.expect("pack_dtype", "int32")
    formats = [config.expect(key, *_V1, "gptq_v2") for key in ("checkpoint_format", "format")]
    config.refuse_others(("bits", "group_size", "pack_dtype", "checkpoint_format", "format", *_HARMLESS))
    is_v1 = "gptq_v2" not in formats
    return {f"{prefix}.weight": _layer(files, prefix, bits, size, is_v1) for prefix in named(files, ".qweight")}


def _layer(files: Files, prefix: str, bits: int, size: int, is_v1: bool) -> Layer:
    names = tuple(f"{prefix}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx") if f"{prefix}.{end}" in files)
    packed, zeros = (part(files, f"{prefix}.{end}", "I32") for end in ("qweight", "qzeros"))
    scale_shape = part(files, f"{prefix}.scales", "F16", "BF16", "F32").shape
    check_shape(f"{prefix}.qweight", packed.shape, (len(packed), *scale_shape[1:2]))
    (rows, n), per_word = packed.shape, 32 // bits
    k = rows * per_word
    n_groups = 1 if size == -1 else -(-k // size)
    check_shape(f"{prefix}.scales", scale_shape, (n_groups, n))
    check_shape(f"{prefix}.qzeros", zeros.shape, (n_groups, -(-n // per_word)))
    if f"{prefix}.g_idx" in files:
        check_shape(f"{prefix}.g_idx", part(files, f"{prefix}.g_idx", "I32").shape, (k,))

    def read() -> Weight:
        whole = zeros.view(np.uint32) + np.uint32(0xFFFFFFFF // ((1 << bits) - 1)) if is_v1 else zeros
        groups = equal_groups(k, n_groups, size)
        if f"{prefix}.g_idx" in files:
            groups = part(files, f"{prefix}.g_idx", "I32").astype(np.int64)

        def quants(first: int, last: int) -> NDArray[np.int16]:
            return fields(packed[:, first:last].T, bits)

        zero_points = fields(whole.view(np.int32), bits)[:, :n].T
        scales = floats(files, f"{prefix}.scales").T
        return Groups(f"{prefix}.weight", bits, scales, zero_points, groups, quants).weight()

    return Layer((n, k), names, read)
