"""BENCHMARKS.md is what its generator makes of the committed results."""

import json

from benchmarks import report, sections
from benchmarks.report import FOLDER, PAGE, newest, page, read, results


def test_the_page_is_current():
    assert PAGE.read_text() == page(results()), "run `python -m benchmarks.report`: rows or measured code have changed"


def test_every_row_has_its_machine_and_commit():
    files = results()
    assert files
    for path in files:
        for row in read(path):
            assert row["machine"]["processor"]
            assert row["commit"]
            assert row["time"]


def test_every_cell_has_its_samples():
    for row in read(FOLDER / "baseline.jsonl"):
        assert row["samples_ts"]


def test_the_newest_measurement_of_a_cell_counts():
    cell = {"model_name": "m", "backend": "simd", "kv": True, "test": "pp1"}
    rows = [{**cell, "samples_ts": [1.0]}, {**cell, "samples_ts": [2.0]}]
    assert [row["samples_ts"] for row in newest(rows)] == [[2.0]]


def test_each_file_has_its_own_section(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "sweep_text", lambda rows: " ".join(row["rung"] for row in rows))
    common = {
        "commit": "abc", "versions": {}, "model_name": "m", "model_size": 2e6, "model_n_params": 3e6,
        "machine": {"processor": "P", "cores": 2, "memory_bytes": None, "system": "S"},
    }  # fmt: skip
    rows = [{**common, "time": time, "rung": rung} for time, rung in (("1", "old"), ("2", "a"), ("2", "b"))]
    (tmp_path / "sweep.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = page([tmp_path / "sweep.jsonl"])
    assert text.startswith("# Benchmarks")
    assert "## The ladder\n\n### m: 3.00 M parameters, 2.0 MB\n\nP, 2 cores, unknown memory" in text
    assert "\n\na b\n" in text


def test_the_section_of_proposed_tokens_has_both_factors():
    from benchmarks.sections import speculation

    common = {
        "commit": "abc", "time": "2026-11-25", "versions": {"mlx-engine": "1"}, "file": "m.gguf", "draft": None,
        "machine": {"processor": "P", "cores": 2, "memory_bytes": None, "system": "S"}, "n_prompt": 4, "n_tokens": 9,
        "off": 50.0, "on": 120.0, "factor": 2.4, "proposed": 40, "accepted": 30, "copies": 1,
    }  # fmt: skip
    theirs = {"off": [2.0, 3.0, 4.0], "on": [2.0, 2.0, 1.0], "is_same": False}
    rows = [
        {**common, "text": "edit", "drafter": "lookup", "llama.cpp": theirs, "factor": 9.9},
        {**common, "text": "edit", "drafter": "lookup", "llama.cpp": theirs},
        {**common, "text": "story", "drafter": "mtp", "llama.cpp": None, "copies": 8},
    ]
    text = speculation(rows)
    assert "| edit | lookup | 50 | 120 | 2.4 | 30 of 40 | 1.5 | another |" in text
    assert "| story, 8 at once | mtp | 50 | 120 | 2.4 | 30 of 40 |  |  |" in text
    assert "9.9" not in text


def test_half_of_the_memory_is_compared_with_all_of_it():
    about = {
        "time": "2", "commit": "abc", "versions": {}, "engine": "E", "has_same_bits": True, "type": "q8_0",
        "machine": {"processor": "P", "cores": 2, "memory_bytes": None, "system": "S"}, "share_of_the_first": 0.04,
        "experts_for_90_percent": 60.2, "guessed_by_the_layer_before": 0.85, "text": "T", "disk": 1e9,
        "chosen_by_the_token_before": 0.45, "chosen_by_the_eight_before": 0.8,
    }  # fmt: skip
    runs = {False: [{"rate": 10.0, "memory": 3e9, "read": 0.0}], True: [{"rate": 6.0, "memory": 15e8, "read": 35e6}]}
    text = sections.experts([{**about, "is_limited": key, "runs": of} for key, of in runs.items()])
    assert "| E | q8_0 | T | 3 | 10 | 1 | 0 |  | yes |" in text
    assert "| E | q8_0 | T | 1.5 | 6 | 0.6 | 35 | 28.6 | yes |" in text


def test_the_first_token_after_a_restart_is_compared_with_the_same_prompt_computed():
    row = {
        "time": "2", "commit": "abc", "versions": {}, "model_name": "shape:m", "n_tokens": 2048, "kv_type": "f16",
        "machine": {"processor": "P", "cores": 2, "memory_bytes": None, "system": "S"},
        "nbytes": 5e6, "disk_gbs": 1.5, "samples_s": {"cold": [4.0, 5.0], "page cache": [0.9], "disk": [1.8]},
    }  # fmt: skip
    old = {**row, "samples_s": {way: [9.0] for way in row["samples_s"]}}
    text = sections.prefix_disk([old, row])
    assert "| f16 | m, 2,048 tokens | 4.5 (4 to 5) | 0.9 | 0.2 | 1.8 | 0.4 | 5 | 1.5 |" in text
    assert text.count("| f16 |") == 1
