"""Compiled code: where it is kept, when it is made anew, and what runs where there can be none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from kernels.cpu import jit
from mlx_engine.backends import kernels

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "tests" / "data" / "qwen3-micro" / "model-q8_0.gguf"
ONCE = "compiling the CPU kernels, once"


def python(code: str, *arguments: str | Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with some variables of the environment set, or taken away."""
    environment = {k: v for k, v in os.environ.items() if k not in changes}
    environment |= {k: v for k, v in changes.items() if v is not None}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


# ---- the folder ----


def test_compiled_code_is_kept_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "given"))
    assert jit.cache_folder() == tmp_path / "given"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_folder() == tmp_path / "xdg" / "mlx_engine" / "numba"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path / "temporary"))
    assert jit.cache_folder().parent == tmp_path / "temporary"


def test_a_folder_that_somebody_else_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever can write there could have this process run code of theirs."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "given"))
    if not hasattr(os, "getuid"):
        pytest.skip("this system does not say whose a folder is")
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    folder = jit.cache_folder()
    assert folder != tmp_path / "given"
    assert folder.name.startswith("mlx_engine-numba-")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_any_change_of_the_source_changes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    (tmp_path / "jit.py").write_text("a = 1\n")
    (tmp_path / "vectors.py").write_text("LANES = 16\n")
    before = jit._digest()
    assert jit._digest() == before
    (tmp_path / "vectors.py").write_text("LANES = 32\n")
    changed = jit._digest()
    (tmp_path / "new.py").write_text("b = 2\n")
    assert len({before, changed, jit._digest()}) == 3


def test_compiled_code_of_another_source_is_not_found(tmp_path: Path):
    code = "from kernels.cpu import jit; print(jit.FOLDER)"
    folder = Path(python(code, NUMBA_CACHE_DIR=str(tmp_path)).stdout.strip())
    assert folder == tmp_path / jit._digest()


KERNEL = """
import numpy as np
from kernels.cpu import float32, jit
print(jit.is_compiled())
y = np.zeros(1, dtype=np.float32)
float32.matvec(np.ones(40, dtype=np.float32), 40, np.ones(40, dtype=np.float32), y, 0, 1)
print(y[0], jit.is_compiled())
"""
NOWHERE = "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n"


@pytest.mark.parametrize("home", ["/proc/nobody", None], ids=["unwritable", "unknown"])
def test_without_a_home_compiled_code_is_kept_in_a_temporary_folder(tmp_path: Path, home: str | None):
    code = (NOWHERE if home is None else "") + KERNEL
    changes = {"NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": home, "TMPDIR": str(tmp_path)}
    runs = [python(code, **changes) for _ in range(2)]
    assert [run.stdout.split() for run in runs] == [["False", "40.0", "True"], ["True", "40.0", "True"]], runs[0].stderr
    assert list(tmp_path.rglob("*.nbi"))


# ---- the announcement ----


def test_compiling_is_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def compile_them() -> object:
        (tmp_path / "matvec.nbi").touch()
        return object()

    monkeypatch.setattr(jit, "FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "Kernels", compile_them)
    for _ in range(2):  # two processes, one after the other
        assert kernels.load_kernels.__wrapped__() is not None
    assert [ONCE in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("name", ["simd", "parallel"])
def test_without_numba_numpy_runs_and_says_so(name: str):
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import mlx_engine; mlx_engine.create_backend(sys.argv[2])\n"
        "engine = mlx_engine.load(sys.argv[1], sys.argv[2])\n"
        "print(type(engine.backend).__name__, len(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True).token_ids))"
    )
    result = python(code, MICRO, name)
    assert result.stdout.split() == [f"{name.capitalize()}Backend", "3"], result.stderr
    assert result.stderr.count("no compiled kernels, NumPy runs instead") == 1


def test_an_old_processor_has_no_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(jit.config, "CPU_NAME", None)
    monkeypatch.setattr(jit.binding, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr(jit.binding, "get_host_cpu_features", lambda: {"fma": True, "avx2": False})
    assert jit.lacking().endswith("lacks f16c, avx2")
    assert kernels.load_kernels.__wrapped__() is None
    assert "lacks f16c, avx2" in caplog.text
    monkeypatch.setattr(jit.binding, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    assert jit.lacking() is None


# ---- on an AVX2 processor, from the first compilation on ----

GENERATE = """
import sys, mlx_engine
engine = mlx_engine.load(sys.argv[1], "parallel", threads=2)
print(*engine.generate([1, 2, 3, 4, 5, 6, 7], max_tokens=5, ignore_eos=True).token_ids)
"""
# The first of them makes a backend, and so compiles everything.
TESTS = (
    "test_cpu_linear.py::test_products",
    "test_cpu_linear.py::test_gates",
    "test_cpu_attention.py::test_attention_of_any_shape",
    "test_cpu_norms.py::test_exp_is_within_one_unit_in_the_last_place_wherever_float32_has_one",
    "test_cpu_q8_0.py::test_products_are_those_of_float64_and_of_the_twin",
)


def is_wider_than_avx2() -> bool:
    """Whether this is an x86 processor on which AVX2 is not what all other tests run on already."""
    return platform.machine() in ("x86_64", "AMD64") and bool(jit.binding.get_host_cpu_features().get("avx512f"))


@pytest.mark.skipif(not is_wider_than_avx2(), reason="no x86 processor with AVX-512, or all other tests say the same")
def test_the_kernels_are_right_on_an_avx2_processor(tmp_path: Path):
    """Without anything compiled before: that is said once, and never again."""
    changes = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    tests = [str(Path(__file__).parent / test) for test in TESTS]
    options = ["-s", "-p", "no:cacheprovider", "-p", "no:logging"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, **changes}
    first = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout
    assert "5 passed" in first.stdout
    second = python(GENERATE, MICRO, **changes)
    assert len(second.stdout.split()) == 5
    assert [first.stderr.count(ONCE), second.stderr] == [1, ""]
