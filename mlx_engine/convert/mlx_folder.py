"""Quantise a Hugging Face folder or a GGUF file into a folder for MLX, which mlx-lm and this engine load.

Matrices of linear layers and embedding tables are quantised, as in mlx-lm. All other tensors keep their values, and so
do matrices whose row length is not a multiple of the group size. A folder cannot have GGUF's block types. If a tensor
of such a type keeps its values, it is written in MLX's groups or, if these cannot represent its values, in float32.

The settings and the tokenizer of a GGUF file become the files of a Hugging Face folder. config.json is verified by
reading it back: it must give the same config as the GGUF file.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders, processors

from mlx_engine.checkpoint.hf_folder import INDEX
from mlx_engine.checkpoint.mlx_quantization import KEYS, WEIGHT
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.safetensors import write_safetensors
from mlx_engine.config.rope import Rotation
from mlx_engine.convert.gguf_form import check_same
from mlx_engine.convert.mlx_tensors import KEEP, OTHERS, TABLE, TARGETS, Part, mlx_form, parts_of, target_type
from mlx_engine.convert.requantize import Line, Matrix, check_finite, check_mixed
from mlx_engine.errors import ModelError, OptionError, SourceError, listed
from mlx_engine.kernels.files import draft
from mlx_engine.models.qwen3_5 import DELTA
from mlx_engine.quant.group_weight import GroupWeight
from mlx_engine.quant.groups import GroupType
from mlx_engine.tokenizer.gguf import from_gguf as read_tokenizer
from mlx_engine.tokenizer.tokenizer import Tokenizer
from mlx_engine.tokenizer.vocabulary import SPACE_MARK, SpacePrefix, TokenType, Vocabulary
from mlx_engine.weights.conversion import GROUPS, HEAD, LAYER_TYPES
from mlx_engine.weights.model import architecture_of, open_model
from mlx_engine.weights.plan import Plan, Tensor, check
from mlx_engine.weights.rope_divisors import rule_of
from mlx_engine.weights.stored import TensorLayout

# Maps a GGUF architecture to its `model_type`. Other architectures have the first of their `Architecture.names`.
TEXT_MODELS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "mistral3": "ministral3",
}
# Maps a GGUF architecture to the `model_type` of its models with a sliding window. OLMo 2 and 3 have the same GGUF
# architecture, but only OLMo 3 has a window.
WITH_WINDOW = {"olmo2": "olmo3"}


def from_gguf(checkpoint: Checkpoint, plan: Plan, *, has_head: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Convert a GGUF file's settings and tokenizer; return config.json, and the texts of the other files by name.

    Raises:
        ModelError: config.json cannot represent the configuration.
        TokenizerError: the file has no tokenizer, or one that is not implemented.
    """
    config = replace(plan.config, **rule_of(checkpoint, plan.config))
    tokenizer = read_tokenizer(checkpoint.metadata, where=checkpoint.where)
    ends = sorted(tokenizer.eog_ids, key=lambda token_id: (token_id != tokenizer.eos_id, token_id))
    roles = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    settings = {
        "model_type": _model_type(checkpoint, config),
        **_shortened(config.to_hf()),
        **roles,
        "tie_word_embeddings": not has_head,
    }
    _read_back(checkpoint, settings, config)
    files = to_json(tokenizer, context_length=config.context_length)
    return settings, files | {"generation_config.json": json.dumps(roles, indent=4) + "\n"}


def _model_type(checkpoint: Checkpoint, config: Any) -> str:
    name = checkpoint.architecture
    if name in WITH_WINDOW and any(config.windows):
        return WITH_WINDOW[name]
    return TEXT_MODELS.get(name) or architecture_of(checkpoint).names[0]


