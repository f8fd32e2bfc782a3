"""Kernels of ggml-metal.metal, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.emulator import Unwritten
from tests.collection.case import Checkout, Results, case
from tests.collection.whole import launch, structure

GGML = "ggml-org/ggml"
FILE = "src/ggml-metal/ggml-metal.metal"
HEADER = "src/ggml-metal/ggml-metal-impl.h"
MUL_MV, MUL_MM, ROPE = 600, 700, 800
FLASH_VEC = 400
Array = NDArray[Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def out(*shape: int, dtype: Any = np.float32) -> Unwritten:
    return Unwritten(shape, dtype)


def run(
    checkout: Checkout, kernel: str, buffers: Any, groups: tuple[int, ...], group: tuple[int, ...], **how: Any
) -> Any:
    """Run threadgroups of a kernel, as ggml dispatches them."""
    wide, tall, deep = (*groups, 1, 1)[:3]
    x, y, z = (*group, 1, 1)[:3]
    return launch(
        checkout, FILE, kernel, buffers, grid=(wide * x, tall * y, deep * z), threadgroup=(x, y, z), include=["src"],
        **how,
    )  # fmt: skip


def shape(prefix: str, *lengths: int, item: int = 4) -> dict[str, int]:
    """Return ggml's `ne` and `nb` of an array with these lengths, the fastest axis first."""
    lengths = (*lengths, 1, 1, 1, 1)[:4]
    strides = [item]
    for n in lengths[:3]:
        strides.append(strides[-1] * n)
    digit = prefix
    return {f"ne{digit}{i}": n for i, n in enumerate(lengths)} | {f"nb{digit}{i}": s for i, s in enumerate(strides)}


def arguments(checkout: Checkout, name: str, **values: Any) -> Any:
    """Return a kernel's arguments; members that it does not have are left out."""
    known = structure(checkout, HEADER, f"ggml_metal_kargs_{name}").dtype.names
    given = {key: value for key, value in values.items() if key in known}
    return structure(checkout, HEADER, f"ggml_metal_kargs_{name}", **given)


# ---- blocks of quantised weights: bytes at random, scales that are small, and what they mean ----


