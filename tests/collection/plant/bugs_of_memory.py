"""Planted bugs: bounds, guards, memory that no thread has written, address spaces, grids."""

from __future__ import annotations

from tests.collection.plant.bug import Bug, Swap
from tests.collection.plant.bugs_of_order import (
    AUDIO,
    CORRIDOR,
    DFLASH,
    FLASH,
    GGML,
    KERNELS,
    LM,
    MAST3R,
    MLX,
    OURS,
    PRIMITIVES,
    VLLM,
    VMLX,
)  # fmt: skip

READ, WRITE = "read out of bounds, device", "write out of bounds, device"
SHARED, PRIVATE = "out of bounds, threadgroup", "out of bounds, private"
LOOP, GUARD, STRIDE = "off by one in a loop", "missing guard", "wrong stride"
OF_THREADGROUP, OF_THREAD = "uninitialised threadgroup memory", "uninitialised private memory"
OUTPUT, SPACE, ALIAS = "output part not written", "wrong address space", "write to an input"
CONSTANT, SIZE, GRID = "write to constant memory", "wrong threadgroup size", "wrong grid"

BUGS = [
    # ---- bounds ----
    Bug(
        f"{MAST3R} upsample_one_by_one",
        READ,
        "the row after the last",
        (Swap(r"min\(h0 \+ 1, int\(H\) - 1\)", "h0 + 1"),),
    ),
    Bug(
        f"{MAST3R} upsample_in_fours",
        READ,
        "the index of another axis",
        (Swap(r"uint b_stride = H \* W \* C", "uint b_stride = out_H * W * C"),),
    ),
    Bug(
        f"{LM} gated_delta_masked",
        READ,
        "rows of another width",
        (Swap(r"state_in \+ \(n \* Dv", "state_in + (n * Dk"),),
    ),
    Bug(f"{OURS} simd_per_row", READ, "a row that is not clamped", (Swap(r"min\(row, N - 1\)", "row"),)),
    Bug(f"{GGML} copy", READ, "the row after", (Swap(r"args\.nb01", "(args.nb01 + 4)"),), after="kernel_cpy_t_t"),
    Bug(f"{MAST3R} rope_one_by_one", WRITE, "a negative index", (Swap(r"k_out\[tid\]", "k_out[int(tid) - 8]"),)),
    Bug(
        f"{MLX} metal_arange",
        WRITE,
        "shifted by one",
        (Swap(r"out\[index\]", "out[index + 1]"),),
        file=f"{KERNELS}/arange.h",
    ),
    Bug(f"{OURS} project_add", WRITE, "rows beyond the matrix", (Swap(r"row < N && "),)),
    Bug(
        f"{PRIMITIVES} gqa_optimized_tiled",
        SHARED,
        "an array for fewer keys",
        (Swap(r"K_shared\[32 \* 128\]", "K_shared[31 * 32]"),),
    ),
    Bug(f"{DFLASH} product_pipelined_of_bytes", SHARED, "one of two buffers", (Swap(r"B_tile\[2\]", "B_tile[1]"),)),
    Bug(
        f"{MLX} metal_softmax block_softmax_float32",
        SHARED,
        "an array for half the SIMD-groups",
        (Swap(r"local_max\[SIMD_SIZE\]", "local_max[SIMD_SIZE / 2]"),),
        file=f"{KERNELS}/softmax.h",
    ),
    Bug(f"{OURS} tiles", SHARED, "an array without its padding", (Swap(r"vectors\[BM \* 36\]", "vectors[BM * 32]"),)),
    Bug(f"{PRIMITIVES} gqa_optimized", PRIVATE, "an array for narrow heads", (Swap(r"acc\[128\]", "acc[16]"),)),
    Bug(
        f"{LM} gated_delta_vectorized",
        PRIVATE,
        "an array of one number",
        (Swap(r"state\[n_per_t\]", "state[n_per_t - 1]"),),
    ),
    Bug(f"{OURS} attention", PRIVATE, "a slot too few", (Swap(r"int slot\[8\]", "int slot[7]"),)),
    # ---- loops, guards, strides ----
    Bug(f"{AUDIO} depthwise_convolution", LOOP, "a tap too many", (Swap(r"k < K;", "k <= K;"),)),
    Bug(f"{LM} gated_delta_vectorized_masked", LOOP, "a step too many", (Swap(r"t < T;", "t <= T;"),)),
    Bug(f"{VLLM} convolution_of_one_token", LOOP, "a state too many", (Swap(r"t < state_len - 1;", "t < state_len;"),)),
    Bug(
        f"{VMLX} codebook_of_a_matrix",
        LOOP,
        "the first element left out",
        (Swap(r"uint i = 0; i <", "uint i = 1; i <"),),
    ),
    Bug(f"{OURS} thread_per_output", LOOP, "a block too many", (Swap("block < K / 32", "block <= K / 32"),)),
    Bug(f"{PRIMITIVES} gated_gelu", GUARD, "of the last threadgroup", (Swap(r"if \(idx >= size\) return;"),)),
    Bug(
        f"{PRIMITIVES} rope rope_forward",
        GUARD,
        "of the last threadgroup",
        (Swap(r"if \(idx >= total_pairs\) return;"),),
    ),
    Bug(
        f"{CORRIDOR} group_norm_of_an_image groupnorm_norm_v2",
        GUARD,
        "of the last threadgroup",
        (Swap(r"if \(elem >= total\) return;"),),
    ),
    Bug(
        f"{MAST3R} grid_sample_in_fours",
        GUARD,
        "pixels outside the image are read",
        (Swap(r"valid_nw \? (x\[idx_nw \+ i\]) : T\(0\)", "x[idx_nw + i]"),),
    ),
    Bug(f"{OURS} thread_per_output", GUARD, "of the last rows", (Swap(r"if \(row < N\)", "if (true)"),)),
    Bug(f"{OURS} embed_rows", GUARD, "of the last columns", (Swap(r"if \(column < K\)", "if (true)"),)),
    Bug(f"{OURS} dequantize", GUARD, "of the last sixteens", (Swap(r"if \(i < COUNT\)", "if (true)"),)),
    Bug(
        f"{MLX} metal_softmax block_softmax_float32",
        GUARD,
        "of a row's end",
        (Swap(r"if \(lid \* N_READS \+ N_READS <= axis_size\)", "if (true)"),),
        file=f"{KERNELS}/softmax.h",
    ),
    Bug(
        f"{MAST3R} grid_sample_one_by_one",
        STRIDE,
        "the height for the width",
        (Swap(r"h_stride = W \* C", "h_stride = H * C"),),
    ),
    Bug(
        f"{DFLASH} product_of_tiles_of_bytes",
        STRIDE,
        "of the activations",
        (Swap(r"ks \* BK_SUB,\s+K\)", "ks * BK_SUB, N)"),),
    ),
    Bug(f"{LM} wkv7", STRIDE, "from step to step", (Swap(r"k_ \+= H \* D;", "k_ += D;"),)),
    Bug(
        f"{GGML} rope_norm",
        STRIDE,
        "of the heads",
        (Swap(r"i1\*args\.nb1  \+", "i1*args.nb2  +"),),
        after="void kernel_rope_norm",
    ),
    Bug(
        f"{OURS} head_norm_rope",
        STRIDE,
        "of the table",
        (Swap(r"size_t\(token\) \* E \+ 2 \* j\]", "size_t(token) * E / 2 + 2 * j]"),),
    ),
    # ---- no thread has written ----
    Bug(
        f"{FLASH} merge_with_a_barrier",
        OF_THREADGROUP,
        "the sum is not shared",
        (Swap(r"shared_lse_merged\[local_nh\] = lse_merged_val;"),),
    ),
    Bug(
        f"{MLX} metal_rms_norm rmsfloat32",
        OF_THREADGROUP,
        "sums of SIMD-groups that do not exist",
        (Swap(r"local_sums\[simd_lane_id\] = 0;"),),
    ),
    Bug(
        f"{GGML} rms_norm kernel_rms_norm_mul_f32",
        OF_THREADGROUP,
        "sums of SIMD-groups that do not exist",
        (Swap(r"shmem_f32\[tiisg\] = 0\.0f;"),),
        after="void kernel_rms_norm_fuse_impl",
    ),
    Bug(
        f"{CORRIDOR} group_norm_of_an_image groupnorm_stats_v2",
        OF_THREADGROUP,
        "sums of half the SIMD-groups",
        (Swap(r"if \(simd_lane == 0\)", "if (simd_lane == 0 && simd_gid < 16)"),),
    ),
    Bug(f"{LM} gated_delta", OF_THREAD, "a sum", (Swap(r"float kv_mem = 0\.0f;", "float kv_mem;"),)),
    Bug(
        f"{PRIMITIVES} grouped_attention gqa_optimized",
        OF_THREAD,
        "the sums",
        (Swap(r"acc\[d\] = 0\.0f;", "(void)acc;"),),
    ),
    Bug(f"{OURS} attention", OF_THREAD, "the sums", (Swap(r"sums\[h \* E / 8 \+ i\] = 0\.0f;", "(void)sums;"),)),
    Bug(f"{MAST3R} rope_of_queries_and_keys", OUTPUT, "one index for two", (Swap(r"q_out\[idx2\]", "q_out[idx1]"),)),
    Bug(
        f"{AUDIO} relu_squared",
        OUTPUT,
        "only positive numbers",
        (Swap(r"out\[elem\] =", "if (val > T(0)) out[elem] ="),),
    ),
    Bug(f"{OURS} norm_qkv", OUTPUT, "the last matrix", (Swap(r"is_k \? k : v;", "is_k ? k : k;"),)),
    # ---- address spaces, and what may be written ----
    Bug(
        f"{OURS} dequantize",
        SPACE,
        "a pointer without one",
        (Swap(r"const Weights w =", "const float* all = y; const Weights w ="),),
    ),
    Bug(
        f"{DFLASH} product_of_four_rows",
        SPACE,
        "threadgroup for device",
        (Swap(r"\(const device Vec8\*\)", "(const threadgroup Vec8*)"),),
    ),
    Bug(
        f"{LM} bit_linear_multiplied",
        SPACE,
        "a cast without one",
        (Swap(r"packed_weights\[row_idx", "((const uint8_t*)packed_weights)[row_idx"),),
    ),
    Bug(
        f"{PRIMITIVES} rope_forward_qk",
        ALIAS,
        "keys are turned in place",
        (Swap(r"k_out\[base_idx \+ d1\]", "((device float*)k)[base_idx + d1]"),),
    ),
    Bug(
        f"{AUDIO} audio_encodec_lstm",
        ALIAS,
        "the cell is written in place",
        (Swap(r"cell_state\[elem\] =", "((device float*)cell)[elem] ="),),
    ),
    Bug(
        f"{OURS} project_add",
        ALIAS,
        "the residual is written in place",
        (Swap(r"y\[at\] =", "((device float*)residual)[at] = y[at] ="),),
    ),
    Bug(f"{AUDIO} multiply_add", CONSTANT, "a small input", (Swap(r"out\[elem\] =", "scale[0] = 2.0f; out[elem] ="),)),
    Bug(
        f"{GGML} argsort",
        CONSTANT,
        "an argument",
        (Swap(r"const int64_t i0 = ib\*args\.top_k;", "args.top_k = 1; const int64_t i0 = ib*args.top_k;"),),
    ),
    # ---- the call ----
    Bug(f"{LM} bit_linear_divided", SIZE, "half a SIMD-group per row", call={"threadgroup": (16, 1, 1)}),
    Bug(
        f"{CORRIDOR} group_norm_of_an_image groupnorm_stats_v2",
        SIZE,
        "fewer threads than the kernel counts",
        (Swap(r"num_threads = threads_per_threadgroup\.x", "num_threads = 1024"),),
        call={"threadgroup": (512, 1, 1)},
    ),
    Bug(
        f"{GGML} rms_norm kernel_rms_norm_f32", SIZE, "more SIMD-groups than the memory holds", call={"memory": {0: 4}}
    ),
    Bug(f"{AUDIO} relu_squared_of_products", GRID, "one sequence of two", call={"grid": (20, 20, 1)}),
    Bug(f"{MAST3R} rope_single", GRID, "threadgroups for threads", call={"grid": (2, 1, 1)}),
    Bug(f"{MLX} metal_sort c_block_sort_float32_float32_bn128_tn4", GRID, "one row of two", call={"grid": (128, 1, 1)}),
]
