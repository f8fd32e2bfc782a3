"""The assembly of kernels for another processor: `python -m tests.assembly TRIPLE PROCESSOR FEATURES default|slow`.

A process of its own compiles for one target from the beginning: tiles choose their shape by the registers that Numba
compiles for. Nothing that is compiled here can run, so nothing is loaded either. Writes a JSON object of name: text.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernels.cpu.build.library import FORMATS

# Triple, processor, features.
ARM64 = ("aarch64-unknown-linux-gnu", "cortex-a72", "+neon")
AVX2 = ("x86_64-unknown-linux-gnu", "haswell", "+avx2,+fma,+f16c")
AVX512 = ("x86_64-unknown-linux-gnu", "skylake-avx512", "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq")


# Some of MLX's affine formats: quants in halves, bytes, quants that cross bytes, and each type of scales.
AFFINE = ("affine4_g64_bf16", "affine8_g64_bf16", "affine3_g64_f16", "affine4_g64_f32")
# Formats whose products are compiled, some of each kind of block: the expansion of every format has the same code for
# the weights of a block.
MULTIPLIED = ("float32", "q8_0", "q4_0", "q4_k", "q6_k", "affine4_g64_bf16")


def is_slow(name: str, target: tuple[str, str, str]) -> bool:
    """Return whether a kernel is compiled for a target under `-m slow` only.

    All formats are expanded for AVX2, which has the fewest registers; for the others, one format of each kind of block.
    """
    format_name, _, kernel = name.partition(".")
    return kernel == "dequantize" and format_name not in MULTIPLIED and target != AVX2


def assembly(target: tuple[str, str, str], name: str) -> str:
    """Return the text of a kernel for a target."""
    return _assembly(target, "slow" if is_slow(name, target) else "default")[name]


@cache
def _assembly(target: tuple[str, str, str], part: str) -> dict[str, str]:
    """Return the text of each kernel, made by a process of its own, once for these sources and this compiler."""
    from kernels.cpu.build.library import folder

    made_from = Path(__file__).read_bytes() + repr((target, part, version("numba"), version("llvmlite"))).encode()
    kept = folder() / f"assembly-{hashlib.sha256(made_from).hexdigest()[:16]}.json"
    if not kept.exists():
        text = _made(target, part)
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Other test processes may do the same.
        draft = kept.with_name(f"{kept.name}.{os.getpid()}")
        draft.write_text(text)
        draft.replace(kept)
    found: dict[str, str] = json.loads(kept.read_text())
    return found


def _made(target: tuple[str, str, str], part: str) -> str:
    command = [sys.executable, "-m", "tests.assembly", *target, part]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    root = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def kernels() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions by name, and the types of their arguments."""
    from numba import types

    from kernels.cpu.attention import attention as attention_block
    from kernels.cpu.attention import stored
    from kernels.cpu.build.exponentials import exp
    from kernels.cpu.build.vectors import LANES, load, store
    from kernels.cpu.formats.format import kernels_of
    from kernels.cpu.products import norms, sum_exp, tile
    from kernels.cpu.products.activations import gated

    floats, raw = types.Array(types.float32, 1, "C"), types.Array(types.uint8, 1, "C")
    n, f = types.int64, types.float32

    def activate(activation: int, gate: Any, up: Any, out: Any) -> None:
        for i in range(0, len(gate), LANES):
            store(out, i, gated(activation, load(gate, i), load(up, i)))

    def exponentials(x: Any, out: Any) -> None:
        for i in range(0, len(x), LANES):
            store(out, i, exp(load(x, i)))

    four = types.UniTuple(n, 4)
    four_rows = (n, four, four, n, n, n, floats, n, floats, n, n, n, n, n)
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for name in (*FORMATS, *AFFINE):
        own = kernels_of(name)
        if name in MULTIPLIED:
            found[f"{name}.four_rows"] = own.four_rows.py_func, four_rows
        if name == "float32":  # a copy, without arithmetic
            continue
        found[f"{name}.dequantize"] = own.dequantize.py_func, (raw, n, n, floats, n, n, n, n)
    tile_arguments = (floats, n, n, floats, n, n, n, n, floats, n, floats, n, n, n, n)
    return found | {
        "add_dots": (tile.add_dots.py_func, tile_arguments),
        "keep_dots": (tile.keep_dots.py_func, tile_arguments[:-5]),
        "set_dots": (stored.set_dots.py_func, (n, n, n, n, floats, n, n, n, n, floats, n, n, n, n)),
        "sum_weighted": (stored.sum_weighted.py_func, (n, floats, n, n, n, n, n, n, n, floats, n, n, n)),
        "attention_block._weights": (attention_block._weights.py_func, (floats, n, n, n, n, n, f)),
        "attention_block._squash": (attention_block._squash.py_func, (floats, n, n, n, f)),
        "attention_block.join": (attention_block.join.py_func, (floats, n, floats, n, n)),
        "rms_norm": (norms.rms_norm.py_func, (floats, n, n, floats, f, floats, n)),
        "layer_norm": (norms.layer_norm.py_func, (floats, n, n, floats, floats, f, floats, n)),
        "rotate": (norms.rotate.py_func, (floats, n, n, floats, floats, n, floats, n)),
        "activate": (activate, (n, floats, floats, floats)),
        "exponentials": (exponentials, (floats, floats)),
        "sum_exp": (sum_exp.sum_exp.py_func, (n, n, types.float64, n)),
    }


def main(triple: str, processor: str, features: str, part: str) -> None:
    """Compile and write."""
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = processor, features
    from numba.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        json.dump(_compiled((triple, processor, features), part), sys.stdout)


def _compiled(target: tuple[str, str, str], part: str) -> dict[str, str]:
    from llvmlite import binding

    from kernels.cpu.build import exports

    translator, texts = exports.Translator.start(target[0]), {}
    for name, (function, arguments) in kernels().items():
        if is_slow(name, target) != (part == "slow"):
            continue
        found, module = exports.translated(function, arguments), binding.parse_assembly("")
        module.triple = target[0]
        module = translator.optimized(module, [found.library], [found.fndesc.llvm_func_name])
        texts[name] = str(translator._tm.emit_assembly(module))
    return texts


if __name__ == "__main__":
    main(*sys.argv[1:])
