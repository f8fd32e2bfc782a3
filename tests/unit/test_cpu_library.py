"""The cache of compiled code: its location, recompilation, and the fallback without a compiler."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.patience import wait_for

pytest.importorskip("numba")

from llvmlite import binding

from kernels.cpu.build import jit, library, machine_code
from mlx_engine.backends.cpu import kernels
from mlx_engine.observe import log
from tests.golden.test_same_bits import digest

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "tests" / "data" / "qwen3-micro" / "model-q8_0.gguf"
ONCE = "compiling the CPU kernels, once"


def unwanted(part: str, code: bytes) -> None:
    raise AssertionError(f"{part} has been compiled")


GENERATE = """
import sys, mlx_engine
engine = mlx_engine.load(sys.argv[1], "parallel", threads=2)
print(*engine.generate([1, 2, 3, 4, 5, 6, 7], max_tokens=5, ignore_eos=True).token_ids)
"""


def python(code: str, *arguments: str | Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, with environment variables set or removed."""
    environment = {k: v for k, v in os.environ.items() if k not in changes}
    environment |= {k: v for k, v in changes.items() if v is not None}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


# ---- the folder ----


def test_any_change_of_the_source_changes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library.resources, "files", lambda package: tmp_path)
    (tmp_path / "jit.py").write_text("a = 1\n")
    (tmp_path / "vectors.py").write_text("LANES = 16\n")
    before = library._digest()
    assert library._digest() == before
    (tmp_path / "vectors.py").write_text("LANES = 32\n")
    changed = library._digest()
    (tmp_path / "new.py").write_text("b = 2\n")
    assert len({before, changed, library._digest()}) == 3


def test_source_in_an_archive_is_the_same_source(tmp_path: Path):
    """Source that is not in the digest could change without recompilation."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in (ROOT / "kernels").rglob("*.py"):
            archive.write(path, path.relative_to(ROOT))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from kernels.cpu.build import library; print(library.__file__, library._digest())"
    )
    file, digest = python(code, tmp_path / "all.zip").stdout.split()
    assert (Path(file).parents[3], digest) == (tmp_path / "all.zip", library._digest())


def test_compiled_code_of_another_source_is_not_found(tmp_path: Path):
    code = "from kernels.cpu.build import library; print(library.code_file('products').parent)"
    folder = Path(python(code, NUMBA_CACHE_DIR=str(tmp_path)).stdout.strip())
    assert folder == tmp_path / library._digest()


# The machine code is cached, so no test waits for the compiler.
KERNEL = """
import sys
from kernels.cpu.build import library, machine_code
files = {part: file for part, file in zip(library.BASE, sys.argv[1:], strict=True)}
machine_code.build = lambda parts, keep: [keep(part, open(files[part], "rb").read()[32:]) for part in parts]
def are_kept():
    return all(library.code_file(part).exists() for part in library.BASE)
