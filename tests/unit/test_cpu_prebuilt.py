"""Machine code that comes with the package: which is loaded, and that it is the code that would be compiled."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("ziglang")  # its linker

from llvmlite import binding

from kernels.cpu.build import layout, library, prebuilt, vectors
from kernels.cpu.build.prebuilt import TARGETS, SharedCode, find, instruction_sets
from tests.unit.test_cpu_library import MICRO, python
from tools import wheel

PART = "q8_0"
MACHINE = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
OWN = [name for name, target in TARGETS.items() if target.machine == MACHINE and target.needs <= instruction_sets()]

pytestmark = pytest.mark.skipif(not OWN, reason="no target is for this processor")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a wheel has it, with one part for two targets, of which only the last runs on every processor here.

    It is compiled once for all tests and later runs.
    """
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        monkeypatch.delenv(name, raising=False)
    wheel.prebuilt(sorted({OWN[0], OWN[-1]}), [PART], tmp_path, library.folder() / "prebuilt")
    library._prebuilt()  # it is kept: the library of this process has no such folder
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    return tmp_path


def source() -> str:
    return library.folder().name


def loaded() -> SharedCode:
    found = find(source())
    assert isinstance(found, SharedCode), found
    return found


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def test_an_unknown_part_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["wheel", "--only", "q8_0", "--only", "q9"])
    with pytest.raises(SystemExit):
        wheel.main()
    assert "--only: the kernels have no part q9; the formats are " in capsys.readouterr().err


def test_the_best_target_is_loaded_and_has_the_parts(folder: Path):
    found = loaded()
    assert (found.name, found.parts) == (OWN[0], {PART})
    assert found.address("q8_0_expand") > 0
    assert found.address("nobody") == 0


def test_loaded_code_has_the_bits_of_compiled_code(folder: Path):
    """On the first and the last target: the weights of Q8_0 blocks, expanded in their order."""
    own, rng = library.load([PART]), np.random.default_rng(1)
    assert isinstance(own._parts[PART], library.Code)
    blocks, scratch = rng.integers(0, 256, (64, 34), dtype=np.uint8), np.zeros(1 << 16, np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.375).tobytes(), np.uint8)
    codes = [(own._parts[PART], vectors.PART)]
    for name in (OWN[0], OWN[-1]):
        found = prebuilt._loaded(name, manifest(folder)[name])
        assert isinstance(found, SharedCode), found
        codes.append((found, 8 if name.startswith("x86-64-v3") else layout.LANES))
    results = []
    for code, apart in codes:
        results.append(np.zeros(64 * 32, np.float32))
        arguments = blocks.ctypes.data, 0, 64, results[-1].ctypes.data, 0, layout.LANES, apart, scratch.ctypes.data
        library.function(code.address("q8_0_expand"), "i" * 8)(*arguments)
    assert np.array_equal(results[0], 0.375 * blocks[:, 2:].view(np.int8).astype(np.float32).reshape(-1))
    assert all(np.array_equal(result, results[0]) for result in results)


def manifest(folder: Path) -> dict[str, dict[str, object]]:
    return json.loads((folder / prebuilt.MANIFEST).read_text())["targets"]


def test_code_of_another_source_is_not_used(folder: Path):
    assert "another version of the kernels" in str(find("0" * 16))


def test_a_damaged_file_is_not_used_and_the_next_target_is(folder: Path):
    if len(OWN) < 2:
        pytest.skip("this processor has one target")
    damage(folder / str(manifest(folder)[OWN[0]]["file"]))
    assert loaded().name == OWN[-1]
    damage(folder / str(manifest(folder)[OWN[-1]]["file"]))
    assert str(find(source())).endswith("has been changed or is damaged")


def test_a_file_that_the_system_cannot_load_is_not_used(folder: Path):
    of = manifest(folder)[OWN[0]]
    (folder / str(of["file"])).write_bytes(b"not a library")
    of["sha256"] = prebuilt.hashlib.sha256(b"not a library").hexdigest()
    assert "cannot be loaded: " in str(prebuilt._loaded(OWN[0], of))


@pytest.mark.some(2)
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"source": "a", "targets": 1}'])
def test_a_damaged_manifest_is_none(folder: Path, text: str):
    (folder / prebuilt.MANIFEST).write_text(text)
    assert find(source()) == "no machine code came with this package"


def test_code_for_another_processor_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prebuilt, "instruction_sets", lambda: TARGETS[OWN[-1]].needs)
    assert loaded().name == OWN[-1]
    monkeypatch.setattr(prebuilt, "instruction_sets", frozenset)
    assert "for this processor" in str(find(source()))


