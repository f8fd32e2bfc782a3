"""What the compiler makes of the kernels on the processors that there are: vector code, on each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

numba = pytest.importorskip("numba")

from llvmlite import binding, ir  # noqa: E402
from numba import types  # noqa: E402

from kernels.cpu import attention, float32, gemm, memory, norms, q4_0, q4_1, q4_k, q6_k, q8_0  # noqa: E402
from kernels.cpu.activations import gated  # noqa: E402
from kernels.cpu.vectors import LANES, exp, load, store  # noqa: E402

ARM64 = ("aarch64-unknown-linux-gnu", "+neon")
AVX2 = ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c")
AVX512 = ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl")

FLOATS, BYTES = types.Array(types.float32, 1, "C"), types.Array(types.uint8, 1, "C")
N, F = types.int64, types.float32


def activate(activation: int, gate: Any, up: Any, out: Any) -> None:
    for i in range(0, len(gate), LANES):
        store(out, i, gated(activation, load(gate, i), load(up, i)))


def exponentials(x: Any, out: Any) -> None:
    for i in range(0, len(x), LANES):
        store(out, i, exp(load(x, i)))


KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "q8_0.matvec": (q8_0.matvec.py_func, (BYTES, N, FLOATS, FLOATS, N, N)),
    "q8_0.matvec_4": (q8_0.matvec_4.py_func, (BYTES, N, FLOATS, FLOATS, N, N, N)),
    "q8_0.four_rows": (q8_0.four_rows.py_func, (BYTES, BYTES, BYTES, BYTES, N, FLOATS, FLOATS, N, N)),
    "q8_0.dequantize": (q8_0.dequantize.py_func, (BYTES, N, N, FLOATS, N)),
    **{
        f"{module.__name__.rpartition('.')[2]}.{name}": (getattr(module, name).py_func, arguments)
        for module in (q4_0, q4_1, q4_k, q6_k)
        for name, arguments in {
            "matvec": (BYTES, N, FLOATS, FLOATS, N, N),
            "dequantize": (BYTES, N, N, FLOATS, N),
            "prepare": (FLOATS, N, FLOATS),
        }.items()
    },
    "float32.matvec": (float32.matvec.py_func, (FLOATS, N, FLOATS, FLOATS, N, N)),
    "float32.four_rows": (float32.four_rows.py_func, (FLOATS, FLOATS, FLOATS, FLOATS, N, FLOATS, FLOATS, N, N)),
    "tiles_6": (gemm.tiles_6.py_func, (FLOATS, N, N, N, N, FLOATS, N, FLOATS, N, N)),
    "multiply_add": (gemm.multiply_add.py_func, (FLOATS, N, N, N, N, FLOATS, N, FLOATS, N, N)),
    "pack": (gemm.pack.py_func, (FLOATS, N, N, N, N, F, FLOATS, N)),
    "_scores_of_four": (attention._scores_of_four.py_func, (FLOATS, N, FLOATS, N, N, N)),
    "_accumulate_four": (attention._accumulate_four.py_func, (FLOATS, N, FLOATS, N, N, N, FLOATS, N)),
    "_visible": (attention._visible.py_func, (FLOATS, N, N, N, N)),
    "_attend_panel": (attention._attend_panel.py_func, (FLOATS, N, FLOATS, N, FLOATS, N, N)),
    "rms_norm": (norms.rms_norm.py_func, (FLOATS, N, N, FLOATS, F, FLOATS, N)),
    "layer_norm": (norms.layer_norm.py_func, (FLOATS, N, N, FLOATS, FLOATS, F, FLOATS, N)),
    "rotate": (norms.rotate.py_func, (FLOATS, N, N, FLOATS, FLOATS, N, FLOATS, N)),
    "activate": (activate, (N, FLOATS, FLOATS, FLOATS)),
    "exponentials": (exponentials, (FLOATS, FLOATS)),
}
# What multiplies, and so must use fused multiplications of whole vectors; the rest must at least use vectors.
MULTIPLY = [name for name in KERNELS if not name.endswith(("_visible", "pack", ".dequantize", ".prepare"))]


@cache
def assembly(name: str, target: tuple[str, str]) -> str:
    """A kernel as another processor would run it."""
    return emitted(llvm(name), target)


@cache
def llvm(name: str) -> str:
    """A kernel in LLVM's language; Numba's wrappers, which are made for this processor alone, are taken away."""
    function, arguments = KERNELS[name]
    dispatcher = numba.njit(nogil=True, boundscheck=False)(function)
    dispatcher.compile(arguments)
    (text,) = dispatcher.inspect_llvm().values()
    for function in re.findall(r"^define .*?^}$", text, flags=re.MULTILINE | re.DOTALL):
        if re.match(r"define [^\n]*@(_ZN7cpython|cfunc|NRT_)", function):
            text = text.replace(function, "")
    # What counts references is still called.
    return text + "".join(
        f"declare void @{name}(ptr)\n" for name in ("NRT_incref", "NRT_decref") if f"@{name}(" in text
    )


def emitted(text: str, target: tuple[str, str]) -> str:
    """LLVM's own language as a processor's."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = binding.parse_assembly(re.sub(r"^target .*$", "", text, flags=re.MULTILINE))
    triple, features = target
    machine = binding.Target.from_triple(triple).create_target_machine(cpu="", features=features, opt=3)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    return str(machine.emit_assembly(module))


