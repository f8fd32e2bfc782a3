"""What the compiler makes of the kernels on processors that are not here: read, since it cannot be run.

What can be said of values is tested by values: the order of sums and one rounding per multiply-add in
`test_cpu_gemm.py`, equal bits of AVX2 and AVX-512 builds in `test_cpu_library.py`, and arm64 in QEMU by
`tests.processors`. Here stands what no value shows.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("numba")

from llvmlite import binding, ir

from kernels.cpu.build import memory
from tests.assembly import AFFINE, ARM64, AVX2, AVX512, FORMATS, assembly, is_slow, kernels

Target = tuple[str, str, str]

KERNELS = list(kernels())
IDS = {ARM64: "arm64", AVX2: "avx2", AVX512: "avx512"}
TARGETS = pytest.mark.parametrize("target", IDS, ids=IDS.values())
# Arithmetic on vectors of the target's full width; and on a single float that was a quant, or half a float.
WHOLE_VECTORS = {
    ARM64: r"\bf(add|sub|mul|mla|mls)\s+v\d+\.(4s|2d)",
    AVX2: r"\bv\w*(add|sub|mul)\w*p[sd]\s.*%ymm",
    AVX512: r"\bv\w*(add|sub|mul)\w*p[sd]\s.*%zmm",
}
CELLS = [
    pytest.param(name, target, id=f"{name}-{IDS[target]}", marks=[pytest.mark.slow] * is_slow(name, target))
    for name in KERNELS
    for target in IDS
    if target == AVX2 or name != "keep_dots"  # the other targets make both sweeps in one call
]
MULTIPLY_ADD = r"vfmadd\w+ps\s|fmla\s+v"
ONE_QUANT = r"cvtsi2ss|[us]cvtf\s+s\d|fcvt\s+s\d+, h"


@pytest.mark.parametrize(("name", "target"), CELLS)
def test_arithmetic_is_done_on_whole_vectors(name: str, target: Target):
    """Values cannot show this: scalar code gives the same bits, several times slower."""
    assert re.search(WHOLE_VECTORS[target], assembly(target, name))


@pytest.mark.parametrize("name", KERNELS)
def test_code_for_avx2_has_no_registers_of_avx512(name: str):
    """The tests may run on a processor with AVX-512, which does not fault on its instructions."""
    assert "%zmm" not in assembly(AVX2, name)


@TARGETS
def test_the_sum_of_exponentials_rounds_every_product(target: Target):
    """NumPy has no fused multiply-add: with one, the kernel's bits would not be those of its twin."""
    assert re.search(r"\bvfn?m(add|sub)|\bf(n?m(add|sub)|ml[as])\b", assembly(target, "sum_exp")) is None


@pytest.mark.parametrize(("name", "target"), [c for c in CELLS if str(c.id).startswith((*FORMATS, *AFFINE))])
def test_no_quant_is_converted_alone(name: str, target: Target):
    """Scalar conversion gives the same floats, and takes longer than reading the weights."""
    assert re.search(ONE_QUANT, assembly(target, name)) is None


def loops(text: str) -> list[list[str]]:
    """Return the innermost loops: instructions from a label to the jump back to it, without another label between."""
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
        ("keep_dots", AVX2, r"%ymm\d+, -?\d*\(%r[sb]p\)"),
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
    """No loop of multiply-adds writes to the stack: sums in memory have the same values and take twice as long."""
    bodies = ["\n".join(body) for body in loops(assembly(target, name))]
    bodies = [body for body in bodies if re.search(MULTIPLY_ADD, body)]
    assert bodies
    assert [body for body in bodies if re.search(spill, body)] == []


@pytest.mark.parametrize("name", ["q4_0.four_rows", "q4_k.four_rows", "q6_k.four_rows", "affine4_g64_bf16.four_rows"])
def test_the_products_of_one_vector_are_added_in_registers_of_avx2(name: str):
    """LLVM would load the weights of four rows first, and write a sum or a weight to the stack for each product."""
    bodies = [body for body in loops(assembly(AVX2, name)) if re.search(MULTIPLY_ADD, "\n".join(body))]
    four_rows = max(bodies, key=len)
    spilled = [line for line in four_rows if re.search(r"%ymm\d+, -?\d*\(%r[sb]p\)", line)]
    assert len(spilled) <= sum("vfmadd" in line for line in four_rows) // 8


@pytest.mark.parametrize(("name", "target"), CELLS)
def test_nothing_is_called_that_a_process_may_not_have(name: str, target: Target):
    """Widening halves, rounding and exponentials are instructions; a process may lack the library, or have another.

    On arm64 an exponential of libm would have the bits of that machine's libm, which is not here to be compared with.
    """
    calls = r"^\s+(?:callq?|bl|movabsq)\s+\$?([A-Za-z_]\w*)"
    named = set(re.findall(calls, assembly(target, name), flags=re.MULTILINE))
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
    """Without it the loop is also correct, but slows the other hardware thread of the core."""
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "wait")
    builder = ir.IRBuilder(function.append_basic_block())
    signature, generate = memory.relax._defn(None)
    generate(WithoutValues(), builder, signature, ())
    builder.ret_void()
    assert re.search(instruction, emitted(str(module), triple, features))


def emitted(text: str, triple: str, features: str) -> str:
    """Compile LLVM IR to the assembly of a processor."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = binding.parse_assembly(re.sub(r"^target .*$", "", text, flags=re.MULTILINE))
    machine = binding.Target.from_triple(triple).create_target_machine(cpu="", features=features, opt=3)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    return str(machine.emit_assembly(module))


class WithoutValues:
    """The part of Numba's compilation context that `relax` needs."""

    def get_dummy_value(self) -> None:
        return None
