"""Files of llama.cpp's making: how they are made, and what is told about them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import llama_quants, sections
from benchmarks.peers.contests import LLAMA, OURS

COMMON: dict[str, Any] = {
    "time": "2020-01-02T03:04", "commit": "abc", "versions": {"numpy": "2"}, "model_name": "m", "model_n_params": 2e6,
    "machine": {"processor": "p", "cores": 2, "memory_bytes": 2**30, "system": "Linux"},
}  # fmt: skip


def decode(file: str, engine: str, setting: str, seconds: list[float]) -> dict[str, Any]:
    told = {"what": "decode", "file": file, "engine": engine, "setting": setting, "n_gen": 64, "seconds": seconds}
    return {**COMMON, **told, "model_size": 4e6 if file == "q8_0" else 2e6}


def test_a_quantizer_that_fails_says_why_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "m-q8_0.gguf"
    source.touch()
    monkeypatch.setattr(llama_quants, "_QUANTIZE", "raise ModuleNotFoundError('no llama_cpp')")
    with pytest.raises(SystemExit, match=r"q4_0-pure: .* failed: ModuleNotFoundError: no llama_cpp"):
        llama_quants.made(source, sys.executable)
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_there_is_not_made_again(tmp_path: Path):
    names = ["m-q8_0.gguf", *(f"m-{name}.gguf" for name in llama_quants.MADE)]
    for name in names:
        (tmp_path / name).touch()
    files = llama_quants.made(tmp_path / names[0], "/nowhere/python")
    assert [path.name for path in files.values()] == names


def test_factors_are_of_rounds_and_over_the_best_setting_of_the_same_file():
    rows = [
        {**decode("q8_0", OURS, "", [99.0]), "time": "2019"},
        decode("q8_0", OURS, "", [4.0, 8.0, 4.0]),
        decode("q4_k_m", OURS, "", [2.0, 2.0, 2.0]),
        decode("q4_k_m", LLAMA, "1 thread", [6.0, 6.0, 6.0]),
        decode("q4_k_m", LLAMA, "2 threads", [3.0, 1.0, 3.0]),
        *({**COMMON, "what": "error", "file": name, "error": 2e-7} for name in ("q8_0", "q4_k_m")),
        {**COMMON, "what": "head", "file": "q8_0", "type": "Q8_0", "nbytes": 2e8, "seconds": [0.01]},
    ]
    text = sections.llama_quants(rows)
    assert "| q8_0 | 4 | 16 (8 to 16) | 1 | - | - | 2.0e-07 |" in text
    assert "| q4_k_m | 2 | 32 (32 to 32) | 2 | 21.3 (21.3 to 64), 2 threads | 1.5 | 2.0e-07 |" in text
    assert "- q8_0: a head of Q8_0 reads 200 MB in 10.00 ms, 20.0 GB/s: 16% of a token." in text