print(are_kept(), library.load().address("project") > 0, are_kept())
"""
NOWHERE = "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n"


@pytest.fixture(scope="module")
def compiled() -> list[Path]:
    library.load()
    return [library.code_file(part) for part in library.BASE]


@pytest.mark.slow
@pytest.mark.parametrize("home", ["/proc/nobody", None], ids=["unwritable", "unknown"])
def test_without_a_home_compiled_code_is_kept_in_a_temporary_folder(
    compiled: list[Path], tmp_path: Path, home: str | None
):
    code = (NOWHERE if home is None else "") + KERNEL
    changes = {"NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": home, "TMPDIR": str(tmp_path)}
    runs = [python(code, *compiled, **changes) for _ in range(2)]
    assert [run.stdout.split() for run in runs] == [["False", "True", "True"], ["True"] * 3], runs[0].stderr
    kept = {path.name: path.read_bytes() for path in tmp_path.rglob("*.code")}
    assert kept == {path.name: path.read_bytes() for path in compiled}


@pytest.mark.slow
def test_damaged_code_is_made_anew(compiled: list[Path], tmp_path: Path):
    changes = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(KERNEL, *compiled, **changes).stdout.split() == ["False", "True", "True"]
    (kept,) = tmp_path.rglob(compiled[0].name)
    kept.write_bytes(kept.read_bytes()[:-1])
    assert python(KERNEL, *compiled, **changes).stdout.split() == ["True", "True", "True"]
    assert kept.read_bytes() == compiled[0].read_bytes()


def test_another_processor_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch):
    # The tests themselves may run with a processor that is named (`tests/processors.py`).
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    files = {library.code_file("q8_0"), library.code_file("q4_0")}
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    files.add(library.code_file("q8_0"))
    monkeypatch.delenv("NUMBA_CPU_NAME")
    monkeypatch.setattr(binding, "llvm_version_info", (1, 2, 3))
    files.add(library.code_file("q8_0"))
    monkeypatch.setenv("NUMBA_OPT", "0")
    files.add(library.code_file("q8_0"))
    assert len(files) == 5


def test_there_is_no_code_for_amx_where_the_system_forbids_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+amx-int8,+fma")
    found = {}
    for is_permitted in (True, False):
        monkeypatch.setattr(library, "permits_tiles", lambda is_permitted=is_permitted: is_permitted)
        found[library.features()] = library.code_file("fixed")
    assert list(found) == ["+avx2,+amx-int8,+fma", "+avx2,-amx-int8,+fma"]
    assert len(set(found.values())) == 2


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:9])
        raise OSError("no space left on device")

    library._write(tmp_path / "one" / "a.code", b"machine code")
    assert library._read(tmp_path / "one" / "a.code") == b"machine code"
    monkeypatch.setattr(Path, "write_bytes", full)
    library._write(tmp_path / "two" / "a.code", b"machine code")
    assert [path.name for path in tmp_path.rglob("*.code*")] == ["a.code"]


# ---- what is in it ----


def test_all_that_is_exported_is_there_and_nothing_else_is_asked_for(compiled: list[Path]):
    folder = Path(library.__file__).parents[1]
    exporting = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if re.search(r"^@(entry|task)$", path.read_text(), re.MULTILINE)
    }
    assert {name for part in library.MODULES.values() for name in part} == exporting
    modules = {importlib.import_module(f"kernels.cpu.{name}").__name__ for name in exporting}
    exports = {name: found for name, found in jit.EXPORTS.items() if found[0].__module__ in modules}
    assert {name for name, (_, kind) in exports.items() if kind != jit.TASK} == set(library.ENTRIES)
    assert all(library.load(library.MODULES).address(name) for name in exports)
    with pytest.raises(KeyError, match="expected a function 'nobody', found none"):
        library.load().address("nobody")


@pytest.mark.slow
def test_compiled_code_runs_without_the_compiler():
    library.load(["q8_0"])
    result = python("import sys; sys.modules['numba'] = None\n" + GENERATE, MICRO)
    assert (len(result.stdout.split()), result.stderr) == (5, "")


def test_a_compiling_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_code, "_CHILD", "raise SystemError('no space left, {parts!r:.0}')")
    with pytest.raises(RuntimeError, match="that compiles the kernels failed: SystemError: no space left"):
        machine_code.build(["products", "attention"], unwanted)
    monkeypatch.setattr(machine_code, "_CHILD", "print('half of an object file {parts!r:.0}')")
    with pytest.raises(RuntimeError, match="failed: exit code 0"):
        machine_code.build(["products", "attention"], unwanted)
    killed = "import os, sys; os.write(2, b'a warning {parts!r:.0}'); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(machine_code, "_CHILD", killed)
    with pytest.raises(RuntimeError, match=r"failed: exit code -9$"):
        machine_code.build(["products", "attention"], unwanted)


def test_compiling_processes_have_the_modules_of_this_one_and_no_input(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), None])
    told = "import sys; sys.path[:] = {path!r}; sys.exit(f'{{len(sys.path)}} {{sys.stdin.read()!r}} {parts!r:.0}')"
    monkeypatch.setattr(machine_code, "_CHILD", told)
    with pytest.raises(RuntimeError, match=rf"failed: {len(sys.path) - 2} ''$"):
        machine_code.build(["products", "attention"], unwanted)


def test_ctrl_c_of_the_terminal_does_not_reach_compiling_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        machine_code, "_CHILD", "import os, sys; sys.exit(f'{{os.getpid() - os.getpgid(0)}} {path!r:.0}{parts!r:.0}')"
    )
    with pytest.raises(RuntimeError, match=r"failed: 0$"):
        machine_code.build(["products"], unwanted)


INTERRUPTED = """
import os, signal, threading, time
from kernels.cpu.build import machine_code
machine_code.n_processes = lambda: 2
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs behind them without one
machine_code._CHILD = "import time; time.sleep(60)  # {path!r:.0}{parts!r:.0}"
children, started = [], machine_code._started
def watched(*arguments):
    children.append(started(*arguments))
    return children[-1]
machine_code._started = watched
def interrupt():
    while len(children) < 2:
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    machine_code.build(["products", "attention"], print)
except KeyboardInterrupt:
    print(*(child.returncode for child in children))
