"""Kernels of dflash-mlx: its own tests, and products with quantised matrices of small sizes."""

from __future__ import annotations

import mlx.core as mx

from tests.collection.case import Checkout, Results, case, normal, suite

DFLASH = "shaneholloman/dflash-mlx"

suite(DFLASH, "gated_delta_trees", "tests/test_gated_delta_tree_kernel.py")


def product(
    checkout: Checkout, maker: str, rows: int, *, bits: int = 4, parts: int = 0, fixed: bool = False
) -> Results:
    """Multiply by a quantised matrix, with the grid of `verify_matmul`."""
    verify, array, group = checkout.module("dflash_mlx.verify_qmm"), normal(), 64
    k, n, dtype = 512, 96, mx.float16
    x, w = array(rows, k).astype(dtype) / 8, array(n, k).astype(dtype) / 8
    quantized = mx.quantize(w, group, bits)
    make, inputs, template = getattr(verify, maker), [x, *quantized], [("T", dtype)]
    shapes, dtypes = [(rows, n)], [dtype]
    if rows == 4:
        kernel, inputs = make(group, dtype, k_parts=2), [*inputs, k, n]
        grid, threadgroup = (64, n // 4, 1), (64, 1, 1)
    elif fixed:
        kernel, inputs, template = make(k, group, dtype), [*inputs, n], [*template, ("KCONST", k)]
        grid, threadgroup = (256, n // 16, 1), (256, 1, 1)
    elif parts:
        kernel, inputs, shapes, dtypes = (
            make(group, dtype),
            [*inputs, rows, k, n, parts],
            [(parts, rows, n)],
            [mx.float32],
        )
        grid, threadgroup = (64, n // 32, parts), (64, 1, 1)
    else:
        kernel, inputs = make(group, dtype), [*inputs, rows, k, n]
        grid, threadgroup = (64, n // 32, 1), (64, 1, 1)
    (found,) = kernel(
        inputs=inputs, template=template, grid=grid, threadgroup=threadgroup, output_shapes=shapes, output_dtypes=dtypes
    )
    expected = x.astype(mx.float32) @ mx.dequantize(*quantized, group, bits).astype(mx.float32).T
    return found.sum(axis=0) if parts else found, expected


@case(DFLASH, tolerance=5e-3)
def product_of_four_rows(checkout: Checkout) -> Results:
    return product(checkout, "_build_kernel_m4_ksplit_np", 4)


@case(DFLASH, tolerance=5e-3)
def product_combined(checkout: Checkout) -> Results:
    return product(checkout, "_build_kernel_m16_combo_ktmpl", 16, fixed=True)


@case(DFLASH, tolerance=5e-3)
def product_in_a_tree(checkout: Checkout) -> Results:
    return product(checkout, "_build_kernel_m16_super_tree_fp16_ktmpl", 16, fixed=True)


@case(DFLASH, tolerance=5e-3)
def product_of_tiles(checkout: Checkout) -> Results:
    return product(checkout, "_build_kernel_mma2big", 16)


@case(DFLASH, tolerance=5e-3)
def product_of_tiles_of_bytes(checkout: Checkout) -> Results:
    return product(checkout, "_build_kernel_mma2big_8bit", 16, bits=8)


@case(DFLASH, tolerance=5e-3)
def product_pipelined(checkout: Checkout) -> Results:
    return product(checkout, "_build_kernel_mma2big_pipe", 16, parts=4)


@case(DFLASH, tolerance=5e-3)
def product_pipelined_of_bytes(checkout: Checkout) -> Results:
    return product(checkout, "_build_kernel_mma2big_pipe_8bit", 16, bits=8, parts=4)
