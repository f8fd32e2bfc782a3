"""Before a model's weights are read, compute how much memory it needs, and check that this memory is free.

The model is built as for a run, but with an `Outline` (a shape and a number of bytes) in place of each array. A small
matrix of each type is prepared, to find out how many bytes the backend needs for a matrix of this type. The command
`plan` builds outlines from a config.json alone, for models that have not been downloaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from mlx_engine.backends.base import Backend, Layers, OpByOp, Program
from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.parameters import Linear, Native
from mlx_engine.cache.pool import LONGEST_PASS, pool_nbytes
from mlx_engine.checkpoint.hf_folder import has_safetensors, read_json
from mlx_engine.checkpoint.mlx_quantization import KEYS, WEIGHT, Quantization, read_quantization
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import NotEnoughMemoryError, OptionError, UnsupportedConfigError, size
from mlx_engine.machine.memory import is_view
from mlx_engine.observe import log
from mlx_engine.quant import BY_NAME, readable_types
from mlx_engine.quant.groups import affine, fixed
from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.quant.weight import Weight, cut_shape
from mlx_engine.weights.model import Model, Planned, architecture_of
from mlx_engine.weights.parameters import EXPERTS, Parameters

ALTERNATIVE = "Q8_0"


@dataclass(frozen=True, eq=False)
class Outline:
    """An array that a backend would hold: its shape and its bytes."""

    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, eq=False)
class LazyWeight:
    """A `Weight` whose values are read only if building the model needs them.

    Attributes:
        is_stored: whether the weight's bytes are bytes of the file, neither converted nor reordered.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    read: Callable[[], Weight]
    is_stored: bool = True

    @property
    def nbytes(self) -> int:
        """`Weight.nbytes`."""
        return self.type.bytes_for(math.prod(self.shape))

    @property
    def data(self) -> np.ndarray:
        """`Weight.data`, read from the file."""
        return self.read().data

    def as_type(self, type_: GGMLType) -> LazyWeight:
        """Return the weight with the type that it has after a conversion."""
        return self if type_ == self.type else replace(self, type=type_, is_stored=False)

    def cut(self, axis: int, ranges: Sequence[tuple[int, int]]) -> LazyWeight:
        """Return `Weight.cut` as a lazy weight. The result stays in the mapped file only if it is one range of rows."""
        shape, is_view = cut_shape(cast(Weight, self), axis, ranges), axis == 0 and len(ranges) == 1
        return replace(
            self, shape=shape, read=lambda: self.read().cut(axis, ranges), is_stored=self.is_stored and is_view
        )

    def dequantize(self) -> np.ndarray:
        """Return `Weight.dequantize`."""
        return self.read().dequantize()


class Expanded(NamedTuple):
    """The size of all matrices of a weight type that the backend expands.

    Attributes:
        stored: bytes before `Backend.prepare`.
        held: bytes after `Backend.prepare`.
        alternative: bytes after `Backend.prepare` if the matrices were Q8_0.
    """

    stored: int
    held: int
    alternative: int


