"""`kernels check FILE`: a program, experiments, and .metal files."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

import kernels
from kernels.emulator import Unwritten, unavailable
from kernels.lab.check import Orders
from kernels.lab.check_file import FileReport, _run
from mlx_engine.commands import app

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

PROGRAM = """import sys
import mlx.core as mx

print("arguments", sys.argv[1:])
kernel = mx.fast.metal_kernel(name="copy", input_names=["x"], output_names=["y"],
                              source="y[thread_position_in_grid.x] = x[thread_position_in_grid.x];")
for threads in map(int, sys.argv[1:]):
    kernel(inputs=[mx.zeros(12)], grid=(threads, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(12,)],
           output_dtypes=[mx.float32])
"""
EXPERIMENT = """
from kernels import Experiment

half = Experiment(name="half", source="uint i = thread_position_in_grid.x; if (i < N) y[i] = 0.5 * x[i];",
                  inputs={"x": "N"}, outputs={"y": "N"}, reference=lambda x: x / DIVISOR, threads=lambda N: N)
"""
METAL = """#include <metal_stdlib>
#include "third.h"
using namespace metal;  // gr\u00f6\u00dfer
kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  if (i > 0) {
    threadgroup float t[32];
    t[lane] = x[i];
    y[i] = THIRD * 0.5 * t[lane];
  }
}
[[kernel]] void nothing() {}
"""


def check(*args, code=0):
    result = CliRunner().invoke(app, ["kernels", "check", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def write(tmp_path):
    def written(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return written


def test_a_program_is_run_with_its_arguments(write):
    assert check(write("program.py", PROGRAM), 12, 12).stdout == "arguments ['12', '12']\ncopy: 2 calls, all right\n"
    assert check(write("show.py", PROGRAM.replace("map(int", "map(len")), "--", "--deep").stdout.startswith(
        "arguments ['--deep']\ncopy: 1 call"
    )


def test_a_mistake_is_told_with_the_lines_of_the_program_and_of_the_kernel(write):
    file = write("program.py", PROGRAM)
    out = check(file, 12, 13, code=1).stdout.splitlines()
    assert out[1:3] == [
        "copy: 1 call, all right",
        f"{file}:8: kernel 'copy': read input 'x' (48 bytes), at byte 48: just past its end, near body, line 1: "
        "`y[thread_position_in_grid.x] = x[thread_position_in_grid.x];`",
    ]


def test_outputs_that_no_thread_has_written_are_told(write):
    """They are no mistake: a program may know which ones it does not read."""
    out = check(write("half.py", PROGRAM), 5, 9).stdout.splitlines()
    assert out[1:3] == [
        "copy: 2 calls, no mistake, but some of the output was not written",
        "note: kernel 'copy': 7 of 12 elements of 'y' were not written, the first is 5",
    ]
    filled = PROGRAM.replace("output_dtypes=", "init_value=0, output_dtypes=")
    assert filled != PROGRAM
    assert check(write("filled.py", filled), 5, 9).stdout.splitlines()[1:] == ["copy: 2 calls, all right"]


@pytest.mark.parametrize("n", [12, 13])
def test_a_read_just_past_the_end_is_told_whatever_the_length(write, n):
    past = PROGRAM.replace("= x[thread_position_in_grid.x]", "= x[thread_position_in_grid.x + 1]").replace("12", str(n))
    out = check(write("past.py", past), n, code=1).stdout
    assert f"kernel 'copy': read input 'x' ({4 * n} bytes), at byte {4 * n}: just past its end" in out
    assert f"thread ({n - 1}, 0, 0)" in out


def test_a_mistake_that_the_program_catches_is_told(write):
    caught = PROGRAM.replace("    kernel(", "  try:\n    kernel(") + "  except Exception: print('another path')\n"
    out = check(write("program.py", caught), 13, 13, code=1).stdout.splitlines()
    assert out[1:3] == ["another path"] * 2
    assert out[3].startswith("kernel 'copy': read input 'x' (48 bytes)")
    assert len(out) == 6


def test_json_is_one_object_whatever_the_program_prints(write):
    found = json.loads(check(write("program.py", PROGRAM), "--json", 9).stdout)
    assert (found["calls"], found["findings"], found["passed"]) == ({"copy": 1}, [], True)


RACE = PROGRAM.replace("mx.zeros(12)", "mx.arange(12.0)").replace(
    "y[thread_position_in_grid.x] =", "y[thread_position_in_grid.x / 2] ="
)


def test_mistakes_and_notes_are_values_in_json(write):
    assert RACE != PROGRAM
    found = json.loads(check(write("race.py", RACE), "--json", 9, code=1).stdout)
    (race,) = found["mistakes"]
    assert (race["kind"], race["is_note"]) == ("race", False)
    assert (race["place"]["file"], race["place"]["line"], race["other"]["line"]) == ("body", 1, 1)
    assert race["place"]["thread"] != race["other"]["thread"]
    assert "write after write of output 'y'" in found["findings"][0]
    same = PROGRAM.replace("= x[thread_position_in_grid.x]", "= x[0]").replace("y[thread_position_in_grid.x]", "y[0]")
    note, _ = json.loads(check(write("same.py", same), "--json", 9).stdout)["notes"]["copy"]
    assert (note["kind"], note["is_note"]) == ("same value", True)
    assert "note: kernel 'copy': two threads write the same value" in check(write("same.py", same), 9).stdout


def test_a_program_that_checks_nothing_has_not_passed(write):
    assert "copy: made, never called" in check(write("program.py", PROGRAM), code=1).stdout
    assert "found neither" in check(write("empty.py", ""), code=1).stdout
    assert "wrong.py:1: ZeroDivisionError: " in check(write("wrong.py", "1 / 0"), code=1).stdout


def test_a_program_may_end_with_an_exit_and_an_error_status_is_a_finding(write):
    assert "copy: 1 call, all right" in check(write("program.py", PROGRAM + "sys.exit(0)\n"), 12).stdout
    for end, finding in (("raise SystemExit", ""), ("raise SystemExit(3)", "half.py:6: SystemExit: 3")):
        report = FileReport("half.py")
        experiments = _run(file := write("half.py", EXPERIMENT + end), (), Orders((0,)), report)
        assert [one.name for one in experiments] == ["half"]
        assert report.findings == [f"{file.parent}/{finding}"] * bool(finding)


def test_experiments_of_a_file_are_checked(write):
    right, wrong = (write(f"{d}.py", EXPERIMENT.replace("DIVISOR", str(d))) for d in (2, 3))
    assert "half (emulator): 15 shapes, 75 runs, all right" in check(right).stdout
    assert "half (emulator): 4 shapes, 8 runs, 4 shapes wrong" in check(wrong, code=1).stdout
    assert "`0.5` has no suffix" in check(right, "--suffixes", code=1).stdout
    shape = write("shape.py", EXPERIMENT.replace("x / DIVISOR", "x[:0]"))
    assert "half.reference for N=1: expected y (1,), found (0,)" in check(shape, code=1).stdout


@pytest.mark.slow
def test_a_metal_file_is_compiled_and_what_it_includes_is_read_each_time(write):
    file = write("scale.metal", METAL)
    assert "'third.h' file not found" in check(file, code=1).stdout
    header = write("third.h", "#define THIRD (1.0 / 3.0)\n")
    assert check(file).stdout.splitlines() == [
        f"{name}: compiles in every build; not run: no experiment" for name in ("scale", "nothing")
    ]
    header.write_text("")
    out = check(file, code=1).stdout
    assert "scale.metal:9:12: error: use of undeclared identifier 'THIRD'" in out
    assert "warning" not in out


TEMPLATE = """#include <metal_stdlib>
using namespace metal;
template <typename T>
kernel void doubled(device const T* x [[buffer(0)]], constant int& n [[buffer(1)]], device T* y [[buffer(2)]],
                    uint i [[thread_position_in_grid]]) {
  if (i < uint(n)) y[i] = 2 * x[i];
}
template [[host_name("doubled_float")]] kernel decltype(doubled<float>) doubled<float>;
template [[host_name("doubled_half")]] kernel decltype(doubled<half>) doubled<half>;
"""
DOUBLED = """
from pathlib import Path
import numpy as np
from kernels import MetalExperiment
from kernels.emulator import Unwritten

