"""Projects whose own tests compare their kernels with operations of MLX or NumPy."""

from __future__ import annotations

from tests.collection.case import suite

# Their conftest.py imports a server.
ALONE = "--noconftest"

VLM = "Blaizzy/mlx-vlm"
EMPTY = (ALONE, "--left-empty=mlx_vlm", "--left-empty=mlx_vlm.models")
suite(VLM, "turboquant", "mlx_vlm/tests/test_turboquant.py", options=EMPTY)
suite(VLM, "rotated", "mlx_vlm/tests/test_turboquant_rht_value_kernels.py", options=EMPTY)
suite(VLM, "rope", "mlx_vlm/tests/test_rope_utils.py", "mlx_vlm/tests/test_one_bit.py", options=EMPTY)

# Apart from those of compile options, whose errors are tested, and whose results are compared to the last bit.
suite("ml-explore/mlx", "fast", "python/tests/test_fast.py", options=("-k", "kernel and not math_mode"))

DEMUCS = "ssmall256/demucs-mlx"
OVERWRITTEN = "a SIMD group writes its variance over the mean that other SIMD groups have yet to read: no barrier"
suite(DEMUCS, "glu", "tests/test_metal_kernels.py", options=("-k", "fused_glu or interleaved"))
suite(DEMUCS, "group_norm", "tests/test_metal_kernels.py", options=("-k", "groupnorm"), bug=OVERWRITTEN)

# Differences of sums in float32 are too rough for that one's bound; with sums in float64 it would pass.
suite("ssmall256/mlx-spectro", "spectral", "tests/test_spectral_ops.py", options=("-k", "not istft_numerical_grad"))

MEGA = "DatasunriseOU/cppmega_mlx"
suite(MEGA, "squared_relu", "tests/test_metal_ops.py", options=("-k", "not default_gpu"))
V4 = "tests/v4/test_kda_paths.py", "tests/v4/test_linear_attention_path_b.py", "tests/v4/test_mhc_metal_v4.py"
suite(MEGA, "linear_attention", *V4)

suite("motsognirr/olmlx", "shards", "tests/test_shardquant_kernels.py",
      options=(ALONE, "-k", "48-True-4 or multi_chunk"))  # fmt: skip

RAPID = "raullenchai/Rapid-MLX"
suite(RAPID, "gdn_prefill", "tests/test_gdn_prefill_kernel.py", options=(ALONE, "--left-empty=vllm_mlx"))
suite(RAPID, "deepseek_v4", "tests/test_deepseek_v4_vendored.py", options=(ALONE, "-k", "not scheduler"))
suite(RAPID, "turboquant", "tests/test_turboquant_k8v4.py", options=(ALONE, "-k", "not Metrics"))

SPATIAL = "appautomaton/mlx-spatial"
suite(SPATIAL, "gaussians", "tests/test_gs_rasterize.py", options=("--left-empty=mlx_spatial",))

SPEECH = tuple(f"--left-empty={name}" for name in ("mlx_speech", "mlx_speech.models", "mlx_speech.models.dots_tts"))
suite("appautomaton/mlx-speech", "vocoder", "tests/unit/test_dots_tts_vocoder.py", options=SPEECH)

FUSION = "dahai80/fusion-mlx"
FUSED = (ALONE, "--left-empty=fusion_mlx")
suite(
    FUSION, "sparse", "tests/unit/test_glm_moe_dsa_patch.py", options=(*FUSED, "-k", "not pre_load and not round_trip")
)

HYPER = "svdrecbd/mhc-mlx"
BEYOND = "tiles are counted with the size of the threadgroup at the edge, which is smaller; a barrier is missing"
ALL_ROUND = "not half_output and not backward_matches_reference"
suite(HYPER, "correctness", "tests/test_correctness.py", options=("-k", ALL_ROUND))
suite(HYPER, "half", "tests/test_correctness.py", options=("-k", f"not ({ALL_ROUND})"), bug=BEYOND)

# It needs SciPy.
ATOMS = "appautomaton/mlx-atomistic"
GPU = ("--run-gpu", "--default-gpu")
NO_PLACE = "a cell with one atom has no pair with itself and so no room for a tile, but one is written"
SMALL = "inputs of fewer than eight numbers are in constant memory, and the functions take device pointers"
CMAP = "not cmap"  # MLX refuses its gradient
TILES = "spatial or nbfix_type"
NEIGHBORS = "neighbor_tile or cell_pairs_matches or staged_neighbor or cell_pairs_above"
CONSTRAINTS = "short_long_run or unchecked_distance or disjoint_shake or composite_retains"
suite(ATOMS, "bonded", "tests/test_fused_bonded_kernel.py", options=(*GPU, "-k", CMAP))
suite(ATOMS, "interaction", "tests/test_interaction_engine_gpu.py", options=GPU)
suite(ATOMS, "pme", "tests/test_pme.py", options=(*GPU, "-k", "not compiled"))
suite(ATOMS, "lj", "tests/test_fused_lj_kernel.py", options=(*GPU, "-k", f"not ({TILES})"))
suite(ATOMS, "lj_tiles", "tests/test_fused_lj_kernel.py", options=(*GPU, "-k", TILES), bug=NO_PLACE)
suite(ATOMS, "neighbors", "tests/test_neighbors.py", options=(*GPU, "-k", f"not ({NEIGHBORS})"))
suite(ATOMS, "neighbor_tiles", "tests/test_neighbors.py", options=(*GPU, "-k", NEIGHBORS), bug=NO_PLACE)
suite(ATOMS, "constraints", "tests/test_constraints.py", options=(*GPU, "-k", f"not ({CONSTRAINTS})"))
suite(ATOMS, "few_atoms", "tests/test_constraints.py", options=(*GPU, "-k", CONSTRAINTS), bug=SMALL)
