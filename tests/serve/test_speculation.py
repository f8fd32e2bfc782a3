"""A server that proposes tokens: the same answers, and what receipts, usage and metrics say about them."""

from __future__ import annotations

import mlx_engine
from mlx_engine.loop.speculation import PassCosts
from tests.serve.served import MICRO, served
from tests.serve.test_metrics import read

SAID = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 40, "temperature": 0,
        "ignore_eos": True}  # fmt: skip


def test_a_predicted_output_is_accepted_and_changes_nothing(monkeypatch):
    # Plans do not depend on the time that passes take here.
    monkeypatch.setattr(PassCosts, "add", lambda *_: None)
    with served() as plain:
        expected = plain.post("/v1/chat/completions", SAID).json()
    assert "completion_tokens_details" not in expected["usage"]
    assert "speculation" not in expected["mlx_engine"]
    with mlx_engine.load(MICRO, "parallel", threads=1, speculate="lookup") as engine, served(engine=engine) as server:
        before, receipts = read(server), []
        text = expected["choices"][0]["message"]["content"]
        for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
            found = server.post(
                "/v1/chat/completions", {**SAID, "prediction": {"type": "content", "content": content}}
            ).json()
            assert found["mlx_engine"]["digest"] == expected["mlx_engine"]["digest"]
            receipt, usage = found["mlx_engine"]["speculation"], found["usage"]
            receipts.append(receipt)
            assert receipt["drafter"] == "lookup"
            assert usage["completion_tokens"] == 40
            assert usage["completion_tokens_details"] == {
                "accepted_prediction_tokens": receipt["accepted"],
                "rejected_prediction_tokens": receipt["proposed"] - receipt["accepted"],
            }
            assert receipt["proposed"] >= receipt["accepted"] > 0
            assert found["mlx_engine"]["timings"]["predicted_n"] == 40
        wrong = server.post("/v1/chat/completions", {**SAID, "prediction": {"type": "file", "content": "x"}})
        assert wrong.status_code == 400
        after = {name: value - before.get(name, 0) for name, value in read(server).items()}
        assert after["spec_decode_num_accepted_tokens_total"] == sum(one["accepted"] for one in receipts)
        assert after["spec_decode_num_draft_tokens_total"] == sum(one["proposed"] for one in receipts)
        assert after["spec_decode_num_drafts_total"] > 0
        places = [n for name, n in after.items() if name.startswith("spec_decode_num_accepted_tokens_per_pos_total")]
        assert sum(places) == sum(one["accepted"] for one in receipts)
