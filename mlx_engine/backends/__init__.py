"""The list of backends. Find the backends that this machine can run, and create a backend by its name.

A backend's own module is imported only when the backend is created.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_engine.backends.base import Backend
from mlx_engine.errors import BackendUnavailableError, OptionError, listed, shown
from mlx_engine.quant.key_values import DTYPES, default_type

# The types of activations (docs/precision.md). Float32 is exact and the default; every backend can compute with it.
ACTIVATIONS = ("f32", "i16", "f16", "bf16")
EXACT = ACTIVATIONS[0]
# The types of keys and values in the cache. Every backend has all these types; q8_0 needs a head dim divisible by 32.
KV_TYPES = tuple(DTYPES)
_ON_CPU, _ON_MLX = (EXACT, "i16"), (EXACT, "f16", "bf16")


@dataclass(frozen=True)
class Settings:
    """Options for creating a backend.

    Attributes:
        threads: the number of threads of the backend `parallel`; None: one thread per core that this process may use.
        jit: whether compiled CPU kernels are used, if they are available.
        activations: the type of activations; it must be in the `activations` of the backend's `Entry`.
        needs: the groups of CPU kernels to compile now, in parallel, instead of at their first use. A group has the
            name of a storage type of the model's matrices, in lower case, or is "experts" or "states", for models with
            experts or recurrent states.
    """

    threads: int | None = None
    jit: bool = True
    activations: str = EXACT
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Entry:
    """A backend in the list of backends.

    Attributes:
        summary: a short description.
        create: a function that returns the backend.
        needs: a fast function that returns the reason why this machine cannot run the backend, or None if it can.
        activations: the types of activations that the backend can compute with.
    """

    summary: str
    create: Callable[[Settings], Backend]
    needs: Callable[[], str | None] = lambda: None
    activations: tuple[str, ...] = (EXACT,)


def backend_names() -> list[str]:
    """Return the names of all backends, without "auto": the CPU backends first, then those on MLX."""
    return list(_ENTRIES)


def summary(name: str) -> str:
    """Return the description of backend `name`."""
    return _entry(name).summary


def unavailable(name: str) -> str | None:
    """Return the reason why backend `name` cannot run on this machine, or None if it can.

    Raises:
        BackendUnavailableError: there is no backend of this name.
    """
    return _entry(name).needs()


def auto() -> str:
    """Return the name of the fastest backend that this machine can run; an emulated `metal` is not considered."""
    return next(name for name in _FASTEST_FIRST if not (name == "metal" and _emulated()) and unavailable(name) is None)


def create_backend(
    name: str = "auto", *, threads: int | None = None, jit: bool = True, activations: str = EXACT,
    kv_type: str | None = None, needs: frozenset[str] = frozenset(),
) -> Backend:  # fmt: skip
    """Create backend `name`. `Settings` describes the options, except `kv_type`, which `kv_type_of` describes.

    Raises:
        BackendUnavailableError: no backend has this name, or this machine cannot run it; the message says why.
        OptionError: the backend does not have this type of activations, or `kv_type` is not in `KV_TYPES`.
    """
    check_backend(name, activations, jit=jit)
    type_ = kv_type_of(activations, kv_type)
    backend = _entry(auto() if name == "auto" else name).create(Settings(threads, jit, activations, needs))
    backend.kv_type = type_
    return backend


def kv_type_of(activations: str, kv_type: str | None = None) -> str:
    """Return `kv_type`, or if it is None, the default type for these activations (`default_type`).

    Raises:
        OptionError: `kv_type` is not in `KV_TYPES`.
    """
    if kv_type is None:
        return default_type(activations)
    if kv_type not in KV_TYPES:
        message = f"kv_type must be {listed(KV_TYPES)}, not {shown(kv_type)}"
        raise OptionError(message, option="kv_type", expected=listed(KV_TYPES), found=kv_type)
    return kv_type


def check_backend(name: str, activations: str = EXACT, *, jit: bool = True) -> None:
    """Check that backend `name` can run on this machine with this type of activations.

    Raises:
        BackendUnavailableError: no backend has this name, or this machine cannot run it; the message says why.
        OptionError: the backend does not have this type of activations.
    """
    reason = None if name == "auto" else unavailable(name)
    if reason is not None:
        raise BackendUnavailableError(name=name, reason=reason)
    refusal = refused(name, activations, jit=jit)
    if refusal is not None:
        possible = listed(activations_of(name))
        raise OptionError(refusal, option="activations", expected=possible, found=activations)


def refused(name: str, activations: str, *, jit: bool = True) -> str | None:
    """Return the reason why backend `name` cannot compute with this type of activations, or None if it can.

    Raises:
        OptionError: no backend has this type of activations.
        BackendUnavailableError: there is no backend of this name.
    """
    if activations not in ACTIVATIONS:
        message = f"activations must be {listed(ACTIVATIONS)}, not {shown(activations)}"
        raise OptionError(message, option="activations", expected=listed(ACTIVATIONS), found=activations)
    if activations in activations_of(name):
        if activations == "i16" and not jit:
            return f"activations i16 needs compiled kernels; --no-jit (jit=False) runs NumPy, which only has {EXACT}"
        return None
    having = listed([other for other in backend_names() if activations in activations_of(other)])
    name = auto() if name == "auto" else name
    return f"activations {activations} needs the backend {having}; {name} has {listed(activations_of(name))}"


def activations_of(name: str) -> tuple[str, ...]:
    """Return the types of activations that backend `name`, or "auto", can compute with; the first is the default."""
    return _entry(auto() if name == "auto" else name).activations


def types_of(backend: Backend) -> dict[str, str]:
    """Return the types of a backend's activations, and of its keys and values, for replies and reports."""
    return {"activations": backend.activations, "kv_type": backend.kv_type}


