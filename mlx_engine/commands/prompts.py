"""Where prompts come from, and what becomes of them for a chat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_engine.commands.console import notice, read_text
from mlx_engine.errors import EngineError, OptionError, require

if TYPE_CHECKING:
    from mlx_engine.decode.options import Options
    from mlx_engine.decode.stream import Stream
    from mlx_engine.engine import Engine, Prompt

DEFAULT_PROMPT = "Once upon a time"


def check_prompts(prompt: str | None, file: Path | None, batch: Path | None, *, chat: bool, system: str | None) -> None:
    """Refuse what cannot be meant, before anything is read.

    Raises:
        OptionError: two prompts, or a system text for nobody.
    """
    other = prompt if prompt is not None else file
    if batch is not None and other is not None:
        raise OptionError(option="batch_file", expected="no other prompt beside it", found=str(other))
    require(chat or system is None, option="system", expected="--chat beside it", found=system)


def read_prompts(prompt: str | None, file: Path | None, batch: Path | None) -> list[str]:
    """The prompt; or those of a batch file, one a line, without the lines that are blank. "-" is stdin.

    Raises:
        OptionError: there is none, there are two, or it is not UTF-8.
        SourceError: a file cannot be read.
    """
    if batch is None:
        return [read_text(prompt, file, "prompt", default=DEFAULT_PROMPT)]
    text = read_text("-", None, "batch_file") if str(batch) == "-" else read_text(None, batch, "batch_file")
    # Not splitlines, for which a form feed or U+2028 inside a prompt would end it.
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    require(bool(lines), option="batch_file", expected="one prompt per line", found=f"none in {batch}")
    return lines


def asked(engine: Engine, texts: Sequence[str], *, chat: bool, system: str | None) -> list[Prompt]:
    """The texts as they are, or each as one turn of a chat; a model without a template takes them as they are."""
    if not chat:
        return list(texts)
    if engine.tokenizer.chat_template is None:
        notice("warning: this model has no chat template: it continues the prompt as plain text, and may not answer")
        return [text if system is None else f"{system}\n\n{text}" for text in texts]
    first = [] if system is None else [{"role": "system", "content": system}]
    return [[*first, {"role": "user", "content": text}] for text in texts]


def streams(engine: Engine, prompts: Sequence[Prompt], options: Options) -> list[Stream]:
    """A run for each prompt, none begun: what cannot be run is known before the first one is.

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
