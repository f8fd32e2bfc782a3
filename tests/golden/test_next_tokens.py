"""The layer of multi-token prediction against a NumPy reference, from a folder and from a GGUF file; and as a drafter.

The reference follows vLLM's models/qwen3_next_mtp.py and llama.cpp's qwen35: the projection reads the normed embedding
first, then the normed hidden state, which is that after the model's last norm (llama.cpp's pull request 24025).
"""

from __future__ import annotations

import json
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba")

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.errors import OptionError
from mlx_engine.loop.mtp import MOST, READ, NextTokens
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.speculation import Speculation
from mlx_engine.models import qwen3_5
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import plan_model
from tests.golden.convert import read_safetensors, write_safetensors
from tests.golden.goldens import DATA
from tests.golden.test_speculation_bits import CASES, Asked, Hostile, compare, run
from tests.random_models import random_checkpoint, with_mtp

FOLDER = DATA / "qwen3_5-micro" / "hf"
IDS = [(5 * i * i + 7 * i) % 120 for i in range(21)]


def rms(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def rotated(x, n, theta=10_000.0):
    """Rotate the first n elements of each head of (T, heads, E), by the position of the row."""
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, n, 2) / n)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : n // 2], x[..., n // 2 : n]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., n:]], axis=-1)


def expected(w, table, head, hidden, ids, sizes):
    """Return logits (T, V) in float64; norm weights in `w` are the model's, by their GGUF names."""
    n_heads, n_kv, E, n_rotated = sizes
    x = (
        np.concatenate([rms(table[ids], w["nextn.enorm"]), rms(hidden, w["nextn.hnorm"])], axis=1)
        @ w["nextn.eh_proj"].T
    )
    h, T = rms(x, w["attn_norm"]), len(ids)
    q, gate = np.split((h @ w["attn_q"].T).reshape(T, n_heads, 2 * E), 2, axis=-1)
    k, v = ((h @ w[f"attn_{name}"].T).reshape(T, n_kv, E) for name in "kv")
    q, k = rotated(rms(q, w["attn_q_norm"]), n_rotated), rotated(rms(k, w["attn_k_norm"]), n_rotated)
    k, v = (np.repeat(of, n_heads // n_kv, axis=1) for of in (k, v))
    scores = np.einsum("the,she->hts", q, k) / np.sqrt(E)
    scores = np.exp(np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf))
    y = np.einsum("hts,she->the", scores / scores.sum(axis=-1, keepdims=True), v) / (1 + np.exp(-gate))
    x = x + y.reshape(T, -1) @ w["attn_output"].T
    h = rms(x, w["post_attention_norm"])
    x = x + (gated_ffn(h, *(w[f"ffn_{part}"] for part in PARTS)) if "ffn_gate" in w else mixture(w, h, n_used=2))
    return rms(x, w["nextn.shared_head_norm"]) @ head.T


PARTS = ("gate", "up", "down")


def gated_ffn(h, gate, up, down):
    return (h @ gate.T / (1 + np.exp(-h @ gate.T)) * (h @ up.T)) @ down.T


def mixture(w, h, n_used):
    """Return the weighted sum of the most probable experts, whose weights add up to 1, and the shared expert."""
    scores = np.exp(h @ w["ffn_gate_inp"].T)
    found = gated_ffn(h, *(w[f"ffn_{part}_shexp"] for part in PARTS))
    found = found / (1 + np.exp(-h @ w["ffn_gate_inp_shexp"].reshape(-1, 1)))
    for t in range(len(h)):
        used = np.argsort(-scores[t])[:n_used]
        for e in used:
            of = gated_ffn(h[t], *(w[f"ffn_{part}_exps"][e] for part in PARTS))
            found[t] += scores[t, e] / scores[t, used].sum() * of
    return found


# The names in a folder, by the GGUF names.
NAMES = {
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm", "attn_norm": "layers.0.input_layernorm",
    "post_attention_norm": "layers.0.post_attention_layernorm", "attn_output": "layers.0.self_attn.o_proj",
    "attn_q_norm": "layers.0.self_attn.q_norm", "attn_k_norm": "layers.0.self_attn.k_norm",
    **{f"attn_{part}": f"layers.0.self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the module `mtp`, as published: norm weights are stored minus 1."""
    path, config = tmp_path_factory.mktemp("mtp") / "model", json.loads((FOLDER / "config.json").read_text())
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    tensors, rng = read_safetensors(FOLDER / "model.safetensors"), np.random.default_rng(1)
    like = {name: f"model.layers.3.{hf.removeprefix('layers.0.')}.weight" for name, hf in NAMES.items() if "." in hf}
    D = config["hidden_size"]
    for name, hf in NAMES.items():
        shape = (D, 2 * D) if hf == "fc" else tensors[like[name]].shape if name in like else (D,)
        values = 0.2 * rng.standard_normal(shape)
        tensors[f"mtp.{hf}.weight"] = (values if len(shape) == 2 else values / 4).astype(np.float32)
    write_safetensors(path / "model.safetensors", tensors)
    return path


def stored(path):
    """Return the layer's tensors by GGUF name, in float64, the embeddings, and the sizes."""
    tensors = {name: values.astype(np.float64) for name, values in read_safetensors(path / "model.safetensors").items()}
    w = {name: tensors[f"mtp.{hf}.weight"] for name, hf in NAMES.items()}
    w = {name: values + 1 if values.ndim == 1 else values for name, values in w.items()}
    return w, tensors["model.embed_tokens.weight"], (4, 2, 32, 8)


def found(model, ids):
    """Return hidden states of all ids but the last, and the layer's logits for the ids after the first."""
    be = model.backend
    with be.session():
        batch = begin([SequenceInput(ids, model.new_pool(64).sequence(), wanted=1)])
        batch.keeps_hidden = True
        model.forward(batch)
        hidden = be.host(batch.hidden)[:-1]
        kv, logits = model.extra.new_pool(64).sequence(), []
        for first, last in ((0, 9), (9, 10), (10, len(ids) - 1)):  # in pieces, as a drafter runs it
            batch = begin([SequenceInput(ids[first + 1 : last + 1], kv, wanted=None)])
            logits.append(be.host(model.extra.forward(batch, be.array(hidden[first:last]))[0]))
            batch.commit()
    return hidden, np.concatenate(logits)


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", ["scalar", "simd", "parallel", "mlx"])
def test_a_folder_s_layer_computes_the_reference(folder, backend):
    w, table, sizes = stored(folder)
    planned = plan_model(open_checkpoint(folder), Conversion(), with_extra=True)
    model = planned.build(create_backend(backend, threads=1)).model
    hidden, logits = found(model, IDS)
    want = expected(w, table, table, hidden.astype(np.float64), IDS[1:], sizes)
    assert np.abs(logits - want).max() < 1e-5 * np.abs(want).max()
    plain = plan_model(open_checkpoint(folder), Conversion())
    assert (planned.n_parameters, plain.n_extra) == (plain.n_parameters, 0)
    assert planned.n_extra == sum(values.size for values in w.values())


@pytest.mark.parametrize(("is_fused", "counts"), [(True, {"mtp_num_hidden_layers": 1}), (False, {})])
def test_a_folder_s_layer_with_experts_computes_the_reference(tmp_path, is_fused, counts):
    """Published folders have the experts of a layer in two tensors, or each expert apart; some count no such layer."""
    own = DATA / "qwen3_5moe-micro" / "hf"
    config, tensors = json.loads((own / "config.json").read_text()), read_safetensors(own / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, **counts}))
    rng, D, n = np.random.default_rng(1), config["hidden_size"], config["num_experts"]
    made = {
        "mtp.fc.weight": 0.2 * rng.standard_normal((D, 2 * D)),
        **{f"mtp.{hf}.weight": rng.standard_normal(D) / 20 for hf in NAMES.values() if "norm" in hf and "." not in hf},
        **{
            name.replace("model.layers.1", "mtp.layers.0"): 0.2 * rng.standard_normal(values.shape)
            for name, values in tensors.items() if name.startswith("model.layers.1.")
        },
    }  # fmt: skip
    w = {name: made[f"mtp.{hf}.weight"] + ("norm" in name) for name, hf in NAMES.items() if "mlp" not in hf}
    block = "mtp.layers.0.mlp"
    w["ffn_gate_inp"], w["ffn_gate_inp_shexp"] = (made[f"{block}.{of}.weight"] for of in ("gate", "shared_expert_gate"))
    for part in PARTS:
        w[f"ffn_{part}_shexp"] = made[f"{block}.shared_expert.{part}_proj.weight"]
        w[f"ffn_{part}_exps"] = np.stack([made[f"{block}.experts.{e}.{part}_proj.weight"] for e in range(n)])
    if is_fused:
        made = {name: values for name, values in made.items() if ".experts." not in name}
        made[f"{block}.experts.gate_up_proj"] = np.concatenate([w["ffn_gate_exps"], w["ffn_up_exps"]], axis=1)
        made[f"{block}.experts.down_proj"] = w["ffn_down_exps"]
    made = {name: values.astype(np.float32) for name, values in made.items()}
    write_safetensors(tmp_path / "model.safetensors", {**tensors, **made})
    model = plan_model(open_checkpoint(tmp_path), Conversion(), with_extra=True).build(create_backend("simd")).model
    hidden, logits = found(model, IDS)
    table = tensors["model.embed_tokens.weight"].astype(np.float64)
    want = expected(w, table, table, hidden.astype(np.float64), IDS[1:], (4, 2, 32, 8))
    assert np.abs(logits - want).max() < 1e-5 * np.abs(want).max()


def test_hidden_states_are_those_after_the_last_norm(folder):
    model = plan_model(open_checkpoint(folder), Conversion(), with_extra=True).build(create_backend("simd")).model
    hidden, _ = found(model, IDS)
    with model.backend.session():
        batch = begin([SequenceInput(IDS, model.new_pool(64).sequence(), wanted=None)])
        logits = model.backend.host(model.forward(batch))[:-1]
        want = model.backend.host(model.backend.linear(model.backend.array(hidden), model.output))
    np.testing.assert_allclose(want, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.some(1)
@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "qwen3next"])
def test_a_gguf_file_s_layer_computes_the_reference(architecture):
    checkpoint = with_mtp(random_checkpoint(architecture, "F32"), "F32")
    model = plan_model(checkpoint, Conversion(), with_extra=True).build(create_backend("parallel", threads=1)).model
    hidden, logits = found(model, IDS)
    values = {name: checkpoint.weight(name).dequantize().astype(np.float64) for name in checkpoint.shapes}
    w = {name[6:-7]: of for name, of in values.items() if name.startswith("blk.2.")}
    head = values.get("output.weight", values["token_embd.weight"])
    s = checkpoint.settings
    sizes = s["attention.head_count"], s["attention.head_count_kv"], s["attention.key_length"], 16
    want = expected(w, values["token_embd.weight"], head, hidden.astype(np.float64), IDS[1:], sizes)
    assert np.abs(logits - want).max() < 1e-5 * np.abs(want).max()


