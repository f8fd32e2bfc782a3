"""LoRA adapters: low-rank products that are added to the outputs of linear layers. Each sequence chooses an adapter.

An adapter is a folder that PEFT or mlx-lm has written. For a linear layer W (N, K) it has A (r, K) and B (N, r), and
the layer computes `W x + B (A x)`; on load, B is multiplied by the adapter's factor (usually alpha / r). All adapters
of a model are stacked: the rows of all A are one matrix (M, K), the columns of all B one matrix (N, M). M is the sum,
over all adapters, of an adapter's largest r, plus padding with zeros. For each token of a pass, the layer computes
`W x + B (mask * (A x))`. The mask (M,) is 1 in the columns of the adapter of the token's sequence, and 0 in all other
columns. So sequences of one pass can have different adapters. A sequence's bits depend only on its own adapter, because
the other adapters add only zeros.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Activation, Array, Linear, LowRank, Norm
from mlx_engine.checkpoint.hf_folder import read_json
from mlx_engine.checkpoint.safetensors import SafetensorsFile, open_safetensors
from mlx_engine.errors import ModelError, OptionError, SourceError, is_number, is_whole, listed, shown
from mlx_engine.kernels.cpu.build.layout import LANES, STRETCH
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.plan import Tensor
from mlx_engine.weights.stored import TensorLayout

# The name that selects the model without an adapter.
BASE = "base"

CONFIG, PEFT_FILE, MLX_FILE = "adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"
PEFT_NAME = re.compile(r"^(.*)\.lora_(A|B)(?:\.default)?(?:\.weight)?$")
PEFT_PREFIX = "base_model.model."
MLX_NAME = re.compile(r"^(.*)\.lora_(a|b)$")
# Group 1 is a module's name without the prefix before the list of layers: "layers.3.mlp.up_proj" for
# "model.layers.3.mlp.up_proj".
IN_LAYER = re.compile(r"(?:^|\.)((?:\w+)\.\d+\..*)$")
# If `init_lora_weights` begins with one of these, PEFT changes the weights of the model before training.
CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of PEFT that are refused if they are set: they add more to a linear layer than A and B, or change other parts
# of the model.
REFUSED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "trainable_token_indices",
    "target_parameters", "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "monteclora_config", "velora_config",
)  # fmt: skip
# Settings of PEFT that are used here.
READ = (
    "peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora",
    "target_modules",
)  # fmt: skip
# Settings of PEFT that concern only the training, or describe the adapter.
HARMLESS = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
)  # fmt: skip
# The accepted settings in `lora_parameters` of mlx-lm. "alpha" is refused, because its meaning depends on the version:
# early versions of mlx-lm multiplied by alpha / rank, and later ones ignore it.
OF_MLX = ("rank", "scale", "dropout", "keys")

# Parts of the GGUF names of matrices in a mixture of experts. Adapters cannot change these matrices, because one kernel
# runs the whole mixture.
OF_EXPERTS = ("_exps.", "_shexp.", "ffn_gate_inp")

Floats = NDArray[np.float32]
Pairs = dict[str, tuple[Floats, Floats]]


@dataclass(frozen=True, eq=False)
class Adapter:
    """The matrices of an adapter.

    Attributes:
        name: the name by which a request selects the adapter.
        path: the adapter's folder.
        pairs: maps the GGUF name of each changed linear layer to (A, B), where B is multiplied by the factor.
    """

    name: str
    path: Path
    pairs: Pairs

    @property
    def rank(self) -> int:
        """The largest r of all pairs."""
        return max(len(a) for a, _ in self.pairs.values())


class Adapters:
    """The stacked adapters of a model.

    Attributes:
        names: the adapters' names; the first adapter is the default.
        masks: (number of adapters + 1, M). Row 0 is zero, for the model without an adapter; row i + 1 is the mask of
            adapter i.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = tuple(adapters)
        self.names = tuple(adapter.name for adapter in adapters)
        self._columns: list[int] = []
        width = 0
        for adapter in adapters:
            width = _first_column(width, adapter.rank)
            self._columns.append(width)
            width += -(-adapter.rank // LANES) * LANES
        self.masks = np.zeros((len(adapters) + 1, width), dtype=np.float32)
        for mask, adapter, first in zip(self.masks[1:], adapters, self._columns, strict=True):
            mask[first : first + adapter.rank] = 1

    @property
    def width(self) -> int:
        """M, the number of columns of a mask."""
        return int(self.masks.shape[1])

    def index(self, name: str | None) -> int:
        """Return the row of `masks` for an adapter's name, for "base" (no adapter) or for None (the first adapter).

        Raises:
            OptionError: no adapter has this name.
        """
        if name is None or name == BASE:
            return 0 if name == BASE else 1
        return 1 + self.names.index(name) if name in self.names else refuse(name, self.names)

    def rows(self, batch: Batch) -> Floats:
        """Return the mask of each token of a pass, (T, M)."""
        chosen = np.repeat(np.array(batch.adapters, dtype=np.int64), np.array(batch.lengths, dtype=np.int64))
        return np.asarray(self.masks[chosen])

    def low_rank(self, name: str, backend: Backend) -> LowRank | None:
        """Return the stacked matrices A and B of all adapters for a linear layer; None if no adapter changes it."""
        found = [adapter.pairs.get(name) for adapter in self._adapters]
        first = next((pair for pair in found if pair is not None), None)
        if first is None:
            return None
        a = np.zeros((self.width, first[0].shape[1]), dtype=np.float32)
        b = np.zeros((len(first[1]), self.width), dtype=np.float32)
        for pair, column in zip(found, self._columns, strict=True):
            if pair is not None:
                a[column : column + len(pair[0])] = pair[0]
                b[:, column : column + len(pair[0])] = pair[1]
        down, up = f"{name}.lora_a", f"{name}.lora_b"
        return LowRank(
            Linear(down, backend.prepare(Weight.pack(down, a, F32))),
            Linear(up, backend.prepare(Weight.pack(up, b, F32))),
        )


def refuse(name: object, names: Sequence[str]) -> Any:
    """Raise OptionError for an adapter that is not loaded."""
    expected = listed([*names, BASE])
    message = f"adapter must be {expected}, not {shown(name)}" if names else (
        f"adapter is {shown(name)}, and the model has been loaded without adapters; pass adapters=[PATH] to load"
    )  # fmt: skip
    raise OptionError(message, option="adapter", expected=expected, found=name)


def _first_column(width: int, rank: int) -> int:
    """Return the first column of an adapter of this rank, if earlier adapters take the first `width` columns.

    Kernels compute a sum per stretch of STRETCH columns, and then add these sums. An adapter of up to STRETCH columns
    lies within one stretch; a longer adapter begins where a stretch begins. So the bits of an adapter's results do not
    depend on its first column.
    """
    inside = width % STRETCH
    return width if inside + rank <= STRETCH else width - inside + STRETCH


def named(given: Sequence[str | Path] | Mapping[str, str | Path]) -> dict[str, Path]:
    """Return a map of names to adapters' folders. A list has NAME=PATH or PATH; for PATH, the folder's name is used.

    Raises:
        OptionError: a name is empty or "base", or occurs twice; or `given` is a single path instead of a list.
    """
    if isinstance(given, str | Path):
        message = f"adapters must be a list of folders, such as [{str(given)!r}], not {shown(given)}"
        raise OptionError(message, option="adapters", expected="a list of folders", found=given)
    pairs = list(given.items()) if isinstance(given, Mapping) else [_named(of) for of in given]
    found: dict[str, Path] = {}
    for name, path in pairs:
        if not name or name == BASE or name in found:
            why = f"is given twice; write NAME={path}" if name in found else f"cannot be a name; write NAME={path}"
            raise OptionError(f"adapter {shown(name)} {why}", option="adapters", expected="different names", found=name)
        found[name] = Path(path).expanduser()
    return found


def _named(of: str | Path) -> tuple[str, str | Path]:
    name, equals, path = str(of).partition("=")
    if equals and not Path(of).expanduser().exists():
        return name, path
    return Path(of).expanduser().resolve().name, of


def open_adapters(folders: Mapping[str, Path], tensors: Mapping[str, Tensor]) -> Adapters | None:
    """Read the adapters in these folders for a model with these tensors; return None if there are no folders.

    Raises:
        SourceError, FormatError: a file cannot be read.
        ModelError: an adapter does not fit the model, or its kind is not implemented.
    """
    modules = _modules(tensors)
    made = [Adapter(name, path, _pairs(path, modules)) for name, path in folders.items()]
    return Adapters(made) if made else None


def _modules(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return a dict that maps each module that adapters can change to its matrices.

    A key is the part of the module's name in transformers that `IN_LAYER` finds. A fused module, such as one for
    queries, keys and values, has several matrices.
    """
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors.values():
        module = IN_LAYER.search(tensor.stored("hf").name)
        is_matrix = len(tensor.shape) == 2 and not any(part in tensor.name for part in OF_EXPERTS)
        if is_matrix and module is not None and module[1].endswith(".weight"):
            found.setdefault(module[1].removesuffix(".weight"), []).append(tensor)
    return found


def _pairs(path: Path, modules: Mapping[str, Sequence[Tensor]]) -> Pairs:
    """Read the adapter in the folder `path`; return `Adapter.pairs`. `modules` is the result of `_modules`."""
    config, where = _config(path), str(path)
    stored, scale_of = _peft(path, config) if "peft_type" in config else _mlx(path, config)
    pairs: Pairs = {}
    for module, (a, b) in stored.items():
        at = IN_LAYER.search(module)
        of = modules.get(at[1]) if at is not None and "vision" not in module and "audio" not in module else None
        if of is None:
            known = sorted({name.rsplit(".", 1)[1] for name in modules})
            raise ModelError(
                f"{where}: the adapter changes {module}, but adapters are implemented only for {', '.join(known)}; "
                "merge the adapter into the model"
            )
        for tensor in of:
            pairs[tensor.name.removesuffix(".weight")] = _pair(where, module, tensor, a, b, scale_of(module, len(a)))
    if not pairs:
        raise ModelError(f"{where}: the adapter has no matrices")
    return pairs


def _pair(where: str, module: str, tensor: Tensor, a: Floats, b: Floats, scale: float) -> tuple[Floats, Floats]:
    """Return A and B for `tensor`, one of the module's matrices; B is multiplied by the factor `scale`.

    The columns of A and the rows of B are in the model's order. If the module is fused, its B also has rows for other
    matrices, which are left out.
    """
    n, k = tensor.shape
    layout = tensor.stored("hf")
    of = n if layout.rows is None else layout.rows[1]
    if layout.expert is not None or layout.is_shifted or layout.outer is not None:
        raise ModelError(f"{where}: the adapter changes {module}, for which adapters are not implemented")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != k or b.shape[0] != of or a.shape[0] != b.shape[1]:
        raise ModelError(
            f"{where}: {module} has A {a.shape} and B {b.shape}, and the model's layer is ({of}, {k}): expected "
            f"A (r, {k}) and B ({of}, r); the adapter is of another model"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ModelError(f"{where}: {module} has values that are NaN or infinite; the file is damaged")
    rows = replace(layout, transposed=False, columns=None)
    columns = TensorLayout(layout.name, columns=layout.columns)
    scaled = (b.astype(np.float64) * scale).astype(np.float32)
    return _taken(columns, a, (len(a), k)), _taken(rows, scaled, (n, len(a)))


def _taken(layout: TensorLayout, values: Floats, shape: tuple[int, int]) -> Floats:
    return layout.take(Weight.pack(layout.name, np.ascontiguousarray(values), F32), shape).dequantize()


def _config(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        message = f"{path}: expected the folder of a LoRA adapter, written by PEFT or mlx-lm, with {CONFIG}"
        raise SourceError(f"{message}; the folder does not exist" if not path.exists() else f"{message}, found none")
    return read_json(path / CONFIG)


def _file(path: Path, name: str) -> SafetensorsFile:
    if not (path / name).is_file():
        pickled = "only adapter_model.bin, which is not read: save the adapter again with safe_serialization=True"
        has_pickle = (path / "adapter_model.bin").is_file()
        raise SourceError(f"{path}: expected {name}, found {pickled if has_pickle else 'none'}")
    return open_safetensors(path / name)


ScaleOf = Callable[[str, int], float]


def _peft(path: Path, config: Mapping[str, Any]) -> tuple[Pairs, ScaleOf]:
    """Return a map of a PEFT folder's modules to their A and B, and a function that returns a module's factor.

    Source: peft, `tuners/lora/config.py` and `tuners/lora/layer.py`.
    """
    kind, begins = config.get("peft_type"), config.get("init_lora_weights")
    wrong = [f"{key} {shown(config[key])}" for key in REFUSED if config.get(key)]
    wrong += [f"peft_type {kind!r}"] if kind != "LORA" else []
    wrong += [f"bias {config['bias']!r}"] if config.get("bias", "none") != "none" else []
    wrong += [f"init_lora_weights {begins!r}"] if str(begins).lower().startswith(CHANGES_MODEL) else []
    known = (*READ, *HARMLESS, *REFUSED)
    wrong += [f"{key} {shown(value)}" for key, value in config.items() if key not in known and value]
    _check(path, wrong)
    targets = config.get("target_modules")
    if not (targets is None or isinstance(targets, str) or _is_list_of_texts(targets)):
        raise ModelError(f"{path / CONFIG}: target_modules must be a text or a list of texts, not {shown(targets)}")
    alphas, ranks = _patterns(path, config, "alpha_pattern"), _patterns(path, config, "rank_pattern")

    def scale_of(module: str, rank: int) -> float:
        module = module.removeprefix(PEFT_PREFIX)  # PEFT's patterns match names without this prefix
        if not _is_target(module, targets):
            raise ModelError(f"{path}: the adapter has matrices of {module}, which is none of its target_modules")
        r = _of_pattern(ranks, module, config.get("r", rank))
        alpha = _of_pattern(alphas, module, config.get("lora_alpha", r))
        _check_rank(path, "r", r, module, rank)
        if not is_number(alpha):
            raise ModelError(f"{path / CONFIG}: lora_alpha must be a number, not {shown(alpha)}")
        return float(alpha) / (math.sqrt(r) if config.get("use_rslora") else r)

    return _read(path, _file(path, PEFT_FILE), PEFT_NAME), scale_of


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_target(module: str, targets: str | Sequence[str] | None) -> bool:
    """Return whether the list `targets` has this module, by PEFT's rule; True if `targets` is not a list."""
    if targets is None or isinstance(targets, str):  # a text is "all-linear" or a regular expression
        return True
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _patterns(path: Path, config: Mapping[str, Any], key: str) -> Mapping[re.Pattern[str], Any]:
    """Return the map of patterns to values in the setting `key`. As in PEFT, patterns match the end of a name."""
    found = config.get(key) or {}
    try:
        return {re.compile(rf"(?:.*\.)?(?:{pattern})$"): value for pattern, value in found.items()}
    except (AttributeError, re.error):
        message = f"{path / CONFIG}: {key} must map names of modules, or regular expressions, to numbers"
        raise ModelError(f"{message}, not {shown(found)}") from None


def _of_pattern(patterns: Mapping[re.Pattern[str], Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the module; `default` if no pattern matches."""
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)


def _check_rank(path: Path, key: str, rank: object, module: str, n_rows: int) -> None:
    """Raise ModelError unless a rank in the settings is the number of rows of A."""
    if rank != n_rows or not is_whole(rank):
        message = f"{path / CONFIG}: {key} is {shown(rank)} for {module}, whose matrices have rank {n_rows}"
        raise ModelError(message)


def _mlx(path: Path, config: Mapping[str, Any]) -> tuple[Pairs, ScaleOf]:
    """Do the same as `_peft` for a folder of mlx-lm. mlx-lm stores A as (K, r) and B as (r, N).

    Source: mlx-lm, `tuner/lora.py` and `tuner/utils.py`.
    """
    kind, of = config.get("fine_tune_type", "lora"), config.get("lora_parameters") or {}
    _check(path, [] if kind == "lora" else [f"fine_tune_type {kind!r}"])
    if not isinstance(of, Mapping):
        raise ModelError(f"{path / CONFIG}: lora_parameters must be an object, not {shown(of)}")
    _check(path, [f"lora_parameters.{key} {shown(value)}" for key, value in of.items() if key not in OF_MLX and value])
    scale = of.get("scale", config.get("lora_scale"))
    if not is_number(scale):
        raise ModelError(f"{path / CONFIG}: lora_parameters.scale must be a number, not {shown(scale)}")
    stored = _read(path, _file(path, MLX_FILE), MLX_NAME)

    def scale_of(module: str, rank: int) -> float:
        _check_rank(path, "lora_parameters.rank", of.get("rank", rank), module, rank)
        return float(scale)

    return {
        module: (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)) for module, (a, b) in stored.items()
    }, scale_of


def _check(path: Path, wrong: Sequence[str]) -> None:
    if wrong:
        message = f"{path / CONFIG}: {', '.join(wrong)} is not implemented: an adapter may only have LoRA matrices"
        raise ModelError(f"{message}; merge the adapter into the model")


def _read(path: Path, file: SafetensorsFile, pattern: re.Pattern[str]) -> Pairs:
    """Return a map of the modules in a file to their matrices A and B."""
    halves: dict[str, dict[str, Floats]] = {}
    for name in file.tensors:
        found = pattern.match(name)
        if found is None:
            raise ModelError(f"{file.path}: {name} is no matrix of LoRA; merge the adapter into the model")
        halves.setdefault(found[1], {})[found[2].lower()] = file.weight(name).dequantize()
    lacking = next((module for module, of in halves.items() if len(of) != 2), None)
    if lacking is not None:
        raise ModelError(f"{file.path}: {lacking} has only one of its two matrices; the file is incomplete")
    return {module: (of["a"], of["b"]) for module, of in halves.items()}


# ---- the layers with adapters ----


def adapted(be: Backend, masks: Array | None) -> Backend:
    """Return a backend that adds the products of adapters, with a mask per token (T, M); `be` if `masks` is None."""
    return be if masks is None else cast(Backend, Adapted(be, masks))


class Adapted:
    """A backend whose linear layers add the products of adapters: `W x + B (mask * (A x))`.

    If a pass has masks, `decoder_layer` uses an `Adapted` in place of its backend (or of the `Lowering` that compiles
    the layers). If an adapter changes a linear layer of a fused block, the block runs as several operations.
    """

    def __init__(self, be: Backend, masks: Array) -> None:
        self._be, self._masks = be, masks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._be, name)

    def linear(self, x: Array, linear: Linear) -> Array:
        return self._added(self._be.linear(x, linear), x, linear)

    def norm_project(self, x: Array, norm: Norm | None, projections: Sequence[Linear]) -> list[Array]:
        if all(p.lora is None for p in projections):
            return self._be.norm_project(x, norm, projections)
        h = self._be.norm(x, norm)
        products = self._be.norm_project(h, None, projections)
        return [self._added(y, h, p) for y, p in zip(products, projections, strict=True)]

    def project_norm(self, x: Array, projection: Linear, norm: Norm) -> Array:
        if projection.lora is None:
            return self._be.project_norm(x, projection, norm)
        return self._be.norm(self.linear(x, projection), norm)

    def project_add(self, x: Array, projection: Linear, residual: Array) -> Array:
        return self._added(self._be.project_add(x, projection, residual), x, projection)

    def project_norm_add(self, x: Array, projection: Linear, norm: Norm, residual: Array) -> Array:
        if projection.lora is None:
            return self._be.project_norm_add(x, projection, norm, residual)
        return self._be.norm_add(self.linear(x, projection), norm, residual)

    def norm_gate_up(self, x: Array, norm: Norm | None, gate: Linear, up: Linear, activation: Activation) -> Array:
        if gate.lora is None and up.lora is None:
            return self._be.norm_gate_up(x, norm, gate, up, activation)
        gates, ups = self.norm_project(x, norm, [gate, up])
        return self._be.gated(gates, ups, activation)

    def norm_up(self, x: Array, norm: Norm | None, up: Linear, activation: Activation) -> Array:
        if up.lora is None:
            return self._be.norm_up(x, norm, up, activation)
        return self._be.activate(self.linear(self._be.norm(x, norm), up), activation)

    def _added(self, y: Array, x: Array, linear: Linear) -> Array:
        """Return `y + B (mask * (A x))`, with the adapters' A and B for a linear layer; y if no adapter changes it."""
        if linear.lora is None:
            return y
        inner = self._be.multiply(self._be.linear(x, linear.lora.a), self._masks)
        return self._be.project_add(inner, linear.lora.b, y)
