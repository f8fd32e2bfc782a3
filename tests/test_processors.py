"""What `python -m tests.processors` decides before it runs anything."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("llvmlite")

from tests import processors
from tests.processors import TARGETS, Outcome, misused, registers

HASWELL, SKYLAKE = ({target.name: target for target in TARGETS}[name] for name in ("haswell", "skylake-avx512"))
AVX2_CODE = "vfmadd231ps %ymm1, %ymm2, %ymm15\nvaddps (%rax), %xmm1, %xmm2"


@pytest.mark.parametrize(
    ("code", "avx512"), [(AVX2_CODE, 0), ("vaddps %ymm16, %ymm1, %ymm2", 1), ("vmovups (%rax), %zmm1 {%k1} {z}", 2)]
)
def test_registers_of_avx512_are_found_whatever_their_width(code: str, avx512: int):
    found = registers(code)
    assert found["evex"] == avx512
    assert (misused(HASWELL, found + registers(AVX2_CODE)) is None) == (not avx512)


def test_code_for_avx512_uses_the_widest_vectors():
    assert misused(SKYLAKE, registers(AVX2_CODE)) == "no zmm register in the kernels"
    assert misused(SKYLAKE, registers("vmovups (%rax), %zmm1")) is None


def test_numba_is_told_the_features_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", "nocona")
    assert HASWELL.environment()["NUMBA_CPU_NAME"] == "haswell"
    assert HASWELL.environment()["NUMBA_CPU_FEATURES"] == ""
    native = next(target for target in TARGETS if target.name == "native")
    assert not set(processors.CHOOSING) & set(native.environment())


def test_all_files_of_the_cpu_kernels_are_run():
    files = {path.name for path in (processors.ROOT / "tests" / "unit").glob("test_cpu_*.py")}
    assert files <= {Path(path).name for path in processors.tests(HASWELL)}


def test_what_the_machine_cannot_execute_is_compiled_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processors.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processors.binding, "get_host_cpu_features", lambda: {"avx2": True, "f16c": True, "fma": True})
    monkeypatch.setattr(processors, "compiled_registers", lambda environment: Counter(ymm=1, zmm=5, evex=5))
    monkeypatch.setattr(processors, "run_tests", lambda *arguments: pytest.fail("run"))
    outcome = processors.on_x86(SKYLAKE, None)
    assert outcome.said == "compiled only: the host lacks avx512f, avx512bw, avx512cd, avx512dq, avx512vl"
    assert (outcome.registers, outcome.failed) == ("ymm 1, zmm 5", False)
    assert processors.on_x86(HASWELL, None).said == "5 registers of AVX-512 in the kernels"


def test_without_a_folder_for_arm64_the_commands_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outcome = processors.on_arm64(TARGETS[-1], tmp_path, None)
    assert isinstance(outcome, Outcome)
    assert not outcome.failed
    assert outcome.said.startswith("left out")
    assert f"--include=python3,libgomp1,libstdc++6 bookworm {tmp_path}" in capsys.readouterr().out
