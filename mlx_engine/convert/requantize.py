"""Quantise the matrices of a GGUF file or a Hugging Face folder into a new GGUF file.

The embedding table is quantised too, because it is a large part of a small model. If the head is tied to the table, the
table gets the type that is requested for the head. If not, the table gets the type of `--to`. If `--to` is one of
llama.cpp's mixes of types (`file_types.py`), the table then gets the type of most matrices in the mix.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_engine import quant
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_values import Value, ValueType
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.convert.file_types import FILE_TYPES, kind_of, types_of
from mlx_engine.convert.gguf_form import GGUFForm, Part, from_folder
from mlx_engine.errors import FormatError, OptionError, SourceError, listed
from mlx_engine.machine.memory import usable_cores
from mlx_engine.quant.statistics import not_finite
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion

# The value of `general.quantization_version`: llama.cpp's version of the block formats, the same since 2023.
QUANTIZATION_VERSION = 2
# Number of values that `squared_difference` compares at a time; a multiple of every block size.
PIECE = 1 << 20


@dataclass
class Line:
    """Totals of all tensors of one layer type.

    Attributes:
        kind: the layer type, such as "attn_q"; "others" for tensors that are never converted.
        types: maps the name of each new type to the number of tensors that get this type.
        n_values: number of values, converted or not.
        squares: sum of the squared errors; values that are not converted have no error.
        power: sum of the squares of the converted values, before the conversion.
    """

    kind: str
    count: int = 0
    types: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    n_values: int = 0
    squares: float = 0.0
    power: float = 0.0

    @property
    def rmse(self) -> float:
        """The root mean square error of all values."""
        return math.sqrt(self.squares / self.n_values) if self.n_values else 0.0

    @property
    def relative_rmse(self) -> float:
        """The root mean square error of the converted matrices, relative to the root mean square of their values."""
        return math.sqrt(self.squares / self.power) if self.power else 0.0

    def add(self, before: Weight, new: Weight, where: str) -> None:
        """Add a tensor, before and after its conversion.

        Raises:
            FormatError: the conversion made values infinite.
        """
        self.count += 1
        self.types[new.type.name] = self.types.get(new.type.name, 0) + 1
        self.bytes_in, self.bytes_out = self.bytes_in + before.nbytes, self.bytes_out + new.nbytes
        self.n_values += math.prod(new.shape)
        if new is before:
            return
        squares, power = squared_difference(before, new)
        if not math.isfinite(squares):
            expected = f"values that {new.type.name} can store"
            found, hint = f"values of {before.name!r} that are too large", "choose bf16, which can store larger values"
            raise FormatError(where=where, expected=expected, found=found, hint=hint)
        self.squares, self.power = self.squares + squares, self.power + power


class Pending:
    """A tensor of the new file, for `write_gguf`.

    Each access to `data` converts the tensor on all cores and adds it to the totals, so access `data` only once.
    """

    def __init__(self, part: Part, type_: GGMLType, line: Line, done: Callable[[], None], where: str) -> None:
        self.name, self.shape, self.type = part.name, part.shape, type_
        self.nbytes = type_.bytes_for(math.prod(part.shape))
        self._make, self._line, self._done, self._where = part.make, line, done, where

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the converted tensor.

        Raises:
            FormatError: a value is NaN, infinite or too large for the new type.
        """
        stored = self._make()
        if stored.type != self.type:
            check_finite(stored, self._where)
        new = stored.as_type(self.type, threads=usable_cores())
        self._line.add(stored, new, self._where)
        self._done()
        return new.data


def check_finite(weight: Weight, where: str) -> None:
    """Raise FormatError if a value is NaN or infinite; `where` names the model."""
    bad = not_finite(weight)
    if bad is not None:
        found = f"NaN or infinity in {weight.name!r} ({bad.count:,} of {math.prod(weight.shape):,} values)"
        raise FormatError(where=where, expected="finite values", found=found, hint="download the model again")


