"""POST /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import mlx_engine
from mlx_engine.serve.reply_types import EmbeddingList, Ranking
from tests.serve.served import MICRO, Served, micro, served
from tests.serve.shapes import openai_document


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, mlx_engine.Engine]]:
    folder = tmp_path_factory.mktemp("reranker") / "hf"
    shutil.copytree(MICRO.parent / "hf", folder)
    config = json.loads((folder / "config.json").read_text()) | {"classifier_from_token": ["n", "y"]}
    (folder / "config.json").write_text(json.dumps(config))
    with mlx_engine.load(folder, "simd") as engine, served(engine=engine) as found:
        yield found, engine


def embedded(server: Served, given: Any, **parameters: Any) -> EmbeddingList:
    response = server.post("/v1/embeddings", {"input": given, **parameters})
    assert response.status_code == 200, response.text
    # OpenAI's document has no vectors in base64, which its own client asks for.
    document = openai_document() if parameters.get("encoding_format") != "base64" else None
    assert document is None or document.problems("CreateEmbeddingResponse", response.json()) == []
    return msgspec.convert(response.json(), EmbeddingList)


@pytest.mark.parametrize("given", ["hello", ["hello", "you there"], [71, 68, 75], [[71, 68, 75], [1]]])
def test_vectors_are_those_of_the_engine(server: Served, given: Any):
    texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    want = np.array(micro().embed(texts))
    found = embedded(server, given)
    assert [one.index for one in found.data] == list(range(len(texts)))
    assert np.array_equal(np.array([one.embedding for one in found.data], np.float32), want)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(micro().prompt_ids(one)) for one in texts)
    assert found.mlx_engine.digest == sha256(want.astype("<f4").tobytes()).hexdigest()
    packed = embedded(server, given, encoding_format="base64", dimensions=8, user="somebody")
    values = [np.frombuffer(base64.b64decode(str(one.embedding)), "<f4") for one in packed.data]
    assert np.array_equal(np.array(values), np.array(micro().embed(texts, 8)))


def test_more_texts_than_slots(server: Served):
    texts = [f"text {i}" for i in range(11)]
    found = embedded(server, texts)
    assert np.array_equal(np.array([one.embedding for one in found.data], np.float32), np.array(micro().embed(texts)))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": ["a", 1]}, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": [100_000]}, "input", "invalid_value"),
        ({"input": [1] * 5000}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 10_000}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_type"),
        ({"input": "a", "model": "another"}, "model", "model_not_found"),
        ({"input": "a", "pooling": "mean"}, "pooling", "unknown_parameter"),
    ],
)
def test_a_wrong_parameter_is_named(server: Served, body: dict[str, Any], param: str, code: str):
    error = server.post("/v1/embeddings", body).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_documents_are_ranked(reranker: tuple[Served, mlx_engine.Engine]):
    server, engine = reranker
    documents = ["one", "two words", "three", "<|im_end|> four", "five"]
    want = engine.rerank("a query", documents)
    response = server.post("/v1/rerank", {"query": "a query", "documents": [*documents[:4], {"text": "five"}]})
    found = msgspec.convert(response.json(), Ranking)
    assert [one.index for one in found.results] == sorted(range(5), key=lambda i: -want[i])
    assert [one.relevance_score for one in found.results] == sorted(want, reverse=True)
    assert [one.document.text for one in found.results] == [documents[one.index] for one in found.results]
    few = server.post("/v1/rerank", {"query": "a query", "documents": documents, "top_n": 2, "return_documents": False})
    assert [*few.json()["results"]] == [
        {"index": one.index, "relevance_score": one.relevance_score} for one in found.results[:2]
    ]
    other = server.post("/v1/rerank", {"query": "a query", "documents": documents, "instruction": "Be short"}).json()
    assert {one["index"]: one["relevance_score"] for one in other["results"]} == dict(
        enumerate(engine.rerank("a query", documents, instruction="Be short"))
    )


def test_a_model_that_is_no_reranker_is_refused(server: Served):
    response = server.post("/v1/rerank", {"query": "a", "documents": ["b"]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_by_model"
    assert "classifier_from_token" in response.json()["error"]["message"]
    assert "/" not in response.json()["error"]["message"].partition(":")[0]
    assert Path(MICRO).name in response.json()["error"]["message"]