doubled = MetalExperiment(
    Path(__file__).with_name("doubled.metal"), "doubled_float", sizes=[{"N": 1}, {"N": 40}], grid=lambda N: 64,
    threadgroup=32, buffers=lambda N, rng: [rng.standard_normal(N, np.float32), N, Unwritten((N,), np.float32)],
    reference=lambda buffers: {2: FACTOR * buffers[0]},
)
"""


def test_kernels_of_a_metal_file_run_with_experiments_beside_it(write):
    file = write("doubled.metal", TEMPLATE)
    right, wrong = (write(f"by_{n}.py", DOUBLED.replace("FACTOR", str(n))) for n in (2, 3))
    lines = check(file, right).stdout.splitlines()
    assert lines[0] == "doubled_float: compiles in every build (and 1 more instantiation, not compiled)"
    assert lines[1].startswith("doubled_float (emulator): 2 shapes, 10 runs, all right")
    out = check(wrong, code=1).stdout
    assert "y[0]: expected " in out
    assert "thread (0, 0, 0), lane 0 wrote it last, at doubled.metal, line 6: `if (i < uint(n)) y[i] = 2" in out
    assert (
        "none.py: no such file; after a .metal FILE comes a Python file with MetalExperiment objects"
        in check(file, "none.py", code=2).stderr
    )


BROKEN = """
template <typename T>
kernel void broken(device T* y [[buffer(0)]]) { y[0] = T::one; }
template [[host_name("broken_float")]] kernel decltype(broken<float>) broken<float>;
"""


@pytest.mark.slow
def test_kernels_of_a_metal_file_are_reported_one_by_one(write):
    file = write("doubled.metal", TEMPLATE + BROKEN)
    out = check(file, code=1).stdout
    assert "doubled_float: compiles in every build (and 1 more instantiation, not compiled); not run" in out
    assert "broken_float: does not compile in the build 'spaces'\ndoubled.metal:12:" in out
    out = check(file, write("by_2.py", DOUBLED.replace("FACTOR", "2")), code=1).stdout
    assert "broken_float: does not compile" in out
    assert "doubled_float (emulator): 2 shapes, 10 runs, all right" in out


def test_a_metal_experiment_with_a_mistake_is_refused_in_one_line(write):
    file = write("doubled.metal", TEMPLATE)
    given = {"file": file, "function": "doubled_float", "grid": 32, "threadgroup": 32, "buffers": lambda: [],
             "reference": lambda buffers: {2: buffers[0]}}  # fmt: skip
    for change, says in (
        ({"file": "none.metal"}, "expected a .metal file, found no file none.metal"),
        ({"function": "tripled"}, "expected a kernel such as doubled_float"),
        ({"sizes": []}, "sizes: expected at least one dict, and the same names in all"),
        ({"grid": lambda N: N}, "grid: expected parameters among"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            kernels.MetalExperiment(**{**given, **change})
    buffers = [np.zeros(4, np.float32), 4, Unwritten((4,), np.float32)]
    for reference, says in (
        (lambda buffers: {0: buffers[0]}, "by the index of a buffer that the kernel writes (2), found [0]"),
        (lambda buffers: {2: buffers[0][:3]}, "expected buffer 2 (4,), found (3,)"),
    ):
        experiment = kernels.MetalExperiment(**{**given, "buffers": lambda: buffers, "reference": reference})
        with pytest.raises(ValueError, match=re.escape(says)):
            kernels.check(experiment)


def test_lint_and_address_spaces_of_a_metal_file(write):
    one = "#include <metal_stdlib>\nkernel void one(device float* y [[buffer(0)]]) {\n  BODY\n}\n"
    out = check(write("one.metal", one.replace("BODY", "double x = 1; y[0] = x;")), code=1).stdout
    assert "one.metal, line 3: `double` is not a type" in out
    out = check(write("one.metal", one.replace("BODY", "threadgroup float* x = y; x[0] = 1;"))).stdout
    assert "one: compiles in every build" in out
    assert "note: one.metal, line 3: " in out
    assert "'threadgroup float *' with an lvalue of type 'device float *'" in out


def test_folders_of_a_metal_file(write, tmp_path):
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "third.h").write_text("#define THIRD 1\n")
    assert check(write("scale.metal", METAL), "-I", folder)


def test_a_body_alone_is_no_metal_file(write):
    assert (
        "expected functions `kernel void NAME(...)`, found none" in check(write("b.metal", "y[0] = 1;"), code=1).stdout
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nothing.py"], "nothing.py: no such Python file or .metal file"),
        (["nothing.py", "-e", "metal"], "leave out --kernel and --executor"),
        (["--suffixes"], "--lanes, --suffixes and --include need a FILE"),
        ([__file__, "--lanes", "few"], "--lanes must be active or all, not 'few'"),
    ],
)
def test_wrong_use_is_one_line(args, says):
    result = check(*args, code=2)
    (line,) = result.stderr.splitlines()
    assert says in line
