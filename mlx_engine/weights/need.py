"""Estimate a model's memory from its outline, before a weight is read, and compare with the free memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.cache.size import pool_nbytes
from mlx_engine.errors import NotEnoughMemoryError, size
from mlx_engine.observe import log
from mlx_engine.weights.outline import ALTERNATIVE, Outlined

# Activations of a token in a pass that are held at the same time, in multiples of the widest matrix.
ACTIVATIONS = 3
# Expansion is reported if it takes this many bytes more than the file.
WORTH_A_LINE = 1 << 26
OPTION = "--allow-too-large"


@dataclass(frozen=True)
class Need:
    """Bytes that a model needs.

    Attributes:
        weights: the weights as the backend holds them.
        mapped: the weights that stay in the mapped file, which the system may drop and read again.
        kv: pages of keys and values.
        workspace: activations of the longest pass, and logits.
        saved: bytes less if all matrices were Q8_0.
    """

    weights: int
    mapped: int
    kv: int
    workspace: int
    saved: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.kv + self.workspace

    @property
    def least(self) -> int:
        """The bytes without which the model cannot run at all."""
        return self.total - self.mapped

    def check(self, where: str, available: int, *, allowed: bool = False) -> None:
        """Compare with the available bytes; warn if the model is larger but can run.

        Raises:
            NotEnoughMemoryError: the model cannot run, and `allowed` is not set.
        """
        if self.least > available and not allowed:
            raise NotEnoughMemoryError(
                where=where, needed=self._text(), found=f"{size(available)} free", hint=self._hint()
            )
        if self.total > available:
            log.warn(f"{where}: needs {self._text()}, and {size(available)} are free: it may be slow, or be ended")

    def _text(self) -> str:
        return f"{size(self.total)} of memory ({size(self.weights)} of weights, {size(self.kv)} of keys and values)"

    def _hint(self) -> str:
        saving = f"--quant q8_0 saves about {size(self.saved)}, " if self.saved > 0 else ""
        return f"{saving}fewer tokens (-n, --context-len, --kv-memory) or a smaller model help; {OPTION} tries anyway"


def need_of(outlined: Outlined, n_tokens: int = 1, *, kv: int | None = None) -> Need:
    """Return the memory that a model needs with `n_tokens` tokens in the cache, or with `kv` bytes of cache."""
    sizes, model = outlined.sizes, outlined.model
    vocab_size = int(model.config.vocab_size)  # of the head's outputs a pass computes a few rows
    widest = max((sum(shape) for shape in sizes.shapes if shape[0] != vocab_size), default=0)
    return Need(
        weights=sizes.nbytes,
        mapped=sizes.n_mapped,
        kv=pool_nbytes(model.kv_layers, n_tokens) if kv is None else kv,
        workspace=4 * (ACTIVATIONS * LONGEST_PASS * widest + vocab_size),
        saved=sizes.saved,
    )


def expansions(outlined: Outlined, backend: str) -> Iterator[str]:
    """Yield a line for each type of weights that this backend expands to several times the bytes of the file."""
    for name, of in outlined.sizes.expanded.items():
        if of.held - of.stored >= WORTH_A_LINE and of.alternative < of.held:
            yield (
                f"{backend} has no kernel for {name}: {size(of.stored)} of weights take {size(of.held)} as floats; "
                f"--quant {ALTERNATIVE.lower()} rounds them to {size(of.alternative)}, which is also faster"
            )
