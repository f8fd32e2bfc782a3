"""Before and after: factors, components, what is in one file only, and files that are no measurements."""

import json

import pytest

from mlx_engine.bench.compare import page
from mlx_engine.bench.tables import read
from mlx_engine.errors import FormatError, SourceError

COMPONENTS = {
    "ms": 10.0,
    "ops": {"linear": {"calls": 2, "ms": 8.0}, "attention": {"calls": 1, "ms": 2.0}},
    "parts": {"layers": 9.0, "head": 1.0},
}
CELL = {
    "model_name": "micro", "backend": "simd", "jit": True, "overlap": True, "kv": True, "quant": "keep", "test": "tg4",
    "n_prompt": 0, "n_gen": 4, "samples_s": [4.0, 4.4, 3.6], "load_s": 2.0, "warm_up_s": 0.5, "estimated": None,
    "unavailable": None, "commit": "old1", "time": "2026-01-01", "machine": {"processor": "A", "cores": 2},
    "versions": {"numpy": "1"},
}  # fmt: skip


def cell(**changes):
    return CELL | changes


@pytest.fixture
def files(tmp_path):
    def write(old, new):
        paths = tmp_path / "old.json", tmp_path / "new.json"
        for path, rows in zip(paths, (old, new), strict=True):
            path.write_text(json.dumps(rows))
        return paths

    return write


def lines(text):
    """Tables' lines by their first cell, the last line of each name."""
    found = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in found}


# ---- factors ----


def test_a_factor_above_one_is_faster(files):
    found = lines(page(*files([cell()], [cell(samples_s=[2.0, 2.2, 1.8], load_s=1.0)])))
    assert found["per token, tg4"] == ["1,000.0", "500.0", "x2.00", ""]
    assert found["load"] == ["2,000.0", "1,000.0", "x2.00", ""]
    assert found["warm-up"] == ["500.0", "500.0", "x1.00", ""]


def test_what_became_slower_is_noted(files):
    found = lines(page(*files([cell()], [cell(samples_s=[8.0, 8.1], load_s=4.0)])))
    assert found["per token, tg4"][2:] == ["x0.50", "slower"]
    assert found["load"][3] == "slower"


def test_samples_that_overlap_may_be_chance(files):
    assert lines(page(*files([cell()], [cell(samples_s=[3.9, 4.5])])))["per token, tg4"][3] == "within the spread"


def test_a_single_sample_must_be_much_slower_to_be_called_so(files):
    for seconds, note in ((4.1, ""), (4.3, "slower")):
        assert lines(page(*files([cell(samples_s=[4.0])], [cell(samples_s=[seconds])])))["per token, tg4"][3] == note


def test_a_prompt_is_the_time_of_all_of_it(files):
    prompt = cell(test="pp8", n_prompt=8, n_gen=0)
    assert lines(page(*files([prompt], [prompt])))["prefill, pp8"][:2] == ["4,000.0", "4,000.0"]


def test_an_estimate_is_told(files):
    found = lines(page(*files([cell(estimated="from 1 of 4 passes")], [cell(samples_s=[1.0])])))
    assert found["per token, tg4"][3] == "estimated"


# ---- components ----


def test_components_are_compared_one_by_one(files):
    faster = {
        "ms": 5.0,
        "ops": {"linear": {"ms": 2.0}, "attention": {"ms": 3.0}},
        "parts": {"layers": 4.0, "head": 1.0},
    }
    text = page(*files([cell(components=COMPONENTS)], [cell(components=faster)]))
    found = lines(text)
    assert found["linear"] == ["8.000", "2.000", "x4.00", "40.0%", ""]
    assert found["attention"] == ["2.000", "3.000", "x0.67", "60.0%", "slower"]
    assert found["layers"] == ["9.000", "4.000", "x2.25", "80.0%", ""]
    assert found["all"][:3] == ["10.000", "5.000", "x2.00"]
    assert "A pass of 10.000 ms became one of 5.000 ms; linear changed most: 6.000 ms less." in text
    # What costs most now comes first.
    assert text.index("| attention") < text.index("|    linear")


def test_an_operation_that_came_or_went_is_told(files):
    fused = COMPONENTS | {"ops": {"norm_project": {"ms": 7.0}, "attention": {"ms": 2.0}}}
    found = lines(page(*files([cell(components=COMPONENTS)], [cell(components=fused)])))
    assert found["norm_project"] == ["-", "7.000", "-", "70.0%", "only new"]
    assert found["linear"] == ["8.000", "-", "-", "-", "only old"]


