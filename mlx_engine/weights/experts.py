"""Mixtures of experts in files: the tensors of a layer's experts and router, and their names and shapes in each format.

In the model, each expert has its own matrices, views of the file's bytes if possible. Files store one tensor per
matrix, or stack the matrices of all X experts of a layer in one tensor. F is the FFN size, D the hidden size:

    GGUF                        blk.0.ffn_gate_exps.weight (X, F, D); files of early 2024: blk.0.ffn_gate.3.weight;
                                Gemma 4, and optionally others: blk.0.ffn_gate_up_exps.weight (X, 2F, D), gate first
    transformers, published     model.layers.0.mlp.experts.3.gate_proj.weight; Mixtral: w1, w2 and w3
    Granite, published          model.layers.0.block_sparse_moe.input_linear.weight (X, 2F, D); output_linear.weight
    Qwen3.5, transformers 5     model.layers.0.mlp.experts.gate_up_proj (X, 2F, D), gate first; experts.down_proj
    Llama 4                     model.layers.0.feed_forward.experts.gate_up_proj (X, D, 2F), down_proj (X, F, D)
    mlx-community               model.layers.0.mlp.switch_mlp.gate_proj.weight; gpt-oss: experts.gate_proj.weight
    gpt-oss, published          model.layers.0.mlp.experts.gate_up_proj_blocks and _scales, (X, 2F, D), gate in the even
                                rows; in bf16, gate_up_proj (X, D, 2F), gate in the even columns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from mlx_engine.backends.experts import Experts, Routing, Scoring, SharedExpert
from mlx_engine.backends.parameters import Gating
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import ConfigBase, Naming, Setting
from mlx_engine.config.settings import Settings
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.stored import TensorLayout

# The largest accepted number of experts in all layers together; every known model has far fewer. Without this bound, a
# damaged count would cause an error that lists millions of missing tensors.
MOST_EXPERTS = 100_000

PARTS = ("gate", "up", "down")
# The value of llama.cpp's `expert_gating_func` for sigmoid scores.
SIGMOIDS = 2


@dataclass(frozen=True)
class Names:
    """The names of an architecture's experts in transformers.

    Attributes:
        block: the module in a layer that contains router and experts; "" if they are in the layer's module itself.
        parts: the published names of gate, up and down; the first is "" if experts have no gate.
        router: the name of the router's module.
        interleaved: whether published folders have gate and up in alternating rows of one tensor (gpt-oss). Experts and
            routers then have biases.
        is_fused: whether published folders have two fused tensors: gate and up of all experts, and down of all experts.
        stacked: the module in which mlx-lm has the stacked experts of a layer.
        stacked_parts: the names of gate, up and down in this module.
        stem: the prefix of the text model's tensors.
        fused: the names of the two fused tensors in the block.
        bias: the name of `Routing.bias` in the block; "" if routers have none.
        bias_rows: 1 if this bias is stored as a matrix of one row, 0 if it is stored as a vector.
        shared: the name of the shared expert's module in the block.
        are_transposed: whether the fused tensors are transposed, (X, D, 2F) and (X, F, D).
    """

    block: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    interleaved: bool = False
    is_fused: bool = False
    stacked: str = "switch_mlp"
    stacked_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stem: str = "model."
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    bias: str = ""
    bias_rows: Literal[0, 1] = 0
    shared: str = "shared_expert"
    are_transposed: bool = False

    def blocks(self, i: int) -> list[str]:
        """Return the modules of layer i that may contain router and experts: `block`, and `mlp` for mlx-lm."""
        return [f"{self.stem}layers.{i}.{block}".removesuffix(".") for block in dict.fromkeys((self.block, "mlp"))]

    @property
    def own_parts(self) -> tuple[int, ...]:
        """The indices in PARTS of the matrices that an expert has."""
        return tuple(part for part, name in enumerate(self.parts) if name)


class Routed(ConfigBase):
    """A base class of configs with experts. Subclasses declare `n_experts`, `n_experts_used` and `normalize`.

    Subclasses may also declare `n_dense`, the number of layers without experts, which are the first ones; `groups`, the
    value of `Routing.groups`; and `routed_scale`, a factor of the weighted sum of the chosen experts' outputs.
    """

    scoring: ClassVar[Scoring] = "softmax"
    sum_eps: ClassVar[float] = 0.0
    weighs_inputs: ClassVar[bool] = False

    @property
    def ffn_kinds(self) -> tuple[str, ...]:
        """The kind of each layer's FFN: "dense", or "sparse" (with experts), for `weights/table.py`."""
        of: Any = self
        n_dense = getattr(of, "n_dense", 0)
        return tuple("dense" if i < n_dense else "sparse" for i in range(of.n_layers))

    def to_gguf(self) -> dict[str, object]:
        """Return the config as GGUF keys; for sigmoid scores, add `expert_gating_func`, which llama.cpp needs."""
        keys = super().to_gguf()
        return keys if self.scoring == "softmax" else {**keys, "expert_gating_func": SIGMOIDS}

    def routing(self, p: Parameters, i: int) -> Routing:
        """Return the rule by which layer i chooses a token's experts and computes their weights."""
        of: Any = self
        name, scale = f"blk.{i}.exp_probs_b", getattr(of, "routed_scale", 1.0)
        return Routing(
            of.n_experts_used, of.normalize, scoring=self.scoring, sum_eps=self.sum_eps,
            groups=getattr(of, "groups", None), bias=p.vector(name, "bias") if f"{name}.bias" in p else None,
            scales=None if scale == 1 else p.constant(f"blk.{i}.routed_scale", of.n_experts, scale),
            weighs_inputs=self.weighs_inputs,
        )  # fmt: skip


