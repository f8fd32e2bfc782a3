"""The command `tokenize`: encode text, decode token ids, show a vocabulary."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import FAILED, notice, read_text, reports_errors, safe_for
from mlx_engine.commands.token_list import as_json, print_info, print_lookup, print_tokens
from mlx_engine.commands.values import plain, print_json
from mlx_engine.errors import OptionError

if TYPE_CHECKING:
    from mlx_engine.tokenizer import Tokenizer

tokenize = typer.Typer(no_args_is_help=True, help="Convert text to token ids and back, or show the vocabulary.")

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="GGUF file (with or without weights), tokenizer.json or its folder, hub id, or builtin."
    ),
]
File = Annotated[Path | None, typer.Option("--file", "-f", help="Read the input from this file.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@tokenize.command()
@reports_errors
def encode(
    text: Annotated[
        str | None, typer.Argument(help="The text; - or no argument reads all of stdin, including the last newline.")
    ] = None,
    model: Model = "builtin",
    file: File = None,
    special: Annotated[bool, typer.Option("--special", help="Recognise control tokens in the text.")] = False,
    pieces: Annotated[bool, typer.Option("--pieces", help="Print one id per line, with its token and text.")] = False,
    round_trip: Annotated[
        bool, typer.Option("--round-trip", help="Fail if the ids do not decode to the same text.")
    ] = False,
    json: AsJSON = False,
) -> None:
    """Print the token ids of a text. No token is added, not even BOS."""
    given = read_text(text, file, "text")
    tokenizer = load(model)
    ids = tokenizer.encode(given, special=special)
    again = tokenizer.decode(ids) if round_trip else given
    if json:
        found = {"ids": ids, "tokens": [tokenizer.token(i) for i in ids], "count": len(ids)}
        print_json({**found, "round_trip": again == given} if round_trip else found)
    elif pieces:
        print_tokens(tokenizer, ids)
    else:
        print(*ids)
    if again != given:
        notice(f"error: the ids decode to a different text: {plain(again)}")
        raise typer.Exit(FAILED)


@tokenize.command()
@reports_errors
def decode(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Token ids, separated by spaces or commas; - or no argument reads stdin.")
    ] = None,
    model: Model = "builtin",
    file: File = None,
    skip_special: Annotated[bool, typer.Option("--skip-special", help="Leave out control tokens.")] = False,
    json: AsJSON = False,
) -> None:
    """Print the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
    given = parse_ids(read_text(" ".join(ids) if ids else None, file, "ids"))
    tokenizer = load(model)
    check_ids(given, tokenizer.vocab_size)
    text = tokenizer.decode(given, skip_special=skip_special)
    if json:
        print_json({"text": text, "ids": given, "count": len(given)})
    else:
        print(safe_for(sys.stdout, text))


@tokenize.command()
@reports_errors
def info(
    model: Model = "builtin",
    lookup: Annotated[
        str | None,
        typer.Option(
            "--lookup", help="Show only this token, given as its id, its text, or its entry in the vocabulary."
        ),
    ] = None,
    json: AsJSON = False,
) -> None:
    """Show the kind and size of the vocabulary, and its special tokens."""
    tokenizer = load(model)
    if lookup is not None:
        print_lookup(tokenizer, lookup, as_json=json)
    elif json:
        print_json(as_json(tokenizer))
    else:
        print_info(tokenizer)


def load(model: str) -> Tokenizer:
    """Load the tokenizer of a model source."""
    from mlx_engine.checkpoint.sources import resolve
    from mlx_engine.tokenizer import load_tokenizer

    return load_tokenizer(resolve(model))


def parse_ids(text: str) -> list[int]:
    """Parse whole numbers separated by spaces or commas, or a JSON list of them.

    Raises:
        OptionError: the text has anything else.
    """
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    try:
        return [int(word) for word in words if word]
    except ValueError:
        found = next((word for word in words if not re.fullmatch(r"\d{1,18}", word)), text)[:40]
        raise OptionError(option="ids", expected="whole numbers", found=found) from None


def check_ids(ids: list[int], vocab_size: int) -> None:
    """Check that all ids are in the vocabulary.

    Raises:
        OptionError: an id is not in the vocabulary.
    """
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise OptionError(option="ids", expected=f"token ids from 0 to {vocab_size - 1:,}", found=wrong)
