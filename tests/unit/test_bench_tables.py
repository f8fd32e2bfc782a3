"""Tables of results: what a person reads, and what a program reads back."""

import csv
import io
import json

import pytest

from mlx_engine.bench.tables import FORMATS, as_csv, as_json, as_jsonl, markdown

CELL = {
    "schema": 1,
    "commit": None,
    "machine": {"processor": "A, B", "cores": 2},
    "model_name": "micro",
    "model_size": 3 * 2**20 // 2,
    "model_n_params": 1_234_567,
    "backend": "simd",
    "threads": None,
    "kv": True,
    "quant": "keep",
    "unavailable": None,
    "test": "pp16",
    "avg_ts": 1234.567,
    "stddev_ts": 8.9,
    "median_ts": 1235.0,
    "samples_ts": [1228.25, 1240.884],
    "samples_s": [0.0130, 0.0128],
    "passes_s": [[0.5, 0.25], [0.5, 0.125]],
    "estimated": None,
}
ABSENT = {key: CELL[key] for key in list(CELL)[:10]} | {
    "backend": "metal",
    "unavailable": "it needs an Apple GPU",
    "test": "pp16",
}


def cell(**changes):
    return CELL | changes


def columns(*rows):
    """The table's lines, each as its cells without the blanks around them."""
    return [[text.strip() for text in line.strip("|").split("|")] for line in markdown(rows).splitlines()]


# ---- Markdown ----


def test_the_table():
    rows = [
        cell(),
        cell(test="tg4 @ d512", avg_ts=56.789, stddev_ts=0.0, estimated="from 1 of 4 passes"),
        ABSENT,
    ]
    assert markdown(rows).splitlines() == [
        "| model |     size | params | backend |       test |                                t/s |",
        "| ----: | -------: | -----: | ------: | ---------: | ---------------------------------: |",
        "| micro | 1.50 MiB | 1.23 M |    simd |       pp16 |                     1234.57 ± 8.90 |",
        "| micro | 1.50 MiB | 1.23 M |    simd | tg4 @ d512 |                      ~56.79 ± 0.00 |",
        "| micro | 1.50 MiB | 1.23 M |   metal |       pp16 | unavailable: it needs an Apple GPU |",
    ]


def test_every_line_is_as_wide_as_the_first():
    rows = [cell(model_name="a much longer name than its heading"), cell(avg_ts=1e9), ABSENT]
    assert len({len(line) for line in markdown(rows).splitlines()}) == 1


def test_options_at_their_defaults_have_no_column():
    assert columns(cell())[0] == ["model", "size", "params", "backend", "test", "t/s"]


@pytest.mark.parametrize(
    ("change", "name", "shown"),
    [
        ({"kv": False}, "kv", ["on", "off"]),
        ({"quant": "q4_0"}, "quant", ["keep", "q4_0"]),
        ({"threads": 8}, "threads", ["-", "8"]),
    ],
)
def test_an_option_that_differs_somewhere_has_a_column(change, name, shown):
    head, _, *rows = columns(cell(), cell(**change))
    assert set(head) == {"model", "size", "params", "backend", name, "test", "t/s"}
    assert [row[head.index(name)] for row in rows] == shown


def test_an_option_that_is_the_same_everywhere_but_not_the_default_has_a_column():
    head, _, *rows = columns(cell(kv=False), cell(kv=False))
    assert [row[head.index("kv")] for row in rows] == ["off", "off"]


def test_columns_stand_in_the_order_of_llama_bench():
    head = columns(cell(kv=False, quant="f32", threads=2))[0]
    assert head == ["model", "size", "params", "backend", "threads", "kv", "quant", "test", "t/s"]


@pytest.mark.parametrize(
    ("avg", "stddev", "shown"),
    [(1234.5678, 0.126, "1234.57 ± 0.13"), (1.0, 0.0, "1.00 ± 0.00"), (0.0625, 0.00049, "0.0625 ± 0.0005")],
)
def test_slow_rates_get_more_digits(avg, stddev, shown):
    assert columns(cell(avg_ts=avg, stddev_ts=stddev))[2][-1] == shown


def test_only_what_was_estimated_is_marked():
    _, _, measured, estimated = columns(cell(), cell(estimated="from a pass of 8 tokens"))
    assert "~" not in "".join(measured)
    assert estimated[-1].startswith("~")
    assert "~" not in "".join(estimated[:-1])


def test_what_cannot_run_has_a_reason_and_no_number():
    assert columns(ABSENT)[2][-1] == "unavailable: it needs an Apple GPU"


# ---- for programs ----


def test_csv_reads_back():
    rows = [cell(model_name='a "quoted", name'), ABSENT]
    first, second = csv.DictReader(io.StringIO(as_csv(rows)))
    assert first["model_name"] == 'a "quoted", name'
    assert float(first["avg_ts"]) == 1234.567
    assert (first["test"], first["backend"], first["kv"]) == ("pp16", "simd", "True")
    assert first["commit"] == first["unavailable"] == ""
    assert (second["backend"], second["unavailable"], second["avg_ts"]) == ("metal", "it needs an Apple GPU", "")


def test_csv_has_the_columns_of_every_row_whichever_comes_first():
    first, second = csv.DictReader(io.StringIO(as_csv([ABSENT, cell()])))
    assert first.keys() == second.keys()
    assert float(second["median_ts"]) == 1235.0


def test_csv_has_no_lists():
    assert not any(c in as_csv([cell()]) for c in "[]{}")


@pytest.mark.parametrize("rows", [[cell()], [cell(), ABSENT, cell(test="tg4")]], ids=["one", "three"])
def test_json_reads_back_with_every_sample(rows):
    assert json.loads(as_json(rows)) == rows


@pytest.mark.parametrize("rows", [[cell()], [cell(), ABSENT, cell(model_name="two\nlines")]], ids=["one", "three"])
def test_json_lines_read_back_with_every_sample(rows):
    lines = as_jsonl(rows).split("\n")
    assert [json.loads(line) for line in lines] == rows


def test_every_format_has_a_name():
    assert {"md": markdown, "csv": as_csv, "json": as_json, "jsonl": as_jsonl} == FORMATS


def test_nothing_ends_with_an_empty_line():
    assert all(text(rows := [cell(), cell()]) == text(rows).rstrip("\n") for text in FORMATS.values())