class OutlineBackend:
    """A stand-in for a backend that prepares outlines, and passes all other calls to the real backend.

    Attributes:
        nbytes: bytes that the real backend needs for all weights prepared so far.
        mapped_nbytes: bytes of the weights that stay in the mapped file.
        expert_nbytes: bytes of the matrices of experts.
        mapped_expert_nbytes: bytes of the matrices of experts that stay in the mapped file.
        shapes: the shapes (N, K) of the matrices.
        saved: bytes that would be saved if every matrix were stored as Q8_0; matrices that would grow count as 0.
        expanded: maps a weight type's name to the size of its matrices; only types that `Backend.prepare` expands.
        types: maps each weight type to the bytes of its matrices before they are prepared.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self.nbytes, self.mapped_nbytes, self.saved = backend, 0, 0, 0
        self.expert_nbytes = self.mapped_expert_nbytes = 0
        self._left: dict[str, int] = {}
        self._multiplied: set[str] = set()
        self.shapes: set[tuple[int, int]] = set()
        self.expanded: dict[str, Expanded] = {}
        self.types: Counter[GGMLType] = Counter()
        self._probed: dict[tuple[str, int], tuple[float, bool]] = {}
        self._of_slots: dict[tuple[str, int], float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prepare(self, weight: Weight | LazyWeight) -> Outline:
        """Return the outline of a weight, and add its bytes to the attributes."""
        n_rows, nbytes = math.prod(weight.shape[:-1]), FLOAT_BYTES * math.prod(weight.shape)
        if len(weight.shape) > 1:
            row_bytes, views = self._probe(weight.type, weight.shape[-1])
            nbytes = round(n_rows * row_bytes)
            self.shapes.add((n_rows, weight.shape[-1]))
            self.types[weight.type] += weight.nbytes
            mapped = nbytes if views and isinstance(weight, LazyWeight) and weight.is_stored else 0
            self.mapped_nbytes += mapped
            if f"{EXPERTS}." in weight.name:
                held = self._held_expert(weight, nbytes)
                self.nbytes += held - nbytes
                self.expert_nbytes += held
                self.mapped_expert_nbytes += mapped
            self._multiplied.add(weight.name)
            alternative = self._as_alternative(weight, nbytes)
            self.saved += max(0, nbytes - alternative)
            if nbytes > weight.nbytes:
                of = self.expanded.get(weight.type.name, Expanded(0, 0, 0))
                found = Expanded(of.stored + weight.nbytes, of.held + nbytes, of.alternative + alternative)
                self.expanded[weight.type.name] = found
        self.nbytes += nbytes
        return Outline(weight.shape, nbytes)

    def embeds_stored(self, table: Weight) -> bool:
        """Return `Backend.embeds_stored`; if it is true, note the bytes of the table for `left_nbytes`."""
        is_left = self._backend.embeds_stored(table)
        if is_left:
            self._left[table.name] = table.nbytes
        return is_left

    @property
    def left_nbytes(self) -> int:
        """Bytes of the embedding tables that stay in the mapped file and are not also the matrix of a tied head."""
        return sum(nbytes for name, nbytes in self._left.items() if name not in self._multiplied)

    @property
    def has_only_mapped_experts(self) -> bool:
        """Whether there are experts, and all of them stay in the mapped file."""
        return 0 < self.expert_nbytes == self.mapped_expert_nbytes

    def stack(self, matrices: Sequence[Any]) -> Sequence[Any]:
        """Return the outlines of several matrices unchanged. `prepare` has counted their bytes (`_held_expert`)."""
        return matrices

    def compile(self, layers: Layers, width: int) -> Program:
        """Return a program that is never run."""
        return OpByOp(cast(Backend, self), layers)

    def _held_expert(self, weight: Weight | LazyWeight, nbytes: int) -> int:
        """Return the bytes of an expert's matrix after `stack_some`; `nbytes` if the backend does not implement it."""
        if not self._backend.holds_some_experts:
            return nbytes
        n_rows, width = math.prod(weight.shape[:-1]), weight.shape[-1]
        key = (weight.type.name, width)
        if key not in self._of_slots:
            prepared = probe(self._backend, weight.type, width)[1]
            slots = self._backend.stack_some(lambda _: Linear("probe", prepared), 1, 1)
            self._of_slots[key] = slots.nbytes / ROWS
        return round(n_rows * self._of_slots[key])

    def _probe(self, type_: GGMLType, width: int) -> tuple[float, bool]:
        """Return the bytes of a row of `width` weights on the backend, and whether the row stays in the mapped file."""
        key = (type_.name, width)
        if key not in self._probed:
            weight, prepared, nbytes = probe(self._backend, type_, width)
            self._probed[key] = nbytes / ROWS, is_view(prepared, weight.data)
        return self._probed[key]

    def _as_alternative(self, weight: Weight | LazyWeight, nbytes: int) -> int:
        """Return the bytes that a matrix would take as Q8_0; `nbytes` if its rows do not fill whole blocks."""
        type_ = BY_NAME[ALTERNATIVE]
        if weight.shape[-1] % type_.block_size:
            return nbytes
        return round(math.prod(weight.shape[:-1]) * self._probe(type_, weight.shape[-1])[0])


