"""Encode a conversation, rendered with the model's chat template, or the prompt of a reranker.

A *marker* is a control token, the unknown token (such as <unk>), or a user-defined token that the template can write
and that has more than two characters. A marker that the template writes becomes one id; the same characters in a
message are encoded as plain text. If no message spells a marker, the whole rendered text is encoded at once, so the ids
are those of transformers.

In a *marked text*, MARK precedes every marker that the template wrote or the model generated. The same characters
without MARK are from a message, and are encoded as plain text.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mlx_engine.errors import ChatTemplateError, OptionError, TokenizerError
from mlx_engine.kernels.cached import cached_property
from mlx_engine.machine.forks import kept_over_forks
from mlx_engine.tokenizer.chat_prompt import HALF, ROLES, ChatPrompt, Message, TemplateInput
from mlx_engine.tokenizer.sandbox_process import DEFAULT_LIMITS, Limits
from mlx_engine.tokenizer.tokenizer import Tokenizer

# A low surrogate, which does not occur in text that UTF-8 can encode.
MARK = "\udc00"

# Called with each text before it is encoded. An exception ends the encoding.
Check: TypeAlias = Callable[[str], None]


def unchecked(text: str) -> None:
    """Accept every text."""


@dataclass(frozen=True)
class Markers:
    """The markers of a tokenizer's chat template.

    Attributes:
        ids: maps the text of each marker to its id.
        always: the markers that are user-defined tokens. `Tokenizer.encode` finds these tokens in any text.
    """

    tokenizer: Tokenizer
    ids: Mapping[str, int]
    always: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, roles: Iterable[str] = ()) -> Markers:
        """Return the markers of a tokenizer's chat template.

        A user-defined token is a marker if the template contains its text, or can compose the text from a role of
        `roles` or `ROLES`, as in `'<|' + role + '|>'`.
        """
        template, known = tokenizer.chat_template or "", {*ROLES, *roles}

        def is_written(text: str) -> bool:
            parts = (text.split(role) for role in known if role in text)
            return text in template or any(all(part in template for part in around) for around in parts)

        found = tokenizer.user_defined_tokens.items()
        always = {text: i for text, i in found if len(text.strip()) > 2 and is_written(text)}
        ids = {text: i for text, i in (tokenizer.special_tokens | always).items() if text}
        return cls(tokenizer, ids, tuple(always))

    @cached_property
    def values(self) -> frozenset[int]:
        """The ids of all markers."""
        return frozenset(self.ids.values())

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _written(self) -> re.Pattern[str]:
        return re.compile(f"{MARK}({self._spelled.pattern})")

    @cached_property
    def _cuts(self) -> re.Pattern[str]:
        """Matches after the first character of each user-defined marker. Splitting a text there breaks the markers."""
        around = (f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in self.always)
        return re.compile("|".join(around) or "(?!)")

    def mark(self, text: str) -> str:
        """Return a text with MARK before every marker."""
        return self._spelled.sub(lambda match: MARK + match[0], text)

    def written(self, marked: str) -> list[int]:
        """Return the ids of the markers that follow a MARK in a marked text."""
        return [self.ids[match[1]] for match in self._written.finditer(marked)]

    def among(self, ids: Iterable[int]) -> list[int]:
        """Return the ids that are markers."""
        return [i for i in ids if i in self.values]

    def encode(self, marked: str, check: Check = unchecked) -> list[int]:
        """Return the ids of a marked text. If a message spells a marker, encode each text between markers separately.

        Raises:
            TokenizerError: the vocabulary cannot encode the text.
            Exception: what `check` raises.
        """
        text = marked.replace(MARK, "")
        check(text)
        ids = self.tokenizer.encode(text, special=True)
        if self.among(ids) == self.written(marked):
            return ids
        ids, at = [], 0
        for match in self._written.finditer(marked):
            ids += [*self._plain(marked[at : match.start()], check), self.ids[match[1]]]
            at = match.end()
        return ids + self._plain(marked[at:], check)

    def _plain(self, text: str, check: Check) -> list[int]:
        check(text)
        forbidden = {self.ids[marker] for marker in self.always}
        return [i for piece in self._cuts.split(text) for i in _without(self.tokenizer, piece, forbidden)]


def _without(tokenizer: Tokenizer, text: str, forbidden: Collection[int]) -> list[int]:
    """Return the ids of plain text. If they include an id of `forbidden`, encode both halves of the text separately.

    A normaliser can cause such an id, although the text has been split inside each user-defined marker.
    """
    ids = tokenizer.encode(text)
    if len(text) < 2 or not any(i in forbidden for i in ids):
        return ids
    half = len(text) // 2
    return [*_without(tokenizer, text[:half], forbidden), *_without(tokenizer, text[half:], forbidden)]


ITEM_BYTES = array("I").itemsize


class History:
    """Marked texts of prompts and answers with their ids; the least recently used texts are dropped. Thread-safe.

    Encoding the text of an answer may give other ids than the model generated; the KV cache of the answer could then
    not be reused. So if a prompt begins with a remembered text, `chat_ids` uses the remembered ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_entries: int = 1024, max_tokens: int = 1 << 20) -> None:
        """Make an empty history of at most `max_entries` texts, with at most `max_tokens` ids (of 4 bytes) together."""
        self._markers = Markers.of(tokenizer)
        self._max_entries, self._max_tokens = max_entries, max_tokens
        self._texts: OrderedDict[bytes, str] = OrderedDict()  # maps ids to texts, the most recently used text last
        self._n_bytes = 0
        self._lock = kept_over_forks(threading.Lock())

    def __len__(self) -> int:
        return len(self._texts)

    def add_prompt(self, ids: Sequence[int], marked: str) -> None:
        """Remember the ids and the marked text of a rendered conversation."""
        with self._lock:
            self._add(_packed(ids), marked)

    def add_answer(self, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> None:
        """Remember a prompt followed by its answer; do nothing if the prompt has been dropped.

        End tokens at the end of the answer are left out: in the next prompt, the template writes its own end token.
        """
        generated = list(generated_ids)
        while generated and generated[-1] in self._markers.tokenizer.eog_ids:
            generated.pop()
        prompt = _packed(prompt_ids)
        answer = self._marked(generated)
        with self._lock:
            if (text := self._texts.get(prompt)) is not None:
                self._add(prompt + _packed(generated), text + answer)

    def beginnings(self, marked: str) -> Iterator[tuple[str, list[int]]]:
        """Yield the remembered texts that are prefixes of a marked text, and their ids; the longest text first.

        A text is yielded only if a marker follows it. The tokenizer always encodes the text before a marker separately,
        so the text from this marker on can be encoded alone.
        """
        with self._lock:
            found = [
                (text, ids)
                for ids, text in self._texts.items()
                if marked.startswith(text) and marked.startswith(MARK, len(text))
            ]
        for text, ids in sorted(found, key=lambda entry: len(entry[0]), reverse=True):
            with self._lock:
                if ids in self._texts:
                    self._texts.move_to_end(ids)
            yield text, array("I", ids).tolist()

    def _add(self, ids: bytes, text: str) -> None:
        self._n_bytes += 0 if ids in self._texts else len(ids)
        self._texts[ids] = text
        self._texts.move_to_end(ids)
        while len(self._texts) > self._max_entries or self._n_bytes > self._max_tokens * ITEM_BYTES:
            dropped, _ = self._texts.popitem(last=False)
            self._n_bytes -= len(dropped)

    def _marked(self, ids: Sequence[int]) -> str:
        """Return the marked text of generated ids."""
        stream, values, pieces = self._markers.tokenizer.stream(at_start=False), self._markers.values, []
        for i in ids:
            # If a marker follows an incomplete character, the stream returns both, the marker last.
            piece = stream.add(i)
            marker = self._markers.tokenizer.token(i) if i in values else ""
            pieces.append(piece.removesuffix(marker) + MARK + marker if marker else piece)
        return "".join([*pieces, stream.finish()])


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


# Placeholders for characters of messages. High surrogates occur in no text that UTF-8 can encode.
STAND_INS = range(0xD800, 0xDC00)


def chat_ids(
    tokenizer: Tokenizer,
    prompt: ChatPrompt | Sequence[Message],
    history: History | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    check: Check = unchecked,
    accept: Check = unchecked,
) -> list[int]:
    """Return the ids of a conversation, up to the beginning of the model's answer.

    This function changes messages only as `chat_prompt.messages_for_template` does; the function
    `conversation.template.chat_ids` also rewrites them to forms that the template supports. A BOS is added if
    `Tokenizer.add_bos` is true and the template has not written one.

    A template may compose control tokens from the roles of messages, and this function does not prevent that. So a
    program that gets roles from users must restrict them to `chat_prompt.ROLES`.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        prompt: messages, or a `ChatPrompt`.
        history: if the rendered text begins with a text of the history, the ids of this text are used, and only the
            rest is encoded. The prompt is added to the history; `History.add_answer` adds the answer.
        limits: limits on the template's time, memory and output.
        check: may raise an error to end the work. Called with an empty text before the template runs, and with each
            text before it is encoded, unless the history has a beginning of the prompt.
        accept: called with the rendered text before it is encoded.

    Raises:
        OptionError: a part has an invalid form, or the prompt sets a variable that the template does not read.
        ChatTemplateError: there is no template, or it rejects the messages, fails or exceeds its limits.
        TokenizerError: the vocabulary cannot encode the text.
    """
    prepared = _prompt_of(prompt).for_template(_template(tokenizer), tokenizer.where)
    markers = Markers.of(tokenizer, (message["role"] for message in prepared.messages))
    check("")
    marked = _rendered(tokenizer, prepared, markers, limits, accept)
    ids = _continued(markers, marked, history) if history is not None else None
    if ids is None:
        ids = _with_bos(tokenizer, markers.encode(marked, check))
    if history is not None:
        history.add_prompt(ids, marked)
    return ids


def _continued(markers: Markers, marked: str, history: History) -> list[int] | None:
    """Return the ids of a marked text: of its longest prefix in `history`, then of the rest; None without a prefix."""
    for text, ids in history.beginnings(marked):
        written = markers.written(text)
        # Markers depend on the roles of a conversation. So the ids may have tokens that are markers now, but that the
        # remembered text does not mark. Such ids are not used.
        if markers.among(ids) in (written, _with_bos(markers.tokenizer, written)):
            return ids + markers.encode(marked[len(text) :])
    return None


def _prompt_of(prompt: ChatPrompt | Sequence[Message]) -> ChatPrompt:
    return prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(prompt)


def _rendered(tokenizer: Tokenizer, prepared: TemplateInput, markers: Markers, limits: Limits, accept: Check) -> str:
    """Return the rendered conversation as a marked text; `accept` is called with its plain text."""
    user_text = "".join(prepared.texts())
    # Messages are rendered with placeholders for the first and last characters of markers. So every marker in the
    # rendered text was written by the template.
    ends = sorted(end for end in {end for text in markers.ids for end in (text[0], text[-1])} if end in user_text)
    if len(ends) > len(STAND_INS):
        message = (
            f"messages have {len(ends):,} different characters that begin or end control tokens; "
            f"at most {len(STAND_INS):,} are supported"
        )
        raise OptionError(message, option="messages", found=len(ends))
    hidden = list(zip(ends, map(chr, STAND_INS), strict=False))
    inputs = [prepared, prepared.map_texts(lambda text: _replaced(text, hidden))] if hidden else [prepared]
    texts = _render(tokenizer, inputs, limits)
    plain, guarded = texts[0], texts[-1]
    if not plain:
        hint = "the template is empty, or cannot write these messages"
        raise ChatTemplateError(where=tokenizer.where, found="one that writes nothing", hint=hint, is_refusal=True)
    accept(plain)
    marked = _replaced(markers.mark(guarded), [(stand_in, end) for end, stand_in in hidden])
    # A template may search its messages for markers, for example to remove reasoning, but placeholders hide markers. So
    # the rendering without placeholders is used if both renderings have the same markers. If a message spells a control
    # token, the rendering with placeholders is used, because only placeholders show which markers the template wrote.
    if marked.replace(MARK, "") == plain or any(text in user_text for text in tokenizer.special_tokens if text):
        return marked
    found = markers.mark(plain)
    return found if markers.written(found) == markers.written(marked) else marked


def _replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return a text with the replacements (old, new) made; faster than `str.translate`."""
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def _with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    bos_id = tokenizer.bos_id if tokenizer.add_bos else None
    return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]


def render(
    tokenizer: Tokenizer, prompts: Sequence[ChatPrompt | Sequence[Message]], limits: Limits = DEFAULT_LIMITS
) -> list[str]:
    """Render each prompt with the chat template, up to the beginning of the model's answer.

    Raises:
        OptionError: a part has an invalid form, or the prompt sets a variable that the template does not read.
        ChatTemplateError: there is no template, or it rejects the messages, fails or exceeds its limits.
    """
    template = _template(tokenizer)
    return _render(
        tokenizer, [_prompt_of(prompt).for_template(template, tokenizer.where) for prompt in prompts], limits
    )


def _render(tokenizer: Tokenizer, inputs: Sequence[TemplateInput], limits: Limits) -> list[str]:
    return tokenizer.sandbox.ask(_request(tokenizer, inputs), limits, tokenizer.where)


def render_each(tokenizer: Tokenizer, prompts: Sequence[ChatPrompt]) -> list[str | None]:
    """Render each prompt; return None for a prompt that the template refuses, or for which it fails.

    Raises:
        OptionError: a part has an invalid form, or the prompt sets a variable that the template does not read.
        ChatTemplateError: there is no template, it exceeds its limit of time or of length, or no sandbox process can be
            started.
    """
    inputs = [prompt.for_template(_template(tokenizer), tokenizer.where) for prompt in prompts]
    return tokenizer.sandbox.ask_each(_request(tokenizer, inputs), DEFAULT_LIMITS, tokenizer.where)


def _request(tokenizer: Tokenizer, inputs: Sequence[TemplateInput]) -> dict[str, object]:
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {
        "template": _template(tokenizer),
        "inputs": [each.names() for each in inputs],
        "names": {name: tokenizer.token(i) for name, i in roles.items() if i is not None},
    }


def _template(tokenizer: Tokenizer) -> str:
    """Return the chat template; raise ChatTemplateError if there is none, or it is not UTF-8."""
    template = tokenizer.chat_template
    if template is None:
        raise ChatTemplateError(where=tokenizer.where, found="none", hint="give the prompt as text instead")
    if HALF.search(template):
        found = "one that is not UTF-8"
        raise ChatTemplateError(where=tokenizer.where, found=found, hint="convert or download the file again")
    return template


# ---- the prompt of a reranker ----

# The default instruction and the prompt of Qwen3-Reranker, from its model card.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
RANKING_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
PLACES = re.compile(r"(\{(?:instruction|query|document)\})")


def ranking_ids(
    tokenizer: Tokenizer, template: str | None, query: str, document: str, instruction: str | None
) -> list[int]:
    """Return the token ids of the prompt that asks a reranker whether a document is relevant to a query.

    `template` is a text with {query}, {document} and, unless its instruction is fixed, {instruction}. RANKING_TEMPLATE
    is used if `template` is None, or if `instruction` is given and `template` has no {instruction}. Control tokens
    in the template are encoded as such; in the query, document and instruction, the same characters are plain text.
    """
    if template is None or (instruction is not None and "{instruction}" not in template):
        template = RANKING_TEMPLATE
    texts = {"{query}": query, "{document}": document, "{instruction}": instruction or INSTRUCTION}
    control = sorted(tokenizer.special_tokens, key=len, reverse=True)
    cut = re.compile(f"({'|'.join(map(re.escape, control))})") if control else re.compile(r"((?!))")
    ids, run = list[int](), ""
    for piece in PLACES.split(template):
        if piece in texts:
            run += texts[piece]
            continue
        for i, part in enumerate(cut.split(piece)):
            if i % 2 == 0:
                run += part
            else:
                ids += [*(tokenizer.encode(run) if run else ()), tokenizer.special_tokens[part]]
                run = ""
    return [*ids, *(tokenizer.encode(run) if run else ())]


def label_ids(tokenizer: Tokenizer, labels: Sequence[str]) -> list[int]:
    """Return the token id of each label, such as "yes"; raise TokenizerError if a label is not a single token."""
    found = [tokenizer.encode(label) for label in labels]
    for label, ids in zip(labels, found, strict=True):
        if len(ids) != 1:
            raise TokenizerError(f"{tokenizer.where}: expected the label {label!r} to be one token, found {len(ids)}")
    return [ids[0] for ids in found]
