"""A file that asks for a BOS gets one before its prompts, from whoever generates and nobody else."""

from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.checkpoint import write_gguf

MODEL = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"


def with_bos(folder: Path, *, asked: bool) -> mlx_engine.Engine:
    with mlx_engine.open_gguf(MODEL) as file:
        metadata = {**file.typed_metadata(), "tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.add_bos_token": asked}
        write_gguf(folder / "model.gguf", metadata, [file.weight(name) for name in file.tensors])
    return mlx_engine.load(folder / "model.gguf", jit=False)


@pytest.mark.some(1)
@pytest.mark.parametrize("asked", [True, False])
def test_bos_goes_before_a_text_where_the_file_asks_for_it(tmp_path: Path, asked: bool):
    engine = with_bos(tmp_path, asked=asked)
    ids = engine.tokenizer.encode("Once")
    assert 5 not in ids
    assert engine.prompt_ids("Once") == ([5] if asked else []) + ids
    assert engine.generate("Once", max_tokens=1).prompt_ids == ([5] if asked else []) + ids


def test_ids_are_taken_as_they_are(tmp_path: Path):
    assert with_bos(tmp_path, asked=True).generate([7, 8], max_tokens=1).prompt_ids == [7, 8]
