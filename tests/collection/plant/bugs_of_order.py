"""Planted bugs: barriers, races, lanes, loops without an end."""

from __future__ import annotations

from tests.collection.plant.bug import Bug, Swap

MAST3R, AUDIO, LM = "Aedelon/mlx-mast3r", "Blaizzy/mlx-audio", "ml-explore/mlx-lm"
PRIMITIVES, DFLASH, FLASH = "zakkeown/mlx-primitives", "shaneholloman/dflash-mlx", "lisihao/FlashMLX"
CORRIDOR, VMLX, VLLM = "cmoyates/corridorkey-mlx", "jjang-ai/vmlx", "vllm-project/vllm-metal"
MLX, GGML, OURS = "ml-explore/mlx", "ggml-org/ggml", "mlx_engine"
KERNELS = "mlx/backend/metal/kernels"

ANY_BARRIER = r"threadgroup_barrier\([^)]*\);"
SIMD_BARRIER = r"simdgroup_barrier\([^)]*\);"
NO_MEMORY = "threadgroup_barrier(mem_flags::mem_none);"
DEVICE = "threadgroup_barrier(mem_flags::mem_device);"

MISSING, NO_FLAGS, OTHER_FLAGS = "missing barrier", "barrier that orders no memory", "barrier for other memory"
DIVERGENT, WEAK = "barrier in divergent flow", "SIMD-group barrier for a threadgroup's"
RACE, SAME = "race on device output", "same-value race"
LANES, SHUFFLE, ENDLESS = "SIMD operation with the wrong lanes", "shuffle out of range", "endless loop"

