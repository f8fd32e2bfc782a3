"""Convert a Hugging Face folder to the contents of a GGUF file: metadata, tokenizer and tensors.

The result is then read back to verify it: all tensors that the architecture's file in `models/` requires must exist,
and the GGUF metadata must give the same config as the folder.

A `tokenizer.json` is converted only if the GGUF file gives every text the same token ids, apart from three differences.
Other converters accept these differences, too, because GGUF has no keys for them: Unicode normalisation to form C
(Qwen) is dropped; SPM (SentencePiece's BPE, with scores) does not distinguish U+2581 in a text from a space; text next
to a special token may be split differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import TokenizerError, UnsupportedConfigError
from mlx_engine.quant import group_weight
from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.tokenizer.bpe import name_of
from mlx_engine.tokenizer.gguf import from_gguf
from mlx_engine.tokenizer.hf import parse, tokenizer_json
from mlx_engine.tokenizer.vocabulary import SPACE_MARK, SpacePrefix, TokenType, Vocabulary
from mlx_engine.weights.model import architecture_of, open_model
from mlx_engine.weights.plan import Plan, Tensor, check
from mlx_engine.weights.stored import TensorLayout

# Name endings of tensors that llama.cpp requires in float32, although some are matrices, such as the router.
FLOATS = (
    "position_embd.weight", ".shortconv.conv.weight", ".ssm_conv1d.weight", ".ssm_norm.weight", ".ssm_a", ".ssm_d",
    ".ffn_gate_inp.weight", ".bias",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A tensor of the GGUF file: its name, shape and type, and a function that reads or converts it."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    make: Callable[[], Weight]


@dataclass(frozen=True)
class GGUFForm:
    """The contents of a GGUF file, and lines for the user about settings that were left out."""

    metadata: Mapping[str, object]
    parts: Mapping[str, Part]
    notes: tuple[str, ...] = ()


def from_folder(folder: Path, allow_settings: Sequence[str] = ()) -> GGUFForm:
    """Convert a Hugging Face folder. Settings in `allow_settings` are dropped if they are not implemented.

    Raises:
        SourceError: there is no such folder, or a file is missing.
        FormatError: a file is damaged, or a tensor has a type that cannot be read.
        ModelError: the architecture is not implemented, or GGUF cannot represent its configuration.
        TokenizerError: GGUF cannot represent the tokenizer.
    """
    checkpoint = open_model(folder, allow_settings)
    of = architecture_of(checkpoint)
    plan = of.plan(checkpoint)
    tensors, architecture = check(checkpoint, plan), plan.config.gguf_architecture or of.gguf
    keys = plan.config.to_gguf()
    metadata = {
        "general.architecture": architecture,
        "general.name": folder.resolve().name,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **to_gguf(folder / "tokenizer.json", plan.config.vocab_size),
    }
    parts = _parts(checkpoint, tensors, plan)
    _read_back(checkpoint, plan, metadata, keys, parts)
    return GGUFForm(metadata, parts, checkpoint.notes)


def _parts(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], plan: Plan) -> dict[str, Part]:
    """Map names to the tensors of the GGUF file. Each is one tensor of the model, or joins several, such as experts."""
    joined: dict[str, list[Tensor]] = {}
    for tensor in tensors.values():
        joined.setdefault(tensor.stored("gguf").name, []).append(tensor)
    parts = {name: _part(checkpoint, of) for name, of in joined.items()}
    for name, values in plan.gguf_only.items():
        parts[name] = Part(name, (len(values),), F32, partial(Weight.pack, name, values, F32))
    return parts


def _part(checkpoint: Checkpoint, tensors: list[Tensor]) -> Part:
    tensors = sorted(tensors, key=lambda tensor: tensor.stored("gguf").place)
    stored = tensors[0].stored("gguf")
    shape = stored.shape(tensors[0].shape)
    # 1-D tensors are norms and biases, which llama.cpp requires in float32, too.
    is_float = len(shape) == 1 or stored.name.endswith(FLOATS)
    type_ = checkpoint.weight(tensors[0].stored(checkpoint.naming).name).type
    type_ = F32 if is_float or stored.is_shifted else group_weight.GGUF if type_ == group_weight.MLX else type_
    return Part(stored.name, shape, type_, partial(_make, checkpoint, tensors, stored, type_))


def _make(checkpoint: Checkpoint, tensors: list[Tensor], stored: TensorLayout, type_: GGMLType) -> Weight:
    weights = [group_weight.in_gguf_order(tensor.weight(checkpoint)).as_type(type_) for tensor in tensors]
    parts = [tensor.stored("gguf").in_file_order(weight) for tensor, weight in zip(tensors, weights, strict=True)]
    return stored.put(parts, [tensor.stored("gguf").order for tensor in tensors])


def _read_back(
    checkpoint: Checkpoint,
    plan: Plan,
    metadata: Mapping[str, object],
    keys: Mapping[str, object],
    parts: Mapping[str, Part],
) -> None:
    """Check that no tensor is missing, and that the GGUF metadata gives the same configuration as the folder.

    Raises:
        ModelError: a tensor is missing, or the configuration differs.
    """
    written = replace(
        checkpoint,
        naming="gguf",
        architecture=str(metadata["general.architecture"]),
        settings=keys,
        metadata=metadata,
        shapes={name: part.shape for name, part in parts.items()},
        weight=lambda name: parts[name].make(),
    )
    again = architecture_of(written).plan(written)
    check(written, again)
    check_same(checkpoint.where, plan.config, again.config, "GGUF", ignored=plan.in_tensors)


def check_same(where: str, config: Any, again: Any, format_: str, *, ignored: Sequence[str] = ()) -> None:
    """Check that a config is equal to `again`, which was read back from settings in the format `format_`.

    Raises:
        UnsupportedConfigError: a field that is not in `ignored` differs, so the format cannot store its value.
    """
    for name in config.differences(again):
        if name not in ignored:
            expected = f"a value that {format_} can store, {getattr(again, name, None)!r:.60}"
            raise UnsupportedConfigError(where=where, key=name, expected=expected, found=getattr(config, name))


# Readers of GGUF recognise many end tokens by their text. The ids of the others, except `eos`, are written to the keys
# `tokenizer.ggml.{name}_token_id` with these names.
MORE_ENDS = ("eot", "eom")


def to_gguf(path: Path, vocab_size: int) -> dict[str, object]:
    """Convert the tokenizer.json at `path` to `tokenizer.*` metadata, for a model with `vocab_size` embedding rows.

    Raises:
        SourceError: the file cannot be read.
        TokenizerError: the file is not a tokenizer, or GGUF cannot represent it.
    """
    vocabulary, core = parse(tokenizer_json(path.parent))
    file = json.loads(core.to_str())
    vocabulary = _fitted(_said(vocabulary, file), vocab_size)
    how = byte_level(vocabulary, file) if vocabulary.kind == "byte-level BPE" else spm(vocabulary, file)
    return _with_ends(vocabulary, {**how, **_roles(vocabulary)})


def _said(vocabulary: Vocabulary, file: dict[str, Any]) -> Vocabulary:
    """Return the vocabulary with the token types that GGUF needs for added tokens.

    Readers of GGUF find an added token anywhere in unnormalised text. Raise TokenizerError if an added token has the
    flag single_word, lstrip or rstrip, or if an SPM tokenizer searches normalised text for a token with U+2581.
    """
    types = vocabulary.types.copy()
    for added in file["added_tokens"]:
        taken = [flag for flag in ("single_word", "lstrip", "rstrip") if added[flag]]
        if taken:
            raise refused(vocabulary, f"token {added['content']!r}", "without single_word, lstrip and rstrip", taken[0])
        token_id = added["id"]
        if vocabulary.kind == "SPM" and types[token_id] == TokenType.USER_DEFINED and SPACE_MARK in added["content"]:
            if added["normalized"]:
                raise refused(vocabulary, f"token {added['content']!r}", "searched in unnormalised text", "normalized")
            # Unnormalised text has spaces in place of U+2581, so a search never finds the token. With the type
            # NORMAL, the token can be produced by merges, which run on normalised text.
            types[token_id] = TokenType.NORMAL
    return replace(vocabulary, types=types)


def _fitted(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Return the vocabulary with one token per embedding row, padded or cut.

    Raise TokenizerError if a normal or byte token has no embedding row, or if two tokens have the same text.
    """
    tokens, types = vocabulary.tokens[:size], vocabulary.types[:size]
    beyond = [vocabulary.tokens[i] for i in vocabulary.ids_of(TokenType.NORMAL, TokenType.BYTE) if i >= size]
    if beyond:
        raise refused(
            vocabulary, "every normal and byte token", f"one of the model's {size:,} embedding rows", repr(beyond[0])
        )
    tokens += [""] * (size - len(tokens))
    types = np.concatenate([types, np.full(size - len(types), TokenType.UNUSED, np.int8)])
    # Readers of GGUF find the id of a token by its text, so every token needs a unique text.
    tokens = [token or f"[PAD{i}]" for i, token in enumerate(tokens)]
    if len({*tokens}) < size:
        raise refused(vocabulary, "every token", "unique", "a token with the name of a padding token, [PADn]")
    return replace(vocabulary, tokens=tokens, types=types)


