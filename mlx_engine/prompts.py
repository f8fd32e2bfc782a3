"""Prompts become requests: tokenizer, chat template, limits of the context. No weight of the model is read for it."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.options import DEFAULT_MAX_TOKENS, UNTIL_FULL, Options
from mlx_engine.decode.output import Output
from mlx_engine.errors import ContextLengthError, OptionError, Words, require
from mlx_engine.machine.forks import kept_over_forks
from mlx_engine.schedule.request import Request

if TYPE_CHECKING:
    from mlx_engine.tokenizer import Tokenizer
    from mlx_engine.tokenizer.chat import History
    from mlx_engine.tokenizer.chat_prompt import ChatPrompt, Message

# Text, token ids, messages, or messages with tools, documents and variables of the template.
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message] | ChatPrompt"


class Prompts:
    """Makes requests from prompts, by a model's config and its tokenizer.

    Attributes:
        config: the model's config.
        phases: seconds of the phases of loading so far, included in the metrics of every request.
    """

    def __init__(self, checkpoint: Checkpoint, path: Path, config: Any) -> None:
        self.config, self.phases = config, dict[str, float]()
        self._path = path
        self._checkpoint: Checkpoint | None = checkpoint  # until there is a tokenizer
        self._lock = kept_over_forks(threading.Lock())

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use.

        Raises:
            TokenizerError: the checkpoint has no tokenizer, or it cannot be built.
        """
        with self._lock:
            if self._checkpoint is not None:
                start = time.perf_counter()
                self._tokenizer = self._build_tokenizer(self._checkpoint)
                self.phases["build_tokenizer"] = time.perf_counter() - start
                self._checkpoint = None  # frees its metadata: 12 MB of strings, one per merge
        return self._tokenizer

    def _build_tokenizer(self, checkpoint: Checkpoint) -> Tokenizer:
        from mlx_engine import tokenizer

        if checkpoint.naming == "hf":
            made = tokenizer.load_tokenizer(self._path)
        else:
            made = tokenizer.from_gguf(checkpoint.metadata, where=checkpoint.where)
        # A padded embedding table has more rows than there are tokens.
        return made.padded(self.config.vocab_size)

    def close(self) -> None:
        """Free the file. A tokenizer that has not been built cannot be built any more."""
        self._checkpoint = None

    def begin_with(self, phases: Mapping[str, float]) -> None:
        """Add the seconds of phases before all others."""
        self.phases = {**phases, **self.phases}

    def request(self, prompt: Prompt, options: Options, *, n: int = 1) -> Request:
        """Return a request for a scheduler: the prompt as token ids, and `n` empty outputs.

        Raises:
            OptionError: an option is invalid for this model, or the prompt is empty.
            ContextLengthError: prompt and max_tokens exceed the context.
            ChatTemplateError: the template is missing, refuses the messages, or fails.
        """
        options.sampling.check_vocabulary(self.config.vocab_size)
        texts = [self.tokenizer.stream(at_start=False) for _ in range(n)]  # building the tokenizer is a phase
        metrics = Metrics(phases=dict(self.phases))
        prompt_ids = metrics.record_phase("tokenize", lambda: self.ids(prompt))
        max_tokens = self.fitting(len(prompt_ids), options.max_tokens, options.context_len)
        end_ids = self.tokenizer.eog_ids
        outputs = [Output(options, max_tokens=max_tokens, text=text, end_ids=end_ids) for text in texts]
        return Request(prompt_ids, options, outputs, metrics=metrics)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: text is encoded, after a BOS token if the file asks for one."""
        is_list = isinstance(prompt, list | tuple)
        if hasattr(prompt, "messages") or (is_list and isinstance(next(iter(prompt), None), Mapping)):
            return self.chat_ids(prompt)  # type: ignore[arg-type]
        if not isinstance(prompt, str):
            return self.checked(prompt)
        bos = self.tokenizer.bos_id if self.tokenizer.add_bos else None
        return self.checked([*([] if bos is None else [bos]), *self.tokenizer.encode(prompt)])

    def chat_ids(
        self,
        messages: Sequence[Message] | ChatPrompt,
        history: History | None = None,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation by the model's chat template, as `Engine.chat_prompt` describes.

        `check` is called before each piece of the work with its text; what it raises ends the work.
        """
        from mlx_engine.tokenizer.chat import chat_ids, unchecked

        return self.checked(chat_ids(self.tokenizer, messages, history, check=check or unchecked))

    def checked(self, ids: Sequence[Any]) -> list[int]:
        """Return the ids as a list of ints, from any sequence.

        Raises:
            OptionError: there are none, or one is not in the vocabulary.
        """
        expected = f"a sequence of token ids from 0 to {self.config.vocab_size - 1}"
        try:
            # The elements of an mx.array are zero-dimensional arrays, which `operator.index` refuses.
            values = [i.item() if hasattr(i, "item") else i for i in ids]
            if isinstance(ids, bytes) or any(isinstance(value, bool) for value in values):
                raise TypeError("bytes and truth values are no ids")
            checked = [operator.index(value) for value in values]
        except (TypeError, ValueError) as error:
            raise OptionError(option="prompt", expected=expected, found=ids) from error
        require(len(checked) > 0, option="prompt", expected="at least one token", found=Words("nothing"))
        wrong = next((i for i in checked if not 0 <= i < self.config.vocab_size), None)
        require(wrong is None, option="prompt", expected=expected, found=wrong)
        return checked

    def fitting(self, n_prompt: int, max_tokens: int | None, context_len: int | None) -> int:
        """Return the largest number of new tokens after `n_prompt` tokens.

        None means 256, or what the context leaves; `UNTIL_FULL` what the context leaves.

        Raises:
            ContextLengthError: prompt and `max_tokens` exceed the context.
        """
        whole: int = self.config.context_length
        length = whole if context_len is None else min(whole, context_len)
        whose = "context_len" if length < whole else "the model's context"
        room, least = length - n_prompt, 1 if max_tokens is None or max_tokens == UNTIL_FULL else max_tokens
        if room < least:
            raise ContextLengthError(
                option="prompt and max_tokens",
                expected=f"at most {length:,} tokens, {whose}",
                found=Words(f"a prompt of {n_prompt:,} and {least:,} more"),
            )
        if max_tokens is not None and max_tokens != UNTIL_FULL:
            return max_tokens
        return min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else room