def _shortened(value: Any) -> Any:
    """Round the float32 values of settings from GGUF to the fewest decimals that give the same float32."""
    if isinstance(value, Mapping):
        return {key: _shortened(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_shortened(of) for of in value]
    return float(str(np.float32(value))) if isinstance(value, float) and np.float32(value) == value else value


def _read_back(checkpoint: Checkpoint, settings: Mapping[str, Any], config: Any) -> None:
    """Check with `check_same` that config.json gives the same configuration as the GGUF file."""
    written = replace(
        checkpoint, naming="hf", architecture=settings["model_type"], settings=settings, metadata={}, shapes={}
    )
    check_same(checkpoint.where, config, architecture_of(written).plan(written).config, "config.json")


def to_json(tokenizer: Tokenizer, *, context_length: int) -> dict[str, str]:
    """Return the texts of tokenizer.json, tokenizer_config.json and, for a chat template, chat_template.jinja."""
    vocabulary, core = tokenizer.parts()
    core.decoder = _decoder(vocabulary)
    if vocabulary.add_bos and vocabulary.bos_id is not None:
        bos = vocabulary.tokens[vocabulary.bos_id]
        core.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, vocabulary.bos_id)]
        )
    files = {
        "tokenizer.json": core.to_str(),
        "tokenizer_config.json": json.dumps(_config(vocabulary, context_length), ensure_ascii=False, indent=4) + "\n",
    }
    if vocabulary.chat_template is not None:
        files["chat_template.jinja"] = vocabulary.chat_template
    return files


def _decoder(vocabulary: Vocabulary) -> Any:
    """Return the decoder that Hugging Face tokenizers of the vocabulary's kind (byte-level BPE or SPM) have."""
    if vocabulary.kind == "byte-level BPE":
        return decoders.ByteLevel()
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.space_prefix is not SpacePrefix.NEVER:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _config(vocabulary: Vocabulary, context_length: int) -> dict[str, object]:
    unknown = next(iter(vocabulary.ids_of(TokenType.UNKNOWN)), None)
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unk": unknown, "pad": vocabulary.pad_id}
    roles = {f"{role}_token": vocabulary.tokens[i] for role, i in ids.items() if i is not None}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "add_bos_token": vocabulary.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }


# The largest number of bytes of tensors in a file, as in mlx-lm.
SHARD_BYTES = 5 << 30
# Files that are not copied: weights, files that the conversion writes, the README of the original, and hidden files.
NOT_COPIED = (
    "*.safetensors", "*.index.json", "*.bin", "*.gguf", "*.pth", "*.pt", "config.json", "README.md", ".*",
)  # fmt: skip


def to_mlx_folder(
    source: Path,
    target: Path,
    to: str,
    layers: Mapping[str, str] | None = None,
    *,
    allow_settings: Sequence[str] = (),
    allow_mixed: bool = False,
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Line]:
    """Write the folder `target` and return totals per layer type. The folder appears only when it is complete.

    Args:
        source: a GGUF file, or a Hugging Face folder, which may already be quantised by MLX.
        target: a path that does not exist.
        to: a key of `mlx_tensors.TARGETS`.
        layers: exceptions from `to`. Maps a layer type, a group of layer types, or `token_embd` to a key of `TARGETS`
            or to "keep".
        allow_settings: settings that are left out if they are not implemented.
        allow_mixed: write the folder even if matrices with more than half of the bytes are not quantised in groups, or
            get more bits than the requested type has. Matrices that are to be kept do not count.
        note: called with lines for the user, about ignored settings, about differences between the results of mlx-lm
            and of this engine, and about matrices that do not get the requested type.
        progress: called with (tensors written, tensors in total).

    Raises:
        OptionError: a type or a layer is unknown; `target` exists; matrices that are stored as one matrix are given
            different types; or too many bytes get another type (see `allow_mixed`).
        SourceError: the source cannot be read, or the target cannot be written.
        FormatError, ModelError: the source is damaged, has NaN or infinity, or its model cannot be written for MLX.
        TokenizerError: a GGUF file has no tokenizer, or one that is not implemented.
    """
    layers = dict(layers or {})
    _check_options(target, to, layers)
    checkpoint = open_model(source, allow_settings)
    plan = architecture_of(checkpoint).plan(checkpoint)
    tensors = check(checkpoint, plan)
    has_head = f"{HEAD}{WEIGHT}" in tensors
    config, write_others = _beside_weights(source, checkpoint, plan, has_head=has_head)
    model_type = str(config.get("model_type"))
    check_loads(checkpoint.where, model_type, plan.config, has_head=has_head)
    for line in (*checkpoint.notes, *notes_on(model_type, plan.config)):
        note(line)
    forms = forms_of(config, plan.config, tensors)
    parts = parts_of(checkpoint, forms, to, layers)
    check_mixed([_matrix(part, part.asked) for part in parts if part.asked], note, allow_mixed=allow_mixed)
    config |= dict.fromkeys(KEYS, _quantization(to, parts))
    try:
        with draft(target.absolute(), is_folder=True) as made:
            lines = _write_tensors(made, parts, progress, checkpoint.where)
            (made / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=4) + "\n")
            write_others(made)
            made.rename(target)
    except OSError as error:
        raise SourceError(f"{target}: expected a place where a folder can be written, found {error}") from error
    return lines


