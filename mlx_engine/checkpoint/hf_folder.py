"""The files of a Hugging Face folder: its shards of safetensors, and its JSON files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mlx_engine.checkpoint.lfs import refuse_pointer
from mlx_engine.checkpoint.safetensors import SafetensorsFile, open_safetensors
from mlx_engine.errors import FormatError, SourceError

INDEX = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")


def shards(folder: Path) -> list[SafetensorsFile]:
    """Open the safetensors files of a folder: the files in its index, or the only one.

    Raises:
        SourceError: a file is missing.
        FormatError: the index or a file is damaged.
    """
    if not (folder / INDEX).exists():
        return [open_safetensors(folder / "model.safetensors")]
    weight_map = read_json(folder / INDEX).get("weight_map")
    # A file name in the index is untrusted: it must not lead out of the folder.
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and SHARD_NAME.fullmatch(name) for name in weight_map.values()
    ):
        raise FormatError(
            where=str(folder / INDEX),
            expected="a weight_map from tensor names to files of this folder",
            found=repr(weight_map)[:80],
            hint="download the folder again",
        )
    return [open_safetensors(folder / name) for name in sorted(set(weight_map.values()))]


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON file that contains an object.

    Raises:
        SourceError: the file is missing, or cannot be read.
        FormatError: the file is a Git-LFS pointer, not JSON, or not an object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: expected a readable file, found {error.strerror or error}") from error
    refuse_pointer(path, content, "JSON")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FormatError(where=str(path), expected="JSON", found=str(error), hint="download the file again") from error
    if not isinstance(value, dict):
        raise FormatError(
            where=str(path),
            expected="a JSON object",
            found=type(value).__name__,
            hint="download the file again",
        )
    return value
