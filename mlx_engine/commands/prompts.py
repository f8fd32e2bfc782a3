"""The prompts of `generate`: their options, and their conversion to model input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import checked_text, notice, read_text
from mlx_engine.commands.options import Think
from mlx_engine.errors import EngineError, OptionError, Words, require

if TYPE_CHECKING:
    from mlx_engine.decode.options import Options
    from mlx_engine.engine import Engine, Prompt
    from mlx_engine.schedule.stream import Stream

DEFAULT_PROMPT = "Once upon a time"
NO_TEMPLATE = "warning: this model has no chat template: it continues the prompt as plain text, and may not answer"


@dataclass(frozen=True)
class PromptOptions:
    """Sources of prompts, and whether prompts are chat messages."""

    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads stdin.", show_default=DEFAULT_PROMPT)] = None
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
        other = self.prompt if self.prompt is not None else self.prompt_file
        if self.batch_file is not None and other is not None:
            raise OptionError(option="--batch-file", expected="no other prompt", found=str(other))
        require(
            self.chat or self.system is None, option="--system", expected="--chat together with it", found=self.system
        )
        if self.system is not None:
            checked_text(self.system, "--system")
        is_free = self.chat or self.think is None
        require(is_free, option="--think", expected="--chat together with it", found=self.think)

    def read(self) -> list[str]:
        """Return the prompt, or the non-blank lines of the batch file. "-" is stdin.

        Raises:
            OptionError: there is no prompt, there are two, or a file is not UTF-8.
            SourceError: a file cannot be read.
        """
        batch = self.batch_file
        if batch is None:
            return [read_text(self.prompt, self.prompt_file, "prompt", default=DEFAULT_PROMPT)]
        text = read_text("-", None, "--batch-file") if str(batch) == "-" else read_text(None, batch, "--batch-file")
        # Not splitlines, which would split a prompt at a form feed or U+2028.
        lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
        require(bool(lines), option="--batch-file", expected="one prompt per line", found=Words(f"none in {batch}"))
        return lines

    def for_model(self, engine: Engine, texts: Sequence[str]) -> list[Prompt]:
        """Return the texts unchanged or, with --chat, as chat messages if the model has a chat template."""
        if not self.chat:
            return list(texts)
        from mlx_engine.tokenizer.chat_prompt import ChatPrompt, thinking

        variables = thinking(engine.tokenizer.chat_template, self.think)
        if engine.tokenizer.chat_template is None:
            notice(NO_TEMPLATE)
            return [text if self.system is None else f"{self.system}\n\n{text}" for text in texts]
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [ChatPrompt([*first, {"role": "user", "content": text}], variables=variables) for text in texts]


def streams(engine: Engine, prompts: Sequence[Prompt], options: Options) -> list[Stream]:
    """Return an unstarted run for each prompt; the runs share forward passes. All prompts are checked first.

    Raises:
        EngineError: a prompt is empty or too long, or the chat template rejects it.
    """
    requests = []
    for i, prompt in enumerate(prompts, start=1):
        try:
            requests.append(engine.request(prompt, options))
        except EngineError:
            if len(prompts) > 1:
                notice(f"prompt {i} of {len(prompts)}:")
            raise
    return engine.run_requests(requests)
