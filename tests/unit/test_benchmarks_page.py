"""BENCHMARKS.md is what its generator makes of the committed results."""

import json

from benchmarks.report import FOLDER, PAGE, load, page


def test_the_page_is_current():
    assert PAGE.read_text() == page(sorted(FOLDER.glob("*.jsonl")))


def test_every_row_has_its_samples_machine_and_commit():
    for path in FOLDER.glob("*.jsonl"):
        for row in load(path):
            assert row["samples_ts"]
            assert row["machine"]["processor"]
            assert row["commit"]


def test_the_newest_measurement_of_a_cell_counts(tmp_path):
    cell = {"model_name": "m", "backend": "simd", "kv": True, "test": "pp1"}
    rows = [{**cell, "samples_ts": [1.0]}, {**cell, "samples_ts": [2.0]}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [row["samples_ts"] for row in load(tmp_path / "some.jsonl")] == [[2.0]]
