"""Cases of products and norms, elementwise operations, and their compositions."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Linear, RMSNorm
from tests.contract.case import OpCase, Run, linear, norm_of, norm_weight, normal, weight
from tests.random_blocks import SPREAD, random_blocks


def embed(ids: list[int], type_name: str = "F32") -> Run:
    return lambda be, rng: be.embed(weight(be, normal(rng, 20, 64), type_name), ids)


def stored_rows(ids: list[int], type_name: str) -> Run:
    return lambda be, rng: be.embed(be.prepare(random_blocks(rng, "w", type_name, 20, 256)), ids)


def linear_case(t: int, n: int, k: int, type_name: str = "F32", *, bias: bool = False, zero: bool = False) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        layer = linear(be, rng, n, k, type_name, bias=bias)
        return be.linear(be.array(normal(rng, t, k) * (0 if zero else 1)), layer)

    return run


def blockwise_scales(be: Backend, rng: np.random.Generator) -> Any:
    """Multiply rows whose block scales differ by 10,000: using one block's scale for all gives a large error."""
    values = normal(rng, 6, 128, scale=128**-0.5) * np.repeat(10.0 ** np.array([0, -2, 2, -1]), 32).astype(np.float32)
    return be.linear(be.array(normal(rng, 2, 128)), Linear("w", weight(be, values, "Q8_0")))


def stored_case(t: int, n: int, k: int, type_name: str) -> Run:
    """Multiply by a matrix of random bytes in a quantised format."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        layer = Linear("w", be.prepare(random_blocks(rng, "w", type_name, n, k, k**-0.5)))
        return be.linear(be.array(normal(rng, t, k)), layer)

    return run


def mixed_formats(t: int) -> Run:
    """Project with matrices of different formats, as in Q4_K_M files: q and k in Q4_K, v in Q6_K."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        kinds = {"Q4_K": 48, "Q6_K": 16, "Q4_0": 17, "F32": 5}
        parts = [
            linear(be, rng, n, 256)
            if kind == "F32"
            else Linear("w", be.prepare(random_blocks(rng, "w", kind, n, 256, 1 / 16)))
            for kind, n in kinds.items()
        ]
        return tuple(
            be.norm_project(be.array(normal(rng, t, 256)), RMSNorm("n", norm_weight(be, rng, 256), 1e-6), parts)
        )

    return run


def rms(shape: tuple[int, ...], scale: float = 1.0, eps: float = 1e-6) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.array(normal(rng, shape[0], int(np.prod(shape[1:])), scale=scale))
        x = be.heads(x, shape[-1]) if len(shape) == 3 else x
        return be.rms_norm(x, norm_weight(be, rng, shape[-1]), eps)

    return run


def layer_norm(shape: tuple[int, int], scale: float = 1.0, shift: float = 0.0) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.array(normal(rng, *shape, scale=scale) + np.float32(shift))
        return be.layer_norm(x, norm_weight(be, rng, shape[1]), weight(be, normal(rng, shape[1])), 1e-5)

    return run


def norm(kind: str) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.array(normal(rng, 3, 32))
        return be.norm(x, norm_of(be, rng, 32, kind))

    return run


def on_rows(method: str, shape: tuple[int, ...], scale: float = 1.0) -> Run:
    return lambda be, rng: getattr(be, method)(be.array(normal(rng, *shape, scale=scale)))


def elementwise(values: list[float], method: str) -> Run:
    return lambda be, rng: getattr(be, method)(be.array(np.array([values], dtype=np.float32)))


def two(method: str, shape: tuple[int, int], *, transposed: bool = False) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        a = normal(rng, *shape[::-1]).T if transposed else normal(rng, *shape)
        return getattr(be, method)(be.array(a), be.array(normal(rng, *shape)))

    return run


def soft_cap(cap: float, size: float) -> Run:
    """Cap logits of about `size` times the cap; a row is not a multiple of any vector."""
    return lambda be, rng: be.soft_cap(be.array(normal(rng, 2, 75, scale=size * cap)), cap)


