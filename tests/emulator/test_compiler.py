"""From text to machine code: the compiler that is found, what it says, and where its work is kept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels import files
from kernels.emulator import (
    CompileError,
    CompilerMissingError,
    LintError,
    RaceError,
    compiler,
    metal_kernel,
    prepare,
    unavailable,
)
from kernels.emulator.compiler import BUILDS, SPACES
from kernels.emulator.signature import Input, signature
from kernels.emulator.source import Part, unit
from tests.emulator import matvec

HERE = Path(compiler.__file__).parent
needs_compiler = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
X = mx.arange(64, dtype=mx.float32)


def run(source: str, header: str = "", inputs: Any = (X,), **options: Any) -> np.ndarray[Any, Any]:
    names = [f"x{i}" if i else "x" for i in range(len(inputs))]
    (y,) = metal_kernel("simple", names, ["y"], source, header)(
        inputs=list(inputs),
        output_shapes=[(4,)],
        output_dtypes=[mx.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        **options,
    )
    return np.array(y)


# ---- which compiler ----


def script(folder: Path, name: str, says: str) -> Path:
    """A program that prints a version."""
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.mark.parametrize(
    ("says", "complaint"),
    [("Debian clang version 14.0.6", "is clang 14"), ("gcc (Debian) 12.2.0", "is not clang"), (None, "cannot be run")],
)
def test_a_chosen_compiler_that_will_not_do(
    says: str | None, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chosen = script(tmp_path, "chosen", says) if says else tmp_path / "missing"
    monkeypatch.setenv(compiler.VARIABLE, str(chosen))
    with pytest.raises(CompilerMissingError, match=f"{compiler.VARIABLE}=.*{complaint}.*expected clang 17 or newer"):
        compiler.compiler()
    assert complaint in str(unavailable())
    with pytest.raises(CompilerMissingError):
        run("y[0] = 0.0f; // not compiled before")


def without_ziglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiler.VARIABLE, raising=False)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    compiler._compiler.cache_clear()


def test_without_any_compiler_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_ziglang(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "pip install ziglang" in str(unavailable())
    compiler._compiler.cache_clear()


def test_the_newest_clang_of_the_system_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_ziglang(monkeypatch)
    script(tmp_path, "clang", "clang version 15.0.0")
    newest = script(tmp_path, "clang-19", "Ubuntu clang version 19.1.1 (1)\nTarget: x86_64")
    script(tmp_path, "clang-18", "clang version 18.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert compiler.compiler() == ((str(newest),), "Ubuntu clang version 19.1.1 (1)")
    compiler._compiler.cache_clear()


# ---- which processor ----


def processor_with(extensions: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this is an x86 processor with these extensions."""
    (folder / "cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu sse2 {extensions} ht\n")
    monkeypatch.setattr(compiler, "_CPUINFO", folder / "cpuinfo")
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    compiler._lacking.cache_clear()


@pytest.fixture
def _own_processor_again() -> Iterator[None]:
    yield
    compiler._lacking.cache_clear()
    compiler._surroundings.cache_clear()


@pytest.mark.usefixtures("_own_processor_again")
def test_a_processor_without_the_baseline_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(compiler.INSTRUCTIONS, raising=False)
    processor_with("bmi1 avx f16c", tmp_path, monkeypatch)
    with pytest.raises(CompilerMissingError, match=r"x86-64-v3.*expected .*one without avx2, bmi2, fma, movbe, abm in"):
        compiler.compiler()
    assert "use another machine" in str(unavailable())
    processor_with("avx2 bmi1 bmi2 f16c fma movbe abm", tmp_path, monkeypatch)
    assert compiler._lacking() == []
    (tmp_path / "cpuinfo").unlink()  # some systems say nothing
    compiler._lacking.cache_clear()
    assert compiler._lacking() == []


@needs_compiler
@pytest.mark.usefixtures("_own_processor_again")
def test_compiled_kernels_are_the_same_for_every_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = set()
    monkeypatch.setattr(compiler, "_built", lambda name, make: names.add(name))
    for more in ("", "avx512f avx512vl amx_tile"):
        processor_with(f"avx2 bmi1 bmi2 f16c fma movbe abm {more}", tmp_path, monkeypatch)
        compiler._surroundings.cache_clear()
        compiler.kernel_library("text", SPACES)
    assert len(names) == 1
    assert not [flag for flags in compiler.BASELINES.values() for flag in flags if "native" in flag]


@needs_compiler
def test_another_instruction_set_may_be_chosen(monkeypatch: pytest.MonkeyPatch):
    names = []
    monkeypatch.setattr(compiler, "_built", lambda name, make: names.append(name))
    for chosen in ("", "x86-64-v2", "native"):
        monkeypatch.setenv(compiler.INSTRUCTIONS, chosen)
        compiler.kernel_library("text", SPACES)
    assert len(set(names)) == 3
    assert compiler._baseline() == ("-march=native",)