def test_layers_that_are_not_whole_are_left_out(folder):
    checkpoint = open_checkpoint(folder)
    checkpoint.shapes.pop("mtp.layers.0.mlp.up_proj.weight")
    assert plan_model(checkpoint, Conversion(), with_extra=True).n_extra == 0
    with pytest.raises(OptionError, match="has no layer of multi-token prediction that this version runs"):
        mlx_engine.load("builtin", speculate="mtp")


# ---- as a drafter ----


def model_with_mtp(backend="parallel"):
    checkpoint = with_mtp(random_checkpoint("qwen35", "Q8_0"), "Q8_0")
    made = MetalBackend("emulator") if backend == "metal" else create_backend(backend, threads=1)
    return plan_model(checkpoint, Conversion(), with_extra=True).build(made).model


def drafting(of, seed, slots, n_tokens=300):
    pool = of.extra.new_pool(n_tokens, n_sequences=slots, page=16)
    return Hostile(None, seed, of.config.vocab_size, [NextTokens(of, of.extra, pool, 0.1)])


BACKENDS = ["parallel", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simd", "metal"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_have_the_same_bits(backend):
    of = model_with_mtp(backend)
    for seed, memory in ((3, 200), (8, 0)):
        made = compare(of, CASES, "mtp", 16, 40, memory, seed, partial(drafting, n_tokens=90 + 2 * memory))
        # A lazy backend runs ahead of proposals that are seldom right, as those of random weights are.
        assert made.n_proposed > (0 if backend == "metal" else 5)


def test_it_predicts_the_first_tokens_of_a_large_vocabulary(folder, monkeypatch):
    """Penalties and biases of other ids are left out; answers are the same."""
    whole = plan_model(open_checkpoint(folder), Conversion(), with_extra=True).build(create_backend("simd")).model
    monkeypatch.setattr(qwen3_5, "FIRST_TOKENS", 16)
    first = plan_model(open_checkpoint(folder), Conversion(), with_extra=True).build(create_backend("simd")).model
    assert (whole.extra.n_vocabulary, first.extra.n_vocabulary) == (128, 16)
    np.testing.assert_array_equal(found(first, IDS)[1], found(whole, IDS)[1][:, :16])
    of = model_with_mtp()
    compare(of, [*CASES, (20, [3], 3, 12, 1, 0)], "mtp", 16, 40, 200, 5, partial(drafting, n_tokens=400))


def test_it_reads_the_end_of_a_prompt_and_all_that_follows(monkeypatch):
    """A step's proposals are those of the layer, run over all hidden states at once."""
    of, calls = model_with_mtp(), []
    made = drafting(of, 3, 1, 600)
    (drafter,) = made.passes
    propose = drafter.propose

    def noted(wanted, budget):
        ids = {one: one.ids for one in wanted}
        proposals = propose(wanted, budget)
        calls.extend((ids[one], proposals[one], drafter._held[one].start) for one in proposals)
        return proposals

    monkeypatch.setattr(drafter, "propose", noted)
    made.depths = lambda drafter, asking, *_: [MOST] * len(asking)
    prompt = [(3 * i * i + i) % 250 for i in range(READ + 40)]
    asked = Asked(of, prompt, 0, 14, 1, 0)
    request = asked.request()
    run(Scheduler(of, of.new_pool(400, n_proposed=8), budget=64, speculation=made), [request])
    assert request.output.token_ids == asked.continued[0]
    assert made.n_accepted <= made.n_proposed
    assert len(calls) > 5
    for ids, proposed, start in calls[:3]:
        assert len(proposed) == MOST
        assert start == len(calls[0][0]) - 1 - READ
        assert proposed[0] == first_of(of, ids, start)
    assert drafter.pool.used_pages(0) == 0


def test_it_begins_after_a_gap_in_the_hidden_states():
    of = model_with_mtp()
    (drafter,) = drafting(of, 3, 1).passes
    rows = np.arange(10.0)[:, None]
    sequence = Named(ids=list(range(9)), hidden=deque([(0, rows[:3]), (5, rows[5:6]), (6, rows[6:8])]))
    part, hidden = drafter._next(sequence)
    assert (list(part.ids), hidden[:, 0].tolist(), drafter._held[sequence].start) == ([6, 7, 8], [5, 6, 7], 5)
    sequence.hidden.append((9, rows[9:]))
    assert drafter._next(sequence) is None


class Named(SimpleNamespace):
    __hash__ = object.__hash__


def first_of(of, ids, start):
    """Return the token that the layer predicts after ids, from the hidden states of all positions from `start` on."""
    be = of.backend
    with be.session():
        batch = begin([SequenceInput(ids[:-1], of.new_pool(400).sequence(), wanted=1)])
        batch.keeps_hidden = True
        of.forward(batch)
        hidden = be.host(batch.hidden)[start:]
        batch = begin([SequenceInput(ids[start + 1 :], of.extra.new_pool(400).sequence(), wanted=1)])
        return int(be.host(of.extra.forward(batch, be.array(hidden))[0]).argmax())


def test_an_engine_proposes_by_the_layer_unless_a_request_says_otherwise(folder, monkeypatch):
    monkeypatch.setattr(Speculation, "depths", lambda self, drafter, asking, *_: [2] * len(asking))
    monkeypatch.setattr(Speculation, "plan", lambda self, chunks, drafts, n: [len(draft.ids) for draft in drafts])
    monkeypatch.setattr("mlx_engine.engine.RequestBuilder.tokenizer", NO_TEXT)
    with mlx_engine.load(folder, "parallel", threads=1) as engine:
        assert engine.speculation == (True, "mtp", ("mtp",))
        runs = {how: engine.generate(IDS, 20, logprobs=0, speculate=how) for how in ("off", "auto", "mtp")}
        assert len({generation.digest for generation in runs.values()}) == 1
        assert [list(runs[how].drafters) for how in runs] == [[], ["mtp"], ["mtp"]]
    with mlx_engine.load(folder, "parallel", threads=1, speculate="off") as engine:
        assert engine.model.extra is None


NO_TEXT = SimpleNamespace(
    eog_ids=frozenset(), stream=lambda **_: SimpleNamespace(add=lambda token: "", finish=lambda: ""),
)  # fmt: skip
