"""Constraints: what is refused, and the masks of tokens, compared with a list of all texts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine import Constraint
from mlx_engine.constraint import FORMATS, UNSUPPORTED, check_schema, without_unsupported
from mlx_engine.engine import Engine
from mlx_engine.errors import ConstraintError, OptionError
from mlx_engine.loop.constraint import Grammars, Matcher, Reasoning
from mlx_engine.options import Options, Sampling

WORDS = [*(bytes([byte]) for byte in range(256)), b"ab", b"ba", b"a", b'{"', b'": ', b"true", b"\n\n", b"think>", b"</"]
OPEN, CALL, END, END_TOO, UNUSED = range(len(WORDS), len(WORDS) + 5)
LONGER = {b"ab": 256, b"ba": 257, b"a": 258}


@dataclass(frozen=True)
class Words:
    """A tokenizer of bytes and some longer tokens, two of which end an answer."""

    eog_ids: frozenset[int] = frozenset({END, END_TOO})
    delimiter_ids: frozenset[int] = frozenset({OPEN, CALL, END, END_TOO})
    words: list[bytes] = field(default_factory=lambda: [*WORDS, b"<think>", b"<call>", b"<end>", b"</s>", b""])

    def pieces(self) -> list[bytes]:
        return self.words


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Words(), UNUSED)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare every mask of the small vocabulary with a test of each token alone, before the mask is known."""
    masks = Matcher.mask
    if "grammars" not in request.fixturenames:
        return

    def mask(self: Matcher) -> np.ndarray:
        alone = self.copy()
        alone._found = None
        each = [alone.allows(token) for token in range(alone._grammars.n_logits)]
        found = masks(self)
        assert np.array_equal(found, each)
        return found

    monkeypatch.setattr(Matcher, "mask", mask)


def words(mask: np.ndarray) -> set[bytes | int]:
    """The tokens of a mask; special ones by id."""
    return {WORDS[i] if i < len(WORDS) else i for i in np.flatnonzero(mask).tolist()}


def written(matcher: Matcher, text: bytes) -> Matcher:
    for byte in text:
        matcher.advance(byte)
    return matcher


TEXTS = ["a", "ab", "abba", "bab", "b ab", "\u00e9", 'say "x"\\']


@pytest.mark.parametrize("prefix", ["", "a", "ab", "abb", "b", "b ", "say"])
def test_a_mask_has_the_tokens_that_some_allowed_text_continues_with(grammars: Grammars, prefix: str):
    matcher = written(grammars.matcher(Constraint.choice(TEXTS)), prefix.encode())
    rest = [text[len(prefix) :].encode() for text in TEXTS if text.startswith(prefix)]
    expected: set[bytes | int] = {word for word in WORDS if any(one.startswith(word) for one in rest)}
    assert words(matcher.mask()) == expected | ({END, END_TOO} if b"" in rest else set())


def test_a_text_that_cannot_go_on_is_complete(grammars: Grammars):
    matcher = grammars.matcher(Constraint.choice(["a", "ab"]))
    matcher.advance(97)
    assert not matcher.is_complete  # "ab" may follow
    matcher.advance(98)
    assert matcher.is_complete
    matcher.roll_back(1)
    assert not matcher.is_complete
    assert words(matcher.mask()) == {b"b", END, END_TOO}
    matcher.advance(END_TOO)
    assert matcher.is_complete
    matcher.roll_back(2)
    assert words(matcher.mask()) == {b"a", b"ab"}
    with pytest.raises(ConstraintError, match="the token 99 does not continue"):
        matcher.advance(99)


def test_a_copy_goes_on_alone(grammars: Grammars):
    first = written(grammars.matcher(Constraint.regex(r"[0-9]{3}x?")), b"12")
    other = first.copy()
    other.advance(ord("3"))
    assert words(other.mask()) == {b"x", END, END_TOO}
    assert words(first.mask()) == {bytes([c]) for c in b"0123456789"}
    first.roll_back(2)
    assert words(other.mask()) == {b"x", END, END_TOO}


