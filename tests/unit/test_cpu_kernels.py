"""The compiled CPU kernels against their NumPy twins and against float64, on the processors that there are."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import blocks as layout

numba = pytest.importorskip("numba")

from kernels.cpu import jit, q8_0, q8_0_numpy  # noqa: E402

ROOT = Path(__file__).parents[2]


def matrix(seed: int, n_rows: int, n_blocks: int) -> np.ndarray:
    """Bytes of a Q8_0 matrix, at an odd address, as they lie in a file."""
    rng = np.random.default_rng(seed)
    made = np.empty(n_rows * n_blocks, layout.Q8_0)
    made["qs"] = rng.integers(-128, 128, (len(made), 32), dtype=np.int8)
    made["d"] = rng.standard_normal(len(made)) * 10.0 ** rng.integers(-3, 2, len(made))
    shifted = np.empty(made.nbytes + 1, dtype=np.uint8)
    shifted[1:] = made.view(np.uint8)
    return shifted[1:]


def in_float64(blocks: np.ndarray, n_blocks: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The products, and what their terms add up to without signs, which bounds the rounding."""
    rows = blocks.view(layout.Q8_0)
    terms = rows["qs"].astype(np.float64) * rows["d"].astype(np.float64)[:, None]
    terms = terms.reshape(-1, n_blocks * 32) * x
    return terms.sum(axis=1), np.abs(terms).sum(axis=1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 12))
def test_products_are_those_of_float64_and_of_the_twin(seed: int, n_rows: int, n_blocks: int):
    blocks = matrix(seed, n_rows, n_blocks)
    x = np.random.default_rng(seed + 1).standard_normal(n_blocks * 32).astype(np.float32)
    want, size = in_float64(blocks, n_blocks, x)
    for kernels in (q8_0, q8_0_numpy):
        y = np.zeros(n_rows, dtype=np.float32)
        kernels.matvec(blocks, n_blocks * 32, x, y, 0, n_rows)
        # At most n_blocks / 2 sums in a lane, five to join the lanes, and two roundings per term.
        assert (np.abs(y - want) <= (n_blocks + 8) * 2.0**-24 * size).all()


@pytest.mark.parametrize(("first", "last"), [(0, 7), (2, 5), (6, 7), (3, 3)])
def test_only_the_rows_asked_for_are_written(first: int, last: int):
    blocks, x = matrix(1, 7, 3), np.ones(96, dtype=np.float32)
    whole, some = np.zeros(7, dtype=np.float32), np.full(7, np.nan, dtype=np.float32)
    q8_0.matvec(blocks, 96, x, whole, 0, 7)
    q8_0.matvec(blocks, 96, x, some, first, last)
    np.testing.assert_array_equal(some[first:last], whole[first:last])
    assert np.isnan(np.delete(some, range(first, last))).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.data())
def test_expanded_blocks_are_those_of_the_twin_bit_for_bit(seed: int, n_blocks: int, data: st.DataObject):
    blocks = matrix(seed, 1, n_blocks)
    first = data.draw(st.integers(0, n_blocks))
    last = data.draw(st.integers(first, n_blocks))
    found, want = (np.full(32 * n_blocks, 7, dtype=np.float32) for _ in range(2))
    q8_0.dequantize(blocks, found, first, last)
    q8_0_numpy.dequantize(blocks, want, first, last)
    np.testing.assert_array_equal(found, want)


def assembly(target: str, features: str) -> str:
    """The matrix product as another processor would run it."""
    from llvmlite import binding
    from numba import types

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    floats, count = types.Array(types.float32, 1, "C"), types.int64
    dispatcher = numba.njit(nogil=True, boundscheck=False)(q8_0.matvec.py_func)
    dispatcher.compile((types.Array(types.uint8, 1, "C"), count, floats, floats, count, count))
    (text,) = dispatcher.inspect_llvm().values()
    # Behind the kernel stand Numba's wrappers, which count references in a way of this processor alone.
    functions = re.findall(r"^define .*?^}$", text, flags=re.MULTILINE | re.DOTALL)
    for wrapper in functions[1:]:
        text = text.replace(wrapper, "")
    text = re.sub(r"^target .*$", "", text, flags=re.MULTILINE)
    module = binding.parse_assembly(text)
    machine = binding.Target.from_triple(target).create_target_machine(cpu="", features=features, opt=3)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    return str(machine.emit_assembly(module))


def test_on_arm64_the_product_is_vector_code():
    text = assembly("aarch64-unknown-linux-gnu", "+neon")
    assert "fmla\tv" in text or "fmla v" in text
    assert "sshll" in text


def test_on_avx2_the_product_is_vector_code():
    text = assembly("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c")
    assert "vfmadd" in text
    assert "ymm" in text
    assert "vpmovsxbd" in text
    assert "vcvtph2ps" in text


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="NUMBA_CPU_NAME=haswell is an x86 processor")
def test_the_kernels_are_right_on_an_avx2_processor(tmp_path: Path):
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    test = f"{__file__}::test_products_are_those_of_float64_and_of_the_twin"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


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


NOWHERE = "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n"


@pytest.mark.parametrize("home", ["/proc/nobody", None], ids=["unwritable", "unknown"])
def test_without_a_home_compiled_code_is_kept_in_a_temporary_folder(tmp_path: Path, home: str | None):
    unset = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"TMPDIR": str(tmp_path)}
    environment |= {"HOME": home} if home else {}
    code = "from mlx_engine.backends.matrices import compiled_kernels; print(compiled_kernels().__name__)"
    command = [sys.executable, "-c", (NOWHERE if home is None else "") + code]
    runs = [subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [run.stdout.strip() for run in runs] == ["kernels.cpu.q8_0"] * 2
    assert [run.stderr.count("compiling the CPU kernels, once") for run in runs] == [1, 0]


def test_without_numba_numpy_runs_and_says_so(tmp_path: Path):
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import mlx_engine; mlx_engine.create_backend('simd'); engine = mlx_engine.load(sys.argv[1], 'simd')\n"
        "print(engine.backend.kernels, engine.generate([1, 2, 3], max_tokens=3).token_ids)"
    )
    model = ROOT / "tests" / "data" / "qwen3-micro" / "model-q8_0.gguf"
    result = subprocess.run([sys.executable, "-c", code, str(model)], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.startswith("None ["), result.stderr
    assert result.stderr.count("no compiled kernels, NumPy runs instead") == 1
