"""Planted bugs: integers, alignment, infinities, half precision, recursion."""

from __future__ import annotations

from tests.collection.plant.bug import Bug, Swap
from tests.collection.plant.bugs_of_order import (
    AUDIO,
    DFLASH,
    FLASH,
    GGML,
    LM,
    MAST3R,
    MLX,
    OURS,
    PRIMITIVES,
    VLLM,
    VMLX,
)  # fmt: skip

OVERFLOW, TRUNCATED, ZERO = "integer overflow", "integer truncation", "integer division by zero"
SHIFT, MISALIGNED = "shift too wide", "misaligned vector load"
INFINITE, HALF, PRECISION = "NaN from infinities", "half overflow", "precision lost in half"
RECURSION = "recursion"

BUGS = [
    Bug(
        f"{VLLM} convolution_of_one_token",
        OVERFLOW,
        "an index",
        (Swap(r"int weight_base = c \* KERNEL_SIZE;", "int weight_base = c * KERNEL_SIZE * 300000000 / 300000000;"),),
    ),
    Bug(
        f"{AUDIO} depthwise_convolution",
        OVERFLOW,
        "an index",
        (Swap(r"\(batch \* L_out\) \+ time\) \* C", "(batch * L_out) + time) * C * 100000000 / 100000000"),),
    ),
    Bug(f"{OURS} thread_per_output", OVERFLOW, "a subtraction", (Swap(r"\) - 128;", " * 100000000) - 128;"),)),
    Bug(
        f"{MAST3R} rope_one_by_one", TRUNCATED, "an index of eight bits", (Swap("uint paired_tid", "uchar paired_tid"),)
    ),
    Bug(
        f"{PRIMITIVES} grouped_attention gqa_optimized",
        TRUNCATED,
        "an offset of 8 bits",
        (Swap("uint kv_base", "uchar kv_base"),),
    ),
    Bug(
        f"{AUDIO} relu_squared relu_squared", TRUNCATED, "a position of eight bits", (Swap("uint elem", "uchar elem"),)
    ),
    Bug(f"{MAST3R} rope_single", ZERO, "a width that is too small", (Swap(r"tid % D_half", "tid % (D_half / 16)"),)),
    Bug(f"{PRIMITIVES} rope rope_forward", ZERO, "an empty axis", (Swap(r"rem % num_heads", "rem % (num_heads / 4)"),)),
    Bug(f"{LM} bit_linear_divided", SHIFT, "beyond the type", (Swap(r"w >> 6", "w >> 38"),)),
    Bug(
        f"{DFLASH} product_pipelined",
        SHIFT,
        "by the bits of a word",
        (Swap(r"packed >> \(ki \* 4\)", "packed >> (ki * 4 + 8)"),),
    ),
    Bug(
        f"{OURS} thread_per_output",
        SHIFT,
        "by the bits of a word",
        (Swap(r"\[size_t\(row\) \* K \+ i\]\)", "[size_t(row) * K + i] << (i % 2 * 32) >> (i % 2 * 32))"),),
    ),
    Bug(
        f"{DFLASH} product_of_four_rows",
        MISALIGNED,
        "the second number",
        (Swap(r"\(const device Vec8\*\)x", "(const device Vec8*)(x + 1)"),),
    ),
    Bug(
        f"{GGML} rms_norm kernel_rms_norm_mul_add_f32_4",
        MISALIGNED,
        "the second number",
        (Swap(r"\(src0 \+", "(src0 + 4 +"),),
        after="void kernel_rms_norm_fuse_impl",
    ),
    Bug(
        f"{OURS} attention",
        MISALIGNED,
        "the second number",
        (Swap(r"load4\(from \+ \(i", "load4(from + 1 + (i"),),
        header=True,
    ),
    Bug(
        f"{OURS} attention",
        INFINITE,
        "scores beyond float",
        (Swap(r"score = score \* scale\[0\];", "score = score * scale[0] * 3.0e38f * 1.0e10f;"),),
    ),
    Bug(
        f"{FLASH} attention_block_stride",
        INFINITE,
        "an empty part",
        (
            Swap(r"m_w = -1e38f", "m_w = -INFINITY"),
            Swap(r"m_w = m_new;", "m_w = m_new; if (t == t_end - 1 && warp == 7) m_w = -INFINITY;"),
        ),
    ),
    Bug(
        f"{GGML} soft_max",
        INFINITE,
        "an infinite maximum",
        (
            Swap(
                r"exp\(\(psrc0\[i00\]\*args\.scale \+ \(pmask \? slope\*pmask\[i00\] : 0\.0f\)\) - max_val\)",
                "exp((psrc0[i00]*args.scale + (pmask ? slope*pmask[i00] : 0.0f)) - (pmask ? pmask[i00] : 0.0f))",
            ),
        ),
    ),
    Bug(
        f"{LM} bit_linear_multiplied",
        HALF,
        "a scaled sum",
        (
            Swap(
                r"static_cast<T>\(sum\[i\] \* scale\)",
                "static_cast<T>(half(sum[i] * 30000.0f) * half(scale) / half(30000.0f))",
            ),
        ),
    ),
    Bug(
        f"{PRIMITIVES} gated_gelu",
        HALF,
        "a power",
        (Swap(r"g \* g \* g\)", "float(half(g * 200.0f) * half(g * 200.0f)) * g / 40000.0f)"),),
    ),
    Bug(
        f"{OURS} simd_per_row",
        PRECISION,
        "a sum",
        (Swap(r"products, sum\);", "products, sum); sum = float(half(sum));"),),
    ),
    Bug(f"{LM} gated_delta", PRECISION, "a sum", (Swap(r"float out = 0\.0f", "half out = 0.0h"),)),
    Bug(f"{VMLX} codebook_of_a_matrix", PRECISION, "a sum", (Swap(r"float sum = 0\.0f", "half sum = 0.0h"),)),
    Bug(f"{MLX} metal_rms_norm rmsfloat32", PRECISION, "a sum", (Swap(r"float acc = 0;", "half acc = 0;"),)),
    Bug(
        f"{AUDIO} audio_encodec_lstm",
        RECURSION,
        "a function that calls itself",
        (Swap(r"(?<=T sigmoid\(T x\) \{)", " if (x > 80) return sigmoid(x - 1);"),),
        header=True,
    ),
    Bug(
        f"{OURS} head_norm_rope",
        RECURSION,
        "a function that calls itself",
        (
            Swap(
                r"return metal::precise::rsqrt\(",
                "return count < 0 ? rms_factor(squares, -count, eps) : metal::precise::rsqrt(",
            ),
        ),
        header=True,
    ),
]
