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

# The beginning of a grammar: the name of a rule and a colon. No slash may follow: C:/file and C:\file are paths.
RULE = re.compile(r"\s*[\w?!]+\s*:(?![/\\])")


@dataclass(frozen=True)
class ConstraintOptions:
    """Output. Constraints on the text of an answer; at most one may be given."""

    json_schema: str | None = option(None, "Generate JSON of this schema, given as text or file.", metavar="SCHEMA")
    regex: str | None = option(None, "Generate a text that this regular expression matches.", metavar="R", is_rare=True)
    grammar: str | None = option(
        None, "Generate a text of this Lark grammar, given as text or file.", metavar="LARK", is_rare=True
    )
    choice: list[str] | None = option(
        None, "Generate one of several texts; give this option once for each.", metavar="TEXT", is_rare=True
    )

    def read(self) -> Constraint | None:
        """Return the constraint; None if no option is given.

        Raises:
            OptionError: several options are given, or the constraint is invalid.
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
    """Return the text of a schema or a grammar: `given` itself, or the contents of the file `given`.

    `given` is the text itself if it is empty, begins with a brace or a bracket (a schema), has several lines, or begins
    with a rule (a grammar). Otherwise it is the path of a file.
    """
    is_text = not given or given.lstrip().startswith(("{", "[")) or "\n" in given or RULE.match(given)
    return given if is_text else read_text(None, Path(given), flag)
