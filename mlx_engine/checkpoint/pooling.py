"""Read from a model's files how hidden states become an embedding, and how a reranker computes a score.

A GGUF file has `ARCH.pooling_type`. A folder may have the files of sentence-transformers: `modules.json`, and the
`config.json` of its Pooling module. A GGUF file is a reranker if its pooling type is `GGUF_RANK` or it has a chat
template named "rerank". A folder is a reranker if it has `classifier_from_token` in config.json, a LogitScore module,
or `pipeline_tag: text-ranking` in the header of its model card.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np

from mlx_engine.checkpoint.hf_folder import read_json
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import FormatError

Kind = Literal["last", "mean", "cls"]

# Maps values of GGUF's `pooling_type` to kinds of pooling. The value 0 means no pooling.
GGUF_KINDS: Mapping[object, Kind] = {1: "mean", 2: "cls", 3: "last"}
GGUF_RANK = 4
CLASSIFIER = "cls.output.weight"
FOLDER_KINDS: Mapping[str, Kind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
# The implemented modules of sentence-transformers; each is named by the last part of its type.
MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")
# The default labels (see `Ranking`): those of Qwen3-Reranker.
LABELS = ("yes", "no")


@dataclass(frozen=True)
class Pooling:
    """How a text becomes a vector.

    Attributes:
        kind: which hidden states are used: the last token's ("last"), the mean of all, or the first token's ("cls").
        is_normalized: whether the vector is scaled to length 1.
        is_declared: whether the files name a kind of pooling; if not, `kind` and `is_normalized` are the defaults.
        missing: a step that the files name but that is not implemented, or None.
        ranking: None if the model is not a reranker.
    """

    kind: Kind = "last"
    is_normalized: bool = True
    is_declared: bool = False
    missing: str | None = None
    ranking: Ranking | None = None


@dataclass(frozen=True, eq=False)
class Ranking:
    """How a reranker scores a document: by the softmax over the logits of two tokens, the labels.

    Attributes:
        labels: the texts of the two tokens. The score is the probability of the first one.
        template: the prompt, with {query} and {document}; None for the prompt of Qwen3-Reranker.
        classifier: (2, D) the rows of the output head for the labels, from the tensor `CLASSIFIER` of a GGUF file; None
            if the file has no such tensor.
    """

    labels: tuple[str, str] = LABELS
    template: str | None = None
    classifier: np.ndarray | None = None


def read_pooling(checkpoint: Checkpoint, path: Path) -> Pooling:
    """Read the pooling of a model from its files; raise FormatError if a file is damaged or unsupported."""
    return _of_gguf(checkpoint) if checkpoint.naming == "gguf" else _of_folder(checkpoint, path)


def _of_gguf(checkpoint: Checkpoint) -> Pooling:
    number = checkpoint.settings.get("pooling_type")
    template = checkpoint.metadata.get("tokenizer.chat_template.rerank")
    if number == GGUF_RANK or isinstance(template, str):
        given = checkpoint.settings.get("classifier.output_labels")
        labels = _labels(given, checkpoint.where) if given is not None else LABELS
        matrix = checkpoint.weight(CLASSIFIER).dequantize() if CLASSIFIER in checkpoint.shapes else None
        if matrix is not None and matrix.shape[0] != len(labels):
            found = f"{matrix.shape[0]} rows"
            raise FormatError(where=checkpoint.where, expected="a row of cls.output for each of 2 labels", found=found,
                              hint="this reranker is not implemented")  # fmt: skip
        if matrix is not None and labels[0] not in ("yes", "true"):
            labels, matrix = (labels[1], labels[0]), matrix[::-1]
        return Pooling(ranking=Ranking(labels, template if isinstance(template, str) else None, matrix))
    kind = GGUF_KINDS.get(number)
    return Pooling() if kind is None else Pooling(kind, is_declared=True)


def _of_folder(checkpoint: Checkpoint, folder: Path) -> Pooling:
    ranking = None
    named, modules = checkpoint.settings.get("classifier_from_token"), folder / "modules.json"
    parts = _modules(modules) if modules.exists() else []
    if named is not None:  # vLLM's key `classifier_from_token` lists the label for "not relevant" first
        no, yes = _labels(named, checkpoint.where)
        ranking = Ranking((yes, no))
    elif any(kind == "LogitScore" for kind, _ in parts) or _is_for_ranking(folder / "README.md"):
        ranking = Ranking()
    if not any(kind == "Pooling" for kind, _ in parts):
        return Pooling(ranking=ranking)
    missing = next((f"the module {kind}" for kind, _ in parts if kind not in MODULES), None)
    (place, *_) = [place for kind, place in parts if kind == "Pooling"]
    config = read_json(folder / place / "config.json")
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [
        name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
        for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on
    ]  # fmt: skip
    kind = FOLDER_KINDS.get(modes[0]) if len(modes) == 1 else None
    if kind is None:
        missing = missing or f"pooling by {' and '.join(map(str, modes)) or 'nothing'}"
    is_normalized = any(kind == "Normalize" for kind, _ in parts)
    return Pooling(kind or "last", is_normalized, is_declared=True, missing=missing, ranking=ranking)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return (type, folder) for each module of modules.json: the last part of its type and of its path."""
    try:
        listed = json.loads(path.read_text("utf-8"))
        if not isinstance(listed, list):
            raise TypeError(f"{type(listed).__name__} in place of a list")
        return [(str(one["type"]).rpartition(".")[2], Path(str(one["path"])).name) for one in listed]
    except (ValueError, TypeError, KeyError) as error:
        expected = "a list of modules, each with type and path"
        raise FormatError(where=str(path), expected=expected, found=str(error), hint="download it again") from error


def _labels(given: object, where: str) -> tuple[str, str]:
    if isinstance(given, list) and len(given) == 2 and all(isinstance(one, str) for one in given):
        return cast("tuple[str, str]", tuple(given))
    hint = "other rerankers are not implemented"
    raise FormatError(where=where, expected="2 labels of a reranker", found=f"{given!r:.80}", hint=hint)


def _is_for_ranking(card: Path) -> bool:
    """Return whether the header of a model card declares a reranker."""
    try:
        head = card.read_text("utf-8")[: 1 << 14]
    except (OSError, UnicodeDecodeError):
        return False
    front = re.match(r"---\n(.*?)\n---", head, re.DOTALL)
    return front is not None and re.search(r"^pipeline_tag:\s*[\"']?text-ranking", front[1], re.MULTILINE) is not None
