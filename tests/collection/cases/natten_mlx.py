"""Kernels of natten-mlx, by its own tests, which compare them with its operations in MLX."""

from __future__ import annotations

from tests.collection.case import suite

NATTEN = "ssmall256/natten-mlx"
# The package refuses to be imported elsewhere.
ON_A_MAC = ("--as-on-a-mac=natten_mlx",)

suite(NATTEN, "backward", "tests/test_backward_parity.py", "tests/test_compat_gradients.py", options=ON_A_MAC)
suite(
    NATTEN,
    "lowp",
    "tests/test_low_precision_backend_parity.py",
    "tests/test_split_ops_grad.py",
    "tests/test_backend_matrix.py",
    options=ON_A_MAC,
)
suite(
    NATTEN,
    "upstream",
    "tests/test_upstream_parity.py",
    "tests/test_nn_module_grad.py",
    "tests/test_autograd.py",
    options=ON_A_MAC,
)
suite(NATTEN, "varlen", "tests/test_varlen*.py", "tests/test_functional*.py", options=ON_A_MAC)
suite(NATTEN, "fast_metal", "tests/test_fast_metal*.py", "tests/test_fused_simd.py", options=ON_A_MAC)
