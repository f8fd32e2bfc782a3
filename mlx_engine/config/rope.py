"""The RoPE settings of a model: read and write them, and compute the frequencies of each scaling rule.

A scaling rule changes only the frequencies, and the factor by which cosines and sines are multiplied. In LongRoPE and
dynamic NTK the frequencies depend on the length of the sequence: transformers changes them in the middle of a long
text. Here they are chosen once, when a model is loaded (`Rotation.within`), so that a token's result does not depend on
the number of tokens after it. Source of the rules: Hugging Face transformers, modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, TypeAlias

import numpy as np

from mlx_engine.backends.parameters import Growth, Rope
from mlx_engine.config.declared import CLOSE, Constant, Key, Naming, Setting, declared, declares
from mlx_engine.config.settings import REQUIRED, Settings
from mlx_engine.errors import OptionError, is_whole

Frequencies: TypeAlias = tuple[float, ...]


def part_of(n: int, head_dim: int) -> float:
    """Return n / head_dim, rounded so that other programs, which compute `int(head_dim * fraction)`, get n."""
    part = n / head_dim
    return part if int(head_dim * part) == n else math.nextafter(part, 1)  # 44 * (30 / 44) is below 30


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding settings of a model.

    Attributes:
        theta: the base of the frequencies. Of n rotated elements, pair j has the frequency `theta ** (-2j / n)`.
        rule: the scaling rule, a key of `RULES`.
        factor: the scaling factor of the rule.
        low, high: "llama3" and "yarn" divide a frequency by `factor` if its pair makes fewer than `low` rotations over
            the training context, and do not change it if the pair makes more than `high` rotations.
        context: length of the training context in tokens; unused by "default", "linear" and "proportional".
        attention_factor: factor of cosines and sines, for "yarn" and "longrope".
        truncate: for "yarn": whether the indices of the pairs with `low` and `high` rotations are rounded.
        short, long: for "longrope": divisors of the frequencies. If `extent` is at most `context`, `short` applies,
            else `long`.
        extent: for "longrope" and "dynamic": length of the longest sequence; None is the training context.
        n_rotated: number of elements of a head that are rotated; None for all.
        part: for "proportional": the fraction of a head's pairs, from the first pair on, that are rotated.
        beta: Llama 4's attention scaling multiplies queries at position p by 1 + beta * ln(1 + p // context).
    """

    theta: float
    rule: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    context: int = 1
    attention_factor: float = 1.0
    truncate: bool = True
    short: Frequencies = ()
    long: Frequencies = ()
    extent: int | None = None
    n_rotated: int | None = None
    part: float = 1.0
    beta: float = 0.0

    @property
    def is_long(self) -> bool:
        """Whether the model is loaded for longer sequences than the training context."""
        return self.extent is not None and self.extent > self.context

    def within(self, extent: int) -> Rotation:
        """Return the rotation for sequences of at most `extent` tokens; unchanged if its rule is not in BY_LENGTH."""
        return replace(self, extent=extent) if self.rule in BY_LENGTH else self

    def for_heads(self, head_dim: int) -> Rope:
        """Return the rotary embedding of heads of this dim. Pairs that are not rotated have the frequency 0."""
        n = self.n_rotated or head_dim
        frequencies, rest = RULES[self.rule](self, Rope.plain(n, self.theta).frequencies), (head_dim - n) // 2
        lengths = None if self.attention_factor == 1 else (self.attention_factor,) * (n // 2) + (1.0,) * rest
        growth = Growth(self.beta, self.context) if self.beta else None
        return Rope(frequencies + (0.0,) * rest, lengths, growth)

    def divisors(self, head_dim: int) -> tuple[float, ...]:
        """Return, for each pair of elements of a head, the number by which the rule divides the pair's frequency."""
        plain, rope = Rope.plain(head_dim, self.theta), self.for_heads(head_dim)
        return tuple(f / slow for f, slow in zip(plain.frequencies, rope.frequencies, strict=True))


def scaled(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Apply linear scaling: divide all frequencies by the factor."""
    return tuple(f / r.factor for f in frequencies)


def dynamic(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Apply dynamic NTK scaling: use a larger base for longer sequences."""
    n = 2 * len(frequencies)
    if not r.is_long or r.extent is None or n == 2:
        return frequencies
    stretch = r.factor * r.extent / r.context - (r.factor - 1)
    return tuple(f * stretch ** (-2 * j / (n - 2)) for j, f in enumerate(frequencies))


def llama3(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Apply llama3 scaling: divide low frequencies by the factor. Source: arXiv 2407.21783.

    Between `low` and `high` rotations, interpolate linearly in the number of rotations.
    """

    def slowed(f: float) -> float:
        rotations = r.context * f / (2 * math.pi)
        width = r.high - r.low or 1e-9  # in Llama 4 both limits are equal, so the interpolation is a step
        kept = min(1.0, max(0.0, (rotations - r.low) / width))
        return kept * f + (1 - kept) * f / r.factor

    return tuple(map(slowed, frequencies))


def yarn(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Apply YaRN scaling: divide low frequencies by the factor. Source: arXiv 2309.00071.

    Between the pairs with `high` and `low` rotations, interpolate linearly in the index of the pair.
    """
    n = 2 * len(frequencies)

    def pair(rotations: float) -> float:
        """Return the index of the pair with this many rotations over the training context."""
        at = n * math.log(r.context / (rotations * 2 * math.pi)) / (2 * math.log(r.theta))
        return min(max(at, 0.0), n - 1.0)

    first, last = pair(r.high), pair(r.low)
    if r.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    width = last - first or 0.001  # if both limits are the same pair, the interpolation is a step

    def slowed(j: int, f: float) -> float:
        slow = min(1.0, max(0.0, (j - first) / width))
        return f / r.factor * slow + f * (1 - slow)

    return tuple(slowed(j, f) for j, f in enumerate(frequencies))


def longrope(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Apply LongRoPE scaling: divide each frequency by its own divisor. Source: arXiv 2402.13753."""
    divisors = r.long if r.is_long else r.short
    return tuple(f / divisor for f, divisor in zip(frequencies, divisors, strict=True))


def proportional(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Divide the frequencies of the first pairs by the factor; set the other frequencies to 0. For Gemma 4.

    `Rotation.part` is the fraction of the pairs whose frequencies are divided.
    """
    n = int(r.part * len(frequencies))
    return tuple(f / r.factor for f in frequencies[:n]) + (0.0,) * (len(frequencies) - n)


RULES: Mapping[str, Callable[[Rotation, Frequencies], Frequencies]] = {
    "default": lambda r, frequencies: frequencies,
    "linear": scaled,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "proportional": proportional,
}
# The rules that depend on the length of the sequence.
BY_LENGTH = ("dynamic", "longrope")


def yarn_attention(factor: float, times: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines, which compensates for the flatter softmax over a longer context.

    `times` is the setting `mscale` or `mscale_all_dim` of DeepSeek.
    """
    return 0.1 * times * math.log(factor) + 1 if factor > 1 else 1.0


def longrope_attention(factor: float, context: int) -> float:
    """Return LongRoPE's factor of cosines and sines, for a context that is `factor` times the training context."""
    return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 and context > 1 else 1.0


# The kinds of layers that may have different rotary settings, with the names of transformers 5.
LAYER_KINDS = ("full_attention", "sliding_attention")
ORIGINAL = "original_max_position_embeddings"
SCALING = "rope.scaling."
# A key in the config.json of DeepSeek-R1-0528-Qwen3-8B: a factor of cosines and sines. It is ignored, as in
# transformers and llama.cpp, which use the result of `yarn_attention`. (vLLM multiplies that by the key's value.)
ATTN_FACTOR = "attn_factor"
# The rules of Llama and of architectures derived from it.
EVERY_RULE = ("linear", "dynamic", "llama3", "yarn", "longrope")
WITH_FACTOR, WITH_CONTEXT = ("linear", "dynamic", "llama3", "yarn", "proportional"), ("llama3", "yarn", "longrope")
# The old name of longrope.
SU = "su"


@dataclass(frozen=True)
class RotationSetting(Setting):
    """The setting that reads and writes a `Rotation`. Declare its field after `head_dim` and `context_length`.

    Attributes:
        gguf: the GGUF key of the base.
        hf: the key of the base in config.json, if `rope_parameters` does not have it.
        theta: the default base, or a function of the fields that were read before.
        rules: the implemented rules besides "default"; if empty, `rope_scaling` is not read.
        layers: the key of this rotation in `rope_parameters`, one of LAYER_KINDS; None if all layers share a rotation.
        always: whether to write the base to a GGUF file even if it is the default.
        partial: whether files may say that only a part of each head is rotated.
        grows: whether files may have Llama 4's attention scaling.
        truncates: the value of `Rotation.truncate` for all GGUF files, which have no key for it.
        part: with `partial`, the fraction of each head that is rotated if config.json has no key for it.
        alpha: whether the rule "dynamic" may have Hunyuan's `alpha`, which is an error in other models.
    """

    gguf: str = "rope.freq_base"
    hf: str = "rope_theta"
    theta: float | Callable[[Any], float] = 10_000.0
    rules: tuple[str, ...] = ()
    layers: str | None = None
    always: bool = True
    partial: bool = False
    grows: bool = False
    truncates: bool = True
    part: float = 1.0
    alpha: bool = False

    def read(self, s: Settings, naming: Naming, known: Any) -> Rotation:
        found = self._from_hf(s, known) if naming == "hf" else self._from_gguf(s, known)
        if found.rule == "yarn" and found.theta <= 1:
            raise s.error(self.gguf if naming == "gguf" else self.hf, "more than 1", found.theta)
        return found

    def _usual(self, known: Any) -> float:
        return self.theta(known) if callable(self.theta) else self.theta

    # ---- GGUF ----

    def _from_gguf(self, s: Settings, known: Any) -> Rotation:
        plain = Rotation(s.number(self.gguf, self._usual(known)), n_rotated=self._rotated_of_gguf(s, known))
        if not self.rules:
            return plain
        # As in llama.cpp, a file with a scaling factor but without a scaling type has linear scaling.
        known_here = [rule for rule in ("linear", "yarn", "longrope") if rule in self.rules]
        rule = s.choice(f"{SCALING}type", "linear" if "linear" in self.rules else "none", "none", *known_here)
        # Read `finetuned`, so that it is not refused as an unread setting; llama.cpp only prints it.
        s.flag(f"{SCALING}finetuned", True)
        context = s.whole(f"{SCALING}original_context_length", getattr(known, "context_length", 1))
        factor, attention = s.number(f"{SCALING}factor", 1.0), s.number(f"{SCALING}attn_factor", 1.0)
        if rule == "yarn":
            return self._yarn_of_gguf(s, replace(plain, rule=rule, factor=factor, context=context), attention)
        if rule != "linear" and factor != 1:
            raise s.error(f"{SCALING}factor", "1.0", factor)
        if rule == "longrope" or ("longrope" in self.rules and factor == 1 and attention != 1):
            return replace(plain, rule="longrope", context=context, attention_factor=attention)
        if attention != 1:
            raise s.error(f"{SCALING}attn_factor", "1.0", attention)
        return plain if factor == 1 else replace(plain, rule=rule, factor=factor)

    def _rotated_of_gguf(self, s: Settings, known: Any) -> int | None:
        if not self.partial:
            return None
        n = s.whole("rope.dimension_count", known.head_dim)
        if n % 2 or n > known.head_dim:
            raise s.error("rope.dimension_count", f"an even number of at most {known.head_dim}", n)
        return None if n == known.head_dim else n

    def _yarn_of_gguf(self, s: Settings, r: Rotation, attention: float) -> Rotation:
        """Return YaRN's rotation. As in llama.cpp, the GGUF key `attn_factor` multiplies `yarn_attention`'s result."""
        s.expect(f"{SCALING}yarn_ext_factor", 1.0)
        usual = yarn_attention(r.factor)
        times = s.number_or_zero(f"{SCALING}yarn_log_multiplier") if self.grows else 0.0
        # llama.cpp ignores the GGUF key `yarn_attn_factor`. In published files it has one of two values of config.json:
        # `attention_factor`, which is `yarn_attention`'s result, or `attn_factor`, the inverse. Accept only these.
        repeated = s.number(f"{SCALING}yarn_attn_factor", usual)
        if not any(isclose(repeated, of, rel_tol=CLOSE) for of in (usual, 1 / usual)):
            raise s.error(f"{SCALING}yarn_attn_factor", f"YaRN's factor, {usual:g}, or its inverse", repeated)
        if times:
            usual /= yarn_attention(r.factor, times)
        low, high = s.number(f"{SCALING}yarn_beta_slow", 1.0), s.number(f"{SCALING}yarn_beta_fast", 32.0)
        beta = s.number_or_zero("attention.temperature_scale") if self.grows else 0.0
        return replace(
            r, low=low, high=high, attention_factor=usual * attention, beta=beta, truncate=self.truncates
        )  # fmt: skip

    def to_gguf(self, value: Rotation) -> Mapping[str, object]:
        """Return the GGUF keys of a rotation. There are no keys for the rules "llama3", "dynamic" and "proportional".

        The divisors of "llama3", "proportional" and "longrope" are tensors (`weights/rope_divisors.py`).
        """
        keys: dict[str, object] = {self.gguf: value.theta} if self.always or value.theta != self.theta else {}
        if self.partial and value.n_rotated is not None:
            keys["rope.dimension_count"] = value.n_rotated
        if value.rule in ("linear", "yarn"):
            keys |= {f"{SCALING}type": value.rule, f"{SCALING}factor": value.factor}
        if value.rule == "longrope":
            keys |= {f"{SCALING}type": value.rule, f"{SCALING}attn_factor": value.attention_factor}
        if value.rule in ("yarn", "longrope"):
            keys[f"{SCALING}original_context_length"] = value.context
        return keys | self._yarn_to_gguf(value) if value.rule == "yarn" else keys

    def _yarn_to_gguf(self, value: Rotation) -> dict[str, object]:
        keys: dict[str, object] = {f"{SCALING}yarn_beta_slow": value.low, f"{SCALING}yarn_beta_fast": value.high}
        more = value.attention_factor / yarn_attention(value.factor)
        if self.grows:
            keys["attention.temperature_scale"] = value.beta
            if value.attention_factor == 1:
                return keys | {f"{SCALING}yarn_log_multiplier": 1.0}
        return keys if isclose(more, 1, rel_tol=CLOSE) else keys | {f"{SCALING}attn_factor": more}

    # ---- config.json ----

    def to_hf(self, value: Rotation, config: Any) -> Mapping[str, object]:
        """Return the keys of a rotation in config.json, with the names of transformers 5."""
        keys: dict[str, object] = {"rope_type": value.rule, "rope_theta": value.theta}
        if value.n_rotated is not None:
            keys["partial_rotary_factor"] = part_of(value.n_rotated, config.head_dim)
        elif self.part != 1:
            keys["partial_rotary_factor"] = 1.0
        if value.rule in WITH_FACTOR:
            keys["factor"] = value.factor
        if value.rule in WITH_CONTEXT:
            keys[ORIGINAL] = value.context
        if value.rule in _WRITTEN:
            keys |= _WRITTEN[value.rule](value)
        return {"rope_parameters": keys if self.layers is None else {self.layers: keys}}

    def _from_hf(self, s: Settings, known: Any) -> Rotation:
        theta, scaling = s.number(self.hf, self._usual(known)), s.mapping("rope_parameters")
        part = self._part(s, known) if self.partial else 1.0
        if scaling is not None and self.layers is not None:
            outer, scaling = scaling, scaling.mapping(self.layers)
            outer.refuse_rest(LAYER_KINDS)
        if self.rules:
            # transformers 5 has `rope_parameters` in place of `rope_scaling`; a file must not have both.
            if scaling is None:
                scaling = s.mapping("rope_scaling")
            else:
                s.expect("rope_scaling", None)
        # Phi-3 has the length of the training context outside of `rope_scaling`.
        original = s.whole_or_none(ORIGINAL, None) if "longrope" in self.rules else None
        if scaling is None:
            return Rotation(theta, n_rotated=self._rotated(s, part, known))
        if self.partial:
            part = scaling.number("partial_rotary_factor", part)
        found = Rotation(scaling.number("rope_theta", theta), n_rotated=self._rotated(s, part, known))
        # If the base is given both in the mapping and outside of it, both values must be equal.
        s.expect(self.hf, found.theta)
        found = self._scaled(scaling, found, known, original)
        scaling.refuse_rest()
        return found

    def _part(self, s: Settings, known: Any) -> float:
        """Return the fraction of each head that is rotated. MiniMax's files instead have the number of elements."""
        n = s.whole_or_none("rotary_dim", None)
        return s.number("partial_rotary_factor", self.part if n is None else part_of(n, known.head_dim))

    def _rotated(self, s: Settings, part: float, known: Any) -> int | None:
        if part == 1:
            return None
        n = int(known.head_dim * part)
        if n % 2 or not 0 < n < known.head_dim:
            expected = f"a fraction that rotates an even number of a head's {known.head_dim} elements"
            raise s.error("partial_rotary_factor", expected, part)
        return n

    def _scaled(self, s: Settings, r: Rotation, known: Any, original: int | None) -> Rotation:
        """Return the rotation with the rule that a mapping describes. Older files have the rule under "type"."""
        kinds = ("default", *self.rules, *((SU,) if "longrope" in self.rules else ()))
        rule = s.choice("rope_type", s.choice("type", *kinds), *kinds)
        rule = "longrope" if rule == SU else rule
        if rule == "default":
            return r
        if rule == "linear":
            return replace(r, rule=rule, factor=s.number("factor"))
        # If the file has no training context, longrope is an error, and other rules use the model's context length.
        usual = original or (REQUIRED if rule == "longrope" else getattr(known, "context_length", 1))
        context = s.whole(ORIGINAL, usual)
        if original not in (None, context):
            raise s.error(ORIGINAL, f"{original}, the value of the same key outside of the RoPE settings", context)
        return _READ[rule](self, s, replace(r, rule=rule, context=context), known)

    def _dynamic(self, s: Settings, r: Rotation, known: Any) -> Rotation:
        alpha = s.number_or_zero("alpha") if self.alpha else 0.0
        if alpha:  # Hunyuan's variant: a larger base, which does not depend on the length of the sequence
            for unused in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
                s.number_or_zero(unused)
            return Rotation(r.theta * alpha ** (known.head_dim / (known.head_dim - 2)))
        s.expect(ORIGINAL, known.context_length)
        return replace(r, factor=s.number("factor"))

    def _proportional(self, s: Settings, r: Rotation, known: Any) -> Rotation:
        part = s.number("partial_rotary_factor", 1.0)
        if part > 1:
            raise s.error("partial_rotary_factor", "at most 1", part)
        return replace(r, factor=s.number("factor", 1.0), part=part)

    def _llama3(self, s: Settings, r: Rotation, known: Any) -> Rotation:
        factor, low, high = s.number("factor"), s.number("low_freq_factor"), s.number("high_freq_factor")
        if high < low:
            raise s.error("high_freq_factor", f"at least low_freq_factor, {low:g}", high)
        return replace(r, factor=factor, low=low, high=high)

    def _yarn(self, s: Settings, r: Rotation, known: Any) -> Rotation:
        factor = s.number("factor", known.context_length / r.context)
        once, all_ = s.number_or_zero("mscale"), s.number_or_zero("mscale_all_dim")
        usual = yarn_attention(factor, once) / yarn_attention(factor, all_) if once and all_ else yarn_attention(factor)
        low, high = s.number("beta_slow", 1.0), s.number("beta_fast", 32.0)
        # Read `finetuned`, so that it is not refused. The first YaRN models have it; transformers does not read it.
        s.flag("finetuned", True)
        s.number(ATTN_FACTOR, 1.0)
        beta = 0.0
        if self.grows:
            beta = s.number_or_zero("llama_4_scaling_beta")
            s.expect("max_position_embeddings", known.context_length)
        return replace(
            r, factor=factor, low=low, high=high, attention_factor=s.number("attention_factor", usual),
            truncate=s.flag("truncate", True), beta=beta,
        )  # fmt: skip

    def _longrope(self, s: Settings, r: Rotation, known: Any) -> Rotation:
        n = (r.n_rotated or getattr(known, "rope_dim", None) or known.head_dim) // 2
        usual = longrope_attention(s.number("factor", known.context_length / r.context), r.context)
        return replace(
            r, attention_factor=s.number("attention_factor", usual), short=_divisors(s, "short_factor", n),
            long=_divisors(s, "long_factor", n),
        )  # fmt: skip


def _yarn_to_hf(value: Rotation) -> dict[str, object]:
    keys: dict[str, object] = {"beta_fast": value.high, "beta_slow": value.low, "truncate": value.truncate}
    if value.beta:
        keys["llama_4_scaling_beta"] = value.beta
    if value.attention_factor == 1:
        return keys | {"mscale": 1.0, "mscale_all_dim": 1.0}
    is_usual = isclose(value.attention_factor, yarn_attention(value.factor), rel_tol=CLOSE)
    return keys if is_usual else keys | {"attention_factor": value.attention_factor}


_WRITTEN: Mapping[str, Callable[[Rotation], dict[str, object]]] = {
    "llama3": lambda of: {"low_freq_factor": of.low, "high_freq_factor": of.high},
    "yarn": _yarn_to_hf,
    "longrope": lambda of: {
        "short_factor": list(of.short), "long_factor": list(of.long), "attention_factor": of.attention_factor,
    },
    "proportional": lambda of: {"partial_rotary_factor": of.part},
}  # fmt: skip
_READ = {
    "dynamic": RotationSetting._dynamic,
    "llama3": RotationSetting._llama3,
    "yarn": RotationSetting._yarn,
    "longrope": RotationSetting._longrope,
    "proportional": RotationSetting._proportional,
}


def _divisors(s: Settings, key: str, n: int) -> tuple[float, ...]:
    """Return n divisors of frequencies, rounded to float32, as in transformers and in GGUF files."""
    return tuple(np.asarray(s.numbers(key, n), dtype=np.float32).tolist())


rotation = declares(RotationSetting)
DUAL_CHUNK = "dual_chunk_attention_config"


def within_chunk(s: Settings, key: str, default: Any) -> int:
    """Return the context length: at most the size of a chunk, if the model has dual chunk attention.

    Within one chunk, dual chunk attention equals the usual attention. In longer contexts it changes the distances
    between tokens, which is not implemented. Source: "Qwen2.5-1M Technical Report", arXiv 2501.15383.
    """
    n, chunks = s.whole(key, default), s.mapping(DUAL_CHUNK)
    if chunks is None:
        return n
    size = chunks.whole("chunk_size")
    chunks.refuse_rest(("local_size", ORIGINAL))
    return min(n, size)


def chunked_context(usual: int | Any = REQUIRED) -> Any:
    """Declare the field `context_length` of a model that may have dual chunk attention."""
    return declared(Key(within_chunk, "context_length", ("max_position_embeddings", usual)))


@dataclass(frozen=True)
class BeyondChunk(Constant):
    """The context length with dual chunk attention, for a note to the user; None without dual chunk attention."""

    value: int | None = None

    def read(self, s: Settings, naming: Naming, known: Any) -> int | None:
        return None if s.mapping(DUAL_CHUNK) is None else s.whole("max_position_embeddings")


def beyond_chunk() -> Any:
    """Declare the field `beyond_chunk`."""
    return declared(BeyondChunk(), compare=False)


def for_context(config: Any, context: int | None) -> Any:
    """Return the config for a context of `context` tokens; None means the model's usual context.

    Only configs with LongRoPE or dynamic NTK change:

    - With LongRoPE, the usual context is the training context, with the short divisors. For a longer `context`, all
      tokens have the long divisors, and the limit of a sequence is the model's `context_length`.
    - With dynamic NTK, the usual context is `context_length`. For a longer `context`, which becomes the limit, all
      tokens have the frequencies that transformers would use for the last of `context` tokens.

    Raise OptionError if `context` is not a whole number >= 1.
    """
    if context is not None and not (is_whole(context) and context >= 1):
        expected = "a whole number of at least 1"
        raise OptionError(
            f"context must be {expected}, not {context!r}", option="context", expected=expected, found=context
        )
    rope, whole = by_length(config), int(config.context_length)
    if rope is None:
        return config
    if rope.rule == "longrope":
        length = whole if (context or 0) > rope.context else min(rope.context, whole)
    else:
        length = max(context or whole, whole)
    return replace(config, rope=rope.within(length), context_length=length)


def by_length(config: Any) -> Rotation | None:
    """Return the rotary settings of a config, if their rule depends on the length of the sequence; None otherwise."""
    rope = getattr(config, "rope", None)
    return rope if isinstance(rope, Rotation) and rope.rule in BY_LENGTH else None


def context_notes(config: Any) -> tuple[str, ...]:
    """Return a note for the user if a loaded model could have a longer context; else an empty tuple."""
    rope, whole = by_length(config), getattr(config, "beyond_chunk", None) or 0
    if whole > config.context_length:
        reached = "dual chunk attention, which is not implemented, would allow"
        return (f"context {config.context_length:,} tokens, one chunk; {reached} {whole:,}",)
    if rope is None or rope.is_long:
        return ()
    return (
        f"context {config.context_length:,} tokens, with {rope.rule}; load with context=N (--context-len N) for more",
    )