def test_special_tokens_of_a_grammar_are_those_of_the_vocabulary(grammars: Grammars):
    matcher = grammars.matcher(
        Constraint.grammar('start: TEXT <call> %json {"type": "boolean"} <end>\nTEXT: /[a-z<>]*/')
    )
    assert CALL in words(matcher.mask())
    written(matcher, b"<call>")  # as text it is no delimiter
    assert CALL in words(matcher.mask())
    matcher.advance(CALL)
    assert words(matcher.mask()) == {b"t", b"f", b"true"}
    written(matcher, b"true")
    assert words(matcher.mask()) == {END}
    matcher.advance(END)
    assert matcher.is_complete


def test_white_space_is_bounded(grammars: Grammars):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}}, "required": ["a"]}
    for constraint in (Constraint.json_schema(schema), Constraint.grammar(f"start: %json {json.dumps(schema)}")):
        matcher = written(grammars.matcher(constraint), b'{"a"')
        assert words(matcher.mask()) == {b":"}
        matcher.advance(ord(":"))
        assert words(matcher.mask()) == {b" ", b"["}
        matcher.advance(ord(" "))
        assert words(matcher.mask()) == {b"["}


def test_without_an_end_token_a_text_ends_where_nothing_follows():
    matcher = Grammars(Words(frozenset()), UNUSED).matcher(Constraint.regex("a?"))  # type: ignore[arg-type]
    assert words(matcher.mask()) == {b"a"}
    matcher.advance(97)
    assert matcher.is_complete
    empty = Grammars(Words(frozenset()), UNUSED).matcher(Constraint.grammar('start: ""'))  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match="no end token"):
        empty.mask()


def test_a_text_that_the_vocabulary_cannot_write_is_an_error_and_no_end():
    few = Words(words=[b"a", *[b""] * (len(WORDS) - 1), b"<think>", b"<call>", b"<end>", b"</s>", b""])
    matcher = Grammars(few, UNUSED).matcher(Constraint.regex("ab"))  # type: ignore[arg-type]
    matcher.advance(0)
    with pytest.raises(ConstraintError, match="constraint: "):
        matcher.mask()


# ---- reasoning first ----

MAYBE, OPENED = Reasoning((OPEN,), b"</think>"), Reasoning((), b"</think>")


def test_the_model_may_reason_first_or_not(grammars: Grammars):
    matcher = grammars.matcher(Constraint.choice(["yes"]), MAYBE)
    assert words(matcher.mask()) == {b"y", OPEN}
    written(matcher, b"y")
    assert words(matcher.mask()) == {b"e"}
    matcher.roll_back(1)
    matcher.advance(OPEN)
    assert not words(matcher.mask()) & {END, END_TOO}
    assert {b"y", b"a", CALL} <= words(matcher.mask())


@pytest.mark.parametrize("closing", [[*b"</think>"], [*b"</", 263], [264, 263]], ids=str)
def test_the_constraint_holds_after_the_closing_marker(grammars: Grammars, closing: list[int]):
    matcher = written(grammars.matcher(Constraint.choice(["yes"]), OPENED), b"yes <think </thin")
    for i in closing:
        matcher.advance(i)
    assert words(matcher.mask()) == {b"y", b"\n", b"\n\n"}
    matcher.advance(262)
    assert words(matcher.mask()) == {b"y"}
    matcher.roll_back(2)
    assert len(words(matcher.mask())) > 200
    matcher.advance(closing[-1])
    assert words(written(matcher, b"ye").mask()) == {b"s"}


def test_a_token_cannot_close_the_reasoning_and_begin_the_answer():
    names = [*WORDS[:-1], b"think>x", b"<think>", b"<call>", b"<end>", b"</s>", b"think>\n"]
    matcher = Grammars(Words(words=names), UNUSED + 1).matcher(Constraint.choice(["x"]), OPENED)  # type: ignore[arg-type]
    assert matcher.mask()[len(WORDS) - 1]
    written(matcher, b"so </")
    assert not matcher.mask()[len(WORDS) - 1]
    assert matcher.mask()[[263, UNUSED]].all()


