"""The file must hold what the checkpoint held, under the names that llama.cpp gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training extra is not installed")
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from tools.evaluate_gguf import read_model  # noqa: E402
from tools.export_gguf import metadata, tensor_name, write  # noqa: E402
from tools.qwen3_torch import Config, Qwen3  # noqa: E402
from tools.train_tokenizer import train  # noqa: E402

SMALL = Config(vocab=400, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=96, context=40)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    torch.manual_seed(1)
    tensors = {tensor_name(name): weight.numpy() for name, weight in Qwen3(SMALL).state_dict().items()}
    tokenizer = json.loads(train(seed=2, count=50, size=400).to_str())
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write(path, metadata(SMALL, tokenizer), tensors)
    return path, tensors


def test_tensors_come_back(exported: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = exported
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert stored.keys() == tensors.keys()
    assert "output.weight" not in stored
    assert len(stored) == 2 + 11 * SMALL.layers
    for name, array in tensors.items():
        values = gguf.dequantize(stored[name].data, stored[name].tensor_type).reshape(array.shape)
        if array.ndim == 1:
            assert stored[name].tensor_type == gguf.GGMLQuantizationType.F32
            np.testing.assert_array_equal(values, array)
        else:
            assert stored[name].tensor_type == gguf.GGMLQuantizationType.Q8_0
            np.testing.assert_allclose(values, array, atol=np.abs(array).max() / 127)
            assert np.abs(values).max() > 0.01


def test_keys_say_what_the_model_is(exported: tuple[Path, dict[str, Any]]) -> None:
    fields = gguf.GGUFReader(exported[0]).fields
    wanted = {
        "general.architecture": "qwen3", "general.license": "mit", "general.file_type": 7,
        "general.quantization_version": 2, "qwen3.block_count": 2, "qwen3.context_length": 40,
        "qwen3.embedding_length": 64, "qwen3.feed_forward_length": 96, "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2, "qwen3.attention.key_length": 32,
        "qwen3.attention.value_length": 32, "qwen3.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": 399,
        "tokenizer.ggml.bos_token_id": 397, "tokenizer.ggml.padding_token_id": 397,
        "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    assert {key: fields[key].contents() for key in wanted} == wanted
    assert fields["qwen3.attention.layer_norm_rms_epsilon"].contents() == pytest.approx(1e-6)


def test_the_vocabulary_is_complete(exported: tuple[Path, dict[str, Any]]) -> None:
    fields = gguf.GGUFReader(exported[0]).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens[397:] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(set(tokens)) == 400
    assert fields["tokenizer.ggml.token_type"].contents() == [1] * 397 + [3] * 3
    merges = fields["tokenizer.ggml.merges"].contents()
    assert len(merges) == 397 - 256
    assert {merge.replace(" ", "") for merge in merges} <= set(tokens)


def test_the_chat_template_is_the_layout_of_the_corpus(exported: tuple[Path, dict[str, Any]]) -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = gguf.GGUFReader(exported[0]).fields["tokenizer.chat_template"].contents()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    text = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert jinja2.Template(template).render(messages=messages[:1]) == "<|im_start|>system\nBe kind.<|im_end|>\n"


def test_the_file_runs_like_the_checkpoint(exported: tuple[Path, dict[str, Any]]) -> None:
    torch.manual_seed(1)
    fresh, stored = Qwen3(SMALL), read_model(exported[0])
    assert replace(stored.config, eps=SMALL.eps) == SMALL
    assert stored.config.eps == pytest.approx(SMALL.eps)  # the file has it in float32
    tokens = torch.arange(30)[None] * 7
    with torch.no_grad():
        expected, got = fresh(tokens), stored(tokens)
    assert not torch.equal(got, expected)  # Q8_0 rounds
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_a_foreign_tensor_is_refused(exported: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, tensors = exported
    tokenizer = json.loads(train(seed=2, count=50, size=400).to_str())
    extra = {**tensors, "output.weight": tensors["token_embd.weight"]}
    write(tmp_path / "extra.gguf", metadata(SMALL, tokenizer), extra)
    with pytest.raises(ValueError, match=r"output\.weight"):
        read_model(tmp_path / "extra.gguf")
