"""`Conversation`: ask a model several questions in turn, as the command `chat` does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.conversation.schemas import arguments_of
from mlx_engine.errors import OptionError
from mlx_engine.options import Options, names_options

if TYPE_CHECKING:
    from mlx_engine.conversation.answer import AnswerReader
    from mlx_engine.conversation.functions import ToolCall
    from mlx_engine.engine import Engine, RequestBuilder
    from mlx_engine.loop.scheduler import Scheduler
    from mlx_engine.loop.stream import Generation, Progress, Stream
    from mlx_engine.tokenizer.chat import History

# Matches the place where a chat template reads the reasoning of an answer from a field of the message.
READS_REASONING = re.compile(r"""reasoning_content|\.thinking\b|\[['"]thinking['"]\]""")

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


@dataclass(frozen=True)
class Turn:
    """An answer of the model, to a question or to the results of tool calls.

    Attributes:
        n_messages: the number of messages up to and including this answer, not counting the system message.
    """

    generation: Generation
    n_messages: int

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt: the whole conversation up to the answer."""
        return len(self.generation.prompt_ids)

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt whose keys and values were in the cache."""
        return self.generation.n_cached

    @property
    def n_generated(self) -> int:
        """Tokens of the answer."""
        return len(self.generation.token_ids)


class Conversation:
    """A conversation. Each prompt has all earlier messages.

    With a chat template, a prompt contains earlier answers as the token ids that the model generated, so that it begins
    with cached tokens. Without a chat template, the whole text of `plain_text` is encoded for each prompt.

    Attributes:
        messages: the messages so far. If the last one is a question without an answer, the next question replaces it.
        turns: the answers in `messages` that were generated here or restored by `restore`.
    """

    @names_options
    def __init__(
        self,
        engine: Engine,
        options: Options | None = None,
        *,
        system: str | None = None,
        kv_memory: int | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Begin a conversation.

        Args:
            engine: the model.
            options: options of every answer.
            system: the system message; None for none.
            kv_memory: bytes for keys and values; None takes half of the free memory. If a full context needs less,
                only this memory is taken.
            variables: variables of the chat template, such as `enable_thinking`.
            tools: descriptions of the tools that the model may call, in the form of OpenAI's API.
        """
        from mlx_engine.tokenizer.chat import History

        self.engine, self.options = engine, options or Options()
        self.messages: list[dict[str, Any]] = []
        self.variables, self.tools = dict(variables or {}), list(tools)
        self.turns: list[Turn] = []
        self._history, self._kv_memory = History(engine.tokenizer), kv_memory
        self._kept: Scheduler | None = None
        self._asked: list[int] = []
        self._stream: Stream | None = None
        self.system = system

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self.engine.tokenizer.chat_template is not None

    @property
    def system(self) -> str | None:
        """The system message, which is the first message; None if there is no system message."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == SYSTEM else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = [*([] if text is None else [{"role": SYSTEM, "content": text}]), *rest]

    @property
    def generation(self) -> Generation | None:
        """The last answer; None before the first answer."""
        return self.turns[-1].generation if self.turns else None

    @property
    def n_tokens(self) -> int:
        """Tokens of the conversation at the end of the last answer."""
        return self.turns[-1].n_prompt + self.turns[-1].n_generated if self.turns else 0

    @property
    def n_context(self) -> int:
        """The largest number of tokens that the conversation can have."""
        whole: int = self.engine.config.context_length
        return whole if self.options.context_len is None else min(whole, self.options.context_len)

    def ask(self, text: str, *, progress: Progress | None = None) -> Iterator[str]:
        """Add a message of the user, and return the answer in pieces.

        The answer is added to the messages when the iterator ends or is closed. If the iterator is closed early, the
        answer is the text so far; without any text, no answer is added. During prefill, `progress` is called with
        (tokens done, tokens in total).

        Raises:
            ContextLengthError: the prompt exceeds the context; the conversation is unchanged.
            EngineError: the template refuses or cannot render the messages; the conversation is unchanged.
        """
        answered = self.messages[:-1] if self._last_role == USER else self.messages
        return self._answer([*answered, {"role": USER, "content": text}], progress)

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls of the last answer. `give` adds their results."""
        from mlx_engine.conversation.functions import ToolCall

        last = self.messages[-1] if self._last_role == ASSISTANT else {}
        return [ToolCall.of(call) for call in last.get("tool_calls", ())]

    def give(self, results: Sequence[str], *, progress: Progress | None = None) -> Iterator[str]:
        """Add the results of `calls`, in the same order. Return the next answer and raise errors as `ask` does."""
        given = [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(self.calls, results, strict=True)
        ]
        return self._answer([*self.messages, *given], progress)

    def retry(self, *, progress: Progress | None = None) -> Iterator[str]:
        """Drop the last answer, and return another one as `ask` does.

        Raises:
            OptionError: nothing was asked yet.
            EngineError: as for `ask`.
        """
        asked = self.messages[:-1] if self._last_role == ASSISTANT else self.messages
        if not asked or asked[-1]["role"] == SYSTEM:
            raise OptionError("there is no question to answer again", option="retry", expected="a question before it")
        return self._answer(asked, progress)

    def undo(self) -> str:
        """Drop the last question and all messages after it, and return the question.

        Later answers are bit-identical to those of a conversation that never had this question: the ids of the dropped
        answer are not used again, and the prefix cache reuses keys and values only for an equal prefix of ids.

        Raises:
            OptionError: nothing was asked yet.
            EngineError: the template cannot render the messages; the conversation is unchanged.
        """
        asked = [i for i, message in enumerate(self.messages) if message["role"] == USER]
        if not asked:
            raise OptionError("there is no question to undo", option="undo", expected="a question before it")
        question, kept = self.messages[asked[-1]], self.messages[: asked[-1]]
        history = self._remembered(kept)
        self._replace(kept)
        self._history = history
        return str(question["content"])

    def clear(self) -> None:
        """Drop all messages except the system message."""
        system, self.messages = self.system, []
        self.system, self.turns = system, []

    def load(self, messages: Sequence[dict[str, Any]]) -> None:
        """Replace the messages, and remove all turns.

        Raises:
            EngineError: `messages` are invalid, or the template cannot render them; the conversation is unchanged.
        """
        if messages:
            self._prompt_ids(asked(messages))
        self.clear()
        self.messages = list(messages)

    def state(self) -> dict[str, Any]:
        """Return the messages, and the token ids of the answers that were generated here, as plain data.

        The value of `model` is `Engine.prefix_identity` in hexadecimal, or None if that method raises an error.
        """
        turns = [
            {
                "n_messages": turn.n_messages, "prompt_ids": of.prompt_ids, "token_ids": of.token_ids, "text": of.text,
                "finish_reason": of.finish_reason,
            }
            for turn in self.turns
            for of in (turn.generation,)
        ]  # fmt: skip
        return {"messages": self.messages, "turns": turns, "model": self._model()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the conversation with a result of the method `state`.

        The token ids in the result are used only if the model is the same.

        Raises:
            EngineError: the messages are invalid, or the template cannot render them; the conversation is unchanged.
        """
        from mlx_engine.loop.metrics import Metrics
        from mlx_engine.loop.stream import Generation

        self.load(state["messages"])
        is_same = state.get("model") is not None and state["model"] == self._model()
        for turn in state["turns"] if is_same else ():
            text, reason = turn["text"], turn["finish_reason"]
            run = Generation(text, turn["token_ids"], Metrics(), reason, turn["prompt_ids"])
            self.turns.append(Turn(run, turn["n_messages"]))
        self._history = self._remembered(self.messages)

    def _model(self) -> str | None:
        try:
            return self.engine.prefix_identity().hex()
        except (OptionError, OSError):  # keys and values cannot be saved, or the model's files have changed
            return None

    def save_prefix(self, path: Path) -> int:
        """Write the keys and values of the conversation to a file, and return the number of tokens in the file.

        Return 0, and write nothing, if no keys and values are cached.

        Raises:
            OptionError: keys and values of this model cannot be saved.
            OSError: the file cannot be written.
        """
        last = self.generation
        if last is None or self._kept is None or not self._kept.is_sound:
            return 0
        return self.engine.save_prefix(path, [*last.prompt_ids, *last.token_ids], scheduler=self._kept)

    def _replace(self, messages: list[dict[str, Any]]) -> None:
        """Set the messages, and drop the turns whose answers the messages no longer contain."""
        n = _n_said(messages)
        self.messages, self.turns = messages, [turn for turn in self.turns if turn.n_messages <= n]

    def _remembered(self, messages: list[dict[str, Any]]) -> History:
        """Return a history with the ids of the generated answers that are still in `messages`."""
        from mlx_engine.tokenizer.chat import History

        history, n_system = History(self.engine.tokenizer), len(messages) - _n_said(messages)
        for turn in self.turns:
            n = n_system + turn.n_messages
            if n <= len(messages):
                # This call adds the prompt to the history: an answer can be added only after its prompt.
                conversation_ids(self.engine.prompts, messages[: n - 1], self.variables, history, self.tools)
                history.add_answer(turn.generation.prompt_ids, turn.generation.token_ids)
        return history

    @property
    def _last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def _answer(self, messages: list[dict[str, Any]], progress: Progress | None) -> Iterator[str]:
        self._asked = ids = self._prompt_ids(messages)
        scheduler = self._scheduler() if self.options.kv else None
        self._stream = stream = self.engine.run(ids, self.options, progress=progress, scheduler=scheduler)
        self._replace(messages)
        return self._pieces(stream)

    def _scheduler(self) -> Scheduler:
        """Return the scheduler, whose prefix cache keeps the keys and values from turn to turn."""
        if self._kept is None or not self._kept.is_sound:
            self._kept = None  # frees the old scheduler's memory before the next scheduler is made
            self._kept = self.engine.scheduler(slots=1, kv_memory=self._kv_memory)
        return self._kept

    def _prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return conversation_ids(self.engine.prompts, messages, self.variables, self._history, self.tools)

    def _pieces(self, stream: Stream) -> Iterator[str]:
        has_text = False
        try:
            for piece in stream:
                has_text = True
                yield piece
        finally:
            stream.close()
            generation = stream.generation
            # If the stream was closed before any text was yielded, the messages stay as they are.
            if (has_text or generation.finish_reason is not None) and generation.token_ids:
                self._history.add_answer(generation.prompt_ids, generation.token_ids)
                self.messages = [*self.messages, self._message(generation)]
                self.turns.append(Turn(generation, _n_said(self.messages)))

    def _message(self, generation: Generation) -> dict[str, Any]:
        """Return the message of an answer.

        If the template reads reasoning from a field, the reasoning is moved from the content to `reasoning_content`.
        If not, the reasoning stays in the content, because templates of thinking models remove it themselves. But if
        the answer has tool calls, both the calls and the reasoning are always removed from the content.
        """
        from mlx_engine.conversation.answer import message_of

        message: dict[str, Any] = {"role": ASSISTANT, "content": generation.text}
        reader = self.reader(generation.prompt_ids)
        is_cut = generation.finish_reason != "stop"
        found = message_of([*reader.add(generation.text, self.marks), *reader.finish(is_cut=is_cut)])
        reads_reasoning = READS_REASONING.search(self.engine.tokenizer.chat_template or "")
        if "tool_calls" in found:
            # Drop a call that was cut off, because it cannot get a result.
            kept = [call for call in found["tool_calls"] if arguments_of(call["function"]["arguments"]) is not None]
            message |= {"content": found["content"] or "", **({"tool_calls": kept} if kept else {})}
        if reads_reasoning and found.get("reasoning_content"):
            message |= {"content": found["content"] or "", "reasoning_content": found["reasoning_content"]}
        return message

    @property
    def marks(self) -> Sequence[int]:
        """The character indices of control tokens in the answer that is running or was last; see `AnswerReader.add`."""
        return () if self._stream is None else self._stream.request.output.marks

    def reader(self, prompt_ids: Sequence[int] | None = None) -> AnswerReader:
        """Return a reader that parses the answer to `prompt_ids`, by default to the last prompt."""
        from mlx_engine.conversation.answer import AnswerReader

        return AnswerReader.after(self.engine.tokenizer, self._asked if prompt_ids is None else prompt_ids, self.tools)


def _n_said(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of messages, not counting a system message at the beginning."""
    return len(messages) - (bool(messages) and messages[0]["role"] == SYSTEM)


def asked(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the messages. If there is only a system message, which many templates refuse, add a question."""
    is_system_alone = len(messages) == 1 and isinstance(messages[0], dict) and messages[0].get("role") == SYSTEM
    return [*messages, {"role": USER, "content": "a"}] if is_system_alone else messages


def conversation_ids(
    prompts: RequestBuilder,
    messages: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] | None = None,
    history: History | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Encode messages with the model's chat template, or with `plain_text` if there is none. This needs no weights.

    Raises:
        OptionError: `messages` is not a list of messages, or there are tools and the format of calls is unknown.
        ChatTemplateError: the template cannot render the messages.
    """
    if tools:
        from mlx_engine.conversation.formats import required_format

        required_format(prompts.tokenizer)
    if prompts.tokenizer.chat_template is not None:
        from mlx_engine.tokenizer.chat_prompt import ChatPrompt

        return prompts.chat_ids(ChatPrompt(messages, tools, variables=variables or {}), history)
    from functools import partial

    from mlx_engine.conversation.dialect import PLAINEST, rewritten
    from mlx_engine.conversation.template import written_calls

    dialect = replace(PLAINEST, head=True, late=True, runs=frozenset({USER, ASSISTANT}), opening=True)
    return prompts.ids(plain_text(rewritten(messages, dialect, partial(written_calls, prompts.tokenizer))))


def plain_text(messages: Sequence[dict[str, Any]]) -> str:
    """Return messages as one text, for a model without a chat template.

    An empty line follows the system message. Each question begins a new line, and its answer continues this line.
    """
    pieces = []
    for i, message in enumerate(messages):
        is_new_line = i > 0 and message["role"] == USER and messages[i - 1]["role"] != SYSTEM
        pieces += ["\n" if is_new_line else "", message["content"], "\n\n" if message["role"] == SYSTEM else ""]
    return "".join(pieces)
