"""`check`: right kernels pass, wrong ones are caught, and the words say where to look."""

import io
import re
import sys

import mlx.core as mx
import numpy as np
import pytest

import kernels
from kernels import Experiment
from kernels.lab.check import EPSILON, compare
from kernels.launch import ExecutorUnavailableError, unavailable
from kernels.metal.reference import Expected
from tests.kernels_lab.toys import PRODUCT, SCALE, changed, rewritten


def check(experiment, sizes, **options):
    return kernels.check(experiment, sizes, executor="emulator", **options)


def test_a_right_kernel_passes_over_ragged_shapes_types_orders_and_builds():
    told = []
    verdict = check(SCALE, None, seeds=(0, 1), progress=lambda done, total: told.append((done, total)))
    n = 2 * len(SCALE.ragged())
    assert verdict
    assert (verdict.shapes, verdict.runs, verdict.executor) == (n, n * (2 * 2 + 1), "emulator")
    assert told == [(i + 1, n) for i in range(n)]
    assert 0 < verdict.worst < 1
    assert str(verdict).startswith(f"scale (emulator): {n} shapes, {5 * n} runs, all right; worst error 0.")
    assert 0 < verdict.compile_seconds <= verdict.seconds


def test_sizes_can_be_combined():
    assert check(PRODUCT, {"N": [1, 5], "K": [32, 64, 96]}, seeds=[0], builds=["spaces"]).runs == 6


def test_out_of_bounds_names_the_smallest_shape_and_the_line():
    verdict = check(rewritten(SCALE, "if (i < N) ", ""), {"N": [64, 40, 33]}, dtypes=["float32"])
    assert not verdict
    assert [failure.shape for failure in verdict.failures] == ["N=33 T=float32", "N=40 T=float32"]
    text = str(verdict)
    assert "smallest: N=33 T=float32" in text
    assert "input 'x' (132 bytes)" in text
    assert "also wrong: N=40 T=float32" in text
    assert "again: kernels.check(scale, [{'N': 33}], dtypes=[\"float32\"], seeds=[0])" in text


def test_a_wrong_number_is_shown_with_what_it_should_be():
    verdict = check(
        rewritten(SCALE, "* a[0]", "* (i == 37u ? 2.0f : a[0])"), [{"N": 36}, {"N": 50}], dtypes=["float32"]
    )
    (failure,) = verdict.failures
    assert re.match(
        r"y\[37\]: expected -?[\d.]+, found -?[\d.]+, [\d.e+]+ times the error that is allowed\n", failure.text
    )
    assert "1 of 50 numbers of y are wrong" in failure.text


def test_what_is_never_written_is_said_so():
    verdict = check(rewritten(SCALE, "i < N", "i + 1 < N"), [{"N": 9}], dtypes=["float16"])
    assert "y[8]: expected " in verdict.failures[0].text
    assert "it was never written" in verdict.failures[0].text


def test_a_race_is_found_however_small_its_effect():
    race = Experiment(
        name="race",
        source="y[0] = 1.0f + 1e-6f * float(simdgroup_index_in_threadgroup);",
        inputs={"x": "N"},
        outputs={"y": "1"},
        reference=lambda: np.ones(1),
        threads=lambda: 128,
        threadgroup=128,
        bound=100,
    )
    verdict = check(race, [{"N": 8}])
    assert not verdict
    assert "the result depends on the order of threads" in verdict.failures[0].text
    assert "seeds=" not in verdict.again


@pytest.mark.slow
def test_text_that_does_not_compile_is_told_with_its_line():
    verdict = check(rewritten(SCALE, "float(x[i])", "flaot(x[i])"), None)
    assert "flaot" in str(verdict)
    assert len(verdict.failures) == 4  # more would tell nothing new


@pytest.mark.slow
def test_a_shape_that_alone_does_not_compile_leaves_the_others_be():
    # Fewer than eight elements lie in another address space: that is MLX's rule, not the emulator's.
    strict = changed(SCALE, header="METAL_FUNC float number(const device float* p) { return p[0]; }\n")
    verdict = check(rewritten(strict, "float(x[i])", "number(x + i)"), [{"N": 4}, {"N": 9}], dtypes=["float32"])
    assert [failure.shape for failure in verdict.failures] == ["N=4 T=float32"]
    assert verdict.shapes == 2