"""


def test_an_interrupt_leaves_no_process_behind():
    result = python(INTERRUPTED)
    assert (result.stdout.split(), result.stderr) == (["-9", "-9"], "")


KILLED = """
import os, signal
from kernels.cpu.build import machine_code
machine_code.n_processes = lambda: 2
first = machine_code._CHILD.partition("sys.path")[0]
machine_code._CHILD = first + "import time; time.sleep(60)  # {path!r:.0}{parts!r:.0}"
started = machine_code._started
started_now = []
def watched(*arguments):
    child = started(*arguments)
    started_now.append(child)
    print(child.pid, flush=True)
    if len(started_now) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return child
machine_code._started = watched
machine_code.build(["products", "attention"], print)
"""


@pytest.mark.slow
def test_compiling_processes_end_with_the_process_that_started_them():
    result = python(KILLED)
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_bundled_application_does_not_start_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(machine_code, "_started", lambda *arguments: pytest.fail("started"))
    with pytest.raises(RuntimeError, match="does not say which Python"):
        machine_code.build(["products", "attention"], unwanted)


def test_a_process_that_compiles_starts_no_others(monkeypatch: pytest.MonkeyPatch):
    """Every new process imports a user's file that is named like a module of the standard library."""
    monkeypatch.setenv("MLX_ENGINE_COMPILING", "1")
    monkeypatch.setattr(machine_code, "_started", lambda *arguments: pytest.fail("started"))
    with pytest.raises(RuntimeError, match="once more"):
        machine_code.build(["products", "attention"], unwanted)


def test_processes_that_compile_know_that_they_do():
    with pytest.MonkeyPatch.context() as patch:
        seen: dict[str, str] = {}
        patch.setattr(machine_code.subprocess, "Popen", lambda *_, env, **__: seen.update(env))
        machine_code._started(["attention"], 0, io.BytesIO())
    assert seen["MLX_ENGINE_COMPILING"] == "1"


# ---- the announcement ----


def test_compiling_is_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(library, "code_file", lambda part: tmp_path / part)
    monkeypatch.setattr(library, "_library", library.Library)
    monkeypatch.setattr(library, "Code", lambda content: content)
    monkeypatch.setattr(machine_code, "build", lambda parts, keep: [keep(part, b"code") for part in parts])
    for _ in range(2):  # two processes, one after the other
        assert kernels.load_kernels.__wrapped__(frozenset({"q8_0", "experts", "gone"})) is not None
    [said] = [record.getMessage() for record in caplog.records]
    seconds = round(machine_code.usual_seconds([*library.BASE, "experts", "float32", "q8_0"]))
    what = f"usually {seconds} s: products, attention, experts, float32, q8_0; they are kept in {library.folder()}"
    assert said == f"{ONCE}, {what}"


def test_on_a_terminal_a_bar_shows_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown: list[object] = []

    @contextlib.contextmanager
    def show_bar(title: str) -> Iterator[log.Bar]:
        shown.append(title)
        yield lambda *reached: shown.append(reached)

    monkeypatch.setattr(log, "show_bar", show_bar)
    monkeypatch.setattr(library, "code_file", lambda part: tmp_path / part)
    with kernels._announced(["products", "attention"]) as done:
        done("attention")
        done("products")
    assert str(shown[0]).startswith("compiling kernels, once, usually ")
    assert shown[1:] == [(0, 2, "products, attention"), (1, 2, "products"), (2, 2, "")]


def test_parts_are_shared_out_so_that_processes_end_at_the_same_time():
    parts = [*library.BASE, "q4_k", "q6_k", "float32"]
    shares = machine_code.shared_out(parts, 2)
    assert sorted(part for share in shares for part in share) == sorted(parts)
    first, second = (sum(map(machine_code.seconds_of, share)) for share in shares)
    assert abs(first - second) <= max(map(machine_code.seconds_of, ("q4_k", "q8_0.fixed")))
    assert machine_code.shared_out(["q8_0"], 8) == [["q8_0"]]


def test_code_that_cannot_be_kept_is_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(library, "code_file", lambda part: tmp_path / part)
    monkeypatch.setattr(library, "folder", lambda: tmp_path)
    with kernels._announced(["products"]) as done:
        done("products")
    assert f"could not be kept in {tmp_path}: the next process compiles again" in caplog.text


def test_kernels_that_cannot_be_compiled_are_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def load(parts: list[str]) -> object:
        raise AttributeError("this compiler is another")

    monkeypatch.setattr(library, "load", load)
    assert kernels.load_kernels.__wrapped__() is None
    assert "no compiled kernels, NumPy runs instead: AttributeError: this compiler is another" in caplog.text