def scale(shape: tuple[int, int], factor: float) -> Run:
    return lambda be, rng: be.scale(be.array(normal(rng, *shape)), factor)


def norm_project(t: int, rows: tuple[int, ...], type_name: str = "F32") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        parts = [linear(be, rng, n, 64, type_name) for n in rows]
        return tuple(be.norm_project(be.array(normal(rng, t, 64)), RMSNorm("n", norm_weight(be, rng, 64), 1e-6), parts))

    return run


def norm_project_layer(t: int) -> Run:
    """Project as GPT-2 does: layer norm, then linear layers with biases."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        parts = [linear(be, rng, n, 64, bias=True) for n in (48, 16)]
        norm = norm_of(be, rng, 64, "layer")
        return tuple(be.norm_project(be.array(normal(rng, t, 64)), norm, parts))

    return run


def project_add(t: int, type_name: str = "F32", *, bias: bool = False) -> Run:
    return lambda be, rng: be.project_add(
        be.array(normal(rng, t, 64)),
        linear(be, rng, 48, 64, type_name, bias=bias),
        be.array(normal(rng, t, 48)),
    )


def project_norm_add(t: int, type_name: str = "F32", *, kind: str = "rms") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, layer = be.array(normal(rng, t, 64)), linear(be, rng, 32, 64, type_name)
        norm = norm_of(be, rng, 32, kind)
        return be.project_norm_add(x, layer, norm, be.array(normal(rng, t, 32)))

    return run


def project_norm(t: int, type_name: str = "F32") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, layer = be.array(normal(rng, t, 64)), linear(be, rng, 32, 64, type_name)
        return be.project_norm(x, layer, norm_of(be, rng, 32, "rms"))

    return run


def without_norm(t: int, type_name: str = "F32") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, gate, up = be.array(normal(rng, t, 64)), *(linear(be, rng, 48, 64, type_name) for _ in range(2))
        return be.norm_gate_up(x, None, gate, up, "silu")

    return run


def norm_gate_up(
    t: int, activation: str, type_name: str = "F32", *, mixed: bool = False, bias: bool = False
) -> Run:  # fmt: skip
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, n = be.array(normal(rng, t, 64)), RMSNorm("n", norm_weight(be, rng, 64), 1e-6)
        up = linear(be, rng, 48, 64, "F32" if mixed else type_name, bias=bias)
        gate = linear(be, rng, 48, 64, type_name, bias=bias)
        return be.norm_gate_up(x, n, gate, up, activation)  # type: ignore[arg-type]

    return run


def norm_up(t: int, activation: str, type_name: str = "F32", *, kind: str = "layer") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, up = be.array(normal(rng, t, 64)), linear(be, rng, 52, 64, type_name, bias=kind == "layer")
        return be.norm_up(x, norm_of(be, rng, 64, kind), up, activation)  # type: ignore[arg-type]

    return run


def norm_head(type_name: str = "F32", *, t: int = 3, kind: str = "rms") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, n = be.array(normal(rng, t, 64)), norm_of(be, rng, 64, kind)
        return be.norm_head(x, n, linear(be, rng, 17, 64, type_name))

    return run


# Formats of 2 to 6 bits, not all of which this project can write.
STORED = tuple(SPREAD)
EXTREMES = [-1e4, -100.0, -20.0, -1e-6, 0.0, 1e-6, 0.5, 20.0, 100.0, 1e4]

CASES = [
    OpCase("embed", "rows", embed([3, 0, 19, 3])),
    OpCase("embed", "one-row", embed([7])),
    OpCase("embed", "q8_0", embed([5, 11], "Q8_0")),
    OpCase("linear", "vector", linear_case(1, 48, 64)),
    OpCase("linear", "matrix", linear_case(7, 33, 96)),
    OpCase("linear", "one-output", linear_case(2, 1, 32)),
    OpCase("linear", "bias", linear_case(3, 20, 64, bias=True)),
    OpCase("linear", "zeros", linear_case(2, 8, 32, zero=True)),
    OpCase("linear", "f16", linear_case(2, 24, 64, "F16")),
    OpCase("linear", "bf16", linear_case(2, 24, 64, "BF16")),
    OpCase("linear", "q8_0", linear_case(1, 40, 128, "Q8_0")),
    OpCase("linear", "q8_0-matrix", linear_case(9, 40, 96, "Q8_0")),
    OpCase("linear", "q8_0-few-vectors", linear_case(3, 300, 64, "Q8_0")),
    OpCase("linear", "q8_0-many-rows", linear_case(6, 300, 64, "Q8_0")),
    OpCase("linear", "q8_0-bias", linear_case(2, 24, 64, "Q8_0", bias=True)),
    OpCase("linear", "q8_0-scales-differ", blockwise_scales),
    *(OpCase("embed", kind.lower(), stored_rows([5, 0, 19], kind)) for kind in STORED),
    *(OpCase("linear", kind.lower(), stored_case(1, 40, 512, kind)) for kind in STORED),
    *(OpCase("linear", f"{kind.lower()}-few-vectors", stored_case(6, 300, 256, kind)) for kind in STORED),
    *(OpCase("linear", f"{kind.lower()}-matrix", stored_case(21, 40, 768, kind)) for kind in STORED),
    OpCase("linear", "q4_0-odd-blocks", stored_case(2, 33, 96, "Q4_0")),
    OpCase("linear", "q4_1-odd-blocks", stored_case(2, 33, 160, "Q4_1")),
    OpCase("norm_project", "mixed-formats", mixed_formats(1)),
    OpCase("norm_project", "mixed-formats-matrix", mixed_formats(19)),
    OpCase("rms_norm", "rows", rms((3, 64))),
    OpCase("rms_norm", "heads", rms((3, 4, 16))),
    OpCase("rms_norm", "tiny", rms((2, 32), scale=1e-5), why="eps outweighs the mean square"),
    OpCase("rms_norm", "huge", rms((2, 32), scale=1e6)),
    OpCase("rms_norm", "zeros", rms((2, 32), scale=0.0)),
    OpCase("layer_norm", "rows", layer_norm((3, 64))),
    OpCase("layer_norm", "far-from-zero", layer_norm((2, 64), shift=100.0), rtol=2e-5, atol=1e-4,
           why="float32 inputs near 100 carry 4e-6 of rounding against a spread of 1"),
    OpCase("layer_norm", "constant", layer_norm((2, 16), scale=0.0, shift=3.0)),
    OpCase("silu", "typical", on_rows("silu", (3, 40))),
    OpCase("silu", "extremes", elementwise(EXTREMES, "silu"), each=1e-6),
    OpCase("gelu", "typical", on_rows("gelu", (3, 40))),
    OpCase("gelu", "extremes", elementwise(EXTREMES, "gelu")),
    OpCase("gelu_erf", "typical", on_rows("gelu_erf", (3, 40))),
    OpCase("gelu_erf", "extremes", elementwise(EXTREMES, "gelu_erf")),
    OpCase("relu2", "typical", on_rows("relu2", (3, 40))),
    OpCase("activate", "gelu", lambda be, rng: be.activate(be.array(normal(rng, 2, 9)), "gelu")),
    OpCase("activate", "silu", lambda be, rng: be.activate(be.array(normal(rng, 2, 9)), "silu")),
    OpCase("add", "typical", two("add", (3, 20))),
    OpCase("add", "not-contiguous", two("add", (5, 8), transposed=True)),
    OpCase("multiply", "typical", two("multiply", (3, 20))),
    OpCase("multiply", "not-contiguous", two("multiply", (5, 8), transposed=True)),
    OpCase("scale", "typical", scale((3, 20), 33.941125)),
    OpCase("scale", "tiny", scale((1, 8), 1e-12)),
    OpCase("scale", "not-contiguous", lambda be, rng: be.scale(be.array(normal(rng, 8, 5).T), -2.0)),
    OpCase("soft_cap", "typical", soft_cap(30.0, 1.0), each=1e-6),
    OpCase("soft_cap", "near-zero", soft_cap(30.0, 1e-4), each=1e-6),
    OpCase("soft_cap", "reached", soft_cap(2.0, 50.0), each=1e-6),
    OpCase("norm", "rms", norm("rms")),
    OpCase("norm", "layer", norm("layer")),
    OpCase("norm_project", "qkv", norm_project(3, (48, 16, 16))),
    OpCase("norm_project", "q8_0", norm_project(1, (48, 17, 17), "Q8_0")),
    OpCase("norm_project", "q8_0-matrix", norm_project(9, (48, 17, 17), "Q8_0")),
    OpCase("norm_project", "q8_0-two", norm_project(3, (48, 17), "Q8_0")),
    OpCase("norm_project", "layer-norm-and-biases", norm_project_layer(3)),
    OpCase("norm_project", "layer-norm-and-biases-vector", norm_project_layer(1)),
    OpCase("project_add", "vector", project_add(1)),
    OpCase("project_add", "matrix", project_add(5)),
    OpCase("project_add", "q8_0", project_add(1, "Q8_0")),
    OpCase("project_add", "q8_0-few", project_add(3, "Q8_0")),
    OpCase("project_add", "q8_0-matrix", project_add(9, "Q8_0")),
    OpCase("project_add", "q8_0-bias", project_add(1, "Q8_0", bias=True)),
    OpCase("project_norm_add", "vector", project_norm_add(1)),
    OpCase("project_norm_add", "matrix", project_norm_add(9)),
    OpCase("project_norm_add", "q8_0", project_norm_add(1, "Q8_0")),
    OpCase("project_norm_add", "q8_0-matrix", project_norm_add(9, "Q8_0")),
    OpCase("project_norm_add", "layer", project_norm_add(2, kind="layer")),
    OpCase("project_norm", "vector", project_norm(1)),
    OpCase("project_norm", "matrix", project_norm(9)),
    OpCase("project_norm", "q8_0", project_norm(3, "Q8_0")),
    OpCase("norm_gate_up", "without-norm", without_norm(1)),
    OpCase("norm_gate_up", "without-norm-q8_0", without_norm(9, "Q8_0")),
    OpCase("norm_gate_up", "silu", norm_gate_up(1, "silu")),
    OpCase("norm_gate_up", "gelu", norm_gate_up(4, "gelu")),
    OpCase("norm_gate_up", "biases", norm_gate_up(1, "silu", "Q8_0", bias=True)),
    OpCase("norm_gate_up", "biases-matrix", norm_gate_up(11, "gelu", bias=True)),
    OpCase("norm_gate_up", "q8_0", norm_gate_up(1, "silu", "Q8_0")),
    OpCase("norm_gate_up", "q8_0-gelu", norm_gate_up(3, "gelu", "Q8_0")),
    OpCase("norm_gate_up", "q8_0-matrix", norm_gate_up(9, "silu", "Q8_0")),
    OpCase("norm_gate_up", "q8_0-and-f32", norm_gate_up(1, "silu", "Q8_0", mixed=True)),
    OpCase("norm_up", "gelu", norm_up(1, "gelu")),
    OpCase("norm_up", "gelu-erf", norm_up(5, "gelu_erf")),
    OpCase("norm_up", "relu2", norm_up(9, "relu2")),
    OpCase("norm_gate_up", "gelu-erf", norm_gate_up(4, "gelu_erf")),
    OpCase("norm_up", "gelu-matrix", norm_up(9, "gelu")),
    OpCase("norm_up", "q8_0", norm_up(3, "gelu", "Q8_0")),
    OpCase("norm_up", "q8_0-matrix", norm_up(17, "gelu", "Q8_0")),
    OpCase("norm_up", "silu-behind-rms", norm_up(2, "silu", kind="rms")),
    OpCase("norm_head", "one-row", norm_head(t=1)),
    OpCase("norm_head", "rows", norm_head()),
    OpCase("norm_head", "layer", norm_head(t=9, kind="layer")),
    OpCase("norm_head", "q8_0-one-row", norm_head("Q8_0", t=1)),
    OpCase("norm_head", "q8_0", norm_head("Q8_0")),
    OpCase("norm_head", "q8_0-many-rows", norm_head("Q8_0", t=9)),
]  # fmt: skip
