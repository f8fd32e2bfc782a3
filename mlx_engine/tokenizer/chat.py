"""Encode a conversation with the model's chat template. Messages cannot forge control tokens.

A control token (marker) that the template writes becomes its one id; the same characters in a message are encoded as
plain text. If no message spells a control token, the ids are those of the whole rendered text, equal to transformers':
the text is not split where messages begin and end.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_engine.errors import ChatTemplateError, OptionError
from mlx_engine.tokenizer.chat_prompt import ChatPrompt, TemplateInput
from mlx_engine.tokenizer.history import History
from mlx_engine.tokenizer.markers import MARK, Check, Markers, unchecked
from mlx_engine.tokenizer.messages import HALF, Message
from mlx_engine.tokenizer.sandbox_process import DEFAULT_LIMITS, Limits
from mlx_engine.tokenizer.tokenizer import Tokenizer

# Stand-ins are high surrogates, which occur in no text that UTF-8 can encode.
STAND_INS = range(0xD800, 0xDC00)


def chat_ids(
    tokenizer: Tokenizer,
    prompt: ChatPrompt | Sequence[Message],
    history: History | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    check: Check = unchecked,
) -> list[int]:
    """Return the ids of a conversation, up to the beginning of the model's answer.

    A BOS is added if the file asks for one and the template has not written it. Roles are trusted: a program that takes
    them from outside must restrict them (`messages.ROLES`). All other texts of a message are not.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        prompt: messages, or a `ChatPrompt` with tools, documents and variables of the template too.
        history: the ids of earlier conversations. If the rendered text begins with a remembered one, its ids are used,
            and the rest is encoded. The prompt is remembered; `History.add_answer` adds the answer to it.
        limits: limits of the template.
        check: called before the template runs with an empty text, and before each encoding with its text; what it
            raises ends the work.

    Raises:
        OptionError: the messages are no list of messages, or the template does not read one of the variables.
        ChatTemplateError: there is no template, or it rejects the messages, fails or exceeds its limits.
        TokenizerError: the vocabulary cannot encode the text.
    """
    prepared = _prompt_of(prompt).for_template(_template(tokenizer), tokenizer.where)
    markers = Markers.of(tokenizer, (message["role"] for message in prepared.messages))
    check("")
    marked = _rendered(tokenizer, prepared, markers, limits)
    ids = _continued(markers, marked, history) if history is not None else None
    if ids is None:
        ids = _with_bos(tokenizer, markers.encode(marked, check))
    if history is not None:
        history.add_prompt(ids, marked)
    return ids


def _continued(markers: Markers, marked: str, history: History) -> list[int] | None:
    """Return the ids of the longest remembered beginning and of the rest; None if there is no such beginning."""
    for text, ids in history.beginnings(marked):
        written = markers.written(text)
        # Roles of this conversation may make markers of tokens that were none when the text was remembered.
        if markers.among(ids) in (written, _with_bos(markers.tokenizer, written)):
            return ids + markers.encode(marked[len(text) :])
    return None


def _prompt_of(prompt: ChatPrompt | Sequence[Message]) -> ChatPrompt:
    return prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(prompt)


def _rendered(tokenizer: Tokenizer, prepared: TemplateInput, markers: Markers, limits: Limits) -> str:
    """Return the rendered conversation as a marked text (see `markers`)."""
    said = "".join(prepared.texts())
    # The template wrote a marker if neither its first nor its last character came from a message.
    ends = sorted(end for end in {end for text in markers.ids for end in (text[0], text[-1])} if end in said)
    fits = len(ends) <= len(STAND_INS)
    if not fits:
        message = f"messages: the markers have {len(ends):,} different ends; {len(STAND_INS):,} are possible"
        raise OptionError(message, option="messages", found=len(ends))
    hidden = list(zip(ends, map(chr, STAND_INS), strict=False))
    inputs = [prepared, prepared.map_texts(lambda text: _replaced(text, hidden))] if hidden else [prepared]
    texts = _render(tokenizer, inputs, limits)
    plain, guarded = texts[0], texts[-1]
    if not plain:
        hint = "the template is empty, or not made for these messages"
        raise ChatTemplateError(where=tokenizer.where, found="one that writes nothing", hint=hint)
    marked = _replaced(markers.mark(guarded), [(stand_in, end) for end, stand_in in hidden])
    # A template may search its messages: one that removes thoughts finds none when their markers are replaced by
    # stand-ins. The plain text is then right, unless a message also spells a control token: the origin of markers in
    # the plain text would be unknown.
    if marked.replace(MARK, "") == plain or any(text in said for text in tokenizer.special_tokens if text):
        return marked
    found = markers.mark(plain)
    return found if markers.written(found) == markers.written(marked) else marked


def _replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return a text with the first character of each pair replaced by the second, much faster than `translate`."""
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
        OptionError: the messages are no list of messages, or the template does not read one of the variables.
        ChatTemplateError: there is no template, or it rejects the messages, fails or exceeds its limits.
    """
    template = _template(tokenizer)
    return _render(
        tokenizer, [_prompt_of(prompt).for_template(template, tokenizer.where) for prompt in prompts], limits
    )


def _render(tokenizer: Tokenizer, inputs: Sequence[TemplateInput], limits: Limits) -> list[str]:
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    request = {
        "template": _template(tokenizer),
        "inputs": [each.names() for each in inputs],
        "names": {name: tokenizer.token(i) for name, i in roles.items() if i is not None},
    }
    return tokenizer.sandbox.ask(request, limits, tokenizer.where)


def _template(tokenizer: Tokenizer) -> str:
    """Return the chat template; raise ChatTemplateError if there is none, or it is not UTF-8."""
    template = tokenizer.chat_template
    if template is None:
        raise ChatTemplateError(where=tokenizer.where, found="none", hint="give the prompt as text instead")
    if HALF.search(template):
        found = "one that is not UTF-8"
        raise ChatTemplateError(where=tokenizer.where, found=found, hint="convert or download the file again")
    return template
