"""Write a GGUF file again, or a Hugging Face folder as one, with its matrices quantised; the rest stays as it is.

A file has one table for the lookup and for a head that is tied to it, and llama.cpp multiplies with that, so here the
table is quantised too: as the head if it is that, else as all layers. A row that is looked up is rounded once, which
costs no time, and the table is a good part of a small model.
"""

from __future__ import annotations

import math
import os
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
from mlx_engine.convert.gguf_form import GGUFForm, Part, from_folder
from mlx_engine.errors import OptionError, require
from mlx_engine.models.conversion import HEAD, LAYER_TYPES, Conversion, layer_type
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight

# `general.file_type`, as llama.cpp numbers the types that most of a file is in.
FILE_TYPES = {"f32": 0, "q4_0": 2, "q4_1": 3, "q8_0": 7}
# `general.quantization_version`: that of the block formats as they are since 2023.
QUANTIZATION_VERSION = 2
TABLE = "token_embd.weight"
# Values that are converted at a time: whole blocks of any type.
PIECE = 1 << 20


@dataclass
class Line:
    """One layer type of the file that was written: matrices, bytes before and after, and squared differences."""

    kind: str
    count: int = 0
    types: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    n_values: int = 0
    squares: float = 0.0

    @property
    def rmse(self) -> float:
        """The root of the mean squared difference to the values that were stored."""
        return math.sqrt(self.squares / self.n_values) if self.n_values else 0.0


class Pending:
    """A tensor of the new file, converted when its bytes are asked for, which is once."""

    def __init__(self, part: Part, type_: GGMLType, line: Line, done: Callable[[], None]) -> None:
        self.name, self.shape, self.type = part.name, part.shape, type_
        self.nbytes = type_.bytes_for(math.prod(part.shape))
        self._make, self._line, self._done = part.make, line, done

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes; the line learns what they are."""
        stored, line = self._make(), self._line
        new = stored.as_type(self.type)
        line.count += 1
        line.types[new.type.name] = line.types.get(new.type.name, 0) + 1
        line.bytes_in, line.bytes_out = line.bytes_in + stored.nbytes, line.bytes_out + new.nbytes
        line.n_values += math.prod(self.shape)
        if new is not stored:
            line.squares += squared_difference(stored, new)
        self._done()
        return new.data


def requantize(
    source: Path, target: Path, conversion: Conversion, *, progress: Callable[[int, int], None] | None = None
) -> list[Line]:
    """Write `target`, and say per layer type what was done; the file appears when it is complete, or not at all.

    `progress` is called with (tensors written, tensors in all).

    Raises:
        OptionError: the conversion has no type for all matrices or names a layer that the model does not have, the two
            are one file, or the target is something else than a file.
        SourceError: the source cannot be read, or the target cannot be written.
        FormatError: the source is not sound, or a type in it cannot be read.
        ModelError: of a folder, GGUF cannot say what the model is.
        TokenizerError: of a folder, GGUF cannot say how its text becomes tokens.
    """
    # The file takes the place of what is there, which must not be a pipe or a device, and need not be a link's target.
    plain = not os.path.lexists(target) or (target.is_file() and not target.is_symlink())
    require(plain, option="OUT", expected="the name of a file, new or there", found=str(target))
    known = conversion.quant in FILE_TYPES
    require(known, option="quant", expected=" or ".join(FILE_TYPES), found=conversion.quant)
    if source.is_dir():
        return _write(source, from_folder(source), target, conversion, progress)
    if target.exists() and source.samefile(target):
        raise OptionError(option="OUT", expected="another file than IN, which is read meanwhile", found=str(target))
    with open_gguf(source) as file:
        parts = {n: Part(n, info.shape, info.type, partial(file.weight, n)) for n, info in file.tensors.items()}
        form = GGUFForm(file.typed_metadata(), parts)
        return _write(source, form, target, conversion, progress, version=file.version)


def _write(
    source: Path,
    form: GGUFForm,
    target: Path,
    conversion: Conversion,
    progress: Callable[[int, int], None] | None,
    *,
    version: int = 3,
) -> list[Line]:
    conversion.check(str(source), form.parts)
    lines: dict[str, Line] = {}
    written: list[str] = []

    def pending(part: Part) -> Pending:
        def done() -> None:
            written.append(part.name)
            if progress is not None:
                progress(len(written), len(form.parts))

        kind = kind_of(part.name, len(part.shape))
        line = lines.setdefault(kind or "others", Line(kind or "others"))
        return Pending(part, new_type(form.parts, part, kind, conversion), line, done)

    tensors = [pending(part) for part in form.parts.values()]
    write_gguf(target, new_metadata(form, conversion), tensors, version=version)
    return list(lines.values())


def kind_of(name: str, n_dims: int) -> str | None:
    """The layer type of a matrix; None for what stays as it is."""
    if n_dims != 2 or not name.endswith(".weight"):
        return None
    if name == TABLE:
        return "token_embd"
    kind = layer_type(name)
    return kind if kind in LAYER_TYPES else None


def new_type(parts: Mapping[str, Part], part: Part, kind: str | None, conversion: Conversion) -> GGMLType:
    """The type that a tensor is written as."""
    if kind is None:
        return part.type
    is_plain_table = kind == "token_embd" and f"{HEAD}.weight" in parts
    asked = Conversion(conversion.quant, conversion.min_dim) if is_plain_table else conversion
    return asked.type_of(part.name, part.shape, part.type)[0]


def new_metadata(form: GGUFForm, conversion: Conversion) -> dict[str, object]:
    """The source's own, with the type that most of the file has now."""
    metadata: dict[str, object] = dict(form.metadata)
    metadata["general.file_type"] = Value(ValueType.UINT32, FILE_TYPES[conversion.quant])
    metadata["general.quantization_version"] = Value(ValueType.UINT32, QUANTIZATION_VERSION)
    return metadata


def squared_difference(a: Weight, b: Weight) -> float:
    """The sum over all values, in float64, a piece at a time."""
    total = 0.0
    for start in range(0, math.prod(a.shape), PIECE):
        one, other = (_values(weight, start) for weight in (a, b))
        difference = one - other
        total += float(np.einsum("i,i->", difference, difference, dtype=np.float64))
    return total


def _values(weight: Weight, start: int) -> NDArray[np.float32]:
    first, last = (n // weight.type.block_size * weight.type.block_bytes for n in (start, start + PIECE))
    return quant.dequantize(weight.data[first:last], weight.type, where=f"tensor {weight.name!r}")


def total(lines: Sequence[Line]) -> Line:
    """All of them together."""
    return Line(
        "total",
        count=sum(line.count for line in lines),
        bytes_in=sum(line.bytes_in for line in lines),
        bytes_out=sum(line.bytes_out for line in lines),
        n_values=sum(line.n_values for line in lines),
        squares=sum(line.squares for line in lines),
    )
