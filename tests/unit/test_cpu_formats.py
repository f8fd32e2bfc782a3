"""Storage formats are compiled one by one, when a model needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("numba")

from kernels.cpu.build import library, machine_code
from mlx_engine import engine
from mlx_engine.backends.cpu import kernels
from mlx_engine.errors import BackendUnavailableError
from tests.unit.test_cpu_library import python

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("name", library.FORMATS)
def test_every_format_has_its_own_code(name: str):
    module = importlib.import_module(f"kernels.cpu.formats.{name}")
    found = library.load().format(name)
    assert found[2:] == (module.BLOCK, module.BLOCK_BYTES, module.MOST)
    assert 0 < found.four_rows != found.expand > 0
    assert library.code_file(name).exists()


@pytest.mark.some(2)
@pytest.mark.parametrize("model", ["gemma4moe-micro", "qwen3_5-micro", "lfm2-micro", "mlx-mixed", "mlx-floats"])
def test_all_that_a_model_needs_is_known_before_its_weights_are_read(model: str, monkeypatch: pytest.MonkeyPatch):
    """So all is compiled at the same time; in a second go, a core would wait."""
    asked: list[list[str]] = []
    read = library.codes

    def codes(parts: list[str]) -> dict[str, bytes]:
        asked.extend([parts] if parts else [])
        return read(parts)

    monkeypatch.setattr(library, "codes", codes)
    monkeypatch.setattr(engine, "FEW_PARAMETERS", 0)  # so that types are probed, as for a large model
    monkeypatch.setattr(library, "_library", cache(library.Library))
    monkeypatch.setattr(kernels, "load_kernels", kernels.load_kernels.__wrapped__)
    engine.open_source(DATA / model / "hf", "simd").build().model.backend.close()  # the first pass is the warm-up
    assert len(asked) == 1
    assert set(library.BASE) < set(asked[0])


def test_formats_that_are_missing_are_compiled_at_the_same_time(tmp_path: Path):
    """And those that are loaded are not compiled again."""
    code = (
        "from kernels.cpu.build import library, machine_code; asked = []\n"
        "def build(parts, keep): asked.append(sorted(parts)); raise RuntimeError('no compiler')\n"
        "loaded = library.load(['q8_0'])\n"
        "library.code_file = lambda part: library.Path('/nowhere') / part\n"
        "machine_code.build = build\n"
        "try: loaded.need(['q4_0', 'q8_0', 'q6_k'])\n"
        "except RuntimeError: print(asked, loaded.has(['q8_0']), loaded.has(['q4_0']))"
    )
    assert python(code).stdout.strip() == "[['q4_0', 'q6_k']] True False"


def test_a_format_that_cannot_be_compiled_is_an_error_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch):
    def build(parts: list[str], keep: Callable[[str, bytes], None]) -> None:
        raise RuntimeError("no space left")

    loaded = library.Library()
    monkeypatch.setattr(machine_code, "build", build)
    monkeypatch.setattr(library, "code_file", lambda part: Path("/nowhere") / part)
    with pytest.raises(BackendUnavailableError, match="q4_1 cannot be compiled: RuntimeError: no space left"):
        kernels.load_formats(loaded, {"q4_1"})


def test_a_format_that_two_threads_load_at_once_is_the_same_for_both(monkeypatch: pytest.MonkeyPatch):
    """Code that nobody refers to is freed, and kernels of the thread that loaded it first may be running."""
    loaded, read, other = library.Library(), library.codes, []

    def codes(parts: list[str]) -> dict[str, bytes]:
        found = read(parts)
        if not other:
            other.append(None)
            other[0] = loaded.format("q8_0")  # as another thread does in the meantime
        return found

    monkeypatch.setattr(library, "codes", codes)
    assert loaded.format("q8_0") == other[0]