class InGroups(Routed):
    """A base class of configs with groups of experts. A token uses only experts of its `n_groups_used` best groups."""

    n_groups: int
    n_groups_used: int

    @property
    def groups(self) -> tuple[int, int] | None:
        """`n_groups` and `n_groups_used`; None if there is only one group."""
        return None if self.n_groups == 1 else (self.n_groups, self.n_groups_used)


@dataclass(frozen=True)
class Count(Setting):
    """The number of experts in each layer.

    config.json has one of three keys: "num_local_experts" (since transformers 5), "num_experts", or the key that the
    field `published` names.
    """

    published: str = "num_experts"

    def read(self, s: Settings, naming: Naming, known: Any) -> int:
        key = "expert_count"
        if naming == "hf":
            keys = ("num_local_experts", "num_experts", self.published)
            key = next((key for key in keys if s.whole_or_none(key, None) is not None), self.published)
        n = s.whole(key)
        most = most_experts(known.n_layers)
        if n > most:
            raise s.error(key, f"at most {most:,} in each of {known.n_layers:,} layers", n)
        return n

    def to_gguf(self, value: int) -> Mapping[str, object]:
        return {"expert_count": value}

    def to_hf(self, value: int, config: Any) -> Mapping[str, object]:
        return {self.published: value}


@dataclass(frozen=True)
class OfFolders(Setting):
    """A setting that has a key in config.json, but none in GGUF.

    Attributes:
        in_gguf: the value that llama.cpp assumes for GGUF files, or a function that returns this value, called with the
            fields that have been read so far.
        hf: the key in config.json.
        kind: the function that reads the key, usually a method of `Settings`.
        usual: the default in config.json.
    """

    in_gguf: Any
    hf: str
    kind: Callable[[Settings, str, Any], Any] = Settings.flag
    usual: Any = False

    def read(self, s: Settings, naming: Naming, known: Any) -> Any:
        if naming == "gguf":
            return self.in_gguf(known) if callable(self.in_gguf) else self.in_gguf
        return self.kind(s, self.hf, self.usual)

    def to_hf(self, value: Any, config: Any) -> Mapping[str, object]:
        return {self.hf: value}


@dataclass(frozen=True)
class Normalize(OfFolders):
    """Whether the weights of a token's experts add up to 1."""

    hf: str = "norm_topk_prob"


