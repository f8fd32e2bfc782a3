"""Load the compiled CPU kernels, or compile them if the disk cache does not have them, and report the compilation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from textwrap import shorten
from typing import TYPE_CHECKING

from mlx_engine.errors import BackendUnavailableError
from mlx_engine.observe import log

if TYPE_CHECKING:
    from mlx_engine.kernels.cpu.build.library import Library


# A progress bar lists the parts (groups of kernels) that are left to compile, in at most this number of characters.
WIDTH = 22


@cache
def load_kernels(needs: frozenset[str] = frozenset(), *, fixed: bool = False) -> Library | None:
    """Return the library of kernels. If it cannot be compiled or loaded on this machine, warn and return None.

    Load the kernels that every model needs, and the kernels for `needs` (see `backends.Settings`). With `fixed`, also
    load the kernels of fixed-point products. If the package has no machine code for this processor, kernels that are
    not in the disk cache are compiled in parallel.
    """
    try:
        from mlx_engine.kernels.cpu.build import library
    except (ImportError, OSError) as error:
        _warn(error)
        return None
    lacking = library.lacking()
    if lacking is not None:
        _warn(lacking)
        return None
    library.announce = _announced
    own = [need for need in sorted(needs) if need in library.MODULES]
    # MLX's mxfp4 ("mlx_mxfp4") is reordered to GGUF's mxfp4 on load. Types without kernels are expanded to float32.
    types = (need.removeprefix("mlx_") for need in needs.difference(own))
    formats = {type_ if library.is_format(type_) else "float32" for type_ in types}
    try:
        return library.load([*own, *parts_of(formats, fixed=fixed)])
    except Exception as error:  # any compiler or loader error: NumPy runs instead
        _warn(f"{type(error).__name__}: {error}")
        return None


def load_formats(library: Library, formats: Collection[str], *, fixed: bool = False) -> None:
    """Load the kernels of storage formats; with `fixed`, also load the kernels of their fixed-point products.

    Kernels that are not in the disk cache are compiled.

    Raises:
        BackendUnavailableError: the kernels can neither be loaded nor compiled.
    """
    parts = parts_of(formats, fixed=fixed)
    if library.has(parts):
        return
    try:
        library.need(parts)
    except Exception as error:  # any compiler or loader error
        raise BackendUnavailableError(
            name="parallel",
            reason=f"the kernels of {', '.join(sorted(formats))} cannot be compiled: {type(error).__name__}: {error}",
            hint="--no-jit (jit=False) with --activations f32 runs NumPy instead",
        ) from error


def parts_of(formats: Iterable[str], *, fixed: bool) -> list[str]:
    """Return the names of the parts (groups of kernels that are compiled together) for these formats.

    With `fixed`, also return the parts for fixed-point products of all formats except "float32".
    """
    from mlx_engine.kernels.cpu.build.library import FIXED, FIXED_END

    names = sorted(formats)
    panels = [name + FIXED_END for name in names if fixed and name != "float32"]
    return [*names, *panels, *([FIXED] if panels else [])]


@contextmanager
def _announced(parts: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Report the compilation of kernel parts with a progress bar, or with a log line if no bar is shown.

    Yield a function that must be called with the name of each part once the part has been compiled. At the end, log a
    line if the machine code could not be written to the disk cache.
    """
    from mlx_engine.kernels.cpu.build import library
    from mlx_engine.kernels.cpu.build.machine_code import usual_seconds

    left, how_long = list(parts), f"once, usually {max(1, round(usual_seconds(parts)))} s"
    with log.progress_bar(f"compiling kernels, {how_long}") as bar:
        if bar is None:
            what = f"{', '.join(parts)}; they are kept in {library.folder()}"
            log.note(f"compiling the CPU kernels, {how_long}: {what}")

        def show() -> None:
            if bar is not None:
                bar(len(parts) - len(left), len(parts), shorten(", ".join(left), WIDTH, placeholder="..."))

        def done(part: str) -> None:
            left.remove(part)
            show()

        show()
        yield done
    if not all(library.code_file(part).exists() for part in parts):
        log.note(f"the compiled CPU kernels could not be kept in {library.folder()}: the next process compiles again")


def _warn(reason: object) -> None:
    log.LOGGER.warning("no compiled kernels, NumPy runs instead: %s", reason)
