"""The prompts of `generate`: their options, and their conversion to model input."""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import BOM, checked_text, notice, read_text
from mlx_engine.commands.options.model import Think
from mlx_engine.errors import EngineError, OptionError, Words, require

if TYPE_CHECKING:
    from mlx_engine.decode.options import Options
    from mlx_engine.prompts import Prompt, Prompts
    from mlx_engine.schedule.request import Request
    from mlx_engine.tokenizer import Tokenizer

DEFAULT_PROMPT = "Once upon a time"
NO_PROMPT = (
    "no prompt was given, neither as an argument nor with -f FILE nor through a pipe: "
    f"continuing {DEFAULT_PROMPT!r}, an example"
)
# Seconds without a byte after which a pipe is reported, or ignored by the example: CI and containers leave some open.
PATIENCE = 3.0

# How a message ends, rather than a text to continue.
ENDS = (".", "?", "!", "。", "\uff1f", "\uff01")
HAS_TEMPLATE = "hint: this model has a chat template; --chat sends the prompt through it, as a message to answer"
NO_TEMPLATE = "warning: this model has no chat template: it continues the prompt as plain text, and may not answer"


@dataclass(frozen=True)
class PromptOptions:
    """Sources of prompts, and whether prompts are chat messages."""

    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - reads stdin.", show_default=f"a pipe, else the example {DEFAULT_PROMPT!r}"),
    ] = None
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="PROMPT", help="The same as the argument.")
    ] = None
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", "-f", help="Read the prompt from this file.")] = (
        None
    )
    batch_file: Annotated[
        Path | None,
        typer.Option("--batch-file", help="Run every non-blank line of this file as a prompt; - reads stdin."),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as one user message through the model's chat template.")
    ] = False
    system: Annotated[str | None, typer.Option("--system", help="System message, with --chat.")] = None
    think: Think = None

    def check(self) -> None:
        """Check for options that exclude each other, before anything is read.

        Raises:
            OptionError: there are two prompts, or --system or --think without --chat.
        """
        twice = self.prompt is not None and self.prompt_option is not None
        require(not twice, option="--prompt", expected="no prompt as an argument", found=self.prompt)
        other = self.prompt_file if self.text is None else self.text
        if self.batch_file is not None and other is not None:
            raise OptionError(option="--batch-file", expected="no other prompt", found=str(other))
        require(
            self.chat or self.system is None, option="--system", expected="--chat together with it", found=self.system
        )
        if self.system is not None:
            checked_text(self.system, "--system")
        is_free = self.chat or self.think is None
        require(is_free, option="--think", expected="--chat together with it", found=self.think)

    @property
    def text(self) -> str | None:
        """The prompt of the command line; "-" is stdin."""
        return self.prompt if self.prompt_option is None else self.prompt_option

    def read(self, *, is_example: bool) -> list[str]:
        """Return the prompt, or the non-blank lines of the batch file. "-" is stdin, and so is a pipe without a prompt.

        A text of a file or of stdin is returned without a byte order mark and without its last line end.

        Args:
            is_example: run the example prompt if stdin is a pipe through which nothing comes for a few seconds.

        Raises:
            OptionError: the batch has no prompt, or a text is not UTF-8.
            SourceError: a file cannot be read.
        """
        if self.batch_file is not None:
            return self._batch(self.batch_file)
        if self.text is not None or self.prompt_file is not None:
            text = read_text(self.text, self.prompt_file, "prompt")
            return [text if self.text not in (None, "-") else without_line_end(text)]
        text = piped(is_example=is_example)
        if not text:
            notice(NO_PROMPT)
        return [without_line_end(text) if text else DEFAULT_PROMPT]

    def _batch(self, file: Path) -> list[str]:
        text = read_text("-", None, "--batch-file") if str(file) == "-" else read_text(None, file, "--batch-file")
        # Not splitlines, which would split a prompt at a form feed or U+2028.
        lines = [line for line in text.removeprefix(BOM).replace("\r\n", "\n").split("\n") if line.strip()]
        require(bool(lines), option="--batch-file", expected="one prompt per line", found=Words(f"none in {file}"))
        return lines

    def hints(self, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
        """Return a hint if a prompt seems to be a chat message: whole sentences."""
        could = not self.chat and tokenizer.chat_template is not None
        return [HAS_TEMPLATE] if could and any(text.rstrip().endswith(ENDS) for text in texts) else []

    def for_model(self, tokenizer: Tokenizer, texts: Sequence[str]) -> list[Prompt]:
        """Return the texts unchanged or, with --chat, as chat messages if the model has a chat template."""
        if not self.chat:
            return list(texts)
        from mlx_engine.tokenizer.chat_prompt import ChatPrompt, thinking

        variables = thinking(tokenizer.chat_template, self.think)
        if tokenizer.chat_template is None:
            notice(NO_TEMPLATE)
            return [text if self.system is None else f"{self.system}\n\n{text}" for text in texts]
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [ChatPrompt([*first, {"role": "user", "content": text}], variables=variables) for text in texts]


def without_line_end(text: str) -> str:
    """Return a text without a byte order mark, and without its last line end: editors and `echo` write one."""
    text = text.removeprefix(BOM)
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def piped(*, is_example: bool) -> str:
    """Return all of stdin if it is a pipe or a file; an empty text if it is a terminal, or closed.

    A pipe that stays silent is waited for, and that is printed; with `is_example` it counts as empty.

    Raises:
        OptionError: the text is not UTF-8.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    if _is_silent(PATIENCE):
        if is_example:
            return ""
        notice("waiting for a prompt on stdin")
    return read_text("-", None, "prompt")


def _is_silent(seconds: float) -> bool:
    """Return whether stdin has neither bytes nor an end within some seconds."""
    try:
        return not select.select([sys.stdin], [], [], seconds)[0]
    except (OSError, ValueError):  # Windows, where select takes sockets alone; a stdin without a file descriptor
        return False


def requests_for(makes: Prompts, prompts: Sequence[Prompt], options: Options) -> list[Request]:
    """Return a request for each prompt. The weights need not have been loaded.

    Raises:
        EngineError: a prompt is empty or too long, or the chat template rejects it.
    """
    requests = []
    for i, prompt in enumerate(prompts, start=1):
        try:
            requests.append(makes.request(prompt, options))
        except EngineError:
            if len(prompts) > 1:
                notice(f"prompt {i} of {len(prompts)}:")
            raise
    return requests


def longest_of(requests: Sequence[Request]) -> int:
    """Return the largest number of tokens that the cache holds for requests that share forward passes."""
    from mlx_engine.engine import BATCH_SLOTS

    return sum(sorted((request.longest for request in requests), reverse=True)[:BATCH_SLOTS])
