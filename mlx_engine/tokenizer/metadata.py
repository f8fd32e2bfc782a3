"""Typed access to a GGUF file's tokenizer keys. Values are validated here, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.errors import TokenizerError

CONVERT_AGAIN = "convert the model again, or download another copy"


@dataclass(frozen=True)
class Metadata:
    """The `tokenizer.ggml.*` keys of one file; `where` names the file in errors."""

    values: Mapping[str, object]
    where: str

    def error(self, key: str, expected: str, found: str, hint: str = CONVERT_AGAIN) -> TokenizerError:
        """Return the error to raise about the value of `key`."""
        return TokenizerError(f"{self.where}: expected {key} to be {expected}, found {found}; {hint}")

    def text(self, key: str) -> str | None:
        """Return a string, or None if the key is missing."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.error(key, "a string", f"{type(value).__name__} {value!r:.40}")

    def flag(self, key: str) -> bool | None:
        """Return a bool, or None if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        raise self.error(key, "true or false", f"{type(value).__name__} {value!r:.40}")

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """Return a valid token id, or None if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < vocab_size:
            raise self.error(key, f"a token id below {vocab_size:,}", f"{value!r:.40}")
        return int(value)

    def strings(self, key: str) -> list[str]:
        """Return a list of valid Unicode strings.

        Raises:
            TokenizerError: the key is missing, or its value is not such a list.
        """
        value = self.values.get(key)
        if not isinstance(value, (list, tuple)):
            raise self.error(key, "a list of strings", "nothing" if value is None else type(value).__name__)
        try:
            "".join(value).encode()
        except TypeError:
            index = next(i for i, item in enumerate(value) if not isinstance(item, str))
            raise self.error(key, "a list of strings", f"{type(value[index]).__name__} at index {index:,}") from None
        except UnicodeEncodeError:
            raise self.error(key, "a list of valid Unicode strings", "half of a surrogate pair") from None
        return list(value)

    def numbers(self, key: str, *, count: int, kinds: str) -> NDArray[Any] | None:
        """Return one finite number per token, or None if the key is missing. `kinds` are NumPy dtype kinds."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            numbers = np.asarray(value)
        except (ValueError, OverflowError):
            raise self.error(key, f"{count:,} numbers", "a list of mixed types") from None
        if numbers.ndim != 1 or numbers.dtype.kind not in kinds:
            raise self.error(key, f"{count:,} numbers", f"{type(value).__name__} of {numbers.dtype}")
        if len(numbers) != count:
            raise self.error(key, f"{count:,} numbers, one per token", f"{len(numbers):,}")
        if not np.isfinite(numbers).all():
            raise self.error(key, "finite numbers", f"{numbers[~np.isfinite(numbers)][0]}")
        return numbers