def requantize(
    source: Path,
    target: Path,
    conversion: Conversion,
    *,
    allow_settings: Sequence[str] = (),
    allow_mixed: bool = False,
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Line]:
    """Write `target` and return the totals per layer type. The file appears only when it is complete.

    Args:
        source: a GGUF file or a Hugging Face folder.
        target: the file to write.
        conversion: the types of the matrices; a `FileConversion` allows more types than a plain `Conversion`.
        allow_settings: settings of a folder that are left out if they are not implemented.
        allow_mixed: write the file even if matrices with more than half of the bytes get neither the requested type
            nor llama.cpp's replacement for it.
        note: called with lines about ignored settings, and about matrices that do not get the requested type.
        progress: called with (tensors written, total tensors).

    Raises:
        OptionError: `conversion.quant` is `keep`, or the conversion names a layer that the model does not have. More
            than half of the bytes get another type (see `allow_mixed`). `allow_settings` is given for a GGUF file. The
            target is the source, a file of the source folder other than a GGUF file, a link, or not a regular file.
        SourceError: the source cannot be read, or the target cannot be written.
        FormatError: the source is damaged, or a type in it cannot be read. A value is NaN, infinite or too large for
            its new type.
        ModelError: GGUF cannot represent the configuration of a folder.
        TokenizerError: GGUF cannot represent the tokenizer of a folder.
    """
    # Accept only a new name or a regular file: renaming the new file to `target` would replace a pipe, a device or a
    # symbolic link (the link itself, not the file that it names).
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        message = f"{target} exists and is a link, folder, pipe or device; name a new file or a regular file"
        raise OptionError(message, option="OUT", found=str(target))
    if conversion.quant not in FILE_TYPES:
        message = f"quant: unknown type {conversion.quant!r}; choose {listed(FILE_TYPES)}"
        raise OptionError(message, option="quant", found=conversion.quant)
    if source.is_dir():
        if target.exists() and _is_in(source, target):
            message = f"{target} is a file of the folder that is read; write to another file"
            raise OptionError(message, option="OUT", found=str(target))
        form = from_folder(source, allow_settings)
        for line in form.notes:
            note(line)
        types = _types(source, form, conversion, note, allow_mixed=allow_mixed)
        return _write(source, form, target, conversion, types, progress)
    if allow_settings:
        message = "--allow-setting needs a folder: all settings of a GGUF file are copied"
        raise OptionError(message, option="--allow-setting", found=allow_settings)
    with open_gguf(source) as file:
        if target.exists() and any(Path(part).samefile(target) for part in (source, *file.files)):
            message = f"{target} is the file that is read; write to another one"
            raise OptionError(message, option="OUT", found=str(target))
        parts = {n: Part(n, info.shape, info.type, partial(file.weight, n)) for n, info in file.tensors.items()}
        form = GGUFForm(file.typed_metadata(), parts)
        types = _types(source, form, conversion, note, allow_mixed=allow_mixed)
        return _write(source, form, target, conversion, types, progress, version=file.version)


def _is_in(folder: Path, target: Path) -> bool:
    """Return whether `target` is a file of `folder`, but no GGUF file; raise SourceError if `folder` is unreadable."""
    try:
        files = [file for file in folder.iterdir() if file.suffix != ".gguf" and file.exists()]
        return any(file.samefile(target) for file in files)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read ({error.strerror or error})") from error


def _types(
    source: Path, form: GGUFForm, conversion: Conversion, note: Callable[[str], None], *, allow_mixed: bool
) -> dict[str, GGMLType]:
    """Check the requested types, and map the name of each tensor of the new file to its type."""
    conversion.check(str(source), form.parts)
    types = {name: part.type for name, part in form.parts.items()}
    matrices = []
    for name, choice in types_of(form.parts, form.metadata, conversion).items():
        if choice is not None:
            part, types[name] = form.parts[name], choice.type
            nbytes = part.type.bytes_for(math.prod(part.shape))
            matrices.append(Matrix(name, part.shape[-1], nbytes, choice.asked, choice.type, is_small=choice.is_small))
    check_mixed(matrices, note, allow_mixed=allow_mixed)
    return types