def q8_0(rows: int, columns: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    block = np.dtype([("d", "f2"), ("qs", "i1", 32)])
    made = np.zeros((rows, columns // 32), block)
    made["d"], made["qs"] = rng.random(made.shape) / 64, rng.integers(-128, 128, (*made.shape, 32))
    return made, (made["d"][..., None].astype(np.float32) * made["qs"]).reshape(rows, columns)


def q4_0(rows: int, columns: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(2)
    block = np.dtype([("d", "f2"), ("qs", "u1", 16)])
    made = np.zeros((rows, columns // 32), block)
    made["d"], made["qs"] = rng.random(made.shape) / 8, rng.integers(0, 256, (*made.shape, 16))
    values = np.concatenate([made["qs"] & 15, made["qs"] >> 4], -1).astype(np.float32) - 8
    return made, (made["d"][..., None].astype(np.float32) * values).reshape(rows, columns)


def q4_k(rows: int, columns: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    block = np.dtype([("d", "f2"), ("dmin", "f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
    made = np.zeros((rows, columns // 256), block)
    made["d"], made["dmin"] = rng.random(made.shape) / 64, rng.random(made.shape) / 64
    made["scales"], made["qs"] = rng.integers(0, 256, (*made.shape, 12)), rng.integers(0, 256, (*made.shape, 128))
    s = made["scales"].astype(np.int32)
    scale = np.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], -1)
    least = np.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], -1)
    q = made["qs"].reshape(*made.shape, 4, 1, 32)
    values = np.concatenate([q & 15, q >> 4], -2).reshape(*made.shape, 8, 32).astype(np.float32)
    d, dmin = (made[name][..., None, None].astype(np.float32) for name in ("d", "dmin"))
    return made, (d * scale[..., None] * values - dmin * least[..., None]).reshape(rows, columns)


IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(rows: int, columns: int) -> tuple[Array, Array]:
    made, _ = q4_0(rows, columns)
    made["d"] /= 16
    values = np.array(IQ4_NL, np.float32)[np.concatenate([made["qs"] & 15, made["qs"] >> 4], -1)]
    return made, (made["d"][..., None].astype(np.float32) * values).reshape(rows, columns)


def product(checkout: Checkout, kernel: str, made: Array, w: Array, per_group: int, simds: int, nr0: int) -> Results:
    """Return a matrix times three vectors by kernel_mul_mv_*."""
    rows, columns = w.shape
    x = normal(3, columns)
    row = made.nbytes // rows
    args = arguments(
        checkout, "mul_mv", ne00=columns, ne01=rows, ne02=1, nb00=made.itemsize, nb01=row, nb02=row * rows,
        nb03=row * rows, **shape("1", columns, 3), ne0=rows, ne1=3, nr0=nr0, r2=1, r3=1,
    )  # fmt: skip
    constants = {MUL_MV: simds, MUL_MV + 1: 8, MUL_MV + 2: 1, MUL_MV + 3: 1, MUL_MV + 4: 1}
    found = run(
        checkout, kernel, [args, made, x, out(3, rows)], (-(-rows // per_group), 3), (32, simds),
        memory={0: 4096}, constants=constants,
    )  # fmt: skip
    return found, [x @ w.T]


@case(GGML)
def mul_mv_f32(checkout: Checkout) -> Results:
    w = normal(24, 128, seed=1)
    return product(checkout, "kernel_mul_mv_f32_f32", w, w, 2, 4, 2)


@case(GGML)
def mul_mv_f16(checkout: Checkout) -> Results:
    w = normal(24, 128, seed=1).astype(np.float16)
    return product(checkout, "kernel_mul_mv_f16_f32_4", w, w.astype(np.float32), 2, 4, 2)


@case(GGML)
def mul_mv_q4_0(checkout: Checkout) -> Results:
    return product(checkout, "kernel_mul_mv_q4_0_f32", *q4_0(24, 256), 8, 2, 4)


@case(GGML)
def mul_mv_q8_0(checkout: Checkout) -> Results:
    return product(checkout, "kernel_mul_mv_q8_0_f32", *q8_0(24, 256), 2, 4, 2)


@case(GGML)
def mul_mv_q4_k(checkout: Checkout) -> Results:
    return product(checkout, "kernel_mul_mv_q4_K_f32", *q4_k(24, 512), 4, 2, 2)


@case(GGML)
def mul_mv_iq4_nl(checkout: Checkout) -> Results:
    return product(checkout, "kernel_mul_mv_iq4_nl_f32", *iq4_nl(24, 256), 4, 2, 2)


BEYOND = "rows are multiplied two or four at a time, the last ones also where the matrix has no more"


@case(GGML, bug=BEYOND)
def mul_mv_q4_0_of_25_rows(checkout: Checkout) -> Results:
    return product(checkout, "kernel_mul_mv_q4_0_f32", *q4_0(25, 256), 8, 2, 4)


@case(GGML, bug=BEYOND)
def mul_mv_q8_0_of_25_rows(checkout: Checkout) -> Results:
    return product(checkout, "kernel_mul_mv_q8_0_f32", *q8_0(25, 256), 2, 4, 2)


@case(GGML, bug=BEYOND)
def mul_mv_f32_of_25_rows(checkout: Checkout) -> Results:
    w = normal(25, 128, seed=1)
    return product(checkout, "kernel_mul_mv_f32_f32", w, w, 2, 4, 2)


def product_of_matrices(checkout: Checkout, kernel: str, made: Array, w: Array) -> Results:
    """Return a matrix times 40 vectors by kernel_mul_mm_*."""
    rows, columns = w.shape
    x = normal(40, columns)
    row = made.nbytes // rows
    args = arguments(
        checkout, "mul_mm", ne00=columns, ne02=1, nb01=row, nb02=row * rows, nb03=row * rows, ne12=1,
        **{key: value for key, value in shape("1", columns, 40).items() if key != "ne12"}, ne0=rows, ne1=40, r2=1, r3=1,
    )  # fmt: skip
    constants = {MUL_MM: False, MUL_MM + 1: True, MUL_MM + 2: 1, MUL_MM + 3: 1, MUL_MM + 4: 1, MUL_MM + 5: 1}
    found = run(
        checkout, kernel, [args, made, x, out(40, rows)], (-(-40 // 32), -(-rows // 64)), (128,), memory={0: 8192},
        constants=constants,
    )  # fmt: skip
    return found, [x @ w.T]


@case(GGML, tolerance=2e-3)
def mul_mm_q4_0(checkout: Checkout) -> Results:
    return product_of_matrices(checkout, "kernel_mul_mm_q4_0_f32", *q4_0(80, 256))


@case(GGML, tolerance=2e-3)
def mul_mm_f32(checkout: Checkout) -> Results:
    w = normal(80, 256, seed=1)
    return product_of_matrices(checkout, "kernel_mul_mm_f32_f32", w, w)


@case(GGML)
def soft_max(checkout: Checkout) -> Results:
    x, mask = normal(3, 100), np.where(normal(3, 100, seed=1) > 1, -np.inf, 0).astype(np.float32)
    s = shape("0", 100, 3)
    args = arguments(
        checkout, "soft_max", **s, **shape("1", 100, 3), nb1=400, nb2=1200, nb3=1200, scale=0.5, m0=1.0, m1=1.0,
        n_head_log2=1,
    )  # fmt: skip
    found = run(checkout, "kernel_soft_max_f32", [args, x, mask, x, out(3, 100)], (3,), (32,), memory={0: 128})
    logits = x * np.float32(0.5) + mask
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return found, [e / e.sum(-1, keepdims=True)]


def norm_arguments(checkout: Checkout, width: int, rows: int, vector: int) -> Any:
    one = np.ones(3, np.int32)
    return arguments(
        checkout, "norm", ne00=width, ne00_t=width // vector, nb1=4 * width, nb2=4 * width * rows, nb3=4 * width * rows,
        eps=1e-5, nef1=[rows, 1, 1], nef2=one, nef3=one, nbf1=[4 * width, 0, 0], nbf2=[0, 0, 0], nbf3=[0, 0, 0],
    )  # fmt: skip


@case(GGML)
def rms_norm(checkout: Checkout) -> Results:
    x, w, b = normal(3, 256), normal(256, seed=1), normal(256, seed=2)
    scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    found = []
    for name, vector in (("f32", 1), ("mul_f32", 1), ("mul_add_f32_4", 4)):
        args = norm_arguments(checkout, 256, 3, vector)
        buffers = [args, x, w, b, out(3, 256)]
        found += run(checkout, f"kernel_rms_norm_{name}", buffers, (3,), (64,), memory={0: 128})
    return found, [scaled, scaled * w, scaled * w + b]


@case(GGML)
def norm(checkout: Checkout) -> Results:
    x, w, b = normal(3, 256), normal(256, seed=1), normal(256, seed=2)
    centred = x - x.mean(-1, keepdims=True)
    buffers = [norm_arguments(checkout, 256, 3, 4), x, w, b, out(3, 256)]
    found = run(checkout, "kernel_norm_mul_add_f32_4", buffers, (3,), (64,), memory={0: 128})
    return found, [centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * w + b]


def rotated(checkout: Checkout, kind: str) -> Results:
    heads, tokens, width = 2, 3, 64
    x, positions = normal(tokens, heads, width), np.array([0, 5, 9], np.int32)
    args = arguments(
        checkout, "rope", **shape("0", width, heads, tokens), **shape("", width, heads, tokens), n_dims=width,
        n_ctx_orig=4096, freq_base=10000.0, freq_scale=1.0, attn_factor=1.0, beta_fast=32.0, beta_slow=1.0,
    )  # fmt: skip
    found = run(
        checkout, f"kernel_rope_{kind}_f32", [args, x, positions, x, out(*x.shape)], (heads, tokens), (32,),
        constants={ROPE: False, ROPE + 1: False},
    )  # fmt: skip
    angle = positions[:, None, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    c, s = np.cos(angle), np.sin(angle)
    a, b = (x[..., ::2], x[..., 1::2]) if kind == "norm" else (x[..., : width // 2], x[..., width // 2 :])
    turned = a * c - b * s, a * s + b * c
    expected = np.stack(turned, -1).reshape(x.shape) if kind == "norm" else np.concatenate(turned, -1)
    return found, [expected]


@case(GGML)
def rope_norm(checkout: Checkout) -> Results:
    return rotated(checkout, "norm")


@case(GGML)
def rope_neox(checkout: Checkout) -> Results:
    return rotated(checkout, "neox")


@case(GGML)
def get_rows(checkout: Checkout) -> Results:
    return rows_of(checkout, "kernel_get_rows_q4_0", *q4_0(20, 256))


@case(GGML)
def get_rows_iq4_nl(checkout: Checkout) -> Results:
    return rows_of(checkout, "kernel_get_rows_iq4_nl", *iq4_nl(20, 256))


def rows_of(checkout: Checkout, kernel: str, made: Array, w: Array) -> Results:
    chosen = np.array([7, 0, 19], np.int32)
    row = made.nbytes // 20
    args = arguments(
        checkout, "get_rows", ne00t=256 // 16, ne00=256, nb01=row, nb02=row * 20, nb03=row * 20, ne10=3, nb10=4,
        nb11=12, nb12=12, nb1=1024, nb2=3072, nb3=3072,
    )  # fmt: skip
    found = run(checkout, kernel, [args, made, chosen, out(3, 256)], (3, 1, 1), (32,))
    return found, [w[chosen]]


@case(GGML)
def argsort(checkout: Checkout) -> Results:
    x = normal(2, 50)
    args = arguments(checkout, "argsort", **shape("0", 50, 2), **shape("", 50, 2), top_k=50)
    buffers = [args, x, out(2, 50, dtype=np.int32)]
    found = run(checkout, "kernel_argsort_f32_i32_asc", buffers, (2,), (64,), memory={0: 256})
    return found, [x.argsort(-1)]


@case(GGML)
def swiglu(checkout: Checkout) -> Results:
    gate, up = normal(3, 96), normal(3, 96, seed=1)
    args = arguments(checkout, "glu", ne00=96, nb01=384, ne10=96, nb11=384, ne0=96, nb1=384)
    found = run(checkout, "kernel_swiglu_f32", [args, gate, up, out(3, 96)], (3,), (32,))
    return found, [gate / (1 + np.exp(-gate)) * up]


@case(GGML)
def copy(checkout: Checkout) -> Results:
    x = normal(3, 96)
    args = arguments(checkout, "cpy", nk0=96, **shape("0", 96, 3), **shape("", 96, 3, item=2))
    found = run(checkout, "kernel_cpy_f32_f16", [args, x, out(3, 96, dtype=np.float16)], (3,), (96, 1))
    return found, [x.astype(np.float16)]


def flash_attention(checkout: Checkout, builds: tuple[str, ...]) -> Results:
    heads, groups, tokens, width = 4, 2, 64, 64
    q, k, v = normal(heads, 1, width), normal(groups, tokens, width, seed=1), normal(groups, tokens, width, seed=2)
    k, v = k.astype(np.float16), v.astype(np.float16)
    args = arguments(
        checkout, "flash_attn_ext_vec", ne01=1, ne02=heads, ne03=1, nb01=4 * width, nb02=4 * width, nb03=q.nbytes,
        ne11=tokens, ne31=1, ne32=1, ne33=1, ne_12_2=groups, ne_12_3=1, ns10=width, nb11=2 * width,
        nb12=2 * width * tokens, nb13=k.nbytes, ns20=width, nb21=2 * width, nb22=2 * width * tokens,
        nb23=v.nbytes, ne1=heads, ne2=1, ne3=1, scale=0.125, m0=1.0, m1=1.0, n_head_log2=1,
    )  # fmt: skip
    constants = dict.fromkeys(range(FLASH_VEC, FLASH_VEC + 5), False)
    constants |= {FLASH_VEC + 20: width, FLASH_VEC + 21: width, FLASH_VEC + 22: 1, FLASH_VEC + 23: 1}
    found = run(
        checkout, "kernel_flash_attn_ext_vec_f16_dk64_dv64", [args, q, k, v, q, q, q, out(heads, width)], (1, heads, 1),
        (32, 1), memory={0: 1024}, constants=constants, builds=builds,
    )  # fmt: skip
    logits = 0.125 * np.einsum("htw,hsw->hts", q, np.repeat(k, 2, 0).astype(np.float32))
    e = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("hts,hsw->htw", e / e.sum(-1, keepdims=True), np.repeat(v, 2, 0).astype(np.float32))
    return found, [expected[:, 0]]


@case(GGML, tolerance=2e-3)
def flash_attention_of_a_token(checkout: Checkout) -> Results:
    return flash_attention(checkout, ("spaces", "undefined"))


@case(GGML, bug="lanes write ss while others may still read it: only shuffles are in between, no simdgroup_barrier")
def flash_attention_of_a_token_races(checkout: Checkout) -> Results:
    return flash_attention(checkout, ("races",))
