"""A server whose model has adapters: each is a model of its own."""

from __future__ import annotations

import mlx_engine
from tests.golden.goldens import DATA
from tests.golden.test_dense import with_tokenizer
from tests.serve.served import HTTP, served

ADAPTERS = {"a": DATA / "adapters" / "llama-0", "b": DATA / "adapters" / "llama-1"}
NAMES = {"micro": "base", "micro:a": "a", "micro:b": "b", "other:b": "b"}


def test_each_adapter_is_a_model(tmp_path):
    base = with_tokenizer(DATA / "llama-micro" / "hf", tmp_path / "base")
    with (
        mlx_engine.load(base, backend="simd", adapters=ADAPTERS) as engine,
        served(engine=engine, adapters=tuple(ADAPTERS), aliases=("other",)) as server,
    ):
        listed = [card["id"] for card in HTTP.get(server.url + "/v1/models").json()["data"]]
        body = {"prompt": [3, 1, 4], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        replies = {name: server.post("/v1/completions", {**body, "model": name}).json() for name in NAMES}
        vectors = [server.post("/v1/embeddings", {"input": [3, 1], "model": name}).json() for name in NAMES]
        unknown = server.post("/v1/completions", {**body, "model": "micro:c"})
        expected = {name: engine.generate([3, 1, 4], 6, ignore_eos=True, adapter=name).text for name in NAMES.values()}
    assert listed == ["micro", "other", "micro:a", "micro:b", "other:a", "other:b"]
    assert {name: reply["choices"][0]["text"] for name, reply in replies.items()} == {
        name: expected[adapter] for name, adapter in NAMES.items()
    }
    assert [reply["model"] for reply in replies.values()] == list(NAMES)
    digests = [reply["mlx_engine"]["digest"] for reply in vectors]
    assert len(set(digests)) == 3
    assert digests[2] == digests[3]
    assert unknown.status_code == 404
