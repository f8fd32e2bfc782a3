"""Embeddings and a reranker against transformers in float64: see make_embedding_goldens.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.loop.row_reader import LastLogits

DATA = Path(__file__).parents[1] / "data"
LENGTHS = (1, 9, 70)
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["qwen3-micro", "gemma3-micro"])
@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens", "cls_token"])
def test_vectors_are_those_of_transformers(tmp_path: Path, name: str, kind: str):
    golden, folder = np.load(DATA / name / "embeddings.npz"), tmp_path / "hf"
    shutil.copytree(DATA / name / "hf", folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode == kind for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    want = [golden[f"{kind.partition('_')[0].removesuffix('token')}_{n}"] for n in LENGTHS]
    with mlx_engine.load(folder, "simd") as engine:
        found = np.array(engine.embed([golden[f"ids_{n}"].tolist() for n in LENGTHS]))
    assert np.abs(found - want).max() < 2e-6


def test_relevance_is_that_of_transformers():
    golden = np.load(DATA / "qwen3-micro" / "embeddings.npz")
    labels = golden["labels"].tolist()
    with mlx_engine.load(DATA / "qwen3-micro" / "hf", "simd") as engine:
        for n in LENGTHS:
            ids = golden[f"ids_{n}"].tolist()
            request = engine.prompts.reading(ids, LastLogits(n, labels))
            list(engine.run_requests([request])[0])
            assert abs(engine.prompts.relevance(request) - golden[f"relevance_{n}"]) < 2e-6