def test_half_accumulation_is_no_rounding_of_the_result():
    slip = rewritten(PRODUCT, "float sum = 0.0f;", "half sum = 0.0h;")
    slip = rewritten(slip, "sum += float(ws", "sum += half(float(ws").source.replace("* x[k];", "* x[k]);")
    assert check(PRODUCT, [{"N": 5, "K": 64}], seeds=[0])
    assert not check(changed(PRODUCT, source=slip), [{"N": 5, "K": 64}], seeds=[0])


def test_whole_numbers_must_be_equal():
    count = Experiment(
        name="count",
        source="if (thread_position_in_grid.x < N) y[thread_position_in_grid.x] = x[thread_position_in_grid.x] + 1;",
        inputs={"x": "int32 N"},
        outputs={"y": "int32 N"},
        reference=lambda x: x + 1,
        threads=lambda N: N,
        threadgroup=32,
    )
    assert check(count, [{"N": 40}])
    verdict = check(rewritten(count, "+ 1", "+ 2"), [{"N": 40}])
    assert "40 of 40 numbers of y are wrong" in str(verdict)


@pytest.mark.parametrize(
    ("dtype", "found", "value", "ok"),
    [
        (mx.float32, 1 + 4 * EPSILON, 1.0, True),
        (mx.float32, 1 + 6 * EPSILON, 1.0, False),
        (mx.float16, 1 + 2**-11, 1.0, True),
        (mx.float16, 1 + 2**-9, 1.0, False),
        (mx.float32, np.nan, np.nan, True),
        (mx.float32, np.nan, 1.0, False),
        (mx.float32, np.inf, np.inf, True),
        (mx.float32, -np.inf, np.inf, False),
        (mx.float32, np.inf, 1.0, False),
    ],
)
def test_what_counts_as_wrong(dtype, found, value, ok):
    launch, _ = SCALE.launch({"N": 1})
    launch = launch.__class__(**{**launch.__dict__, "output_dtypes": [dtype]})
    _, wrong = compare(launch, [np.array([found])], [Expected(np.array([value]), np.array([4 * EPSILON]))])
    assert (wrong is None) is ok


def test_who_wrote_a_wrong_number_is_told():
    verdict = check(rewritten(SCALE, "if (i < N) ", "if (i < N && i != 5) "), [{"N": 8}], dtypes=["float32"])
    assert "no thread wrote it; next to it, threadgroup (0, 0, 0), thread (4, 0, 0), lane 4 wrote" in str(verdict)
    assert "check the grid, the guards, and the index of the store" in str(verdict)
    verdict = check(rewritten(SCALE, "if (i < N) ", "if (i < N && i > N) "), [{"N": 8}], dtypes=["float32"])
    assert "no thread wrote this element or one near it" in str(verdict)


def test_an_index_beyond_a_private_array_is_the_cause_of_what_it_damages():
    body = (
        "uint i = thread_position_in_grid.x; float mine[4] = {}; for (int j = -8; j < 4; j++) mine[j] = 1e30f; "
        "if (i < N) y[i] = x[i] + 0.0f * mine[0];"
    )
    assert "index beyond an array's bounds" in str(check(changed(SCALE, source=body), [{"N": 8}], dtypes=["float32"]))


@pytest.mark.parametrize(
    "nothing", [{"sizes": []}, {"sizes": {axis: [] for axis in SCALE.axes}}, {"seeds": []}, {"builds": []}]
)
def test_a_check_of_nothing_is_refused(nothing):
    with pytest.raises(ValueError, match="at least one shape, one seed and one build"):
        check(SCALE, **{"sizes": None} | nothing)


def test_an_executor_that_is_not_there_is_refused_with_the_reason():
    absent = next(name for name in ("metal", "cuda") if unavailable(name) is not None)
    with pytest.raises(ExecutorUnavailableError, match=f"kernels cannot run on '{absent}': MLX finds no"):
        kernels.check(SCALE, executor=absent)


# ---- what is said of several mistakes, and of all shapes ----

NEXT = changed(
    SCALE,
    source="const uint i = thread_position_in_grid.x; if (i < N) y[i] = x[i] * a[0] + x[i + 1];",
    inputs={"x": "N", "a": "1"},
    outputs={"y": "N"},
    reference=lambda x, a: a * x,
)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 7, 33])
def test_a_read_past_the_end_is_named_for_every_length(n):
    verdict = check(NEXT, [{"N": n}])
    text = str(verdict)
    assert f"read input 'x' ({4 * n} bytes), at byte {4 * n}: just past its end, near body, line 1" in text
    assert f"thread ({(n - 1) % 32}, 0, 0)" in text
    assert verdict.failures[0].rank == 0