class OutlineParameters(Parameters):
    """`Parameters` of `LazyWeight`s."""

    def _read(self, name: str) -> Weight:
        tensor = self._tensors[name]
        stored = tensor.stored(self._checkpoint.naming)
        type_ = F32 if stored.is_shifted else self._checkpoint.weight(stored.name).type
        is_copied = stored.is_shifted or stored.transposed or any((stored.heads, stored.order, stored.columns))
        unread = LazyWeight(name, tensor.shape, type_, lambda: tensor.weight(self._checkpoint), not is_copied)
        return cast(Weight, unread)


@dataclass(frozen=True)
class Outlined:
    """A model of outlines, which cannot run.

    Attributes:
        sizes: the sums over the model's weights.
        held_share: the fraction of each layer's experts that is in memory at the same time.
    """

    model: Model
    sizes: OutlineBackend
    held_share: float = 1.0

    def share_of_experts(self, backend: Backend, most: int, where: str) -> float:
        """Return the share of the experts that fits into `most` bytes. `where` names the model in errors.

        Raises:
            OptionError: `most` is too small for the experts of one token, the backend cannot bound the memory of
                experts, or the model has no experts.
        """
        if not backend.holds_some_experts:
            message = (
                f"experts_memory needs a backend with compiled kernels, or mlx, metal or cuda; {backend.name} cannot "
                "bound the memory of experts"
            )
            raise OptionError(message, option="experts_memory", expected="none", found=most)
        total, config = self.sizes.expert_nbytes, cast(Any, self.model.config)
        if not total:
            message = f"experts_memory needs a model with experts; {where} has none"
            raise OptionError(message, option="experts_memory", expected="none", found=most)
        n, n_used, share = config.n_experts, config.n_experts_used, min(1.0, most / total)
        if int(n * share) < n_used:
            least = -(-total * n_used // n)
            message = (
                f"experts_memory is {most:,} bytes; the {n_used} experts of one token in every layer need {least:,}, "
                f"and all {n} experts need {total:,}"
            )
            raise OptionError(message, option="experts_memory", expected=f"at least {least:,}", found=most)
        return float(share)


def outlined(planned: Planned, backend: Backend) -> Outlined:
    """Build a model of outlines, without LoRA adapters; raise UnsupportedTypeError if a type cannot be read."""
    sizes = OutlineBackend(backend)
    made, given = cast(Backend, sizes), (planned.checkpoint, planned.tensors)
    parts: dict[str, Any] = {"stage": planned.stage, "slices": planned.slices}
    parameters = OutlineParameters(*given, made, conversion=planned.conversion, **parts)
    return Outlined(planned.make(planned.config, parameters, made), sizes, planned.held_share)


# Per token, a pass holds at most ACTIVATIONS * (N + K) float32 activations. (N, K) is the shape of the matrix with the
# largest N + K.
ACTIVATIONS = 3
# If not all experts fit, the experts in memory take this share of the memory that the rest of the model leaves free.
EXPERTS_SHARE = 0.9
# `expansions` reports a type if its weights grow by at least this many bytes.
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
        saved: bytes that would be saved if every matrix were stored as Q8_0.
        experts: the weights of experts that stay in the mapped file; 0 if the memory of experts is limited.
    """

    weights: int
    mapped: int
    kv: int
    workspace: int
    saved: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """The sum of weights, keys and values, and workspace."""
        return self.weights + self.kv + self.workspace

    @property
    def least(self) -> int:
        """The bytes without which the model cannot run: all but the weights in the mapped file."""
        return self.total - self.mapped

    def __add__(self, other: Need) -> Need:
        """Return the need of two models whose passes do not run at the same time."""
        return Need(
            self.weights + other.weights, self.mapped + other.mapped, self.kv + other.kv,
            max(self.workspace, other.workspace), self.saved + other.saved, self.experts + other.experts,
        )  # fmt: skip

    def for_experts(self, available: int) -> int:
        """Return the bytes that the experts in memory may take if not all experts fit."""
        return max(0, int(EXPERTS_SHARE * (available - self.total + self.experts)))

    def check(self, where: str, available: int, *, allowed: bool = False) -> bool:
        """Compare the need with the available bytes, and warn if the model needs more.

        Return True if the model needs more, and its experts can be read from the file when tokens choose them.

        Raises:
            NotEnoughMemoryError: `least` is larger than the available bytes, and `allowed` is not set.
        """
        if self.least > available and not allowed:
            raise NotEnoughMemoryError(
                where=where, needed=self._text(), found=f"{size(available)} free", hint=self._hint()
            )
        if self.total > available and self.total - self.experts <= available:
            log.warn(
                f"{where}: needs {self._text()}, and {size(available)} are free: the {size(self.experts)} of experts "
                "are read from the file when tokens choose them, and those that fit stay in memory"
            )
        elif self.total > available:
            log.warn(f"{where}: needs {self._text()}, and {size(available)} are free: it may run slowly or be killed")
        return self.experts > 0 and self.total > available

    def _text(self) -> str:
        return f"{size(self.total)} of memory ({size(self.weights)} of weights, {size(self.kv)} of keys and values)"

    def _hint(self) -> str:
        saving = f"--quant q8_0 saves about {size(self.saved)}, " if self.saved > 0 else ""
        return f"{saving}fewer tokens (-n, --context-len, --kv-memory) or a smaller model help; {OPTION} tries anyway"


def need_of(outlined: Outlined, n_tokens: int = 1, *, kv: int | None = None) -> Need:
    """Return the memory that a model needs with `n_tokens` tokens in the cache, or with `kv` bytes of cache."""
    sizes, model, share = outlined.sizes, outlined.model, outlined.held_share
    # `widest` excludes the head, because a pass computes only few rows of logits.
    vocab_size = int(model.config.vocab_size)
    widest = max((sum(shape) for shape in sizes.shapes if shape[0] != vocab_size), default=0)
    return Need(
        weights=sizes.nbytes - round((1 - share) * sizes.expert_nbytes),
        mapped=sizes.mapped_nbytes if share == 1 else sizes.mapped_nbytes - sizes.mapped_expert_nbytes,
        kv=pool_nbytes(model.kv_layers, n_tokens) if kv is None else kv,
        workspace=4 * (ACTIVATIONS * LONGEST_PASS * widest + vocab_size),
        saved=sizes.saved,
        experts=sizes.mapped_expert_nbytes if share == 1 else 0,
    )


def expansions(outlined: Outlined, backend: str) -> Iterator[str]:
    """Yield a message for each weight type that this backend expands by many bytes, if Q8_0 would need less."""
    for name, of in outlined.sizes.expanded.items():
        if of.held - of.stored >= WORTH_A_LINE and of.alternative < of.held:
            yield (
                f"{backend} has no kernel for {name}: {size(of.stored)} of weights take {size(of.held)} as floats; "
                f"--quant {ALTERNATIVE.lower()} rounds them to {size(of.alternative)}, which is also faster"
            )


FLOAT_BYTES = 4
# `probe` prepares matrices of ROWS rows. COLUMNS is a multiple of the block size of every type.
ROWS, COLUMNS = 16, 512


def probe(backend: Backend, type_: GGMLType, width: int) -> tuple[Weight, Native, int]:
    """Return a matrix of `ROWS` rows of zeros, its prepared form on the backend, and the bytes of this form."""
    weight = Weight("probe", (ROWS, width), type_, np.zeros(type_.bytes_for(ROWS * width), np.uint8))
    prepared = backend.prepare(weight)
    return weight, prepared, nbytes_of(prepared)


def stored_types(backend: Backend) -> tuple[str, ...]:
    """Return the names of F32 and of the readable types that this backend does not expand to float32."""

    def is_stored(type_: GGMLType) -> bool:
        nbytes = probe(backend, type_, COLUMNS)[2] / ROWS
        return nbytes < FLOAT_BYTES * COLUMNS or nbytes <= type_.bytes_for(COLUMNS)

    return tuple(type_.name for type_ in readable_types() if is_stored(type_))


CONFIG = "config.json"
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# The type of weights if config.json names none: most models are published in this type.
USUAL_DTYPE = "bfloat16"


def is_config_alone(path: Path) -> bool:
    """Return whether a path is a config.json, or a folder with a config.json and no weights."""
    if path.is_dir():
        return (path / CONFIG).is_file() and not has_safetensors(path) and not any(path.glob("*.gguf"))
    return path.name == CONFIG


def open_config(path: Path) -> Checkpoint:
    """Return the checkpoint that a config.json describes, with zeros as weights.

    If MLX has quantised a matrix, its type is the one in the setting `quantization`. The type of other tensors is the
    one in `torch_dtype` or `dtype`.

    Raises:
        SourceError, FormatError: the file cannot be read, or is invalid.
        ModelError: the architecture or a setting is not implemented, or the types of weights cannot be derived from the
            settings.
    """
    file = path / CONFIG if path.is_dir() else path
    config = read_json(file)
    draft = Checkpoint(str(file), "hf", str(config.get("model_type")), config, {}, {}, _no_weight)
    architecture, quantization = architecture_of(draft), read_quantization(config, str(file))
    if quantization is None and config.get(KEYS[1]):
        raise UnsupportedConfigError(
            where=str(file),
            key=KEYS[1],
            expected="absent, or MLX's quantization, for which config.json has all types",
            found=config[KEYS[1]],
            hint="plan with the original model's config.json and --quant q4_0, or with a GGUF file",
        )
    settings = {key: value for key, value in config.items() if quantization is None or key not in KEYS}
    draft = replace(draft, settings=settings)
    shapes = {
        tensor.stored("hf").name: tensor.stored("hf").shape(tensor.shape)
        for tensor in architecture.plan(draft).tensors
        if tensor.required
    }
    dtype = _dtype(config, str(file))

    def weight(name: str) -> Weight:
        shape = shapes[name]
        type_ = BY_NAME[DTYPES[dtype]] if quantization is None else _type(quantization, name, shape, DTYPES[dtype])
        nbytes = type_.bytes_for(math.prod(shape))
        return Weight(name, shape, type_, np.broadcast_to(np.zeros(1, np.uint8), (nbytes,)))

    return replace(draft, shapes=shapes, weight=weight)


def _no_weight(name: str) -> Weight:
    raise KeyError(name)


def _dtype(config: Mapping[str, object], where: str) -> str:
    inner = config.get("text_config")
    places = [config, *([inner] if isinstance(inner, Mapping) else [])]
    found = [place[key] for place in places for key in ("torch_dtype", "dtype") if place.get(key) is not None]
    name = str(found[0] if found else USUAL_DTYPE).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedConfigError(where=where, key="torch_dtype", expected=" or ".join(DTYPES), found=name)
    return name


def _type(quantization: Quantization, name: str, shape: tuple[int, ...], scale: str) -> GGMLType:
    """Return the type of a tensor in a folder that MLX has quantised.

    `scale` is the type of scales, and of tensors that are not quantised.
    """
    setting = quantization.of(name.removesuffix(WEIGHT))
    if setting is None or len(shape) < 2 or not name.endswith(WEIGHT) or shape[-1] % setting.group:
        return BY_NAME[scale]
    return affine(setting.bits, setting.group, scale) if setting.mode == "affine" else fixed(setting.mode)