BUGS = [
    # ---- missing ----
    Bug(f"{PRIMITIVES} gqa_optimized_tiled", MISSING, "before the tiles are read", (Swap(ANY_BARRIER),)),
    Bug(f"{PRIMITIVES} gqa_optimized_tiled", MISSING, "before the tiles are written again", (Swap(ANY_BARRIER, n=1),)),
    Bug(f"{DFLASH} product_of_tiles", MISSING, "before the tile is written again", (Swap(ANY_BARRIER, n=1),)),
    Bug(f"{DFLASH} product_combined", MISSING, "before the partial sums are added", (Swap(ANY_BARRIER),)),
    Bug(f"{DFLASH} product_combined", MISSING, "of a SIMD-group, before its tile is read", (Swap(SIMD_BARRIER),)),
    Bug(f"{DFLASH} product_in_a_tree", MISSING, "between two steps of the tree", (Swap(ANY_BARRIER, n=1),)),
    Bug(f"{FLASH} attention_block_stride", MISSING, "before the parts are merged", (Swap(ANY_BARRIER),)),
    Bug(
        f"{MLX} metal_softmax block_softmax_float32",
        MISSING,
        "between the maxima and the largest",
        (Swap(ANY_BARRIER, n=1),),
        file=f"{KERNELS}/softmax.h",
    ),
    Bug(f"{MLX} metal_rms_norm rmsfloat32", MISSING, "before the mean is read", (Swap(ANY_BARRIER, n=2),)),
    Bug(
        f"{GGML} norm kernel_norm_mul_add_f32_4",
        MISSING,
        "before the sums are overwritten",
        (Swap(ANY_BARRIER, n=2),),
        after="void kernel_norm_fuse_impl",
    ),
    Bug(
        f"{GGML} argsort",
        MISSING,
        "between two steps of the sort",
        (Swap(ANY_BARRIER, n=1),),
        after=r"void kernel_argsort_f32_i32",
    ),
    Bug(f"{OURS} attention", MISSING, "before the chains are merged", (Swap(ANY_BARRIER),)),
    Bug(f"{OURS} tiles", MISSING, "before the tile is multiplied", (Swap(ANY_BARRIER),)),
    Bug(f"{OURS} tiles", MISSING, "of a SIMD-group, before the edge is copied", (Swap(SIMD_BARRIER),)),
    # ---- weak ----
    Bug(f"{PRIMITIVES} fused_rope_flash_attention_tiled", NO_FLAGS, "mem_none", (Swap(ANY_BARRIER, NO_MEMORY),)),
    Bug(
        f"{MLX} metal_reduce",
        NO_FLAGS,
        "mem_none",
        (Swap(ANY_BARRIER, NO_MEMORY),),
        file=f"{KERNELS}/reduction/reduce_row.h",
    ),
    Bug(
        f"{CORRIDOR} group_norm_of_an_image groupnorm_stats_v2", OTHER_FLAGS, "mem_device", (Swap(ANY_BARRIER, DEVICE),)
    ),
    Bug(
        f"{MLX} metal_logsumexp",
        OTHER_FLAGS,
        "mem_device",
        (Swap(ANY_BARRIER, DEVICE, 1),),
        file=f"{KERNELS}/logsumexp.h",
    ),
    Bug(f"{FLASH} attention_fused", WEAK, "simdgroup_barrier", (Swap("threadgroup_barrier", "simdgroup_barrier"),)),
    Bug(
        f"{MLX} metal_scan",
        WEAK,
        "simdgroup_barrier",
        (Swap("threadgroup_barrier", "simdgroup_barrier", 1),),
        file=f"{KERNELS}/scan.h",
    ),
    # ---- not reached by all ----
    Bug(
        f"{PRIMITIVES} fused_rope_flash_attention_tiled",
        DIVERGENT,
        "threads without a query return",
        (Swap(r"(?<=valid_q = \(global_q_idx < seq_len_q\);)", " if (!valid_q) return;"),),
    ),
    Bug(
        f"{FLASH} merge_with_a_barrier",
        DIVERGENT,
        "only the threads that write come to it",
        (Swap(r"(?<=\(d == 0\) \{)", f" {NO_MEMORY}"),),
    ),
    Bug(
        f"{MLX} metal_softmax looped_softmax_float32",
        DIVERGENT,
        "in the branch of one lane",
        (Swap(r"if \(simd_lane_id == 0\) \{", f"if (simd_lane_id == 0) {{ {NO_MEMORY}"),),
        file=f"{KERNELS}/softmax.h",
        after="void softmax_looped",
    ),
    Bug(
        f"{OURS} tiles",
        DIVERGENT,
        "SIMD-groups beyond the matrix return",
        (
            Swap(
                r"(?m)(?<=vector0 = int\(threadgroup_position_in_grid\.y\) \* BM;)",
                " if (row0 + simdgroup * 16 >= N) return;",
            ),
        ),
    ),
    # ---- outputs ----
    Bug(
        f"{AUDIO} relu_squared_of_products",
        RACE,
        "rows share their outputs",
        (Swap(r"row \* k_shape\[2\] \+ col;", "col;"),),
    ),
    Bug(f"{VMLX} codebook_of_experts", RACE, "experts share an output", (Swap(r"\+ expert_local\)", ")"),)),
    Bug(
        f"{CORRIDOR} group_norm_of_a_tile",
        RACE,
        "each thread adds to one number",
        (Swap(r"out\[elem\] =", "out[0] +="),),
    ),
    Bug(
        f"{GGML} swiglu",
        RACE,
        "rows share their outputs",
        (Swap(r"dst  \+ tgpig\*args\.nb1", "dst  + tgpig*args.nb1/2"),),
        after="void kernel_swiglu",
    ),
    Bug(
        f"{OURS} simd_per_row",
        RACE,
        "SIMD-groups share an output",
        (Swap(r"N \+ row\] = sum", "N + row / NSG] = sum"),),
    ),
    Bug(
        f"{FLASH} merge", SAME, "each thread writes the sum", (Swap(r"if \(d == 0\)", "if (true)"),), note="same value"
    ),
    Bug(f"{OURS} matvec", SAME, "each lane writes the sum", (Swap("lane % 8 == 0 && "),), note="same value"),
    # ---- lanes ----
    Bug(
        f"{LM} wkv7",
        LANES,
        "a sum under a condition on the lane",
        (Swap(r"sa = simd_sum\(sa\);", "if (thread_index_in_simdgroup < 31) sa = simd_sum(sa);"),),
    ),
    Bug(
        f"{LM} gated_delta",
        LANES,
        "a sum of half the SIMD-group",
        (Swap(r"out = simd_sum\(out\);", "for (ushort d = 8; d > 0; d /= 2) out += simd_shuffle_xor(out, d);"),),
    ),
    Bug(
        f"{LM} bit_linear_divided",
        LANES,
        "a broadcast for a sum",
        (Swap(r"simd_sum\(sum\[j\]\)", "simd_broadcast(sum[j], 0)"),),
    ),
    Bug(
        f"{OURS} simd_per_row",
        LANES,
        "lanes return before the sum",
        (Swap(r"sum = simd_sum\(sum\);", "if (lane >= 16) return;\n  sum += simd_shuffle_xor(sum, ushort(16));"),),
    ),
    Bug(
        f"{LM} ssm_update",
        SHUFFLE,
        "a lane beyond the SIMD-group",
        (Swap(r"acc = simd_sum\(acc\);", "acc += simd_shuffle(acc, ushort(thread_index_in_simdgroup + 16));"),),
    ),
    Bug(
        f"{OURS} attention",
        SHUFFLE,
        "shifted by more lanes than there are",
        (Swap(r"simd_shuffle_xor\(weight\[h\], ushort\(16\)\)", "simd_shuffle_down(weight[h], ushort(33))"),),
    ),
    Bug(
        f"{MLX} metal_arg_reduce",
        SHUFFLE,
        "one lane too far",
        (Swap(r"simd_shuffle_down\(best, offset\)", "simd_shuffle(best, ushort(simd_lane_id + offset))"),),
    ),
    # ---- loops ----
    Bug(f"{VMLX} codebook_of_a_matrix", ENDLESS, "the counter is not advanced", (Swap(r"; g\+\+", "; "),)),
    Bug(f"{GGML} get_rows", ENDLESS, "no break", (Swap("break;"),), after="void kernel_get_rows_q"),
    Bug(
        f"{OURS} thread_per_output",
        ENDLESS,
        "an unsigned counter that goes down",
        (
            Swap(
                r"for \(int i = block \* 32; i < block \* 32 \+ 32; i\+\+\)",
                "for (uint i = block * 32 + 31; i >= uint(block) * 32; i -= block ? 1 : 0)",
            ),
        ),
    ),
]