def most_experts(n_layers: int) -> int:
    """Return the largest accepted number of experts per layer."""
    return max(1, MOST_EXPERTS // n_layers)


def of_all(n_used: int, known: Any) -> str | None:
    """Return None if the model has at least `n_used` experts, else the text of what is expected."""
    return None if n_used <= known.n_experts else f"at most the number of experts, {known.n_experts}"


def of_groups(n_used: int, known: Any) -> str | None:
    """Return None if a token can use `n_used` groups, else the text of what is expected.

    The groups must have at least `n_experts_used` experts together.
    """
    least = -(-known.n_experts_used * known.n_groups // known.n_experts)
    return None if least <= n_used <= known.n_groups else f"from {least} to {known.n_groups} groups"


def sparse_layers(cfg: Any) -> list[int]:
    """Return the indices of the layers with experts: all layers if the config has no `ffn_kinds`."""
    kinds = getattr(cfg, "ffn_kinds", ("sparse",) * cfg.n_layers)
    return [i for i, kind in enumerate(kinds) if kind == "sparse"]


def with_experts(plan: Plan, checkpoint: Checkpoint, names: Names, expert_size: int) -> Plan:
    """Return the plan plus the tensors of each layer's router and experts; an expert has the FFN size `expert_size`."""
    cfg = plan.config
    made = list(plan.tensors)
    for i in sparse_layers(cfg):
        made += expert_tensors(cfg, checkpoint, names, expert_size, i, names.blocks(i))
    return replace(plan, tensors=made)


def expert_tensors(
    cfg: Any, checkpoint: Checkpoint, names: Names, expert_size: int, i: int, blocks: Sequence[str]
) -> list[Tensor]:
    """Return the tensors of the router and experts of layer i, which are in one of the modules `blocks`."""
    made = list[Tensor]()
    routers = [f"{block}.{names.router}.weight" for block in blocks]
    router = next((name for name in routers if name in checkpoint.shapes), routers[0])
    made.append(Tensor(f"blk.{i}.ffn_gate_inp.weight", router, (cfg.n_experts, cfg.hidden_size)))
    if names.bias:
        outer = (names.bias_rows, cfg.n_experts) if names.bias_rows else None
        # mlx-lm stores EXAONE's bias in the router's module.
        biases = f"{blocks[0]}.{names.bias}", f"{blocks[0]}.gate.{names.bias}"
        bias = TensorLayout(next((name for name in biases if name in checkpoint.shapes), biases[0]), outer=outer)
        made.append(Tensor(f"blk.{i}.exp_probs_b.bias", bias, (cfg.n_experts,)))
    for part in names.own_parts:
        made += _tensors(checkpoint, i, part, blocks, names, cfg.n_experts, (expert_size, cfg.hidden_size))
    if names.interleaved:
        made.append(Tensor(f"blk.{i}.ffn_gate_inp.bias", f"{blocks[0]}.{names.router}.bias", (cfg.n_experts,)))
        made += _biases(checkpoint, i, blocks[0], cfg.n_experts, (expert_size, cfg.hidden_size))
    return made


def _tensors(
    checkpoint: Checkpoint, i: int, part: int, blocks: Sequence[str], names: Names, n: int, size: tuple[int, int]
) -> list[Tensor]:
    """Return a tensor for the matrix `PARTS[part]` of each of the n experts of layer i; `size` is (F, D)."""
    stem, shape = f"blk.{i}.ffn_{PARTS[part]}", size[::-1] if PARTS[part] == "down" else size
    half = None if PARTS[part] == "down" else (part * size[0], 2 * size[0])
    gguf = _form(
        checkpoint,
        _of_block(f"{stem}_exps.weight", n),
        lambda e: TensorLayout(f"{stem}.{e}.weight"),
        _of_block(f"blk.{i}.ffn_gate_up_exps.weight", n, rows=half),
    )
    if names.interleaved:
        hf = _interleaved(checkpoint, f"{blocks[0]}.experts", PARTS[part], size[0], n)
    else:
        # The first fused tensor has the rows of gate, then those of up.
        name, how = names.fused[PARTS[part] == "down"], {"rows": half, "transposed": names.are_transposed}
        fused = [_of_block(f"{block}.{name}", n, **how) for block in blocks]
        own, stacked = names.parts[part], f"{names.stacked}.{names.stacked_parts[part]}.weight"
        hf = _form(
            checkpoint,
            *(fused if names.is_fused else ()),
            *(lambda e, block=block: TensorLayout(f"{block}.experts.{e}.{own}.weight") for block in blocks),
            *(_of_block(f"{block}.{stacked}", n) for block in blocks),
            *fused,
        )
    return [Tensor(f"{stem}_exps.{e}.weight", hf(e), shape, gguf=gguf(e)) for e in range(n)]


def _of_block(name: str, n: int, **how: Any) -> Callable[[int], TensorLayout]:
    """Return a function that maps an expert's index to the expert's layout in a tensor of n experts."""
    return lambda e: TensorLayout(name, expert=(e, n), **how)


def _form(checkpoint: Checkpoint, *choices: Callable[[int], TensorLayout]) -> Callable[[int], TensorLayout]:
    """Return the first choice whose tensor for expert 0 is in the checkpoint; `choices[0]` if no tensor is."""
    return next((choice for choice in choices if choice(0).name in checkpoint.shapes), choices[0])


def _interleaved(checkpoint: Checkpoint, stem: str, part: str, width: int, n: int) -> Callable[[int], TensorLayout]:
    """Return a function that maps an expert's index to the layout of its `part` in a folder of gpt-oss."""
    whole = f"{stem}.down_proj" if part == "down" else f"{stem}.gate_up_proj"
    rows: dict[str, Any] = {} if part == "down" else {"rows": (int(part == "up"), 2 * width), "step": 2}
    return _form(
        checkpoint,
        _of_block(f"{whole}_blocks", n, **rows),  # MXFP4
        _of_block(f"{stem}.{part}_proj.weight", n),  # mlx-community
        _of_block(whole, n, transposed=True, **rows),  # bf16
    )


def _biases(checkpoint: Checkpoint, i: int, block: str, n: int, size: tuple[int, int]) -> list[Tensor]:
    """Return the biases of gpt-oss's experts in layer i; `size` is (F, D)."""
    width, hidden = size
    made = []
    for part in PARTS:
        name, shape = f"blk.{i}.ffn_{part}_exps", (hidden if part == "down" else width,)
        whole = _of_block(f"{block}.experts.down_proj_bias", n)
        if part != "down":
            rows = (int(part == "up"), 2 * width)
            whole = _of_block(f"{block}.experts.gate_up_proj_bias", n, rows=rows, step=2)
        hf = _form(checkpoint, whole, _of_block(f"{block}.experts.{part}_proj.bias", n))
        gguf = _of_block(f"{name}.bias", n)
        made += [Tensor(f"{name}.{e}.bias", hf(e), shape, gguf=gguf(e)) for e in range(n)]
    return made


def with_shared_expert(plan: Plan, names: Names, size: int, *, has_weight: bool = True) -> Plan:
    """Return the plan plus the tensors of each layer's shared expert, whose FFN size is `size`."""
    made, hidden = list(plan.tensors), plan.config.hidden_size
    for i in sparse_layers(plan.config):
        block = f"{names.blocks(i)[0]}.{names.shared}"
        made += shared_tensors(hidden, size, i, block, has_weight=has_weight, own_parts=names.own_parts)
    return replace(plan, tensors=made)


def shared_tensors(
    hidden: int, size: int, i: int, block: str, *, has_weight: bool = True, own_parts: Sequence[int] = (0, 1, 2)
) -> list[Tensor]:
    """Return the tensors of the shared expert of layer i, whose module in a folder is `block`.

    With `has_weight`, the expert's output is multiplied by the sigmoid of a linear layer with one output. GGUF files
    store the matrix of this layer as a vector.
    """
    weight = TensorLayout(f"{block}_gate.weight", expert=(0, 1))
    made = [Tensor(f"blk.{i}.ffn_gate_inp_shexp.weight", weight, (hidden,))] if has_weight else []
    for part in (PARTS[at] for at in own_parts):
        shape = (hidden, size) if part == "down" else (size, hidden)
        made.append(Tensor(f"blk.{i}.ffn_{part}_shexp.weight", f"{block}.{part}_proj.weight", shape))
    return made


def experts(p: Parameters, i: int, n_experts: int, routing: Routing, activation: Gating = "silu") -> Experts:
    """Return the router and the experts of layer i, and its shared expert, if there is one."""
    has_gate = f"blk.{i}.ffn_gate_exps.0.weight" in p
    up, down = (p.expert_linear(f"blk.{i}.ffn_{part}_exps", n_experts) for part in PARTS[1:])
    gate = p.expert_linear(f"blk.{i}.ffn_gate_exps", n_experts) if has_gate else None
    name, shared = f"blk.{i}.ffn_gate_inp_shexp", None
    # `activation` is checked only for mypy: gpt-oss, the only model with "clamped_swiglu", has no shared experts.
    if f"blk.{i}.ffn_up_shexp.weight" in p and activation != "clamped_swiglu":
        weight = p.row(name) if f"{name}.weight" in p else None
        of_gate = p.linear(f"blk.{i}.ffn_gate_shexp") if has_gate else None
        of_up, of_down = (p.linear(f"blk.{i}.ffn_{part}_shexp") for part in PARTS[1:])
        shared = SharedExpert(weight, of_gate, of_up, of_down, activation)
    router = p.router(f"blk.{i}.ffn_gate_inp")
    return Experts(f"blk.{i}.ffn_moe", router, routing, gate, up, down, activation, shared)
