"""`generate` with penalties, a bias and log-probabilities."""

import json
import math

import pytest

import mlx_engine
from tests.unit.test_command_generate import MODEL, generate, only_line


def run(*options):
    result = generate("Once", "-n", 6, "--ignore-eos", "--json", *options)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_log_probabilities_are_in_the_object_of_json():
    plain, found = run(), run("--logprobs", 2)
    assert "logprobs" not in plain
    assert set(found) - set(plain) == {"logprobs"}
    assert [token["id"] for token in found["logprobs"]] == found["token_ids"] == plain["token_ids"]
    for token in found["logprobs"]:
        assert set(token) == {"id", "text", "logprob", "top"}
        assert token["top"][0] == {name: token[name] for name in ("id", "text", "logprob")}, "greedy takes the first"
        assert len(token["top"]) == 2
        assert 0 < math.exp(token["logprob"]) <= 1
    assert [token["top"] for token in run("--logprobs", 0)["logprobs"]] == [[]] * 6


def test_log_probabilities_are_a_table_on_stderr_after_the_text():
    plain, result = generate("Once", "-n", 3), generate("Once", "-n", 3, "--logprobs", 1)
    assert (result.code, result.out) == (0, plain.out)
    lines = result.err.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split() == ["id", "logprob", "token"])
    for token, line in zip(run("-n", 3, "--logprobs", 1)["logprobs"], lines[head + 1 : head + 4], strict=True):
        quoted = json.dumps(token["text"], ensure_ascii=False)
        assert line.split(maxsplit=2)[:2] == [str(token["id"]), f"{token['logprob']:.4f}"]
        assert line.endswith(f"  {quoted}  ({quoted} {token['logprob']:.4f})")
    assert lines[head + 4].startswith("1 prompt token and 3 generated tokens")
    assert generate("Once", "-n", 3, "--logprobs", 1, "-v").err.count("logprob") == 1
    assert "logprob" not in generate("Once", "-n", 3, "--logprobs", 1, "-q").err


def test_a_batch_has_a_table_for_each_prompt(tmp_path):
    (tmp_path / "batch.txt").write_text("a\nb\n")
    lines = generate("--batch-file", tmp_path / "batch.txt", "-n", 1, "--logprobs", 0).err.splitlines()
    assert [line for line in lines if line in ("[1]", "[2]")] == ["[1]", "[2]"]


def test_a_bias_forces_and_bans():
    first, *_ = run()["token_ids"]
    assert first not in run("--logit-bias", f"{first}=-100")["token_ids"]
    assert run("--logit-bias", "7=100")["token_ids"] == [7] * 6
    twice = run("--logit-bias", "7=100", "--logit-bias", "8=100")["token_ids"]
    assert set(twice) <= {7, 8}


def test_the_penalties_are_those_of_the_engine():
    engine, bias = mlx_engine.load(MODEL, "simd"), dict.fromkeys(range(300, 316), 50.0)
    flags = ["--temp", 4, "--seed", 1, "-n", 30]
    flags += [flag for token, value in bias.items() for flag in ("--logit-bias", f"{token}={value}")]
    texts = [run(*flags)["token_ids"]]
    for name in ("presence_penalty", "frequency_penalty"):
        texts.append(run(*flags, f"--{name.replace('_', '-')}", 2)["token_ids"])
        options = {"temperature": 4.0, "seed": 1, "logit_bias": bias, name: 2}
        assert texts[-1] == engine.generate("Once", 30, ignore_eos=True, **options).token_ids
    assert len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--presence-penalty", "2.1"), "--presence-penalty"),
        (("--frequency-penalty", "nan"), "--frequency-penalty"),
        (("--logit-bias", "5"), "--logit-bias"),
        (("--logit-bias", "x=1"), "--logit-bias"),
        (("--logit-bias", "-5=1"), "--logit-bias"),
        (("--logit-bias", "5=101"), "--logit-bias"),
        (("--logit-bias", "5=1", "--logit-bias", "5=2"), "--logit-bias"),
        (("--logprobs", "21"), "logprobs"),
        (("--logprobs", "-1"), "logprobs"),
    ],
    ids=str,
)
def test_wrong_use_is_exit_2_before_the_model_is_looked_for(options, found):
    result = generate("a", *options, model="nope.gguf")
    assert (result.code, result.out) == (2, "")
    assert found in only_line(result)


def test_an_id_that_the_model_lacks_is_wrong_use():
    result = generate("a", "--logit-bias", "512=1")
    assert (result.code, result.out) == (2, "")
    assert "--logit-bias must have token ids from 0 to 511, not 512" in result.err