@pytest.mark.parametrize("name", KERNELS)
def test_on_arm64_it_is_vector_code(name: str):
    text = assembly(name, ARM64)
    assert re.search(r"fml[as]\s+v\d+\.4s" if name in MULTIPLY else r"\bv\d+\.4s", text)


@pytest.mark.parametrize("name", KERNELS)
def test_on_avx2_it_is_vector_code(name: str):
    text = assembly(name, AVX2)
    assert re.search(r"vfn?madd\w+ps\s.*%ymm" if name in MULTIPLY else r"%ymm", text)
    assert "%zmm" not in text


@pytest.mark.parametrize(
    "name",
    [
        "q4_0.matvec",
        "q4_k.matvec",
        "q6_k.matvec",
        "q8_0.matvec",
        "q8_0.matvec_4",
        "q8_0.four_rows",
        "float32.four_rows",
        "tiles_6",
        "multiply_add",
        "_scores_of_four",
        "_attend_panel",
    ],
)
def test_on_avx512_it_is_code_of_the_widest_vectors(name: str):
    assert re.search(r"vfn?madd\w+ps\s.*%zmm", assembly(name, AVX512))


@pytest.mark.parametrize("name", ["q4_0.matvec", "q4_1.matvec", "q4_k.matvec", "q6_k.matvec"])
def test_codes_are_cut_out_of_whole_words(name: str):
    """A mask and a conversion each: nothing is widened, and few words are shifted."""
    text = assembly(name, AVX2)
    assert re.search(r"vcvtdq2ps\s+%ymm", text)
    assert not re.search(r"vpmov[sz]xb[dw]\s+%?[^\n]*%ymm", text) or name in ("q4_k.matvec", "q6_k.matvec")
    assert len(re.findall(r"vpsrl[dw]\s", text)) < len(re.findall(r"vcvtdq2ps\s", text))
    assert re.search(r"ucvtf|scvtf\s+v\d+\.4s", assembly(name, ARM64))


@pytest.mark.parametrize("name", ["q8_0.matvec", "q8_0.matvec_4", "q8_0.four_rows", "q8_0.dequantize"])
def test_codes_and_scales_are_widened_by_the_vector(name: str):
    arm64, avx2 = assembly(name, ARM64), assembly(name, AVX2)
    assert re.search(r"scvtf\s+v\d+\.4s", arm64)
    assert re.search(r"fcvtl\s+v\d+\.4s", arm64)
    assert "vpmovsxbd" in avx2
    assert "vcvtph2ps" in avx2


@pytest.mark.parametrize("target", [ARM64, AVX2, AVX512], ids=["arm64", "avx2", "avx512"])
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_called_that_a_process_may_not_have(name: str, target: tuple[str, str]):
    """Widening halves, rounding and exponentials are instructions, not functions of some library."""
    named = re.findall(r"^\s+(?:callq?|bl|movabsq)\s+\$?([A-Za-z_]\w*)", assembly(name, target), flags=re.MULTILINE)
    assert {function for function in named if not function.startswith(("_ZN7kernels", "NRT_"))} <= {"memset"}


@pytest.mark.parametrize(
    ("target", "instruction"),
    [(ARM64, r"\byield\b|\bhint\s+#(0x)?1\b"), (AVX2, r"\bpause\b"), (("arm64-apple-darwin", "+neon"), r"\byield\b")],
    ids=["arm64", "x86_64", "darwin"],
)
def test_a_loop_that_waits_tells_the_processor(target: tuple[str, str], instruction: str):
    module = ir.Module()
    module.triple = target[0]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "wait")
    builder = ir.IRBuilder(function.append_basic_block())
    signature, generate = memory.relax._defn(None)
    generate(WithoutValues(), builder, signature, ())
    builder.ret_void()
    assert re.search(instruction, emitted(str(module), target))


class WithoutValues:
    """As much of Numba's compilation context as `relax` needs."""

    def get_dummy_value(self) -> None:
        return None
