"""The table of GGUF's tensor types: number, name, weights per block and bytes per block.

Files with tensors of any type in this table can be opened and listed. `quant.readable_types()` returns the types that
can also be dequantised.

Source: `enum ggml_type` and the type traits of ggml, from which llama.cpp computes tensor sizes,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/include/ggml.h
A block of Q8_1 has 36 bytes here, as in ggml's struct: two float16 and 32 quants. The Python package `gguf`
counts 40 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A storage format: `block_size` consecutive weights of a row take `block_bytes` bytes."""

    id: int
    name: str
    block_size: int
    block_bytes: int

    def bytes_for(self, n_elements: int) -> int:
        """Return the bytes that `n_elements` weights take.

        Raises:
            ValueError: the weights do not fill whole blocks.
        """
        n_blocks, rest = divmod(n_elements, self.block_size)
        if rest:
            raise ValueError(
                f"{self.name} stores {self.block_size} weights per block; {n_elements:,} do not fill blocks"
            )
        return n_blocks * self.block_bytes

    def __str__(self) -> str:
        return self.name


# ggml has removed the types 4, 5, 31 to 33 and 36 to 38. Opening a file with such a type raises FormatError.
TYPES: tuple[GGMLType, ...] = tuple(
    GGMLType(*row)
    for row in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 36),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
)

BY_ID = {type_.id: type_ for type_ in TYPES}
BY_NAME = {type_.name: type_ for type_ in TYPES}

F32, F16, BF16 = BY_NAME["F32"], BY_NAME["F16"], BY_NAME["BF16"]
Q8_0, Q4_0, Q4_1 = BY_NAME["Q8_0"], BY_NAME["Q4_0"], BY_NAME["Q4_1"]
