"""gpt-oss against transformers, from every form of its files; windows are a fifth of the longer prompt."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.convert.requantize import requantize
from mlx_engine.models.conversion import Conversion
from tests.contract.check import EMULATED
from tests.golden.convert import read_safetensors, write_safetensors
from tests.golden.goldens import BACKENDS, DATA, Golden, check_close, engine, greedy
from tests.golden.test_dense import with_tokenizer

FOLDER = DATA / "gptoss-micro"
FORMS = ("hf", "bf16", "mlx", "mxfp4.gguf", "q8_0.gguf")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
Goldens = Callable[[str], Golden]


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    made = tmp_path_factory.mktemp("gpt-oss")
    return cache(lambda form: golden(form, made))


def golden(form: str, made: Path) -> Golden:
    path, suffix = made / form, "_q8" if form.startswith("q8_0") else ""
    if form == "hf":
        path = FOLDER / "hf"
    elif form == "mxfp4.gguf":
        requantize(tokenized(made), path, Conversion("f32", layers=dict.fromkeys(EXPERTS, "keep")))
    elif form == "q8_0.gguf":
        requantize(tokenized(made), path, Conversion("q8_0"))
    else:
        folder_of(path, {"bf16": in_floats, "mlx": as_mlx_community}[form](tensors()), quantization=form)
    return Golden(form, path, FOLDER / "golden.npz", suffix)


def tokenized(made: Path) -> Path:
    folder = made / "tokenized"
    return folder if folder.exists() else with_tokenizer(FOLDER / "hf", folder)


def tensors() -> dict[str, np.ndarray]:
    return read_safetensors(FOLDER / "hf" / "model.safetensors")


def folder_of(path: Path, made: dict[str, np.ndarray], quantization: str = "hf", **settings: object) -> Path:
    """A copy of the folder with other tensors and settings."""
    shutil.copytree(FOLDER / "hf", path)
    config = json.loads((path / "config.json").read_text()) | settings
    if quantization != "hf":
        del config["quantization_config"]
    if quantization == "mlx":
        config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", made)
    return path


def in_floats(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts as transformers has them in memory: floats, transposed."""
    made = {name: values for name, values in stored.items() if not name.endswith(("_blocks", "_scales"))}
    checkpoint = open_checkpoint(FOLDER / "hf")
    for name in stored:
        if name.endswith("_blocks"):
            made[name.removesuffix("_blocks")] = checkpoint.weight(name).dequantize().swapaxes(1, 2)
    return made


def as_mlx_community(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as mlx-lm divides and names them."""
    made = {}
    for name, values in stored.items():
        stem, is_expert, part = name.partition(".experts.")
        if not is_expert:
            made[name] = values
            continue
        whole, kind = part.rsplit("_", 1)
        new = {"blocks": "weight", "scales": "scales", "bias": "bias"}[kind]
        if kind == "blocks":
            values = np.ascontiguousarray(values).view(np.uint32).reshape(*values.shape[:2], -1)
        parts = {"down_proj": values}
        if whole == "gate_up_proj":
            parts = {"gate_proj": values[:, ::2], "up_proj": values[:, 1::2]}
        made |= {f"{stem}.experts.{p}.{new}": np.ascontiguousarray(v) for p, v in parts.items()}
    return made


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        # The forms differ in what is read, and `scalar` and the emulator take long.
        pytest.param(
            backend, form, marks=[pytest.mark.slow] * (backend in ("scalar", EMULATED) and form != "mxfp4.gguf")
        )
        for backend in BACKENDS
        for form in FORMS
    ],
)
def test_logits_and_greedy_ids(goldens: Goldens, form: str, backend: str):
    of = goldens(form)
    for i in (1,) if backend in ("scalar", EMULATED) else (0, 1):
        check_close(of.logits(i), np.asarray(engine(of.checkpoint, backend).logits(of.prompt(i))))
    if backend not in ("scalar", EMULATED):
        assert greedy(of, 1, backend, kv=True) == of.greedy(1)
