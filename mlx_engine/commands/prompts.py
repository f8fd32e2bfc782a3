"""The prompts of a command: the options that give them, and what is sent to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import notice, read_text
from mlx_engine.errors import EngineError, OptionError, require

if TYPE_CHECKING:
    from mlx_engine.decode.options import Options
    from mlx_engine.decode.stream import Stream
    from mlx_engine.engine import Engine, Prompt

DEFAULT_PROMPT = "Once upon a time"


@dataclass(frozen=True)
class PromptOptions:
    """Where prompts come from, and whether they are messages of a chat."""

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
    system: Annotated[str | None, typer.Option("--system", help="The system message of --chat.")] = None

    def check(self) -> None:
        """Refuse options that exclude each other, before anything is read.

        Raises:
            OptionError: there are two prompts, or a system message without a chat.
        """
        other = self.prompt if self.prompt is not None else self.prompt_file
        if self.batch_file is not None and other is not None:
            raise OptionError(option="batch_file", expected="no other prompt beside it", found=str(other))
        require(self.chat or self.system is None, option="system", expected="--chat beside it", found=self.system)

    def read(self) -> list[str]:
        """Return the prompt, or the lines of the batch file that are not blank. "-" is stdin.

        Raises:
            OptionError: there is no prompt, there are two, or it is not UTF-8.
            SourceError: a file cannot be read.
        """
        batch = self.batch_file
        if batch is None:
            return [read_text(self.prompt, self.prompt_file, "prompt", default=DEFAULT_PROMPT)]
        text = read_text("-", None, "batch_file") if str(batch) == "-" else read_text(None, batch, "batch_file")
        # Not splitlines, for which a form feed or U+2028 inside a prompt would end it.
        lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
        require(bool(lines), option="batch_file", expected="one prompt per line", found=f"none in {batch}")
        return lines

    def for_model(self, engine: Engine, texts: Sequence[str]) -> list[Prompt]:
        """Return the texts as they are, or as messages of a chat; a model without a chat template gets text."""
        if not self.chat:
            return list(texts)
        if engine.tokenizer.chat_template is None:
            notice(
                "warning: this model has no chat template: it continues the prompt as plain text, and may not answer"
            )
            return [text if self.system is None else f"{self.system}\n\n{text}" for text in texts]
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [[*first, {"role": "user", "content": text}] for text in texts]


def streams(engine: Engine, prompts: Sequence[Prompt], options: Options) -> list[Stream]:
    """Return a run for each prompt, none of them begun: a prompt that cannot be run is refused before the first run.

    Raises:
        EngineError: a prompt is empty or too long, or the chat template refuses it.
    """
    made = []
    for i, prompt in enumerate(prompts, start=1):
        try:
            made.append(engine.run(prompt, options))
        except EngineError:
            if len(prompts) > 1:
                notice(f"prompt {i} of {len(prompts)}:")
            raise
    return made