@needs_compiler
def test_builds_without_optimisation_have_the_same_bits_and_checks():
    """Half literals, too, which such a build converts when it runs."""
    source = "uint i = thread_index_in_simdgroup; half h = 0.3337h * half(x[i]); y[i] = exp(x[i]) + float(h) / 3;"
    call = {"inputs": [mx.arange(32) * 0.37], "grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    call |= {"output_shapes": [(32,)], "output_dtypes": [mx.float32]}
    found, races = [], []
    for optimize in (True, False):
        kernel = metal_kernel("same", ["x"], ["y"], source)
        racy = metal_kernel("racy", ["x"], ["y"], "y[0] = x[thread_position_in_grid.x];")
        for build in BUILDS:
            for one in (kernel, racy):
                one.prepare([(call["inputs"], call["output_dtypes"], None)], build=build, optimize=optimize)
            found.append(np.array(kernel(**call, build=build)[0]).tobytes())
        with pytest.raises(RaceError) as error:
            racy(**call, build="races")
        races.append(str(error.value))
    assert len(set(found)) == len(set(races)) == 1


# ---- what it says ----


@needs_compiler
def test_errors_point_at_the_kernels_own_lines():
    with pytest.raises(
        CompileError, match=r"(?s)kernel 'simple' does not compile.*body:3:10: error:.*y\[0\] = unknown;"
    ):
        run("\n  uint i = 0;\n  y[0] = unknown;\n")
    with pytest.raises(CompileError, match=r"header:2:\d+: error: "):
        run("y[0] = half_of(x[0]);", "// halves\nfloat half_of(float x) { return x / two; }\n")


@needs_compiler
def test_small_inputs_give_a_hint():
    source = "y[0] = first(x);"
    header = "float first(const device float* x) { return x[0]; }"
    assert run(source, header)[0] == 0
    with pytest.raises(CompileError, match="hint: x: fewer than 8 elements, so MLX passes this as `constant`"):
        run(source, header, [X[:7]])


@needs_compiler
def test_all_that_is_wrong_is_said_at_once():
    source = "double b = 1;\nfloat a = 0.5;\nif (a > x[0]) { y[1] = 1.0; y[0] = *(float*)x; }"
    with pytest.raises(LintError) as caught:
        run(source, suffixes=True)
    said = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in said[1:]] == [
        "body, line 1",
        "body, line 2",
        "body, line 3",
        "body, line 3",
    ]


@needs_compiler
@pytest.mark.parametrize(
    "source",
    [
        "float a = 1e-3f + 2.f + .5f + 0x1p-3f; y[0] = a;",
        "half h = 0.5h; y[0] = float(h) + x[0];",
        '// 0.5 and (float*)x\n/* 1.0 */ constexpr auto text = "0.5"; y[0] = text[0];',
        "uint n = x_shape[0]; y[0] = float(n) * float4(1, 2, 3, 4).y;",
        "int3 v = int3(1, 2, 3); y[0] = v.z * 1.0f;",
        "y[0] = *(const device float*)(x + 1) + ((const device float2*)x)[1].x;",
        "threadgroup float* none = nullptr; y[0] = none ? 1.0f : 0.0f;",
        "// gr\u00f6\u00dfer \u2265 0\ny[0] = 1.0;",
        "if (x[0] < 1) { threadgroup float t[4]; t[0] = 0.25; y[0] = t[0]; } else { threadgroup int t; y[0] = t = 1; }",
    ],
)
def test_lints_leave_right_kernels_alone(source: str):
    assert np.isfinite(run(source)[0])


@needs_compiler
def test_attributes_of_parameters_are_allowed_anywhere():
    header = (
        "float of(uint lane [[thread_index_in_simdgroup]], uint i [[thread_position_in_grid]]) { return lane + i; }"
    )
    assert run("y[0] = of(thread_index_in_simdgroup, thread_position_in_grid.x);", header)[0] == 0


@needs_compiler
def test_warnings_do_not_bury_an_error():
    source = "half h = 0.5h;\n" + "h += x[0];\n" * 30 + "y[0] = h + missing;\n" + "h += x[1];\n" * 30
    with pytest.raises(CompileError) as caught:
        run(source)
    said = str(caught.value).splitlines()
    assert said[1].startswith("body:32:")
    assert "undeclared identifier 'missing'" in said[1]
    assert len(said) < 8
    assert "warning" not in str(caught.value)


@pytest.mark.slow
@needs_compiler
def test_of_several_kernels_the_wrong_one_is_blamed():
    right, wrong = (metal_kernel(name, [], ["y"], f"y[0] = {value};") for name, value in (("right", 1), ("wrong", "x")))
    with pytest.raises(CompileError, match="kernel 'wrong' does not compile\nbody:1:8"):
        prepare([(right, [], [mx.float32], None), (wrong, [], [mx.float32], None)])