# ---- what is refused ----


def nested(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}}, "$defs": {"b": schema}}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_a_keyword_that_no_mask_implements_is_refused_with_its_path(name: str):
    with pytest.raises(OptionError, match=r"\$\.\$defs\.b\." + name.replace("$", r"\$") + ": the keyword"):
        Constraint.json_schema(nested({name: {"type": "null"}}))
    check_schema({"properties": {name: {}}, "enum": [{name: 1}], "default": {name: 1}, "$defs": {"unused": {name: 1}}})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"format": "int32"}, r"\$\.format: 'int32' is not supported; use one of date-time, "),
        ({"items": [{}, {"$ref": "https://a.b/c"}]}, r"\$\.items\[1\]\.\$ref: 'https://a.b/c' is no path"),
        ({"$ref": "#/$defs/none"}, r"\$\.\$ref: '#/\$defs/none' names nothing"),
        ({"properties": {"a": 3}}, r"\$\.properties\.a: expected a schema, found 3"),
        ("{", "a JSON Schema in valid JSON"),
        ("[]", "must be a JSON Schema, which is an object"),
        (False, "must be a JSON Schema, which is an object"),
    ],
    ids=str,
)
def test_a_schema_that_is_none_is_refused(schema: Any, message: str):
    with pytest.raises(OptionError, match=message) as caught:
        Constraint.json_schema(schema)
    assert caught.value.option == "constraint"


def test_formats_are_those_that_masks_implement(grammars: Grammars):
    """llguidance accepts other formats, and ignores them."""
    for name in FORMATS:
        matcher = grammars.matcher(Constraint.json_schema({"type": "string", "format": name}))
        assert ord("\n") not in np.flatnonzero(written(matcher, b'"').mask())
        assert not matcher.mask()[ord("\\")]


def test_what_a_lenient_schema_cannot_have_is_left_out_and_named():
    schema = {"type": "array", "uniqueItems": True, "items": {"format": "int32", "not": {}, "type": "integer"}}
    kept, left_out = without_unsupported(schema)
    assert kept == {"type": "array", "items": {"type": "integer"}}
    assert left_out == ["$.uniqueItems", "$.items.format", "$.items.not"]
    assert "uniqueItems" in schema


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constraint.choice([]), "a choice of at least one text"),
        (lambda: Constraint.choice(["a", ""]), "a choice of texts"),
        (lambda: Constraint.choice("ab"), "a list of texts"),
        (lambda: Constraint.regex(""), "a regular expression"),
        (lambda: Constraint.grammar("start: %json {"), "JSON after each %json"),
        (lambda: Constraint.grammar('start: %json {"not": {}}'), r"\$\.not"),
        (lambda: Constraint("xml", "a"), "a JSON Schema, a regular"),  # type: ignore[arg-type]
        (lambda: Options(constraint={"type": "object"}), r"such as Constraint\.json_schema"),  # type: ignore[arg-type]
        (lambda: Options(constraint=Constraint.json_object(), ignore_eos=True), "ignore_eos cannot be combined"),
    ],
)
def test_other_constraints_that_make_no_sense_are_refused(make: Any, message: str):
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.regex("[a"), "unclosed character class"),
        (Constraint.regex("(?=a)b"), "look-around"),
        (Constraint.grammar("start: a"), 'unknown name: "a"'),
        (Constraint.grammar("start: <none>"), "unknown special token"),
        (Constraint.json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "nsatisfiable|minimum"),
    ],
    ids=str,
)
def test_a_constraint_that_cannot_be_compiled_is_refused_with_the_reason(
    grammars: Grammars, constraint: Constraint, message: str
):
    with pytest.raises(OptionError, match=message) as caught:
        grammars.matcher(constraint)
    assert "\n" not in str(caught.value)


def test_constraints_are_values():
    first, other = (Constraint.json_schema(given) for given in ({"type": "null"}, '{"type":   "null"}'))
    assert first == other
    assert hash(first) == hash(other)
    assert first.digest == other.digest != first.after_reasoning().digest != Constraint.regex("null").digest


