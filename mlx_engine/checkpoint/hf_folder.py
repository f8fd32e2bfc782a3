"""Open the safetensors and JSON files of a Hugging Face folder. The JSON files are not trusted."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from mlx_engine.checkpoint.paths import read_file, refuse_pointer
from mlx_engine.checkpoint.safetensors import SafetensorsFile, open_safetensors
from mlx_engine.errors import FormatError, SourceError, first

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NUMBERED = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
# A JSON file may have at most this many bytes, and this many lists and objects. The second limit bounds the memory of
# the parsed value: an empty list with its comma has 3 bytes in the file, but takes 64 bytes of memory. The largest
# published index has 17 MB.
MAX_JSON_BYTES, MAX_JSON_VALUES = 1 << 25, 1 << 20
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")


def has_safetensors(folder: Path) -> bool:
    """Return whether a folder has model.safetensors, an index, or files with the names of shards."""
    return any((folder / name).exists() for name in (INDEX, SINGLE)) or bool(_named_shards(folder))


def shards(folder: Path) -> list[SafetensorsFile]:
    """Open the safetensors files of a folder.

    If the folder has an index, open the files that the index lists. Otherwise, open model.safetensors if it exists, and
    the files model-I-of-N.safetensors if it does not.

    Raises:
        SourceError: a file is missing.
        FormatError: the index or a file is damaged.
    """
    if (folder / INDEX).exists():
        names, source = _indexed(folder), INDEX
    elif (folder / SINGLE).exists():
        names, source = [SINGLE], SINGLE
    else:
        names, source = _named_shards(folder) or [SINGLE], "the numbers in the file names"
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise SourceError(
            f"{folder}: safetensors files are missing: {first(missing)}. By {source}, the model has "
            f"{len(names):,} safetensors files. Download what is missing: "
            f"`hf download ORG/NAME --local-dir {shlex.quote(str(folder))}`"
        )
    return [open_safetensors(folder / name) for name in names]


def _indexed(folder: Path) -> list[str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    # A file name in the index must not lead out of the folder.
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and SHARD_NAME.fullmatch(name) for name in weight_map.values()
    ):
        raise FormatError(
            where=str(folder / INDEX),
            expected="a weight_map from tensor names to files of this folder",
            found=repr(weight_map)[:80],
            hint="download the folder again",
        )
    return sorted(set(weight_map.values()))


def _named_shards(folder: Path) -> list[str]:
    """Return the names of all N shards if there is a file model-I-of-N.safetensors, otherwise []."""
    for file in sorted(folder.glob("model-*.safetensors")):
        match = NUMBERED.fullmatch(file.name)
        if match:
            return [f"model-{i:05}-of-{match[2]}.safetensors" for i in range(1, int(match[2]) + 1)]
    return []


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        SourceError: the file is missing, or cannot be read.
        FormatError: the file is a Git-LFS pointer, is too large, is not JSON, or does not contain an object.
    """
    content = read_file(path, MAX_JSON_BYTES)
    refuse_pointer(path, content, "JSON")
    value = parse_json(content, str(path))
    if not isinstance(value, dict):
        found, hint = type(value).__name__, "download the file again"
        raise FormatError(where=str(path), expected="a JSON object", found=found, hint=hint)
    return value


def parse_json(content: bytes | str, where: str, hint: str = "download the file again") -> Any:
    """Parse a JSON text; raise FormatError if it is invalid or too large. `where` names the file in errors."""
    braces, brackets = ("{", "[") if isinstance(content, str) else (b"{", b"[")
    n_values = content.count(braces) + content.count(brackets)  # type: ignore[arg-type]
    if len(content) > MAX_JSON_BYTES or n_values > MAX_JSON_VALUES:
        expected = f"JSON of at most {MAX_JSON_BYTES:,} bytes with at most {MAX_JSON_VALUES:,} lists and objects"
        found = f"{len(content):,} bytes with {n_values:,} lists and objects"
        raise FormatError(where=where, expected=expected, found=found, hint=hint)
    try:
        return json.loads(content)
    except RecursionError:
        found = "lists or objects nested too deep"
    except ValueError as error:  # not JSON, not UTF-8, or an integer of more than 4,300 digits, Python's limit
        found = str(error).partition(";")[0] if content else "an empty file"
    raise FormatError(where=where, expected="JSON", found=found, hint=hint)