def _roles(vocabulary: Vocabulary) -> dict[str, object]:
    unknown = next(iter(vocabulary.ids_of(TokenType.UNKNOWN)), None)
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unknown": unknown, "padding": vocabulary.pad_id}
    roles: dict[str, object] = {
        f"tokenizer.ggml.{role}_token_id": token_id
        for role, token_id in ids.items()
        if token_id is not None and token_id < len(vocabulary.tokens)
    }
    roles["tokenizer.ggml.add_bos_token"] = vocabulary.add_bos
    if vocabulary.chat_template is not None:
        roles["tokenizer.chat_template"] = vocabulary.chat_template
    return roles


def _with_ends(vocabulary: Vocabulary, metadata: dict[str, object]) -> dict[str, object]:
    """Return the metadata with keys for the end tokens that `from_gguf` does not find in it."""
    known = from_gguf(metadata, where=vocabulary.where).eog_ids
    missed = sorted(i for i in vocabulary.eog_ids - known if i < len(vocabulary.tokens))
    if len(missed) > len(MORE_ENDS):
        unknown = "the end tokens that readers of GGUF do not recognise by their text"
        raise refused(vocabulary, unknown, f"at most {len(MORE_ENDS)}", missed)
    keys = (f"tokenizer.ggml.{name}_token_id" for name in MORE_ENDS)
    return metadata | dict(zip(keys, missed, strict=False))