def _write(
    source: Path,
    form: GGUFForm,
    target: Path,
    conversion: Conversion,
    types: Mapping[str, GGMLType],
    progress: Callable[[int, int], None] | None,
    *,
    version: int = 3,
) -> list[Line]:
    lines: dict[str, Line] = {}
    written: list[str] = []

    def pending(part: Part) -> Pending:
        def done() -> None:
            written.append(part.name)
            if progress is not None:
                progress(len(written), len(form.parts))

        kind = kind_of(part.name, len(part.shape))
        line = lines.setdefault(kind or "others", Line(kind or "others"))
        return Pending(part, types[part.name], line, done, str(source))

    tensors = [pending(part) for part in form.parts.values()]
    write_gguf(target, new_metadata(form, conversion), tensors, version=version)
    return list(lines.values())


def new_metadata(form: GGUFForm, conversion: Conversion) -> dict[str, object]:
    """Return the source's metadata with the new file type and the version of the block formats."""
    metadata: dict[str, object] = dict(form.metadata)
    metadata["general.file_type"] = Value(ValueType.UINT32, FILE_TYPES[conversion.quant])
    metadata["general.quantization_version"] = Value(ValueType.UINT32, QUANTIZATION_VERSION)
    return metadata


def squared_difference(a: Weight, b: Weight) -> tuple[float, float]:
    """Return the sum of the squares of `b - a`, and the sum of the squares of `a`, both in float64."""
    difference, power = 0.0, 0.0
    for start in range(0, math.prod(a.shape), PIECE):
        one, other = (_values(weight, start) for weight in (a, b))
        power += float(np.einsum("i,i->", one, one, dtype=np.float64))
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            other -= one
        difference += float(np.einsum("i,i->", other, other, dtype=np.float64))
    return difference, power


def _values(weight: Weight, start: int) -> NDArray[np.float32]:
    first, last = (n // weight.type.block_size * weight.type.block_bytes for n in (start, start + PIECE))
    return quant.dequantize(weight.data[first:last], weight.type, where=f"tensor {weight.name!r}")


def total(lines: Sequence[Line]) -> Line:
    """Return the totals of all lines."""
    types = Counter[str]()
    for line in lines:
        types.update(line.types)
    names = ("count", "bytes_in", "bytes_out", "n_values", "squares", "power")
    return Line("total", types=dict(types), **{name: sum(getattr(line, name) for line in lines) for name in names})


@dataclass(frozen=True)
class Matrix:
    """A matrix to convert.

    Attributes:
        columns: the number of weights in a row.
        nbytes: the bytes of the matrix in the source.
        asked: the requested type.
        type: the type that the matrix gets.
        is_small: whether `type` is about as small as `asked`, so that `check_mixed` accepts the matrix. In a GGUF file,
            this is true of `asked` and of llama.cpp's replacement for it. In a folder for MLX, it is true of quantised
            groups with at most as many bits as `asked`.
    """

    name: str
    columns: int
    nbytes: int
    asked: GGMLType
    type: GGMLType
    is_small: bool


def check_mixed(matrices: Sequence[Matrix], note: Callable[[str], None], *, allow_mixed: bool) -> None:
    """Report the matrices that get another type, because their rows are not divisible into the requested type's blocks.

    Call `note` with a line for each of these matrices, then with a line about their number and share of the bytes.

    Raises:
        OptionError: more than half of the bytes are in matrices without `is_small`, and `allow_mixed` is False.
    """
    others = [matrix for matrix in matrices if matrix.type != matrix.asked]
    if not others:
        return
    for matrix in others:
        blocks = f"{matrix.columns:,} columns do not fill {matrix.asked.name} blocks of {matrix.asked.block_size}"
        note(f"{matrix.name}: {blocks}; its type is {matrix.type.name}")
    whole = sum(matrix.nbytes for matrix in matrices)
    types = ", ".join(f"{n} {name}" for name, n in Counter(matrix.type.name for matrix in others).most_common())
    share = sum(matrix.nbytes for matrix in others) / whole
    note(f"{len(others)} of {len(matrices)} matrices, {share:.0%} of their bytes, get another type: {types}")
    large = [matrix for matrix in others if not matrix.is_small]
    n_bytes = sum(matrix.nbytes for matrix in large)
    if 2 * n_bytes > whole and not allow_mixed:
        part = f"{len(large)} of {len(matrices)} matrices, {n_bytes / whole:.0%} of the bytes"
        message = f"{part}, cannot have the type of --to; choose another type, or give --allow-mixed"
        raise OptionError(message, option="--to", found=part)