# ---- generating ----


@pytest.fixture(scope="module")
def engine() -> Engine:
    return mlx_engine.load("builtin", "simd")


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.5, "seed": 3}, {"temperature": 1, "top_k": 1, "seed": 1}], ids=str
)
def test_an_answer_ends_where_its_schema_is_complete(engine: Engine, sampling: dict[str, Any]):
    made = engine.generate("Once", 80, constraint=Constraint.json_schema(PERSON), **sampling)
    assert made.finish_reason == "stop"
    found = json.loads(made.text)
    assert list(found) == ["name", "age"]
    assert 0 <= found["age"] <= 99
    assert made.token_ids[-1] not in engine.tokenizer.eog_ids


def test_no_bias_and_no_penalty_gives_a_forbidden_token_back(engine: Engine):
    comma = engine.tokenizer.encode(",")[0]
    made = engine.generate(
        "Once", 6, constraint=Constraint.regex("[ab]{4}"), logit_bias={comma: 100}, frequency_penalty=-2,
        repetition_penalty=1e-9, temperature=0.5, seed=1,
    )  # fmt: skip
    assert made.finish_reason == "stop"
    assert set(made.text) <= set("ab")
    assert len(made.text) == 4


def test_log_probabilities_are_the_models_and_have_what_the_mask_left(engine: Engine):
    constraint = Constraint.choice([" a", " the", " Tom"])
    made = engine.generate("Once upon", 4, constraint=constraint, logprobs=20)
    assert made.logprobs is not None
    logits = np.array(engine.logits(made.prompt_ids), dtype=np.float64)[-1]
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    first = made.logprobs[0]
    assert first.logprob == pytest.approx(np.log(p[first.token_id]), rel=1e-5)
    assert first.top[0][0] == p.argmax()
    matcher = engine.prompts.matcher(constraint, made.prompt_ids)
    assert first.allowed == pytest.approx(p[matcher.mask()].sum(), rel=1e-5)
    assert first.token_id == np.where(matcher.mask(), p, 0).argmax()
    free = engine.generate("Once upon", 4, logprobs=0).logprobs
    assert free is not None
    assert free[0].allowed is None


def test_a_batch_has_one_constraint_per_prompt(engine: Engine):
    each = [Constraint.choice(["yes", "no"]), None, Constraint.regex("[0-9]{3}")]
    yes, free, number = engine.generate_batch(["Once"] * 3, 8, constraint=each)
    assert yes.text in ("yes", "no")
    assert free.finish_reason == "length"
    assert number.text.isdigit()
    assert free.token_ids == engine.generate("Once", 8).token_ids


def test_a_dead_end_ends_its_own_request_with_the_reason(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    masks = Matcher.mask

    def mask(self: Matcher) -> np.ndarray:
        if self._n_text == 2:
            raise ConstraintError("constraint: no token of the vocabulary continues the text")
        return masks(self)

    monkeypatch.setattr(Matcher, "mask", mask)
    with pytest.raises(ConstraintError, match="no token of the vocabulary"):
        engine.generate("Once", 8, constraint=Constraint.regex("[0-9]{9}"))
    streams = engine.run_requests(
        [engine.request("Once", Options.of(8, constraint=one)) for one in (Constraint.regex("[a-z]{9}"), None)]
    )
    other = list(streams[1])
    assert "".join(other) == engine.generate("Once", 8).text
    assert isinstance(streams[0].request.error, ConstraintError)


def test_sampling_keeps_its_options_as_they_were():
    assert Sampling() == Options(constraint=Constraint.json_object()).sampling


@pytest.mark.parametrize("n", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_replies_to_random_schemas_are_valid_if_they_end(engine: Engine, n: int):
    pytest.importorskip("jsonschema")
    from tests.constraints.__main__ import random_schemas

    n_replies, n_ended, wrong = random_schemas(engine, n)
    assert wrong == []
    assert n_replies == n
    assert n_ended > 0.5 * n