# ---- what is kept ----


@needs_compiler
def test_many_instantiations_compile_as_one(monkeypatch: pytest.MonkeyPatch):
    units: list[str] = []
    build = compiler.kernel_library
    monkeypatch.setattr(
        "kernels.emulator.kernel.kernel_library", lambda text, *a, **k: units.append(text) or build(text, *a, **k)
    )
    kernel, problems = matvec.kernel(), [matvec.problem(n, k) for n in (1, 3) for k in (32, 96)]
    requests = [matvec.request(kernel, given)[1:] for given in problems]
    first = [
        ((a.shape, a.dtype.name) if i else a) for i, a in enumerate(requests[0][0])
    ]  # an array, or what it is like
    kernel.prepare([(first, *requests[0][1:]), *requests[1:]])
    kernel.prepare(requests)
    assert [text.count("void msl_entry_") for text in units] == [4]
    for given in problems:
        assert matvec.errors(matvec.run(kernel, given), given).max() < 4
    assert len(units) == 1


@pytest.mark.slow
@needs_compiler
def test_nothing_is_compiled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = matvec.problem(2, 32)
    first = matvec.run(matvec.kernel(), given)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.so")}
    assert files
    monkeypatch.setattr(compiler.subprocess, "run", None)
    assert np.array_equal(matvec.run(matvec.kernel(), given), first)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.so")} == files
    assert not list(tmp_path.rglob("building-*"))


@needs_compiler
def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "home").write_text("no folder")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    files._first.cache_clear()
    try:
        assert files.cache_folder("emulator").parent == tmp_path / "tmp"
        assert run("y[0] = 5.0f; // in a temporary folder")[0] == 5
        assert list((tmp_path / "tmp").rglob("spaces-*.so"))
        files._first.cache_clear()
        assert files.cache_folder("emulator") == tmp_path / "tmp" / f"mlx_engine-emulator-{os.getuid()}"
    finally:
        files._first.cache_clear()


FRESH = """
from kernels.emulator import compiler
from kernels.emulator.compiler import BUILDS, UNOPTIMIZED
BUILDS["spaces"] = UNOPTIMIZED  # compiled in a fraction of the time, with the same bits
compiler._RUNTIME_FLAGS += ("-DMSL_UCONTEXT", "-O0")
from tests.emulator import matvec
given = matvec.problem(5, 288, 2)
print(matvec.run(matvec.kernel(), given).tobytes().hex())
"""


@pytest.mark.slow
@needs_compiler
def test_processes_that_compile_at_once_and_the_slow_switch_give_the_same(tmp_path: Path):
    """Two processes share a cache that is empty. Fibres are switched by the C library, as on other processors."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "XDG_CACHE_HOME": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", FRESH], env=environment, **pipes) for _ in range(2)]
    results = [process.communicate() for process in processes]
    want = matvec.run(matvec.kernel(), matvec.problem(5, 288, 2)).tobytes().hex()
    assert [out.strip() for out, _ in results] == [want] * 2, results[0][1]


# ---- other machines ----


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("target", ["aarch64-macos", "aarch64-linux-gnu"])
def test_other_processors_are_compiled_for(target: str, tmp_path: Path):
    """Zig compiles for all of them, so what is not run here is at least compiled, without a warning."""
    command = compiler.compiler().command
    if not command[0].endswith("zig"):
        pytest.skip("a system's clang has no headers of other systems")
    inputs = [(name, Input("float32", 2, False)) for name in ("wq", "ws", "x")]
    source = (
        "threadgroup half t[4]; t[0] = half(x[0]); y[0] = simd_sum(exp(x[0])) + float(t[0]) + float(bfloat(ws[0]));"
    )
    text = unit([Part(signature("other", source, inputs, [("y", "float32")]), "", source)])
    (tmp_path / "kernels.cc").write_text(text)
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "zig"), "ZIG_LOCAL_CACHE_DIR": str(tmp_path / "zig")}
    flags = [flag for flag in compiler._KERNEL_FLAGS if flag != "-fstack-clash-protection"]
    flags += compiler.BASELINES["aarch64"]
    runtime_flags = [*compiler._RUNTIME_FLAGS, *compiler.BASELINES["aarch64"]]
    jobs = [[*flags, "-fno-sanitize=all", "-c", str(tmp_path / "kernels.cc")]]
    jobs += [[*runtime_flags, "-c", str(source)] for source in (HERE / "runtime").glob("*.c")]
    for job in jobs:
        # Without optimisation, which would take most of the time; the compiler's warnings come before it.
        result = subprocess.run(
            [*command, "-target", target, *job, "-O0", "-o", str(tmp_path / "out.o")],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **caches},
        )
        assert (result.returncode, result.stderr) == (0, "")
