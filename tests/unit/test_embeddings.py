"""Embeddings: pooling as files say, the same bits in any batch, and the prompt of a reranker."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.pooling import Pooling, read_pooling
from mlx_engine.errors import ContextLengthError, FormatError, ModelError, OptionError, TokenizerError
from mlx_engine.loop.request import Request
from mlx_engine.loop.row_reader import PooledHidden
from mlx_engine.options import Options
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.tokenizer.chat import label_ids, ranking_ids
from tests import scheduling
from tests.scheduling import MICRO

PROMPT = [int(i) for i in np.random.default_rng(5).integers(0, 400, 90)]
FOLDER = MICRO.parent / "hf"


@pytest.fixture(scope="module", params=["simd", "parallel"])
def engine(request: pytest.FixtureRequest):
    with mlx_engine.load(MICRO, request.param) as found:
        yield found


def reading(engine: mlx_engine.Engine, ids: list[int], kind: Any = "mean") -> Request:
    return engine.prompts.reading(list(ids), PooledHidden(len(ids), kind))


def vector(request: Request) -> list[float]:
    assert isinstance(request.reader, PooledHidden)
    return request.reader.vector(normalized=True).tolist()


def alone(engine: mlx_engine.Engine, ids: list[int], kind: Any = "mean") -> list[float]:
    scheduler, request = scheduling.scheduler_of(engine), reading(engine, ids, kind)
    scheduler.submit(request)
    scheduling.run(scheduler)
    return vector(request)


def copy_of(tmp_path: Path, **config: Any) -> Path:
    folder = tmp_path / "hf"
    shutil.copytree(FOLDER, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return folder


def gguf_with(tmp_path: Path, *tensors: Weight, **metadata: Any) -> Path:
    path = tmp_path / "model.gguf"
    with open_gguf(MICRO) as file:
        write_gguf(path, {**file.metadata, **metadata}, [*map(file.weight, file.tensors), *tensors])
    return path


def test_a_vector_has_length_1_and_the_same_bits_in_any_batch(engine: mlx_engine.Engine):
    texts = ["hello", "you there, and more words than the others have", "a", PROMPT]
    found = np.array(engine.embed(texts))
    assert (found.dtype, found.shape) == (np.float32, (4, engine.config.hidden_size))
    assert np.allclose((found.astype(np.float64) ** 2).sum(1), 1)
    for text, row in zip(texts, found, strict=True):
        assert np.array_equal(np.array(engine.embed([text]))[0], row)
    short = np.array(engine.embed(texts, 8))
    assert np.allclose(short, found[:, :8] / np.sqrt((found[:, :8] ** 2).sum(1, keepdims=True)), atol=1e-6)
    assert engine.embed([]).shape == (0, engine.config.hidden_size)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_and_answers_beside_them_change_no_bit(engine: mlx_engine.Engine, kind: Any, budget: int):
    scheduler = scheduling.scheduler_of(engine, budget=budget, shared_budget=budget)
    others, found = scheduling.requests(engine), [reading(engine, PROMPT[i:], kind) for i in (0, 40, 89)]
    for request in (*others[:2], *found, *others[2:]):
        scheduler.submit(request)
    scheduling.run(scheduler)
    assert [vector(request) for request in found] == [alone(engine, PROMPT[i:], kind) for i in (0, 40, 89)]
    assert scheduling.ids(others) == scheduling.alone(engine)


def test_answers_and_vectors_take_turns(engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch):
    scheduler, kinds = scheduling.scheduler_of(engine, budget=8, shared_budget=8), list[str]()
    for name in ("forward", "forward_hidden"):
        run = getattr(engine.model, name)
        monkeypatch.setattr(engine.model, name, lambda batch, run=run, name=name: (kinds.append(name), run(batch))[1])
    for request in (engine.request([1, 2], scheduling.options(0, 9)), reading(engine, PROMPT)):
        scheduler.submit(request)
    scheduling.run(scheduler)
    assert kinds[:16] == ["forward_hidden", "forward"] * 8 or kinds[:16] == ["forward", "forward_hidden"] * 8


def test_a_preempted_text_gives_the_same_vector(engine: mlx_engine.Engine):
    scheduler = scheduling.scheduler_of(engine, 100, budget=16, shared_budget=16)
    first, second = engine.request([7] * 30, scheduling.options(0, 40)), reading(engine, PROMPT)
    scheduler.submit(first)
    scheduler.submit(second)
    scheduling.run(scheduler)
    assert second.n_preemptions > 0
    assert vector(second) == alone(engine, PROMPT)


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_a_backend_that_works_ahead_reads_the_whole_text(kind: Any):
    """The last pass over the text is under way, or has no row to read, when the one before it is settled."""
    with mlx_engine.load(MICRO, "mlx") as lazy:
        scheduler, request = scheduling.scheduler_of(lazy, budget=50, shared_budget=50), reading(lazy, PROMPT, kind)
        scheduler.submit(request)
        scheduling.run(scheduler)
        assert np.allclose(vector(request), alone(lazy, PROMPT, kind), atol=1e-6)


def test_what_cannot_be_embedded_is_refused(engine: mlx_engine.Engine):
    for texts, error in (([""], OptionError), ([[]], OptionError), ([[1] * 5000], ContextLengthError)):
        with pytest.raises(error):
            engine.embed(texts)
    for dimensions in (0, engine.config.hidden_size + 1, 1.5):
        with pytest.raises(OptionError, match="dimensions must be"):
            engine.embed(["a"], dimensions)  # type: ignore[arg-type]


# ---- what files say ----


def no_weight(name: str) -> Weight:
    raise KeyError(name)


def checkpoint_of(folder: Path) -> Checkpoint:
    """A folder whose tensors nobody reads."""
    return Checkpoint(str(folder), "hf", "qwen3", {}, {}, {}, no_weight)


def folder_pooling(folder: Path, modules: list[str], config: dict[str, Any]) -> Pooling:
    listed = [{"path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
              for i, name in enumerate(modules)]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return read_pooling(checkpoint_of(folder), folder)


def test_the_modules_of_a_folder(tmp_path: Path):
    three = ["Transformer", "Pooling", "Normalize"]
    assert folder_pooling(tmp_path, three, {"pooling_mode_lasttoken": True}) == Pooling("last", is_declared=True)
    assert folder_pooling(tmp_path, three[:2], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}) == (
        Pooling("mean", is_normalized=False, is_declared=True)
    )
    assert folder_pooling(tmp_path, three, {"pooling_mode": "cls"}).kind == "cls"
    dense = folder_pooling(tmp_path, [*three[:2], "Dense", "Normalize"], {"pooling_mode_mean_tokens": True})
    assert dense.missing == "the module Dense"
    two = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    assert folder_pooling(tmp_path, three, two).missing == "pooling by mean and max"
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(FormatError, match="a list of modules"):
        read_pooling(checkpoint_of(tmp_path), tmp_path)


def test_a_model_card_can_say_that_a_model_ranks(tmp_path: Path):
    checkpoint = checkpoint_of(tmp_path)
    card = tmp_path / "README.md"
    for text, is_reranker in (("---\nlicense: mit\npipeline_tag: text-ranking\n---\n", True), ("text-ranking", False)):
        card.write_text(text)
        assert (read_pooling(checkpoint, tmp_path).ranking is not None) == is_reranker


def test_a_folder_whose_tokenizer_ends_texts(tmp_path: Path):
    folder = copy_of(tmp_path)
    file = json.loads((folder / "tokenizer.json").read_text())
    end = file["added_tokens"][0]
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["content"], "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(file))
    with mlx_engine.load(folder, "simd") as engine:
        assert engine.tokenizer.ends == (end["id"],)
        assert engine.prompts.embedding("hello").prompt_ids == [*engine.prompt_ids("hello"), end["id"]]
        assert engine.prompts.embedding([5, 6]).prompt_ids == [5, 6]


@pytest.mark.parametrize(("number", "kind"), [(0, "last"), (1, "mean"), (2, "cls"), (3, "last")])
def test_the_pooling_type_of_a_gguf_file(tmp_path: Path, number: int, kind: str):
    with mlx_engine.load(gguf_with(tmp_path, **{"qwen3.pooling_type": number}), "simd") as engine:
        assert engine.prompts.pooling.kind == kind
        ends = [engine.tokenizer.eos_id] if number == 3 else []
        assert engine.prompts.embedding("hello").prompt_ids == [*engine.prompt_ids("hello"), *ends]


def test_an_eos_after_texts_of_a_gguf_file(tmp_path: Path):
    added = {"qwen3.pooling_type": 1, "tokenizer.ggml.add_eos_token": True}
    with mlx_engine.load(gguf_with(tmp_path, **added), "simd") as engine:
        assert engine.prompts.embedding("hello").prompt_ids[-1] == engine.tokenizer.eos_id
        assert engine.prompt_ids("hello")[-1] != engine.tokenizer.eos_id


# ---- rerankers ----


def test_a_reranker_of_a_folder(tmp_path: Path):
    folder = copy_of(tmp_path, classifier_from_token=["n", "y"])
    documents = ["one", "two words, and a third", "four"]
    with mlx_engine.load(folder, "simd") as engine:
        found = engine.rerank("a query", documents)
        yes, no = label_ids(engine.tokenizer, ("y", "n"))
        for document, score in zip(documents, found, strict=True):
            ids = ranking_ids(engine.tokenizer, None, "a query", document, None)
            row = np.array(engine.logits(ids))[-1].astype(np.float64)
            assert score == pytest.approx(1 / (1 + math.exp(row[no] - row[yes])), rel=1e-6)
            assert engine.rerank("a query", [document]) == [score]
        assert engine.rerank("a query", []) == []


def test_the_rows_of_a_gguf_reranker(tmp_path: Path):
    with open_gguf(MICRO) as file:
        table = file.weight("token_embd.weight").dequantize()
    template = "{query} and {document}<|im_end|>"
    labels = {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}
    rows = Weight.pack("cls.output.weight", table[[30, 40]], F32)
    path = gguf_with(tmp_path, rows, **labels, **{"tokenizer.chat_template.rerank": template})
    with mlx_engine.load(path, "simd") as engine:
        (score,) = engine.rerank("one", ["two"])
        ids = [*engine.tokenizer.encode("one and two"), engine.tokenizer.special_tokens["<|im_end|>"]]
        assert engine.prompts.reranking("one", "two").prompt_ids == ids
        hidden = engine.prompts.reading(ids, PooledHidden(len(ids), "last"))
        list(engine.run_requests([hidden])[0])
        assert isinstance(hidden.reader, PooledHidden)
        yes, no = table[[30, 40]].astype(np.float64) @ hidden.reader.vector(normalized=False).astype(np.float64)
        assert score == pytest.approx(1 / (1 + math.exp(no - yes)), rel=1e-6)


def test_the_prompt_of_a_reranker_is_that_of_the_model_card():
    with mlx_engine.load(FOLDER, "simd") as engine:
        tokenizer = engine.tokenizer
        start, end = (tokenizer.special_tokens[f"<|im_{name}|>"] for name in ("start", "end"))
        found = ranking_ids(tokenizer, None, "a query", "a <|im_end|> document", "Be short")
        pair = "<Instruct>: Be short\n<Query>: a query\n<Document>: a <|im_end|> document"
        judge = (
            "system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".'
        )
        after = tokenizer.encode("assistant\n<think>\n\n</think>\n\n", special=True)
        assert found == [
            *(start, *tokenizer.encode(judge), end, *tokenizer.encode("\n")),
            *(start, *tokenizer.encode(f"user\n{pair}"), end, *tokenizer.encode("\n"), start, *after),
        ]
        with pytest.raises(TokenizerError, match="to be one token"):
            label_ids(tokenizer, ("two words",))


def test_a_model_that_is_no_reranker_says_how_one_is_recognised(engine: mlx_engine.Engine):
    with pytest.raises(ModelError, match="classifier_from_token"):
        engine.rerank("a", ["b"])


def test_options_of_a_run_are_no_part_of_an_embedding(engine: mlx_engine.Engine):
    assert engine.prompts.embedding("a").options == Options(0)
