"""`report` as a user meets it: what is printed, what is written, and an earlier report beside this one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mlx_engine.bench import roofline
from mlx_engine.bench.compare import read_report, refuse, section
from mlx_engine.commands import app
from mlx_engine.errors import FormatError, OptionError, SourceError

DATA = Path(__file__).parents[1] / "data"
MODEL = DATA / "qwen3-micro" / "model-q8_0.gguf"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The machine's own limits are not what is tested here."""
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)


def run(folder, *args, model=MODEL, backend="simd"):
    command = ["report", "-m", str(model), "-b", backend, "-p", "5", "-n", "2", "-r", "1", "--out", str(folder)]
    result = CliRunner().invoke(app, [*command, *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The JSON of a report that was made before."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(roofline, "SECONDS", 1e-4)
        folder = tmp_path_factory.mktemp("earlier")
        assert run(folder).code == 0
    return folder / "report.json"


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["scalar", "simd", "parallel", "mlx"])
def test_the_page_is_printed_and_written(tmp_path, backend):
    result = run(tmp_path, backend=backend)
    assert result.code == 0
    assert result.out.strip() == (tmp_path / "report.md").read_text().strip()
    assert result.err.splitlines() == [f"report.md and report.json are in {tmp_path}"]
    titles = [line for line in result.out.splitlines() if line.startswith("#")]
    assert titles == [
        f"# Bottlenecks: {json.loads((tmp_path / 'report.json').read_text())['model']['name']} on {backend}",
        "## Remaining bottlenecks of a decode step, ranked",
        "## Remaining bottlenecks of prefill, ranked",
        "## Model",
        "## Timing",
        "## A decode step, profiled",
        "## Prefill, profiled",
        "## Every pass",
        "## Method",
    ]


def test_the_sum_of_what_is_told_is_the_plain_pass(earlier):
    report = json.loads(earlier.read_text())
    for phase in report["phases"].values():
        whole = sum(op["ms"] for op in phase["operations"]) + phase["between_ms"]
        assert whole == pytest.approx(phase["plain_ms"]["median"])
        assert sum(phase["parts"].values()) + phase["between_ms"] == pytest.approx(whole)
        assert all(op["measured_ms"]["n"] == phase["watched_ms"]["n"] for op in phase["operations"])


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gpt2-micro", "gemma3-micro", "llama-micro"])
def test_every_architecture_has_a_report(tmp_path, name):
    assert run(tmp_path, model=DATA / name / "hf").code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    roles = {op["role"] for op in report["phases"]["decode"]["operations"]}
    assert {"attn_output", "ffn_down", "head", "embedding"} <= roles
    assert report["model"]["format"] == "safetensors"


def test_json_on_stdout_is_the_file(tmp_path):
    result = run(tmp_path, "--json")
    assert json.loads(result.out) == json.loads((tmp_path / "report.json").read_text())
    settings = json.loads(result.out)["settings"]
    assert (settings["n_prompt"], settings["n_gen"], settings["repetitions"]) == (5, 2, 1)


def test_a_test_beyond_the_context_is_one_line(tmp_path):
    result = run(tmp_path, "--depth", 10**6)
    assert result.code == 2
    assert "the model's context has" in result.err


# ---- an earlier report ----


def test_the_same_passes_are_set_side_by_side(tmp_path, earlier):
    result = run(tmp_path, "--against", earlier)
    assert result.code == 0
    assert "## Changes since the earlier report" in result.out
    (line,) = [line for line in result.out.splitlines() if line.lstrip("| ").startswith("first token |")]
    assert line.split("|")[4].strip().startswith("x")


@pytest.mark.parametrize("args", [("-p", 6), ("-n", 3)])
def test_other_passes_are_refused_before_anything_is_measured(tmp_path, earlier, args, monkeypatch):
    from mlx_engine.bench.bottlenecks import report

    monkeypatch.setattr(report, "measured", lambda *args: pytest.fail("measured"))
    result = run(tmp_path, "--against", earlier, *args)
    assert result.code == 2
    assert "--against: the reports differ" in result.err


def test_another_model_is_refused_or_marked(tmp_path, earlier):
    other = DATA / "qwen3-mqa" / "model-q8_0.gguf"
    refused = run(tmp_path, "--against", earlier, model=other)
    assert refused.code == 2
    marked = run(tmp_path, "--against", earlier, "--anyway", model=other)
    assert marked.code == 0
    assert "- **not the same**:" in marked.out


def test_a_factor_above_1_is_faster_and_chance_is_told(earlier):
    old, new = (json.loads(earlier.read_text()) for _ in range(2))
    old["timing"]["decode"] |= {"median": 4.0, "q1": 3.5, "q3": 4.5}
    new["timing"]["decode"] |= {"median": 2.0, "q1": 1.9, "q3": 2.1}
    old["timing"]["load"] |= {"median": 1.0, "q1": 0.9, "q3": 1.1}
    new["timing"]["load"] |= {"median": 2.0, "q1": 1.1, "q3": 3.0}
    old["timing"]["warm_up"] |= {"median": 1.0, "q1": 0.9, "q3": 1.1}
    new["timing"]["warm_up"] |= {"median": 2.0, "q1": 1.2, "q3": 3.0}
    new["settings"]["quant"] = "q4_0"
    for each in (old, new):  # as measured, an operation may be so much slower that the table leaves others out
        for op in each["phases"]["decode"]["operations"]:
            op["measured_ms"] |= {"median": 1.0}
    (head,) = [op for op in old["phases"]["decode"]["operations"] if op["role"] == "head"]
    head["role"] = "projection"
    head["measured_ms"] |= {"median": 50.0}
    text = section(old, new)
    lines = text.partition("prefill, profiled")[0].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    cells = {row[0]: row[1:] for row in table if len(row) == 5}
    assert cells["decode"] == ["4.000", "2.000", "x2.00", ""]
    assert cells["load"] == ["1.000", "2.000", "x0.50", "within the spread"]
    assert cells["warm up"] == ["1.000", "2.000", "x0.50", "slower"]
    assert cells["projection"] == ["50.000", "-", "-", "only old"]
    assert cells["head"][0] == "-"
    assert cells["head"][2:] == ["-", "only new"]
    assert "- changed: quant keep -> q4_0" in text


@pytest.mark.parametrize(
    ("part", "name"), [("model", "parameters"), ("model", "width"), ("machine", "processor"), ("settings", "depth")]
)
def test_what_must_be_the_same(earlier, part, name):
    old, new = (json.loads(earlier.read_text()) for _ in range(2))
    refuse(old, new)
    old[part][name] = "another"
    with pytest.raises(OptionError, match=f"{name.replace('_', ' ')} another -> "):
        refuse(old, new)


@pytest.mark.parametrize("name", ["model", "timing", "phases", "kind"])
def test_a_file_of_which_a_part_is_missing_is_refused(tmp_path, earlier, name):
    broken = json.loads(earlier.read_text())
    del broken[name]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(FormatError, match="expected a bottleneck report"):
        read_report(path)


@pytest.mark.parametrize("raw", [b"", b"[]", b"[" * 10**5, b"\xff", b'{"kind": 1}', b'{"kind": "bottlenecks"}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, raw):
    path = tmp_path / "old.json"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=r"old\.json: expected a bottleneck report"):
        read_report(path)


@pytest.mark.parametrize(
    "broken", [None, [], {"median": "1"}, {"median": 1.0}, {"median": 1, "q1": float("nan"), "q3": 1}]
)
def test_times_that_are_none_are_refused(tmp_path, earlier, broken):
    for place in ("timing", "operations", "phases"):
        report = json.loads(earlier.read_text())
        if place == "timing":
            report["timing"]["load"] = broken
        elif place == "operations":
            report["phases"]["decode"]["operations"][0]["measured_ms"] = broken
        else:
            report["phases"]["prefill"] = broken
        path = tmp_path / "old.json"
        path.write_text(json.dumps(report))
        with pytest.raises(FormatError):
            read_report(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(SourceError, match="cannot be read"):
        read_report(tmp_path / "nowhere.json")
    assert run(tmp_path, "--against", tmp_path / "nowhere.json").code == 1


def test_what_layers_become_is_an_option_and_said(tmp_path):
    found = run(tmp_path, "--quant", "q8_0", "--quant-min-dim", "8", "--quant-layer", "attn_v=f32")
    assert found.code == 0
    assert "weights: q8_0 min-dim=8 attn_v=f32" in found.out
    assert "--quant q8_0 --quant-min-dim 8" in found.out
    assert "--quant-layer attn_v=f32" in found.out