def _matrix(part: Part, asked: GroupType) -> Matrix:
    nbytes = part.type_before.bytes_for(math.prod(part.shape))
    is_small = isinstance(part.type, GroupType) and part.type.bits <= asked.bits
    return Matrix(part.name, part.shape[-1], nbytes, asked, part.type, is_small=is_small)


def _beside_weights(
    source: Path, checkpoint: Checkpoint, plan: Plan, *, has_head: bool
) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """Return the contents of config.json, and a function that writes the tokenizer and other files into a folder."""
    if source.is_dir():
        config = config_for_mlx(checkpoint.settings, has_head=has_head, known=plan.config.to_hf())
        return config, partial(_copy_others, source)
    config, files = from_gguf(checkpoint, plan, has_head=has_head)
    return config_for_mlx(config, has_head=has_head), partial(_write_files, files)


def _check_options(target: Path, to: str, layers: Mapping[str, str]) -> None:
    if to not in TARGETS:
        raise OptionError(f"--to: unknown type {to!r}; choose {listed(TARGETS)}", option="--to", found=to)
    kinds = (*LAYER_TYPES, *GROUPS, TABLE)
    for name, value in layers.items():
        if name not in kinds:
            raise OptionError(f"--layer: no layer {name!r}; choose {listed(kinds)}", option="--layer", found=name)
        allowed = (*TARGETS, KEEP)
        if value not in allowed:
            message = f"--layer {name}: unknown type {value!r}; choose {listed(allowed)}"
            raise OptionError(message, option="--layer", found=value)
    if target.exists() or target.is_symlink():
        raise OptionError(f"{target} exists; name a new folder", option="OUT", found=str(target))


def forms_of(
    config: Mapping[str, Any], sizes: Any, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, TensorLayout]]:
    """Map the GGUF name of each tensor to the tensor and its layout in the new folder; `sizes` is the `Config`."""
    model_type, n_experts = str(config.get("model_type")), int(getattr(sizes, "n_experts", 0))
    is_inner = "text_config" in config or model_type in INNER.values()
    how: dict[str, Any] = {"n_experts": n_experts, "is_inner": is_inner}
    # Leave out tensors that only GGUF files have: they encode settings, and have no name in a folder.
    stored = {name: tensor for name, tensor in tensors.items() if tensor.stored("hf").name}
    return {name: (tensor, mlx_form(tensor, model_type, **how)) for name, tensor in stored.items()}


def _quantization(to: str, parts: Sequence[Part]) -> dict[str, object]:
    """Return the setting `quantization`: the type `to`, and the type (or False) of each matrix that differs."""
    whole = settings_of(target_type(to, parts[0].type_before))
    by_name: dict[str, object] = {}
    for part in parts:
        if isinstance(part.type, GroupType) and settings_of(part.type) != whole:
            by_name[part.name.removesuffix(WEIGHT)] = settings_of(part.type)
        elif part.kind != OTHERS and not part.is_quantized:
            by_name[part.name.removesuffix(WEIGHT)] = False
    return {**whole, **by_name}


