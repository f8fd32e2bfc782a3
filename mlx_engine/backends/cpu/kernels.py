"""Load the compiled CPU kernels once per process, from the disk cache if they have been compiled before."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mlx_engine.errors import BackendUnavailableError
from mlx_engine.observe.log import LOGGER

if TYPE_CHECKING:
    from mlx_engine.kernels.cpu.build.library import Library


@cache
def load_kernels() -> Library | None:
    """Return the kernels; None, with one warning, if they cannot be compiled or loaded here."""
    try:
        from mlx_engine.kernels.cpu.build import library
    except (ImportError, OSError) as error:
        _warn(error)
        return None
    lacking = library.lacking()
    if lacking is not None:
        _warn(lacking)
        return None
    try:
        return _load(library)
    except Exception as error:  # any compiler or loader error: NumPy runs instead
        _warn(f"{type(error).__name__}: {error}")
        return None


def load_formats(library: Library, formats: Collection[str], *, fixed: bool = False) -> None:
    """Load the kernels of these storage formats; those that have never been compiled are compiled at the same time.

    With `fixed`, load those of products in fixed point, too. float32, which is a format here, has none.

    Raises:
        BackendUnavailableError: a format cannot be compiled.
    """
    from mlx_engine.kernels.cpu.build import library as code

    missing = [name for name in sorted(formats) if not library.has_format(name)]
    packed = [name for name in sorted(formats) if fixed and name != "float32" and not library.has_panels(name)]
    if not missing and not packed:
        return
    parts = [*missing, *(name + code.FIXED_END for name in packed), *([code.FIXED] if packed else [])]
    what = f" of {', '.join(sorted({*missing, *packed}))}"
    try:
        with _announced([code.code_file(part) for part in parts], what):
            if missing:
                library.format(*missing)
            if packed:
                library.panels(*packed)
    except Exception as error:  # any compiler or loader error
        raise BackendUnavailableError(
            name="parallel",
            reason=f"the kernels{what} cannot be compiled: {type(error).__name__}: {error}",
            hint="--no-jit (jit=False) with --activations f32 runs NumPy instead",
        ) from error


def _load(library: ModuleType) -> Library:
    with _announced([library.code_file(part) for part in library.BASE]):
        loaded: Library = library.load()
    return loaded


@contextmanager
def _announced(files: Sequence[Path], what: str = "") -> Iterator[None]:
    """Log that kernels are compiled if one of their files does not exist, and afterwards if it could not be kept."""
    folder = files[0].parent
    if not all(file.exists() for file in files):
        LOGGER.warning("compiling the CPU kernels%s, once, usually for 5 to 20 seconds; they are kept in %s",
                       what, folder)  # fmt: skip
    yield
    if not all(file.exists() for file in files):
        LOGGER.warning("the compiled CPU kernels could not be kept in %s: the next process compiles again",
                   folder)  # fmt: skip


def _warn(reason: object) -> None:
    LOGGER.warning("no compiled kernels, NumPy runs instead: %s", reason)
