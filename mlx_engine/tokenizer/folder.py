"""The tokenizer.json of a folder; if it has none, an error that says what the folder has in its place."""

from __future__ import annotations

from pathlib import Path

from mlx_engine.errors import SourceError

# Other forms of tokenizers, which transformers reads, and the older form of Mistral, which it does not.
_OTHERS = {
    "tokenizer.model": "a SentencePiece model",
    "vocab.json": "an older form of byte-level BPE",
    "tekken.json": "Mistral's own form",
}
_HINT = (
    "download tokenizer.json, which many models have beside it, or write it with transformers, "
    """`python -c "from transformers import AutoTokenizer as T; T.from_pretrained({0!r}).save_pretrained({0!r})"`"""
)


def tokenizer_json(folder: Path) -> Path:
    """Return the path of the tokenizer.json of a folder.

    Raises:
        SourceError: there is none; the message names other forms of a tokenizer in the folder.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        return path
    other = next((name for name in _OTHERS if (folder / name).exists()), None)
    if other is None:
        found, hint = "none", "download it too, or name a file that has a tokenizer"
    else:
        found, hint = f"only {other}, {_OTHERS[other]}, which is not read here", _HINT.format(str(folder))
    raise SourceError(f"{folder}: expected a folder with a tokenizer.json, found {found}; {hint}")