def settings_of(type_: GroupType) -> dict[str, object]:
    """Return the settings by which config.json describes a type, as mlx-lm writes them."""
    return {"group_size": type_.block_size, "bits": type_.bits, "mode": type_.mode}


def _write_tensors(
    folder: Path, parts: Sequence[Part], progress: Callable[[int, int], None] | None, source: str
) -> list[Line]:
    """Write the tensors into shards (files), and the index. `source` names the model in errors."""
    shards, lines = _shards(parts), dict[str, Line]()
    where: dict[str, str] = {}
    done = 0

    def data(shard: Sequence[Part]) -> Iterator[NDArray[np.uint8]]:
        nonlocal done
        for part in shard:
            before = part.before()
            if part.is_quantized and part.type != before.type:
                check_finite(before, source)
            new = part.new(before)
            lines.setdefault(part.kind, Line(part.kind)).add(before, new, source)
            tensors = (new.parts.quants, *new.parts.in_order[:-1]) if isinstance(new, GroupWeight) else (new.data,)
            yield from (np.ascontiguousarray(tensor) for tensor in tensors)
            done += 1
            if progress is not None:
                progress(done, len(parts))

    for i, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        entries = [entry for part in shard for entry in part.entries()]
        where |= {entry.name: name for entry in entries}
        write_safetensors(folder / name, entries, data(shard))
    nbytes = sum(entry.nbytes for part in parts for entry in part.entries())
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=4) + "\n")
    return list(lines.values())