def _entry(name: str) -> Entry:
    if name not in _ENTRIES:
        known = ", ".join([*_ENTRIES, "auto"])
        raise BackendUnavailableError(name=name, reason=f"no backend has this name; there are {known}")
    return _ENTRIES[name]


def _scalar(settings: Settings) -> Backend:
    from mlx_engine.backends.numpy.scalar import ScalarBackend

    return ScalarBackend()


def _simd(settings: Settings) -> Backend:
    from mlx_engine.backends.numpy.simd import SimdBackend

    return _compiled("simd", 1, settings) or SimdBackend()


def _parallel(settings: Settings) -> Backend:
    from mlx_engine.backends.numpy.simd import ParallelBackend
    from mlx_engine.machine.memory import usable_cores

    threads = settings.threads or usable_cores()
    return _compiled("parallel", threads, settings) or ParallelBackend(threads)


def _compiled(name: str, threads: int, settings: Settings) -> Backend | None:
    """Return a backend with compiled kernels; None if `jit` is off, or if the kernels cannot be loaded or compiled.

    Raises:
        OptionError: there are no compiled kernels, and NumPy cannot compute with this type of activations.
    """
    from mlx_engine.backends.cpu.kernels import load_kernels

    library = load_kernels(settings.needs, fixed=settings.activations == "i16") if settings.jit else None
    if library is not None:
        from mlx_engine.backends.cpu.backend import CompiledBackend

        return CompiledBackend(library, name, threads, settings.activations)
    if settings.activations != EXACT:
        message = f"activations {settings.activations} needs compiled kernels, and there are none; use {EXACT}"
        raise OptionError(message, option="activations", expected=EXACT, found=settings.activations)
    return None


def _mlx(settings: Settings) -> Backend:
    from mlx_engine.backends.mlx.backend import MlxBackend

    return MlxBackend(settings.activations)


def _needs_mlx() -> str | None:
    try:
        importlib.import_module("mlx.core")
    except (ImportError, OSError) as error:
        return f"MLX cannot be imported: {error}"
    return None


def _metal(settings: Settings) -> Backend:
    executor: Literal["emulator", "metal"] = "emulator" if _emulated() else "metal"
    if settings.activations != EXACT:
        from mlx_engine.backends.metal.rounded import RoundedMetalBackend

        return RoundedMetalBackend(settings.activations, executor)
    from mlx_engine.backends.metal.backend import MetalBackend

    return MetalBackend(executor)


def _cuda(settings: Settings) -> Backend:
    if settings.activations != EXACT:
        from mlx_engine.backends.mlx.backend import MlxBackend

        return MlxBackend(settings.activations, "cuda")
    from mlx_engine.backends.metal.backend import MetalBackend

    return MetalBackend("cuda")


def _emulated() -> bool:
    """Return whether the environment variable MLX_ENGINE_METAL selects the emulator."""
    return os.environ.get(VARIABLE) == "emulate"


def _needs_metal() -> str | None:
    if _emulated():
        return _needs_mlx() or _needs_executor("emulator")
    if os.environ.get(VARIABLE):
        return f"{VARIABLE} must be 'emulate' or unset, not {os.environ[VARIABLE]!r}"
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return _needs_mlx() or _needs_executor("metal")
    here = f"{platform.system()} on {platform.machine()}"
    return f"it needs an Apple GPU; this is {here} ({VARIABLE}=emulate runs it on the CPU, to test it)"


def _needs_cuda() -> str | None:
    if platform.system() != "Linux":
        return f"it needs an NVIDIA GPU on Linux; this is {platform.system()} on {platform.machine()}"
    if not any(Path(device).exists() for device in _NVIDIA_DEVICES):
        return "it needs an NVIDIA GPU; this machine has none, or no driver for it"
    return _needs_mlx() or _needs_executor("cuda")


def _needs_executor(name: Literal["metal", "cuda", "emulator"]) -> str | None:
    from mlx_engine.kernels import launch

    return launch.unavailable(name)


VARIABLE = "MLX_ENGINE_METAL"
# Device files of NVIDIA's driver on Linux, and on WSL. They are looked for before MLX is imported, which takes 0.1 s.
_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")

_ENTRIES = {
    "scalar": Entry("the reference in plain Python, too slow to generate text", _scalar),
    "simd": Entry("one thread: compiled kernels, or NumPy and BLAS", _simd, activations=_ON_CPU),
    "parallel": Entry("simd on several threads", _parallel, activations=_ON_CPU),
    "mlx": Entry("stock MLX operations on MLX's default device", _mlx, _needs_mlx, _ON_MLX),
    "metal": Entry("MLX with our own Metal kernels", _metal, _needs_metal, _ON_MLX),
    "cuda": Entry("MLX with our Metal kernels, translated to CUDA", _cuda, _needs_cuda, _ON_MLX),
}

# The backends that `auto` chooses from.
_FASTEST_FIRST = ("metal", "cuda", "parallel", "simd")
