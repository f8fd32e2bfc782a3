"""What the compiler makes of the kernels on the processors that there are: vector code, on each of them."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("numba")

from llvmlite import binding, ir

from kernels.cpu import memory
from tests.assembly import ARM64, AVX2, AVX512, FORMATS, assembly

Target = tuple[str, str, str]

ROWS = [f"{name}.four_rows" for name in (*FORMATS, "float32")]
TILES = ["add_dots", "sum_weighted"]
# What multiplies and adds, and so must use fused instructions of whole vectors; the rest must at least use vectors.
MULTIPLY = [*ROWS, *TILES, "attention._weights", "attention._join", "rms_norm", "layer_norm", "rotate", "activate",
            "exponentials"]  # fmt: skip
KERNELS = [*MULTIPLY, *(f"{name}.dequantize" for name in FORMATS)]
MULTIPLY_ADD = r"vfmadd\w+ps\s|fmla\s+v"
TARGETS = pytest.mark.parametrize("target", [ARM64, AVX2, AVX512], ids=["arm64", "avx2", "avx512"])


@TARGETS
def test_every_kernel_was_compiled(target: Target):
    assert set(assembly(target)) == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_on_arm64_it_is_vector_code(name: str):
    assert re.search(r"fml[as]\s+v\d+\.4s" if name in MULTIPLY else r"\bv\d+\.4s", assembly(ARM64)[name])


@pytest.mark.parametrize("name", KERNELS)
def test_on_avx2_it_is_vector_code(name: str):
    text = assembly(AVX2)[name]
    assert re.search(r"vfn?m(add|sub)\w+ps\s.*%ymm" if name in MULTIPLY else r"%ymm", text)
    assert "%zmm" not in text


@pytest.mark.parametrize("name", KERNELS)
def test_on_avx512_it_is_code_of_the_widest_vectors(name: str):
    assert re.search(r"vfn?m(add|sub)\w+ps\s.*%zmm" if name in MULTIPLY else r"%zmm", assembly(AVX512)[name])


def loops(text: str) -> list[list[str]]:
    """The innermost loops: instructions from a label to the jump back to it, with no other label between."""
    found, label, body = [], "", []
    for line in text.splitlines():
        if re.match(r"\.?L\w+:", line):
            label, body = line.partition(":")[0], []
        elif label and re.match(r"\s+(j\w+|b(\.\w+)?|cbnz|tbnz)\s.*" + re.escape(label) + r"$", line):
            found.append(body)
        elif re.match(r"\s+[a-z]", line):
            body.append(line)
    return found


@pytest.mark.parametrize(
    ("name", "target", "spill"),
    [
        ("add_dots", AVX2, r"%ymm\d+, -?\d*\(%r[sb]p\)"),
        ("add_dots", AVX512, r"%zmm\d+, -?\d*\(%r[sb]p\)"),
        ("add_dots", ARM64, r"st[rp]\s+q\d+.*\[sp"),
        # With AVX-512 LLVM stores one of 24 sums for some processors, and none for others.
        ("sum_weighted", AVX2, r"%ymm\d+, -?\d*\(%r[sb]p\)"),
        ("sum_weighted", ARM64, r"st[rp]\s+q\d+.*\[sp"),
        ("q8_0.four_rows", AVX512, r"%zmm\d+, -?\d*\(%r[sb]p\)"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_sums_of_a_tile_stay_in_registers(name: str, target: Target, spill: str):
    """No loop of multiply-adds writes to the stack."""
    bodies = ["\n".join(body) for body in loops(assembly(target)[name])]
    bodies = [body for body in bodies if len(re.findall(MULTIPLY_ADD, body)) >= 4]
    assert len(bodies) >= 3
    assert [body for body in bodies if re.search(spill, body)] == []


@TARGETS
def test_a_tile_has_a_shape_for_the_registers_of_its_target(target: Target):
    """The largest loop has two steps of a whole tile: its rows times its vectors."""
    bodies = [len(re.findall(MULTIPLY_ADD, "\n".join(body))) for body in loops(assembly(target)["add_dots"])]
    assert max(bodies) == 2 * 4 * (3 if target == AVX2 else 6)


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith(("q4", "q6"))])
def test_quants_become_floats_by_the_vector(name: str):
    assert re.search(r"vcvtdq2ps\s+%ymm", assembly(AVX2)[name])
    assert re.search(r"[us]cvtf\s+v\d+\.4s", assembly(ARM64)[name])


@pytest.mark.parametrize("name", ["q8_0.four_rows", "q8_0.dequantize"])
def test_quants_and_scales_are_widened_by_the_vector(name: str):
    arm64, avx2 = assembly(ARM64)[name], assembly(AVX2)[name]
    assert re.search(r"scvtf\s+v\d+\.4s", arm64)
    assert re.search(r"fcvtl\s+v\d+\.4s", arm64)
    assert "vpmovsxbd" in avx2
    assert "vcvtph2ps" in avx2


@TARGETS
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_called_that_a_process_may_not_have(name: str, target: Target):
    """Widening halves, rounding and exponentials are instructions, not functions of some library."""
    calls = r"^\s+(?:callq?|bl|movabsq)\s+\$?([A-Za-z_]\w*)"
    named = set(re.findall(calls, assembly(target)[name], flags=re.MULTILINE))
    assert {function for function in named if not function.startswith(("_ZN7kernels", "NRT_"))} <= {"memset"}


@pytest.mark.parametrize(
    ("triple", "features", "instruction"),
    [
        (ARM64[0], ARM64[2], r"\byield\b|\bhint\s+#(0x)?1\b"),
        (AVX2[0], AVX2[2], r"\bpause\b"),
        ("arm64-apple-darwin", "+neon", r"\byield\b"),
    ],
    ids=["arm64", "x86_64", "darwin"],
)
def test_a_loop_that_waits_tells_the_processor(triple: str, features: str, instruction: str):
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "wait")
    builder = ir.IRBuilder(function.append_basic_block())
    signature, generate = memory.relax._defn(None)
    generate(WithoutValues(), builder, signature, ())
    builder.ret_void()
    assert re.search(instruction, emitted(str(module), triple, features))


def emitted(text: str, triple: str, features: str) -> str:
    """LLVM's own language as a processor's."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = binding.parse_assembly(re.sub(r"^target .*$", "", text, flags=re.MULTILINE))
    machine = binding.Target.from_triple(triple).create_target_machine(cpu="", features=features, opt=3)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    return str(machine.emit_assembly(module))


class WithoutValues:
    """As much of Numba's compilation context as `relax` needs."""

    def get_dummy_value(self) -> None:
        return None
