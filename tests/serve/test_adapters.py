"""A server whose model has adapters: each is a model of its own."""

from __future__ import annotations

from typing import NoReturn

import pytest

import mlx_engine
from mlx_engine.errors import OptionError
from mlx_engine.serve.service import Service
from mlx_engine.serve.worker import Worker
from tests.golden.goldens import DATA
from tests.golden.test_dense import with_tokenizer
from tests.serve.served import HTTP, served

ADAPTERS = {"a": DATA / "adapters" / "llama-0", "b:2": DATA / "adapters" / "llama-1"}
NAMES = {"micro": "base", "micro:a": "a", "micro:b:2": "b:2", "other:7:b:2": "b:2"}


def test_each_adapter_is_a_model(tmp_path):
    base = with_tokenizer(DATA / "llama-micro" / "hf", tmp_path / "base")
    with (
        mlx_engine.load(base, backend="simd", adapters=ADAPTERS) as engine,
        served(engine=engine, adapters=tuple(ADAPTERS), aliases=("other:7",)) as server,
    ):
        cards = HTTP.get(server.url + "/v1/models").json()["data"]
        body = {"prompt": [3, 1, 4], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        replies = {name: server.post("/v1/completions", {**body, "model": name}).json() for name in NAMES}
        vectors = [server.post("/v1/embeddings", {"input": [3, 1], "model": name}).json() for name in NAMES]
        unknown = server.post("/v1/completions", {**body, "model": "micro:c"})
        expected = {name: engine.generate([3, 1, 4], 6, ignore_eos=True, adapter=name).text for name in NAMES.values()}
    assert {card["id"]: card.get("alias_of") for card in cards} == {
        "micro": None,
        "other:7": "micro",
        "micro:a": None,
        "micro:b:2": None,
        "other:7:a": "micro:a",
        "other:7:b:2": "micro:b:2",
    }
    assert {name: reply["choices"][0]["text"] for name, reply in replies.items()} == {
        name: expected[adapter] for name, adapter in NAMES.items()
    }
    assert [reply["model"] for reply in replies.values()] == list(NAMES)
    digests = [reply["mlx_engine"]["digest"] for reply in vectors]
    assert len(set(digests)) == 3
    assert digests[2] == digests[3]
    assert unknown.status_code == 404


def test_names_that_stand_for_two_models_are_refused():
    Service(Worker(no_model), "m", ("m:a",), ("b",)).check_names()
    for aliases, adapters in ((("m:a",), ("a",)), (("m:a",), ("b", "a:b"))):
        with pytest.raises(OptionError, match="different names MODEL:ADAPTER"):
            Service(Worker(no_model), "m", aliases, adapters).check_names()


def no_model() -> NoReturn:
    raise AssertionError