def test_the_finding_of_a_larger_shape_is_shown_before_the_wrong_value_of_a_smaller_one():
    source = "const uint i = thread_position_in_grid.x; if (i < N) y[i] = N < 9 ? 0.0f : x[i < 9 ? i : i + 1] * a[0];"
    verdict = check(changed(NEXT, source=source), [{"N": 2}, {"N": 7}, {"N": 13}, {"N": 40}])
    assert [failure.rank == 0 for failure in verdict.failures] == [False, False, True, True]
    lines = str(verdict).splitlines()
    assert lines[1] == "clearest: N=13"
    assert "read input 'x' (52 bytes), at byte 52: just past its end" in lines[3]
    assert lines[-2:] == ["also wrong: N=2; N=7; N=40", "again: kernels.check(scale, [{'N': 13}], seeds=[0])"]


def test_a_wrong_value_is_said_after_what_explains_it():
    """The first seed reads the bytes past the end, as no page is unmapped there, and its value is wrong."""
    source = "const uint i = thread_position_in_grid.x; if (i < N) y[i] = x[int(i) - 1] * a[0];"
    (failure,) = check(changed(NEXT, source=source), [{"N": 5}], seeds=(0,)).failures
    assert failure.build == "races"
    assert failure.text.startswith(
        "kernel 'scale': read input 'x' (20 bytes), 4 bytes before its start, at body, line 1"
    )
    assert failure.text.splitlines()[3].startswith("y[0]: expected ")


def test_elements_that_are_not_written_are_counted_beside_a_wrong_value():
    verdict = check(rewritten(SCALE, "i < N", "i + 8 < N"), [{"N": 13}], dtypes=["float32"])
    assert "8 of 13 elements of 'y' were not written, the first is 5" in str(verdict)


# ---- ties ----

TOP = Experiment(
    name="top",
    source="""
    const uint row = thread_position_in_grid.x;
    float last = INFINITY;
    int last_at = -1;
    for (uint k = 0; row < V && k < K; k++) {
      float best = -INFINITY;
      int at = -1;
      for (int i = 0; i < N; i++) {
        const float v = x[row * N + i];
        const bool left = v < last || (v == last && i > last_at);
        if (left && v > best) { best = v; at = i; }
      }
      values[row * K + k] = last = best;
      places[row * K + k] = last_at = at;
    }
""",
    inputs={"x": "V N"},
    outputs={"values": "V K", "places": "int32 V K"},
    reference=lambda x, K: (-np.sort(-x)[:, :K], np.argsort(-x, kind="stable")[:, :K]),
    threads=lambda V: V,
    threadgroup=32,
    sizes=[{"V": 1, "N": 4, "K": 4}, {"V": 3, "N": 9, "K": 2}, {"V": 2, "N": 33, "K": 5}],
)


def test_a_kernel_that_compares_also_gets_equal_numbers():
    verdict = check(TOP, None, seeds=(0, 1))
    assert verdict
    assert verdict.shapes == 5  # two of them a second time
    wrong = rewritten(TOP, "v < last || (v == last && i > last_at)", "v < last")
    verdict = check(wrong, None, seeds=(0, 1))
    assert not verdict
    assert all(failure.shape.endswith(", of few distinct numbers") for failure in verdict.failures)
    assert check(changed(wrong, ties=False), None, seeds=(0, 1))


# ---- sizes, and what is shown meanwhile ----


def test_sizes_and_least_of_an_experiment_are_kept():
    assert check(changed(SCALE, sizes={"N": [2, 5]}), None, seeds=[0], dtypes=["float32"]).shapes == 2
    assert check(changed(SCALE, sizes=[{"N": 7}]), {"N": [2, 5, 6]}, seeds=[0], dtypes=["float32"]).shapes == 3
    least = changed(SCALE, least={"N": 20})
    assert [sizes["N"] for sizes in least.ragged()][:3] == [20, 31, 32]
    with pytest.raises(ValueError, match="expected sizes >= 1 of N from 20 on, found N=3"):
        check(least, [{"N": 3}])


def test_a_terminal_shows_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert check(SCALE, [{"N": 3}], seeds=[0], dtypes=["float32"])
    assert "checking scale, shapes" in sys.stderr.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert check(SCALE, [{"N": 3}], seeds=[0], dtypes=["float32"])
    assert not sys.stderr.getvalue()