def _shards(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the tensors of each file. A file has at most SHARD_BYTES of tensors, unless one tensor alone has more."""
    shards: list[list[Part]] = []
    size = 0
    for part in parts:
        nbytes = sum(entry.nbytes for entry in part.entries())
        if not shards or size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += nbytes
    return shards


def _write_files(files: Mapping[str, str], target: Path) -> None:
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8", newline="")


def _copy_others(source: Path, target: Path) -> None:
    """Copy the tokenizer and all other files except those that NOT_COPIED matches."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not any(fnmatch(file.name, pattern) for pattern in NOT_COPIED):
            shutil.copyfile(file, target / file.name)


# The kinds of layers that have separate rotary settings.
GLOBAL, LOCAL = "full_attention", "sliding_attention"
# mlx-lm has some text models only inside a multimodal model. Maps their `model_type` to that of the multimodal model.
INNER = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
GEMMA4 = ("gemma4", "gemma4_text")
# Architectures for which mlx-lm reads the nested settings `rope_parameters` of transformers 5.
NESTED = ("mellum", "ministral3", *INNER, *INNER.values(), *GEMMA4)
# Architectures whose `vocab_size` mlx-lm reads outside of `text_config`.
SIZE_OUTSIDE = ("gemma3", "gemma4")
# The keys of rotary settings in transformers 4.
ROTARY = {"rope_theta", "rope_scaling", "rope_local_base_freq"}
# Architectures with one rotary base for all kinds of layers, and no key for a second base.
ONE_BASE = ("olmo3",)
# Keys of `rope_parameters` that mlx-lm reads outside of `rope_scaling`; the second one only with LongRoPE.
BESIDE = ("partial_rotary_factor", "original_max_position_embeddings")


def config_for_mlx(
    config: Mapping[str, Any], *, has_head: bool, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config that mlx-lm and transformers read in the same way.

    `tie_word_embeddings` is always written, because its default for Llama is different in the two programs.
    transformers 5 nests the rotary settings in `rope_parameters`, which most models of mlx-lm 0.32 do not read: for
    Llama, mlx-lm would silently use a base of 10,000. So rotary settings are written as in transformers 4, except for
    the architectures in NESTED. In a multimodal model, all this applies to the settings of the text model. `known` is
    the result of `ConfigBase.to_hf` for the text model. If `config` lacks a setting, it is taken from `known`.
    """
    text, known = config.get("text_config"), known or {}
    if isinstance(text, Mapping):
        made = {**config, "text_config": _text_model(text, known, has_head=has_head)}
        is_outer = made.get("model_type") in SIZE_OUTSIDE and "vocab_size" in known
        return made | ({"vocab_size": known["vocab_size"]} if is_outer else {})
    made = _text_model(config, known, has_head=has_head)
    return made | ({"model_type": INNER[made["model_type"]]} if made.get("model_type") in INNER else {})


def _text_model(config: Mapping[str, Any], known: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
    made = _named_as_published({**config, "tie_word_embeddings": not has_head})
    missing = {key: value for key, value in known.items() if made.get(key) is None and value is not None}
    if not ROTARY.isdisjoint(made):
        missing.pop("rope_parameters", None)
    made = _completed(made | missing)
    if made.get("model_type") in NESTED:
        return made
    nested = made.pop("rope_parameters", None)
    if not isinstance(nested, Mapping):
        return made
    of_all = nested.get(GLOBAL, nested)
    local = nested.get(LOCAL)
    made["rope_theta"] = of_all.get("rope_theta", made.get("rope_theta"))
    if local is not None and not (made.get("model_type") in ONE_BASE and local["rope_theta"] == made["rope_theta"]):
        made["rope_local_base_freq"] = local["rope_theta"]
    rule = of_all.get("rope_type", "default")
    made["rope_scaling"] = None if rule == "default" else {k: v for k, v in of_all.items() if k != "rope_theta"}
    made |= {key: of_all[key] for key in BESIDE[:1] if key in of_all}
    if rule == "longrope":
        made |= {key: of_all[key] for key in BESIDE if key in of_all}
        made["rope_scaling"] |= {"type": rule}
    return {key: value for key, value in made.items() if value is not None or key == "rope_scaling"}


def _named_as_published(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys and values of published files; transformers 5 saves some of them differently."""
    if config.get("model_type") in ("mellum", "qwen3_moe") and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if config.get("model_type") == "granitemoehybrid" and "layer_types" in config:
        words = {GLOBAL: "attention", DELTA: "mamba"}
        config["layer_types"] = [words.get(kind, kind) for kind in config["layer_types"]]
        config["position_embedding_type"] = config.get("position_embedding_type") or "nope"
    if config.get("model_type") == "nemotron_h":
        config.pop("layers_block_type", None)  # repeats hybrid_override_pattern, in words that mlx-lm does not know
    if config.get("model_type") in INNER:
        config["model_type"] = INNER[config["model_type"]]
    kinds = config.get("layer_types") or ()
    if config.get("model_type") in INNER.values() and GLOBAL in kinds:
        config.setdefault("full_attention_interval", kinds.index(GLOBAL) + 1)
    sizes = config.pop("per_layer_config", None)
    if config.get("model_type") == "gemma4_text" and sizes is not None:
        of_global = sizes.get(str(config["num_hidden_layers"] - 1), {})  # the last layer is global
        for key, name in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
            config[name] = of_global.get(key, config.get(key))
    if config.get("model_type") == "lfm2" and "hidden_size" in config:
        config.setdefault("block_dim", config["hidden_size"])
    return config


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys that mlx-lm requires and transformers does not."""
    if config.get("model_type") == "gpt2" and "n_positions" in config:
        config.setdefault("n_ctx", config["n_positions"])
    if config.get("model_type") in GEMMA4 and "vocab_size" in config:
        config.setdefault("vocab_size_per_layer_input", config["vocab_size"])
    if config.get("model_type") == "gpt_neox":
        rope = {**config, **(config.get("rope_parameters") or {})}
        names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
        config |= {key: rope[name] for key, name in names.items() if name in rope and key not in config}
    if config.get("model_type") == "minimax_m2" and "head_dim" in config:
        part = {**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor", 1)
        config.setdefault("rotary_dim", int(config["head_dim"] * part))
    return config


# ---- models that mlx-lm 0.32 cannot load, and models for which its results differ ----


# Architectures for which mlx-lm ignores `head_dim` and uses hidden_size / n_heads.
HEADS_OF_SIZE = (
    "cohere", "gpt_neox", "granite", "granitemoehybrid", "internlm2", "internlm3", "lfm2", "mimo", "minicpm", "mixtral",
    "phi", "phi3", "qwen2", "qwen2_moe", "stablelm",
)  # fmt: skip
# Architectures for which mlx-lm reads no list of layer types, only the interval between layers with full attention.
BY_INTERVAL = ("gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe")
# Architectures whose sliding window mlx-lm ignores.
WITHOUT_WINDOW = ("gemma2", "phi3")
# Maps an architecture to the way in which mlx-lm differs from this engine, for notes to the user.
OTHERWISE = {
    "gemma": "its gate has GELU without Gemma's approximation, so its results differ a little",
    "glm": "it rotates whole heads, so its results differ",
    "gpt_bigcode": "it has GELU without the approximation, so its results differ a little",
    "olmo": "it loads only files of OLMo's first implementation",
}


def check_loads(where: str, model_type: str, config: Any, *, has_head: bool) -> None:
    """Check that mlx-lm can load a model and computes the same results; `where` names the model in the error.

    Differences for which `notes_on` has a note are no error.

    Raises:
        ModelError: mlx-lm cannot load the model, or ignores one of its settings.
    """
    if getattr(config, "n_kv_arrays", 2) == 1:
        raise ModelError(
            f"{where}: expected attention with keys and values, found latent attention, whose head matrices mlx-lm "
            "splits in two; --to q8_0 or q4_0 writes a GGUF file"
        )
    problem = _gpt2(config, has_head=has_head) if model_type == "gpt2" else _layers(model_type, config)
    if model_type == "gpt_neox":
        problem = _gpt2(config, has_head=False)
    if model_type == "minicpm" and not has_head:
        problem = "a matrix for the head, found a head that is tied to the embedding table"
    if model_type in HEADS_OF_SIZE and config.head_dim * config.n_heads != config.hidden_size:
        size = config.hidden_size // config.n_heads
        problem = f"heads of {size} elements, hidden_size / n_heads, found {config.head_dim}"
    if problem is not None:
        raise ModelError(
            f"{where}: expected {problem}; mlx-lm's {model_type!r} would refuse the folder or compute "
            "other results; --to q8_0 or q4_0 writes a GGUF file"
        )


def _gpt2(config: Any, *, has_head: bool) -> str | None:
    """Return what mlx-lm expects of a GPT-2 or GPT-NeoX and what was found; None if mlx-lm supports the model."""
    size = 4 * config.hidden_size
    if config.intermediate_size != size:
        return f"an FFN of {size:,}, 4 times the hidden size, found {config.intermediate_size:,}"
    return "a head that is tied to the embedding table, found a matrix for the head" if has_head else None


def _layers(model_type: str, config: Any) -> str | None:
    """Return the order of layers that mlx-lm expects and what was found; None if mlx-lm supports the order."""
    if model_type in BY_INTERVAL:
        kinds = getattr(config, "kinds", None)
        is_other = [kind == DELTA for kind in kinds] if kinds else [window is not None for window in config.windows]
        n = is_other.index(False) + 1 if False in is_other else 0
        if not n or is_other != [(i + 1) % n != 0 for i in range(len(is_other))]:
            return "full attention in every n-th layer, found another order of layers"
    if model_type == "gpt_oss" and len({window is None for window in config.windows}) < 2:
        return "layers with a window and layers without, found only one kind"
    return None


def notes_on(model_type: str, config: Any) -> list[str]:
    """Return notes for the user on differences between mlx-lm and this engine for a model."""
    windows = [window for window in config.windows if window is not None]
    found, rope = [OTHERWISE[model_type]] if model_type in OTHERWISE else [], getattr(config, "rope", None)
    if model_type in WITHOUT_WINDOW and windows:
        found.append(f"its attention ignores the window, so its results differ after {min(windows):,} tokens")
    if isinstance(rope, Rotation) and rope.rule == "yarn" and not rope.truncate:
        found.append("it rounds the limits of YaRN, as llama.cpp does, so its results differ")
    if isinstance(rope, Rotation) and rope.rule == "longrope":
        found.append(f"it has only LongRoPE's long factors, so its results differ up to {rope.context:,} tokens")
    return [f"mlx-lm's {model_type!r}: {line}" for line in found]
