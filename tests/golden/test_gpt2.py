"""GPT-2's logits and greedy ids, against transformers: from its own folder, and from GGUF."""

from pathlib import Path

import numpy as np
import pytest

from tests.contract.check import EMULATED
from tests.golden.convert import convert
from tests.golden.goldens import BACKENDS, DATA, Golden, check_close, engine, greedy, in_chunks

ARCHITECTURES = ("gpt2",)
NAMES = [f"{architecture}-{file}" for architecture in ARCHITECTURES for file in ("hf", "F32", "Q8_0")]
# A few seconds for what others do in a moment: one prompt is enough for them.
SLOW = ("scalar", EMULATED)
WITHOUT_JIT = "simd --no-jit"
# Chunks against one pass: the same products, summed in another order.
CUT, CUT_OF_ONE = 2e-6, 1e-5

backends = pytest.mark.parametrize("backend", [*BACKENDS, WITHOUT_JIT])
names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    made = tmp_path_factory.mktemp("gguf")
    return {name: golden(name, made) for name in NAMES}


def golden(name: str, made: Path) -> Golden:
    architecture, file = name.split("-")
    folder = DATA / f"{architecture}-micro"
    if file == "hf":
        return Golden(name, folder / "hf", folder / "golden.npz")
    path = made / f"{name}.gguf"
    convert(folder / "hf", path, file)
    return Golden(name, path, folder / "golden.npz", "_q8" if file == "Q8_0" else "")


@names
@backends
def test_logits(goldens: dict[str, Golden], backend: str, name: str):
    of = goldens[name]
    for i in range(of.prompts()):
        check_close(of.logits(i), np.asarray(engine(of.checkpoint, backend).logits(of.prompt(i))))


@names
@backends
def test_greedy_ids(goldens: dict[str, Golden], backend: str, name: str):
    of = goldens[name]
    for i in (1,) if backend in SLOW else range(of.prompts()):
        assert greedy(of, i, backend, kv=True) == of.greedy(i)


@names
def test_greedy_ids_without_a_cache(goldens: dict[str, Golden], name: str):
    of = goldens[name]
    for i in range(of.prompts()):
        assert greedy(of, i, "simd", kv=False) == of.greedy(i)


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 9])
@names
def test_chunks_equal_one_pass(goldens: dict[str, Golden], name: str, chunk: int):
    of = goldens[name]
    ids = of.prompt(2)
    whole, cut = (in_chunks(of.checkpoint, "simd", ids, n) for n in (len(ids), chunk))
    check_close(whole, cut, each=CUT_OF_ONE, all_=CUT)


def test_text_comes_out():
    """Ids that mean nothing, but through the folder's own tokenizer and back."""
    for architecture in ARCHITECTURES:
        made = engine(DATA / f"{architecture}-micro" / "hf", "simd")
        generation = made.generate("ab", max_tokens=4, ignore_eos=True)
        assert len(generation.token_ids) == 4
        assert made.tokenizer.encode("ab") == generation.prompt_ids[-len(made.tokenizer.encode("ab")) :]
