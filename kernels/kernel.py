"""`Kernel`: the source text of a GPU kernel, and the names of its input and output arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

METAL = Path(__file__).with_name("metal")
HEADERS = ("sixteen", "q8_0", "q4_0", "q4_k", "q6_k", "affine", "products", "heads")

MathMode = Literal["safe", "relaxed", "fast"]


@dataclass(frozen=True)
class Kernel:
    """The arguments of `mx.fast.metal_kernel`: the parts of a kernel that do not depend on the shapes of a launch.

    `source` is the body of a function in the Metal Shading Language; MLX generates the function's signature. `header`
    is inserted before the function.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    math_mode: MathMode = "safe"

    def __post_init__(self) -> None:
        # Kernels are keys of a cache, so their fields must be hashable: tuples, not lists.
        object.__setattr__(self, "input_names", tuple(self.input_names))
        object.__setattr__(self, "output_names", tuple(self.output_names))
        if not (self.name.isidentifier() and self.name.isascii()):
            raise ValueError(f"kernel {self.name!r}: expected a name that C accepts: letters, digits and _")

    @classmethod
    def load(
        cls, name: str, inputs: Sequence[str], outputs: Sequence[str], *, headers: Sequence[str] = (), body: str = ""
    ) -> Kernel:
        """Load the source from `metal/BODY.metal`, by default `metal/NAME.metal`, and the header.

        The header joins the texts of `metal/PART.h.metal` for each PART in `HEADERS`, then in `headers`.
        """
        header = "\n".join(_text(f"{part}.h.metal") for part in (*HEADERS, *headers))
        return cls(name, tuple(inputs), tuple(outputs), _text(f"{body or name}.metal"), header)


@lru_cache
def _text(file: str) -> str:
    return (METAL / file).read_text(encoding="utf-8")
