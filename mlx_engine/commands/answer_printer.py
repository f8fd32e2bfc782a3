"""Print an answer as it is generated, with its reasoning set apart."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlx_engine.commands.console import is_plain, safe_for

if TYPE_CHECKING:
    from mlx_engine.tokenizer.thinking import Piece

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


class AnswerPrinter:
    """Prints the pieces of one answer: reasoning dimmed in a terminal, else on stderr, or nowhere with `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._in_terminal, self._quiet, self._is_reasoning = not is_plain(sys.stdout), quiet, False

    def print(self, pieces: Iterable[Piece]) -> None:
        """Print more pieces."""
        for text, is_reasoning in pieces:
            if self._is_reasoning and not is_reasoning:
                self._write("\n\n", is_reasoning=True)
            self._is_reasoning = is_reasoning
            self._write(text, is_reasoning=is_reasoning)

    def _write(self, text: str, *, is_reasoning: bool) -> None:
        out = sys.stdout if self._in_terminal or not is_reasoning else sys.stderr
        if out is sys.stderr and self._quiet:
            return
        text = safe_for(out, text)
        print(f"{DIM}{text}{NORMAL}" if is_reasoning and self._in_terminal else text, end="", file=out, flush=True)