@pytest.mark.parametrize(
    "broken", [None, 5, {}, {"ops": [1]}, {"ops": {"linear": {"ms": "fast"}}, "parts": {"head": None}}]
)
def test_components_of_which_little_is_left_are_no_error(files, broken):
    assert "per token, tg4" in page(*files([cell(components=COMPONENTS)], [cell(components=broken)]))


# ---- which rows ----


@pytest.mark.parametrize(
    "change",
    [
        *({"backend": "parallel"}, {"jit": False}, {"overlap": False}, {"kv": False}),
        *({"quant": "f32"}, {"test": "tg5"}, {"model_name": "b"}),
    ],
)
def test_rows_of_different_cells_are_not_compared(files, change):
    text = page(*files([cell()], [cell(**change)]))
    assert "x1.00" not in text
    old, new = text.split("Only in ")[1:]
    assert "old.json" in old
    assert "micro, simd, tg4" in old
    assert "new.json" in new


def test_rows_in_both_files_are_not_listed_as_alone(files):
    text = page(*files([cell(), cell(test="pp1")], [cell()]))
    assert text.count("Only in ") == 1
    assert text.endswith("- micro, simd, pp1")


def test_what_else_changed_is_told(files):
    new = cell(commit="new2", machine={"processor": "B", "cores": 2}, versions={"numpy": "2"}, threads=4)
    text = page(*files([cell(threads=2)], [new]))
    for part in (
        "commit old1",
        "commit new2",
        "machine, processor A -> B",
        "versions, numpy 1 -> 2",
        "threads, 2 -> 4",
    ):
        assert part in text
    assert "- changed" not in page(*files([cell()], [cell()]))


def test_a_rung_that_could_not_run_is_no_row(files):
    absent = {key: value for key, value in cell(backend="metal", unavailable="no").items() if key != "samples_s"}
    old, _ = files([cell(), absent], [])
    assert [row["backend"] for row in read(old).values()] == ["simd"]


def test_the_newest_of_a_cell_counts_in_json_lines_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(cell(samples_s=[s])) for s in (1.0, 2.0)))
    (row,) = read(path).values()
    assert row["samples_s"] == [2.0]


@pytest.mark.parametrize("untold", ["jit", "overlap"])
def test_rows_from_before_all_was_told_are_compared(files, untold):
    old, new = files([{key: value for key, value in CELL.items() if key != untold}], [cell()])
    assert read(old).keys() == read(new).keys()


# ---- damage ----


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SourceError, match=r"nowhere\.json: cannot be read"):
        read(tmp_path / "nowhere.json")
    with pytest.raises(SourceError):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "no row"),
        (b"[]", "no row"),
        (b"{}", "dict"),
        (b"7", "int"),
        (b"[7]", "int in row 1"),
        (b'[{"backend": "simd"', "invalid JSON"),
        (b"\xff\xfe\x00", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (json.dumps([CELL | {"n_gen": "4"}]).encode(), "n_gen = '4' in row 1"),
        (json.dumps([CELL, CELL | {"kv": 1}]).encode(), "kv = 1 in row 2"),
        (json.dumps([CELL | {"backend": ["simd"]}]).encode(), "backend"),
        (json.dumps([CELL | {"jit": "yes"}]).encode(), "jit = 'yes'"),
        (json.dumps([CELL | {"samples_s": []}]).encode(), "samples_s = []"),
        (json.dumps([CELL | {"samples_s": [0.0]}]).encode(), "samples_s = [0.0]"),
        (json.dumps([CELL | {"samples_s": [float("nan")]}]).encode(), "samples_s = [nan]"),
        (json.dumps([{k: v for k, v in CELL.items() if k != "samples_s"}]).encode(), "samples_s = None"),
    ],
)
def test_a_file_that_is_no_measurement(tmp_path, content, found):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read(path)
    assert found in caught.value.found
    assert str(path) in str(caught.value)


def test_every_cut_of_a_file_is_told(tmp_path):
    whole, path = json.dumps([cell(components=COMPONENTS)]), tmp_path / "rows.json"
    for n in range(0, len(whole), 7):
        path.write_text(whole[:n])
        with pytest.raises(FormatError):
            read(path)