MARK = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
PREPEND = {"type": "Prepend", "prepend": SPACE_MARK}
# A pre-tokenizer that splits at spaces. It has no effect, because the normalizer has already replaced all spaces.
NO_CUT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def refused(vocabulary: Vocabulary, what: str, expected: str, found: object) -> TokenizerError:
    """Return the error for a tokenizer that GGUF cannot represent; `what` names the setting."""
    return TokenizerError(
        f"{vocabulary.where}: expected {what} to be {expected}, found {found!s:.120}; GGUF cannot store this, so the "
        "file would give other token ids; quantise the folder on load instead, with --quant"
    )


def byte_level(vocabulary: Vocabulary, file: dict[str, Any]) -> dict[str, object]:
    """Return the metadata of a byte-level BPE: pre-tokenizer, tokens and merges.

    Raises:
        TokenizerError: GGUF cannot represent a setting.
    """
    model = file["model"]
    _check_model(vocabulary, model, byte_fallback=False)
    if file["normalizer"] not in (None, {"type": "NFC"}):
        raise refused(vocabulary, "normalizer", "NFC, or none", file["normalizer"])
    pre = name_of(file["pre_tokenizer"], whole_words=bool(model["ignore_merges"]))
    if pre is None:
        raise refused(vocabulary, "pre_tokenizer", "one that GGUF has a name for", file["pre_tokenizer"])
    merges = [" ".join(pair) for pair in model["merges"]]
    if len({*merges}) < len(merges) or any(merge.count(" ") != 1 for merge in merges):
        raise refused(vocabulary, "merges", "pairs without spaces, each listed once", "other pairs")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        **_tokens(vocabulary),
        "tokenizer.ggml.merges": merges,
    }