@pytest.mark.some(1)
@pytest.mark.parametrize("missing", ["numba", "llvmlite"])
def test_without_a_compiler_numpy_runs_and_says_so_once(tmp_path: Path, missing: str):
    code = (
        f"import sys; sys.modules['{missing}'] = None\n"
        "import mlx_engine\n"
        "for name in ('simd', 'parallel'):\n"
        "    engine = mlx_engine.load(sys.argv[1], name)\n"
        "    n = len(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True).token_ids)\n"
        "    print(type(engine.backend).__name__, n)"
    )
    result = python(code, MICRO, NUMBA_CACHE_DIR=str(tmp_path))
    assert result.stdout.split() == ["SimdBackend", "3", "ParallelBackend", "3"], result.stderr
    assert result.stderr.count("no compiled kernels, NumPy runs instead") == 1
    assert "Numba, which compiles the kernels, is not installed: pip install numba" in result.stderr


def test_an_old_processor_has_no_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for told in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        monkeypatch.delenv(told, raising=False)
    monkeypatch.setattr(binding, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"fma": True, "avx2": False})
    assert library.lacking().endswith("lacks f16c, avx2")
    assert kernels.load_kernels.__wrapped__() is None
    assert "lacks f16c, avx2" in caplog.text
    monkeypatch.setattr(binding, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    assert library.lacking() is None


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="any other processor widens halves")
@pytest.mark.parametrize(
    ("name", "features", "is_able"),
    [
        ("generic", None, False),
        ("generic", "+f16c", True),
        ("haswell", None, True),
        ("haswell", "", True),
        ("nehalem", "", False),
        (None, "+f16c", True),
        ("haswell", "-f16c", False),
    ],
)
def test_code_for_a_processor_that_cannot_widen_halves_is_not_made(
    monkeypatch: pytest.MonkeyPatch, name: str | None, features: str | None, *, is_able: bool
):
    """It would call a missing function and abort the process."""
    for variable, value in (("NUMBA_CPU_NAME", name), ("NUMBA_CPU_FEATURES", features)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    expected = None if is_able else f"the processor that Numba is told to compile for ({name}) lacks f16c"
    assert library.lacking() == expected


# ---- on an AVX2 processor, from the first compilation on ----

# Products and attention are compared with the order in NumPy, bit for bit.
TESTS = (
    "test_cpu_norms.py::test_exp_is_within_one_unit_in_the_last_place_wherever_float32_has_one",
    "test_cpu_linear.py::test_products_are_those_of_the_order_in_numpy",
    "test_cpu_attention.py::test_attention_has_the_bits_of_the_order_in_numpy",
    "test_cpu_sum_exp.py::test_the_twin_has_the_bits_of_the_kernel",
)
# The name alone would leave the features of this processor: registers would be those of AVX-512.
AS_HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
RUN_TESTS = """
import sys
import pytest
from kernels.cpu.build.vectors import register_lanes
assert register_lanes() == 8
status = pytest.main(sys.argv[1:])
from mlx_engine.observe import log
from tests.golden.test_same_bits import digest
print(digest())
sys.exit(status)
"""


def is_wider_than_avx2() -> bool:
    """Return whether this is an x86 processor on which the other tests do not run with AVX2."""
    return platform.machine() in ("x86_64", "AMD64") and bool(binding.get_host_cpu_features().get("avx512f"))


@pytest.mark.skipif(not is_wider_than_avx2(), reason="no x86 processor with AVX-512, or all other tests say the same")
def test_the_kernels_are_right_on_an_avx2_processor():
    """In the cache of all tests, because compiling for a second processor takes longer than everything else here."""
    tests = [str(Path(__file__).parent / test) for test in TESTS]
    # Each format is compiled for the first time here: one with small blocks and one with large ones.
    formats = "not products or AFFINE4_G64_BF16 or Q4_K"
    options = ["-s", "-p", "no:cacheprovider", "-p", "no:logging", "-m", "", "-k", formats]
    result = python(RUN_TESTS, *options, *tests, **AS_HASWELL)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 passed" in result.stdout
    assert result.stdout.split()[-1] == digest()
    # With an empty cache each announcement is printed once.
    said = [line for line in result.stderr.splitlines() if ONCE in line]
    assert len(said) == len(set(said))


WITHOUT_TILES = """
import sys
import pytest
from kernels.cpu.formats.panels import TILES
assert not TILES
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(library.TILES not in library.features(), reason="no AMX here: the other tests run without it")
def test_fixed_point_is_its_definition_without_amx():
    features = library.features().replace(library.TILES, "-amx-int8")
    options = ["-p", "no:cacheprovider", "-m", "", "-k", "product_is_its_definition and (Q8_0 or Q4_K or AFFINE4)"]
    tests = str(Path(__file__).parent / "test_cpu_fixed.py")
    result = python(WITHOUT_TILES, *options, tests, NUMBA_CPU_FEATURES=features)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search("[1-9][0-9]* passed", result.stdout)
