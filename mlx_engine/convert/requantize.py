"""Quantise a GGUF file or a Hugging Face folder into a new GGUF file. Only matrices are quantised.

The embedding table is quantised too: with tied embeddings it is the output head, and its type is the head's; otherwise
it has the type of all layers. Quantised lookups cost no time, and the table is a large part of a small model.
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
from mlx_engine.checkpoint.gguf_types import Value, ValueType
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.convert.gguf_form import GGUFForm, Part, from_folder
from mlx_engine.errors import OptionError, require
from mlx_engine.models.conversion import Conversion
from mlx_engine.models.layer_types import HEAD, LAYER_TYPES, layer_type
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight

# `general.file_type`: llama.cpp's numbers for the type of most tensors in a file.
FILE_TYPES = {"f32": 0, "q4_0": 2, "q4_1": 3, "q8_0": 7}
# `general.quantization_version`: the version of the block formats since 2023.
QUANTIZATION_VERSION = 2
TABLE = "token_embd.weight"
# Values converted at a time; a multiple of every block size.
PIECE = 1 << 20


@dataclass
class Line:
    """Totals of one layer type: number of matrices, bytes before and after, squared errors."""

    kind: str
    count: int = 0
    types: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    n_values: int = 0
    squares: float = 0.0

    @property
    def rmse(self) -> float:
        """The root mean square error relative to the values of the source."""
        return math.sqrt(self.squares / self.n_values) if self.n_values else 0.0


class Pending:
    """A tensor of the new file, converted when `data` is accessed (once)."""

    def __init__(self, part: Part, type_: GGMLType, line: Line, done: Callable[[], None]) -> None:
        self.name, self.shape, self.type = part.name, part.shape, type_
        self.nbytes = type_.bytes_for(math.prod(part.shape))
        self._make, self._line, self._done = part.make, line, done

    @property
    def data(self) -> NDArray[np.uint8]:
        """Convert the tensor, add it to the totals, and return its bytes."""
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
    source: Path,
    target: Path,
    conversion: Conversion,
    *,
    allow_settings: Sequence[str] = (),
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Line]:
    """Write `target` and return the totals per layer type. The file appears only when it is complete.

    `progress` is called with (tensors written, total tensors), and `note` with a line for each of `allow_settings`:
    settings of a folder that are left out if they are not implemented.

    Raises:
        OptionError: the conversion has no type for all matrices or names a layer that the model does not have, source
            and target are the same file, or the target is not a regular file.
        SourceError: the source cannot be read, or the target cannot be written.
        FormatError: the source is damaged, or a type in it cannot be read.
        ModelError: GGUF cannot represent the configuration of a folder.
        TokenizerError: GGUF cannot represent the tokenizer of a folder.
    """
    # The new file replaces an existing one, which must not be a pipe or a device. A symbolic link itself is replaced.
    plain = not os.path.lexists(target) or (target.is_file() and not target.is_symlink())
    require(plain, option="OUT", expected="the path of a new or an existing file", found=str(target))
    known = conversion.quant in FILE_TYPES
    require(known, option="quant", expected=" or ".join(FILE_TYPES), found=conversion.quant)
    if source.is_dir():
        form = from_folder(source, allow_settings)
        for line in form.notes:
            note(line)
        return _write(source, form, target, conversion, progress)
    expected = "a folder as IN, or no such option: all settings of a GGUF file are copied"
    require(not allow_settings, option="--allow-setting", expected=expected, found=allow_settings)
    if target.exists() and source.samefile(target):
        raise OptionError(
            option="OUT", expected="another file than IN, which is read during writing", found=str(target)
        )
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
    """Return the layer type of a matrix, or of the matrices of all experts; None for tensors that are not converted."""
    kind = layer_type(name)
    if n_dims != (3 if kind.endswith("_exps") else 2) or not name.endswith(".weight"):
        return None
    if name == TABLE:
        return "token_embd"
    return kind if kind in LAYER_TYPES else None


def new_type(parts: Mapping[str, Part], part: Part, kind: str | None, conversion: Conversion) -> GGMLType:
    """Return the type of a tensor in the new file."""
    if kind is None:
        return part.type
    is_plain_table = kind == "token_embd" and f"{HEAD}.weight" in parts
    asked = Conversion(conversion.quant, conversion.min_dim) if is_plain_table else conversion
    return asked.type_of(part.name, part.shape, part.type)[0]


def new_metadata(form: GGUFForm, conversion: Conversion) -> dict[str, object]:
    """Return the source's metadata with an updated file type."""
    metadata: dict[str, object] = dict(form.metadata)
    metadata["general.file_type"] = Value(ValueType.UINT32, FILE_TYPES[conversion.quant])
    metadata["general.quantization_version"] = Value(ValueType.UINT32, QUANTIZATION_VERSION)
    return metadata


def squared_difference(a: Weight, b: Weight) -> float:
    """Return the sum of squared differences over all values, in float64, piece by piece."""
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
    """Return the totals of all lines."""
    return Line(
        "total",
        count=sum(line.count for line in lines),
        bytes_in=sum(line.bytes_in for line in lines),
        bytes_out=sum(line.bytes_out for line in lines),
        n_values=sum(line.n_values for line in lines),
        squares=sum(line.squares for line in lines),
    )
