"""The ladder of a sweep: which rung moved what, in a table, in sentences and in pictures."""

import io

import pytest
from matplotlib.container import ErrorbarContainer
from rich.console import Console

from mlx_engine.bench import plots
from mlx_engine.bench.ladder import RUNGS, bars, growth_of, in_cache, ladder, moves, notes, page, passes, steps, text
from mlx_engine.bench.ladder import tests as in_common
from mlx_engine.bench.tables import figure

MACHINE = {"processor": "Fast CPU", "cores": 2, "memory_bytes": 8 << 30, "cache_bytes": 1 << 20, "system": "Linux"}


def row(rung, test, rate, weights="F32", **changes):
    """A row of a sweep; `rate` of None is a rung that is not there."""
    n = int(test[2:])
    made = {
        "rung": rung, "backend": rung.split(",")[0], "kv": "no cache" not in rung, "jit": True, "quant": "keep",
        "weights": weights, "weight_bytes": 8e6, "threads": None, "device": "cpu", "test": test, "n_depth": 0,
        "n_prompt": n if test[:2] == "pp" else 0, "n_gen": n if test[:2] == "tg" else 0, "median_ts": rate,
        "samples_s": [0.5], "passes_s": [], "estimated": None, "unavailable": None, "watched": False,
        "bytes_per_token": 8e6, "flops_per_token": 4e6, "gbs": 2.0, "gflops": 1.0, "read_gbs": 20.0,
        "peak_gflops": 100.0, "read_share": 0.1, "peak_share": 0.01, "model_name": "micro|\n", "model_size": 9e6,
        "model_n_params": 2_000_000, "model_sha256": "abc", "machine": MACHINE, "versions": {"mlx-engine": "9"},
        "commit": "0123", "time": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    if rate is None:
        made = {key: value for key, value in made.items() if key not in ("median_ts", "estimated", "watched")}
        made |= {"unavailable": "it needs the moon", "weights": None}
    return made | changes


def swept():
    """Two rungs that expand weights, one with both kinds, one that is not there, and the long text."""
    late = [1.0] * 240 + [1.1] * 16
    return [
        row("scalar", "pp8", 2.0), row("scalar", "pp64", 1.0, estimated="from 4 tokens"), row("scalar", "tg4", 4.0),
        row("simd, NumPy", "pp8", 30.0), row("simd, NumPy", "pp64", 50.0), row("simd, NumPy", "tg4", 10.0),
        row("simd, compiled", "pp8", 40.0, quant="f32"), row("simd, compiled", "pp64", 60.0, quant="f32"),
        row("simd, compiled", "tg4", 20.0, quant="f32"), row("simd, compiled", "pp8", 41.0, "Q8_0"),
        row("simd, compiled", "pp64", 55.0, "Q8_0"), row("simd, compiled", "tg4", 50.0, "Q8_0"),
        row("metal", "pp8", None), row("metal", "pp64", None), row("metal", "tg4", None),
        row("simd, compiled", "tg256", 45.0, "Q8_0", passes_s=[late, late]),
        row("simd, compiled, no cache", "tg256", 5.0, "Q8_0", passes_s=[[0.5, 0.6, 0.7]], estimated="from 3 of 256"),
    ]  # fmt: skip


def told(found):
    return [(step.old, step.new, step.weights, round(step.factor, 3), step.estimated) for step in found]


# ---- which rung moved what ----


@pytest.mark.slow
def test_each_rung_is_held_against_the_one_before_with_the_same_weights():
    assert told(steps(swept(), "tg4")) == [
        ("scalar", "simd, NumPy", None, 2.5, False),
        ("simd, NumPy", "simd, compiled", "F32", 2.0, False),
        ("simd, NumPy", "simd, compiled", "Q8_0", 5.0, False),
        ("simd, compiled: F32", "Q8_0", None, 2.5, False),
    ]


def test_a_factor_of_an_estimate_is_an_estimate():
    first, second, *_ = steps(swept(), "pp64")
    assert (first.factor, first.estimated, second.estimated) == (50.0, True, False)
    assert first.text == "scalar -> simd, NumPy ~x50.0"
    assert second.text == "simd, NumPy -> simd, compiled (F32) x1.20"


def test_the_cache_is_a_step_of_its_own():
    (step,) = [s for s in steps(swept(), "tg256") if "no cache" in s.new]
    assert step.factor == pytest.approx(1 / 9)


def test_a_rung_that_is_not_there_is_stepped_over():
    rows = [row("scalar", "pp8", 2.0), row("simd, NumPy", "pp8", None), row("parallel", "pp8", 8.0)]
    assert told(steps(rows, "pp8")) == [("scalar", "parallel", None, 4.0, False)]


def test_the_tests_of_the_rungs_are_found_and_those_of_the_long_text_are_not():
    assert in_common(swept()) == (["pp8", "pp64"], ["tg4"])
    assert in_common([row("metal", "tg4", None)]) == ([], ["tg4"])
    assert in_common([]) == ([], [])


def test_the_rungs_climb_by_one_idea_at_a_time():
    titles = [rung.title for rung in RUNGS]
    assert titles[:5] == ["scalar, no cache", "scalar", "simd, NumPy", "simd, compiled", "parallel"]
    assert [(rung.backend, rung.kv, rung.jit) for rung in RUNGS[:4]] == [
        ("scalar", False, True),
        ("scalar", True, True),
        ("simd", True, False),
        ("simd", True, True),
    ]


@pytest.mark.parametrize(("value", "shown"), [(1234.5, "1,234"), (99.94, "99.9"), (9.994, "9.99"), (0.1234, "0.12")])
def test_figures_have_three_digits(value, shown):
    assert figure(value) == shown


# ---- the table ----


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_line_for_each_rung_and_kind_of_weights():
    head, _, *lines = cells(ladder(swept()))
    assert head == [
        "rung",
        "weights",
        "threads",
        "pp8",
        "pp64",
        "tg4",
        "MB/token",
        "GB/s",
        "of read",
        "GFLOP/s",
        "of peak",
    ]
    assert [line[:6] for line in lines] == [
        ["scalar", "F32", "-", "2.00", "~1.00", "4.00"],
        ["simd, NumPy", "F32", "-", "30.0", "50.0", "10.0"],
        ["simd, compiled", "F32", "-", "40.0", "60.0", "20.0"],
        ["simd, compiled", "Q8_0", "-", "41.0", "55.0", "50.0"],
    ]
    assert all(line[6:] == ["8.00", "2.00", "10.0%", "1.00", "1.0%"] for line in lines)


def test_bytes_are_of_decode_and_arithmetic_is_of_the_longest_prompt():
    rows = [row("scalar", "pp8", 1.0, gflops=3.0, gbs=5.0), row("scalar", "pp64", 1.0, gflops=4.0, gbs=5.0)]
    rows += [row("scalar", "tg4", 1.0, gflops=6.0, gbs=7.0, threads=3)]
    (line,) = cells(ladder(rows))[2:]
    assert (line[7], line[9], line[2]) == ("7.00", "4.00", "-")


def test_what_was_not_measured_is_a_dash():
    rows = [row("scalar", "pp8", 1.0), row("simd, NumPy", "tg4", 1.0)]
    assert [line[3:] for line in cells(ladder(rows))[2:]] == [
        ["1.00", "-", "-", "-", "-", "1.00", "1.0%"],
        ["-", "1.00", "8.00", "2.00", "10.0%", "-", "-"],
    ]


def test_a_device_without_limits_has_no_share():
    (line,) = cells(ladder([{k: v for k, v in row("mlx", "tg4", 1.0).items() if "share" not in k}]))[2:]
    assert line[-3] == "-"


# ---- the sentences ----


def test_reasons_are_told_once_per_rung():
    (reason,) = [note for note in notes(swept()) if "moon" in note]
    assert reason == "metal: not measured, it needs the moon."


def test_rungs_that_expand_weights_are_named():
    (note,) = [note for note in notes(swept()) if "expanded" in note]
    expanded = "Q8_0 weights are expanded to F32 on load, so there are only rows of F32."
    assert note == f"With `scalar` and with `simd, NumPy`, {expanded}"
    assert not any("expanded" in note for note in notes([row("scalar", "tg4", 1.0)]))


@pytest.mark.parametrize(("size", "told"), [(8e6, False), (2**20, False), (2**20 - 1, True)])
def test_weights_that_fit_into_the_cache_are_told(size, told):
    assert (in_cache([row("scalar", "tg4", 1.0, weight_bytes=size)]) is not None) == told


def test_weights_fit_in_the_form_in_which_they_are_smallest():
    rows = [row("scalar", "tg4", 1.0, weight_bytes=3e6), row("simd, NumPy", "tg4", 1.0, weight_bytes=5e5)]
    assert "F32 (0.5 MB)" in in_cache(rows)
    assert in_cache([row("scalar", "tg4", 1.0, machine={"cores": 1})]) is None


def test_the_machines_own_rates_are_told_by_threads():
    rows = [row("simd, NumPy", "tg4", 1.0), row("parallel", "tg4", 1.0, threads=2, read_gbs=30.0, peak_gflops=200.0)]
    (note,) = [note for note in notes(rows) if "itself" in note]
    assert "20.0 GB/s and 100 GFLOP/s on 1 thread, 30.0 GB/s and 200 GFLOP/s on 2 threads" in note


def test_a_run_with_the_log_on_has_a_note():
    assert not any("log" in note for note in notes(swept()))
    assert any("MLX_ENGINE_LOG" in note for note in notes([row("scalar", "tg4", 1.0, watched=True)]))


def test_the_rung_that_moved_most_comes_first():
    assert moves("decode", "tg4", swept()).splitlines()[0] == (
        "decode (tg4): the largest speedup is simd, NumPy -> simd, compiled (Q8_0) x5.00; all changes:"
    )
    assert moves("decode", "tg4", swept()[:1]) is None


def test_late_passes_are_held_against_early_ones():
    with_cache, without = swept()[-2:]
    assert growth_of(with_cache) == pytest.approx(1.1)
    assert growth_of(without) is None
    early = [1.0] * 7 + [2.0] * 16 + [9.0] * 217 + [3.0] * 16
    assert growth_of(row("scalar", "tg256", 1.0, passes_s=[early])) == pytest.approx(1.5)


def test_passes_that_were_not_made_have_no_median():
    with_cache, without = passes(swept()).splitlines()[2:]
    assert with_cache == "- simd, compiled, Q8_0, with a cache: x1.10"
    assert without == "- simd, compiled, Q8_0, without a cache: not known, from 3 of 256"
    assert passes([row("scalar", "tg4", 1.0)]) is None


def test_the_text_has_all_of_it():
    whole = text(swept())
    assert whole.startswith("|")
    for part in (
        "prefill (pp64): the largest speedup",
        "decode (tg4): the largest",
        "moon",
        "x1.10",
        "simd, compiled: F32 -> Q8_0",
    ):
        assert part in whole


def test_a_sweep_of_nothing_but_absent_rungs_has_their_reasons():
    assert "metal: not measured, it needs the moon." in text([row("metal", "pp8", None)])


def test_the_page_says_what_was_measured_where_and_shows_the_plots():
    whole = page(swept(), ["a.png"])
    assert whole.startswith("# micro??\n")
    for part in ("2.00 M parameters", "SHA-256 abc", "Fast CPU, 2 cores, 8 GiB", "commit 0123", "![a.png](a.png)"):
        assert part in whole


# ---- the pictures ----


@pytest.mark.slow
def test_every_plot_is_a_file(tmp_path):
    names = plots.write(swept(), tmp_path)
    assert names == ["passes.png", "ladder.png", "roofline.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert all("</svg>" in (tmp_path / name).with_suffix(".svg").read_text() for name in names)


@pytest.mark.slow
def test_what_has_no_rows_is_not_drawn(tmp_path):
    assert plots.write([row("metal", "pp8", None)], tmp_path) == []
    assert plots.write([row("scalar", "pp8", 1.0)], tmp_path) == ["ladder.png", "roofline.png"]


def test_passes_are_drawn_with_a_cache_and_without_and_an_estimate_goes_on():
    (axes,) = plots.passes(swept()).axes
    lines = {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in axes.get_lines()}
    assert set(lines) == {"with a cache", "without a cache", "without a cache, estimated"}
    x, y = lines["with a cache"]
    assert (list(x), list(y)[:1], list(y)[-1:]) == (list(range(1, 257)), [1000.0], [1100.0])
    # 0.6 s on average for lengths 1 to 3, so 0.3 s for each token of the sequence.
    x, y = lines["without a cache, estimated"]
    assert list(x) == list(range(4, 257))
    assert list(y) == pytest.approx([n * 300.0 for n in range(4, 257)])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("pass", "ms per pass")


def test_estimates_are_hatched_and_absent_rungs_are_listed():
    prefill, decode = plots.ladder(swept()).axes
    bars = {axes: [bar for bar in axes.patches if bar.get_width() > 0] for axes in (prefill, decode)}
    assert [bar.get_hatch() for bar in bars[prefill]] == ["///", None, None, None]
    assert [bar.get_width() for bar in bars[decode]] == [4.0, 10.0, 20.0, 50.0]
    assert [label.get_text() for label in prefill.get_yticklabels()][-2:] == ["simd, compiled, Q8_0", "metal"]
    assert "not measured" in [label.get_text() for label in decode.texts]
    assert prefill.get_xscale() == decode.get_xscale() == "log"


def test_a_terminal_gets_the_bars_with_the_longest_for_the_fastest_rung():
    console = Console(width=60, file=io.StringIO(), force_terminal=False)
    prefill, decode = bars(swept())
    console.print(decode)
    title, *lines = console.file.getvalue().splitlines()
    assert title.strip() == "decode, tg4: tokens per second (log scale)"
    assert [line.split()[-1] for line in lines] == ["4.00", "10.0", "20.0", "50.0"]
    lengths = [line.count("█") for line in lines]
    assert lengths == sorted(lengths)
    assert lengths[0] > 0
    console.print(prefill)
    assert "~1.00" in console.file.getvalue()


def test_error_bars_reach_from_the_slowest_to_the_fastest_repetition():
    axes, _ = plots.ladder(
        [row("parallel", "pp8", 10.0, samples_ts=[7.0, 10.0, 12.0]), row("parallel", "tg4", 5.0)]
    ).axes
    (bar,) = [each for each in axes.containers if isinstance(each, ErrorbarContainer)]
    (segment,) = bar.lines[2][0].get_segments()
    assert [x for x, _ in segment] == [7.0, 12.0]


def test_the_roofline_has_the_machines_limits_and_a_point_for_each_cell():
    (axes,) = plots.roofline(swept()).axes
    lines = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    roof = lines["1 thread: 20 GB/s, 100 GFLOP/s"]
    assert list(roof.get_ydata()) == pytest.approx([min(100.0, 20.0 * x) for x in roof.get_xdata()])
    points = [line for line in axes.get_lines() if list(line.get_xdata()) == [0.5]]
    assert len(points) == sum(1 for cell in swept() if not cell["unavailable"])
    assert sum(line.get_markerfacecolor() == "none" for line in points) == 2
