"""Projects whose own tests compare their kernels with operations of MLX or NumPy."""

from __future__ import annotations

from tests.collection.case import suite

suite("ml-explore/mlx", "fast", "python/tests/test_fast.py", options=("-k", "kernel"))
suite("ml-explore/mlx", "export", "python/tests/test_export_import.py", "python/tests/test_eval.py",
      options=("-k", "kernel"))
suite("ssmall256/demucs-mlx", "glu", "tests/test_metal_kernels.py", options=("-k", "fused_glu or interleaved"))
OVERWRITTEN = "a SIMD group writes its variance over the mean that other SIMD groups have yet to read: a barrier is missing"
suite("ssmall256/demucs-mlx", "group_norm", "tests/test_metal_kernels.py", options=("-k", "groupnorm"), bug=OVERWRITTEN)
suite("ssmall256/mlx-spectro", "spectral_ops", "tests/test_spectral_ops.py")
ATOMS = "appautomaton/mlx-atomistic"
GPU = ("--run-gpu",)
suite(ATOMS, "lj", "tests/test_fused_lj_kernel.py", options=GPU)
suite(ATOMS, "bonded", "tests/test_fused_bonded_kernel.py", options=GPU)
suite(ATOMS, "interaction", "tests/test_interaction_engine_gpu.py", options=GPU)
suite(ATOMS, "constraints", "tests/test_constraints.py", options=GPU)
suite(ATOMS, "pme", "tests/test_pme.py", options=GPU)
suite(ATOMS, "neighbors", "tests/test_neighbors.py", options=GPU)
suite(ATOMS, "owner", "tests/test_owner_compute_engine.py", "tests/test_fused_half_engine.py", options=GPU)
CPP = "DatasunriseOU/cppmega_mlx"
suite(CPP, "ops", "tests/test_metal_ops.py")
suite(CPP, "fp8", "tests/test_fp8_msl_kernels.py")
suite(CPP, "tile", "tests/test_tilelang_m2rnn.py", "tests/test_tilelang_mamba3.py")
suite(CPP, "mla", "tests/test_tilelang_sparse_mla.py", "tests/test_tilelang_sparse_mla_fp8.py", "tests/test_tilelang_sparse_mla_blockscaled.py")
suite(CPP, "v4", "tests/v4/test_kda_paths.py", "tests/v4/test_linear_attention_path_b.py", "tests/v4/test_mhc_metal_v4.py")
suite("motsognirr/olmlx", "shardquant", "tests/test_shardquant_kernels.py", "tests/test_shardquant_fused.py", options=("--noconftest",))
RAPID = "raullenchai/Rapid-MLX"
suite(RAPID, "gdn_prefill", "tests/test_gdn_prefill_kernel.py", options=("--noconftest", "--left-empty=vllm_mlx"))
suite(RAPID, "deepseek_v4", "tests/test_deepseek_v4_vendored.py", options=("--noconftest", "-k", "not scheduler",))
suite(RAPID, "turboquant", "tests/test_turboquant_k8v4.py", options=("--noconftest", "-k", "not Metrics",))
suite(RAPID, "mtp", "tests/test_mtp_spec_decode.py", options=("--noconftest", "-k", "argmax"))
suite("appautomaton/mlx-spatial", "gs", "tests/test_gs_rasterize.py", options=("--left-empty=mlx_spatial",))
suite("appautomaton/mlx-spatial", "mesh", "tests/spatialkit/test_mesh_processing.py", options=("--left-empty=mlx_spatial",))
suite("appautomaton/mlx-speech", "vocoder", "tests/unit/test_dots_tts_vocoder.py", options=("--left-empty=mlx_speech", "--left-empty=mlx_speech.models", "--left-empty=mlx_speech.models.dots_tts"))
suite("dahai80/fusion-mlx", "w4a8", "tests/unit/custom_kernels/test_w4a8.py", options=("--noconftest",))
suite("dahai80/fusion-mlx", "kda", "tests/unit/test_flash_kda.py", options=("--noconftest", "--left-empty=fusion_mlx",))
suite("dahai80/fusion-mlx", "dsa", "tests/unit/test_glm_moe_dsa_patch.py", options=("--noconftest", "--left-empty=fusion_mlx",))
suite("dahai80/fusion-mlx", "v4", "tests/unit/test_deepseek_v4_patch.py", options=("--noconftest", "--left-empty=fusion_mlx",))
VLM = "Blaizzy/mlx-vlm"
EMPTY = ("--left-empty=mlx_vlm", "--left-empty=mlx_vlm.models", "--noconftest")
suite(VLM, "turboquant", "mlx_vlm/tests/test_turboquant.py", options=EMPTY)
suite(VLM, "rht", "mlx_vlm/tests/test_turboquant_rht_value_kernels.py", options=EMPTY)
suite(VLM, "rope", "mlx_vlm/tests/test_rope_utils.py", "mlx_vlm/tests/test_one_bit.py", "mlx_vlm/tests/test_minimax_m3.py", options=EMPTY)
suite(VLM, "qwen", "mlx_vlm/tests/test_qwen3_5_ragged_sdpa_fallback.py", "mlx_vlm/tests/test_speculative.py", options=EMPTY)