def test_what_numbas_variables_choose_is_used_if_it_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch):
    target = TARGETS[OWN[-1]]
    monkeypatch.setenv("NUMBA_CPU_NAME", target.processor)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", target.features)
    assert loaded().name == OWN[-1]
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+sse4.2")
    assert "for this processor" in str(find(source()))


def test_parts_that_came_with_the_package_are_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "codes", lambda parts: pytest.fail("compiled"))
    monkeypatch.setattr(library, "_prebuilt", loaded)
    found = library.Library()
    found.need([PART])
    assert found.has([PART])
    assert library.lacking() is None


def test_what_did_not_come_with_the_package_is_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Kernels that are compiled for this processor would lay out memory in another way than those of a package."""
    monkeypatch.setattr(library, "codes", lambda parts: pytest.fail("compiled"))
    monkeypatch.setattr(library, "_prebuilt", loaded)
    found = library.Library()
    with pytest.raises(LookupError, match=r"^the machine code that came with this package has no q4_0, q9_0$"):
        found.need(["q4_0", PART, "q9_0"])


def test_a_wheel_has_no_files_of_an_earlier_one(folder: Path):
    (folder / "old.so").touch()
    wheel.prebuilt([OWN[-1]], [PART], folder, library.folder() / "prebuilt")
    assert {file.name for file in folder.iterdir()} == {prebuilt.MANIFEST, str(manifest(folder)[OWN[-1]]["file"])}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="LLVM has other names elsewhere")
def test_a_processor_has_the_instructions_that_llvm_sees():
    found, host = instruction_sets(), binding.get_host_cpu_features()
    names = {"abm": "lzcnt", "bmi1": "bmi", "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni"}
    for name in set.union(*(set(target.needs) for target in TARGETS.values() if target.machine == "x86_64")):
        assert (name in found) == bool(host.get(names.get(name, name))), name


ADD = "define i64 @f(i64* %p) {\n  %x = atomicrmw add i64* %p, i64 1 seq_cst\n  ret i64 %x\n}"


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.machine == "aarch64"])
def test_an_arm64_target_needs_the_atomic_instructions_that_llvm_emits(name: str):
    target = TARGETS[name]
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(target.triple).create_target_machine(target.processor, target.features)
    text = machine.emit_assembly(binding.parse_assembly(ADD))
    assert ("ldadd" in text) == ("atomics" in target.needs)


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.machine == "x86_64"])
def test_an_x86_target_needs_vnni_if_llvm_emits_it(name: str):
    target = TARGETS[name]
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(target.triple).create_target_machine(target.processor, target.features)
    text = machine.emit_assembly(binding.parse_assembly(vectors._PROBE_OF_PAIRS))
    assert ("vpdpwssd" in text) == bool({"avx_vnni", "avx512_vnni"} & target.needs)


def test_the_target_of_a_wheel_is_what_the_kernels_are_compiled_for_there():
    assert {target.machine for target in TARGETS.values()} == {"x86_64", "aarch64"}
    assert set(wheel.all_parts()) > {*library.MODULES, *library.FORMATS, "affine4_g64_bf16", PART}
    assert all(library.is_format(part.removesuffix(".fixed")) or part in library.MODULES for part in wheel.all_parts())


# ---- whole models ----

WITHOUT_A_COMPILER = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
from pathlib import Path
from kernels.cpu.build import prebuilt
prebuilt.FOLDER = Path(sys.argv[1])
import numpy as np
import mlx_engine
for activations in ("f32", "i16"):
    engine = mlx_engine.load(sys.argv[2], "parallel", threads=2, activations=activations)
    print(type(engine.backend).__name__, np.array(engine.logits(list(range(1, 60)))).tobytes().hex())
"""
WITH_A_COMPILER = WITHOUT_A_COMPILER.replace('sys.modules["numba"] = sys.modules["llvmlite"] = None\n', "").replace(
    "prebuilt.FOLDER = Path(sys.argv[1])\n", ""
)


@pytest.mark.slow
@pytest.mark.parametrize("target", OWN)
def test_a_model_has_the_same_bits_without_a_compiler(target: str, tmp_path: Path):
    parts = [*library.BASE, "fixed", PART, "q8_0.fixed"]
    wheel.prebuilt([target], parts, tmp_path, library.folder() / "prebuilt")
    ours = python(WITHOUT_A_COMPILER, tmp_path, MICRO)
    assert ours.stderr == ""
    assert ours.stdout == python(WITH_A_COMPILER, tmp_path, MICRO).stdout
    assert ours.stdout.split()[::2] == ["CompiledBackend"] * 2
