"""Split GGUF files, NAME-00001-of-00005.gguf: their names, and all parts as one file.

The first part has the metadata of the model; all parts have their number, counted from 0, the number of parts and the
number of tensors in all. Source: llama.cpp, tools/gguf-split, and `llama_split_path` in src/llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_engine.checkpoint.gguf import COUNT_KEY, GGUFFile
from mlx_engine.errors import FormatError, SourceError
from mlx_engine.quant.weight import Weight

NUMBER_KEY, TENSORS_KEY = "split.no", "split.tensors.count"
_KEYS = (NUMBER_KEY, COUNT_KEY, TENSORS_KEY)
_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_DAMAGED = "the parts are of different models or damaged; download all of them again"


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the split file to which a file of this name belongs, or the name alone."""
    match = _NAME.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    return [f"{match['stem']}-{i:05}-of-{match['count']}.gguf" for i in range(1, int(match["count"]) + 1)]


def part_files(path: Path) -> list[Path]:
    """Return the files of the split file to which `path` belongs by its name, or `path` alone if one is missing."""
    files = [path.with_name(name) for name in part_names(path.name)]
    return files if all(file.is_file() for file in files) else [path]


class SplitGGUFFile(GGUFFile):
    """All parts of a split GGUF file as one: the metadata of the first part, and the tensors of all."""

    def __init__(self, parts: Sequence[GGUFFile]) -> None:
        first = parts[0]
        self.path, self.version, self.alignment = first.path, first.version, first.alignment
        self.metadata = {key: value for key, value in first.metadata.items() if key not in _KEYS}
        self.kinds = {key: kind for key, kind in first.kinds.items() if key not in _KEYS}
        self.data_offset = sum(part.data_offset for part in parts)
        self.tensors = {name: info for part in parts for name, info in part.tensors.items()}
        self._parts = parts
        self._part_of = {name: part for part in parts for name in part.tensors}

    @property
    def files(self) -> list[Path]:
        """The files of all parts, in order."""
        return [part.path for part in self._parts]

    def weight(self, name: str) -> Weight:
        """Return a tensor in its stored type, as a view of the mapped part that has it."""
        return self._part_of[self._info(name).name].weight(name)

    def close(self) -> None:
        """Close all parts."""
        for part in self._parts:
            part.close()


def open_split(named: GGUFFile, open_part: Callable[[Path], GGUFFile]) -> GGUFFile:
    """Open all parts of a split file, given any of them; a file with a count of one part is returned itself.

    Raises:
        SourceError: a part is missing, or the name of the file does not show where the others are.
        FormatError: the parts do not fit together.
    """
    count = _number(named, COUNT_KEY)
    if count == 1:
        return named
    names = part_names(named.path.name)
    if len(names) != count:
        raise SourceError(
            f"{named.path}: expected a name that ends in -00001-of-{count:05}.gguf, because the file is one of "
            f"{count:,} parts, found {named.path.name!r}; give all parts the names that they were published with"
        )
    paths = [named.path.with_name(name) for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 5:,} more" if len(missing) > 5 else ""
        raise SourceError(
            f"{named.path}: expected all {count:,} parts of this split file in one folder, found no "
            f"{', '.join(missing[:5])}{more}; download the missing parts"
        )
    parts: list[GGUFFile] = []
    try:
        for path in paths:
            parts.append(named if path == named.path else open_part(path))
        _check(parts, count)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return SplitGGUFFile(parts)


def _check(parts: Sequence[GGUFFile], count: int) -> None:
    """Check that the parts are numbered in order, and have together the tensors that the first one counts."""
    names = set[str]()
    for number, part in enumerate(parts):
        for key, expected in ((COUNT_KEY, count), (NUMBER_KEY, number)):
            found = _number(part, key)
            if found != expected:
                raise _error(part, f"{key} to be {expected:,}", f"{found:,}")
        twice = sorted(names & set(part.tensors))
        if twice:
            raise _error(part, "each tensor in one part only", f"{twice[0]!r} in two")
        names |= set(part.tensors)
    total = _number(parts[0], TENSORS_KEY)
    if len(names) != total:
        raise _error(parts[0], f"{total:,} tensors in all parts together, as {TENSORS_KEY} says", f"{len(names):,}")


def _number(part: GGUFFile, key: str) -> int:
    value = part.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < (key == COUNT_KEY):
        raise _error(part, f"a whole number as {key}", repr(value)[:80])
    return value


def _error(part: GGUFFile, expected: str, found: str) -> FormatError:
    return FormatError(where=str(part.path), expected=expected, found=found, hint=_DAMAGED)