def spm(vocabulary: Vocabulary, file: dict[str, Any]) -> dict[str, object]:
    """Return the metadata of an SPM tokenizer: tokens, and scores that give the same merges.

    Raises:
        TokenizerError: GGUF cannot represent a setting.
    """
    _check_model(vocabulary, file["model"], byte_fallback=True)
    if file["model"]["ignore_merges"]:
        raise refused(vocabulary, "ignore_merges", "false", "true")
    prefixes = {SpacePrefix.NEVER: [MARK], SpacePrefix.SECTION: [PREPEND, MARK]}
    steps = file["normalizer"] or {}
    steps = steps.get("normalizers", [steps])
    if steps != prefixes.get(vocabulary.space_prefix):
        expected = f"one that replaces spaces by {SPACE_MARK}, and may also put {SPACE_MARK} before the text"
        raise refused(vocabulary, "normalizer", expected, steps)
    if file["pre_tokenizer"] not in (None, NO_CUT):
        raise refused(vocabulary, "pre_tokenizer", "none", file["pre_tokenizer"])
    if len(vocabulary.ids_of(TokenType.BYTE)) < 256:
        raise refused(vocabulary, "byte tokens", "256", len(vocabulary.ids_of(TokenType.BYTE)))
    merges = [tuple(pair) for pair in file["model"]["merges"]]
    values = scores(vocabulary.where, vocabulary.tokens, vocabulary.ids_of(TokenType.NORMAL), merges)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        **_tokens(vocabulary),
        "tokenizer.ggml.scores": np.array(values, np.float32),
        "tokenizer.ggml.add_space_prefix": vocabulary.space_prefix is SpacePrefix.SECTION,
    }


def _check_model(vocabulary: Vocabulary, model: dict[str, Any], *, byte_fallback: bool) -> None:
    if model["type"] != "BPE":
        raise refused(vocabulary, "the model", "BPE", model["type"])
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[key]:
            raise refused(vocabulary, key, "absent", model[key])
    if model["byte_fallback"] != byte_fallback:
        raise refused(vocabulary, "byte_fallback", str(byte_fallback).lower(), model["byte_fallback"])


def _tokens(vocabulary: Vocabulary) -> dict[str, object]:
    return {
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types.astype(np.int32),
    }


def scores(where: str, tokens: Sequence[str], normal: Iterable[int], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Convert a BPE merge list to SPM scores of all tokens; `normal` has the ids of the tokens that merges may produce.

    BPE merges the adjacent pair of lowest rank. SPM merges the adjacent pair that forms the token of highest score.
    Both produce the same tokens under a condition, which is checked here: for every token that SPM can produce, BPE
    encodes the text of the token as this one token. Proof: suppose that, at some point of merging a text, two adjacent
    tokens could be merged to a token T. Up to this point, no merge has crossed the ends of this pair. So when BPE
    encodes the text of T alone, it also produces this pair, and its last merge joins the pair. Hence all pairs that SPM
    can merge are in the merge list, and BPE and SPM choose from the same pairs. They choose the same pair, because a
    token gets a higher score if its last merge has a lower rank.

    Raises:
        TokenizerError: SPM would produce a token that the merges do not produce.
    """
    ids = {tokens[i]: i for i in normal}
    # Only merges among normal tokens count: other tokens are found before merging, or never result from plain text.
    ranks = {pair: rank for rank, pair in enumerate(merges) if all(text in ids for text in (*pair, "".join(pair)))}
    last = {i: last_step(token, ranks) for token, i in ids.items() if len(token) > 1}
    for i, rank in last.items():
        if rank is None and any(tokens[i][:cut] in ids and tokens[i][cut:] in ids for cut in range(1, len(tokens[i]))):
            raise TokenizerError(
                f"{where}: expected merges that produce {tokens[i]!r:.40} (id {i:,}) from its text, found none; GGUF's "
                "scores would produce it; quantise the folder on load instead, with --quant"
            )
    # Scores are float32, which is exact for integers up to 2**24. There may be more than 2**24 merges, but not more
    # tokens. So the score is minus the token's place in the order of ranks, not minus the rank.
    made = sorted((rank, i) for i, rank in last.items() if rank is not None)
    places = {i: place for place, (_, i) in enumerate(made)}
    return [-float(places.get(i, len(made))) for i in range(len(tokens))]


def last_step(text: str, ranks: Mapping[tuple[str, str], int]) -> int | None:
    """Return the rank of the last merge when BPE encodes `text`; None if several tokens remain."""
    parts, rank = list(text), None
    while len(parts) > 1:
        steps = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not steps:
            return None
        rank, i = min(steps)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return rank
