"""The options that constrain the text of an answer, for `generate` and `chat`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_engine.commands.console import read_text
from mlx_engine.constraint import Constraint
from mlx_engine.errors import OptionError
from mlx_engine.options import option

# The beginning of a grammar: the name of a rule and a colon. A path such as C:\file has a slash after the colon.
RULE = re.compile(r"\s*[\w?!]+\s*:(?![/\\])")


@dataclass(frozen=True)
class ConstraintOptions:
    """Output. The texts that an answer may have: at most one of these options."""

    json_schema: str | None = option(None, "Generate JSON of this schema: its text or its file.", metavar="SCHEMA")
    regex: str | None = option(None, "Generate a text that this regular expression matches.", metavar="R", is_rare=True)
    grammar: str | None = option(
        None, "Generate a text of this Lark grammar: its text or its file.", metavar="LARK", is_rare=True
    )
    choice: list[str] | None = option(
        None, "Generate one of several texts; give this option once for each.", metavar="TEXT", is_rare=True
    )

    def read(self) -> Constraint | None:
        """Return the constraint; None without one.

        Raises:
            OptionError: there are several, or it is invalid.
            SourceError: a file cannot be read.
        """
        made: dict[str, tuple[Any, Callable[[Any], Constraint]]] = {
            "--json-schema": (self.json_schema, lambda given: Constraint.json_schema(_text(given, "--json-schema"))),
            "--regex": (self.regex, Constraint.regex),
            "--grammar": (self.grammar, lambda given: Constraint.grammar(_text(given, "--grammar"))),
            "--choice": (self.choice or None, Constraint.choice),
        }
        found = {flag: make for flag, (given, make) in made.items() if given is not None}
        if not found:
            return None
        flag, *others = found
        if others:
            raise OptionError(f"{others[0]} cannot be combined with {flag}; give one of them", option=others[0])
        try:
            return found[flag](made[flag][0])
        except OptionError as error:
            message = str(error).removeprefix("constraint").removeprefix(":").strip()
            raise OptionError(f"{flag}: {message}", option=flag, expected=error.expected) from None


def _text(given: str, flag: str) -> str:
    """Return a schema or a grammar: the given text, or the text of the file that it names.

    A schema begins with a brace or a bracket, and a grammar has several lines, or begins with its first rule.
    """
    is_text = not given or given.lstrip().startswith(("{", "[")) or "\n" in given or RULE.match(given)
    return given if is_text else read_text(None, Path(given), flag)
