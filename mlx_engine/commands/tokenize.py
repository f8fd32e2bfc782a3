"""The command `tokenize`: encode text, decode token ids, show a vocabulary."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import FAILED, notice, read_text, reports_errors, safe_for
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.help import Command, Group
from mlx_engine.commands.values import columns, plain, print_json
from mlx_engine.errors import OptionError
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.tokenizer import Tokenizer

tokenize = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    help="Convert text to token ids and back, or show the vocabulary.",
)

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="GGUF file (with or without weights), tokenizer.json or its folder, hub id, or builtin."
    ),
]
File = Annotated[Path | None, typer.Option("--file", "-f", help="Read the input from this file.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@tokenize.command(cls=Command)
@reports_errors
@takes_groups
def encode(
    text: Annotated[
        str | None, typer.Argument(help="The text; - or no argument reads all of stdin, including the last newline.")
    ] = None,
    model: Model = "builtin",
    file: File = None,
    special: bool = option(False, "Recognise control tokens in the text."),
    pieces: bool = option(False, "Print one id per line, with its token and text."),
    round_trip: bool = option(False, "Fail if the ids do not decode to the same text."),
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


@tokenize.command(cls=Command)
@reports_errors
@takes_groups
def decode(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Token ids, separated by spaces or commas; - or no argument reads stdin.")
    ] = None,
    model: Model = "builtin",
    file: File = None,
    skip_special: bool = option(False, "Leave out control tokens."),
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


@tokenize.command(cls=Command)
@reports_errors
@takes_groups
def info(
    model: Model = "builtin",
    lookup: str | None = option(
        None, "Show only this token, given as its id, its text, or its entry in the vocabulary."
    ),
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
    """Load the tokenizer of a model: a file, a folder, a hub id or "builtin"."""
    from mlx_engine.checkpoint.sources import resolve
    from mlx_engine.tokenizer import load_tokenizer

    return load_tokenizer(resolve(model))


def parse_ids(text: str) -> list[int]:
    """Parse whole numbers separated by spaces or commas, or a JSON list of them; raise OptionError for other texts."""
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    try:
        return [int(word) for word in words if word]
    except ValueError:
        found = next((word for word in words if not re.fullmatch(r"\d{1,18}", word)), text)[:40]
        raise OptionError(f"ids must be whole numbers, not {found!r}", option="ids", found=found) from None


def check_ids(ids: list[int], vocab_size: int) -> None:
    """Raise OptionError if an id is not in the vocabulary."""
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        message = f"ids must be from 0 to {vocab_size - 1:,}, not {wrong}"
        raise OptionError(message, option="ids", found=wrong)


def print_tokens(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Print a line per id: the token as spelled in the vocabulary, and its text."""
    rows = [(str(i), plain(tokenizer.token(i)), repr(tokenizer.decode([i], at_start=False))) for i in ids]
    for line in columns(rows, "><<"):
        print(line)


def print_lookup(tokenizer: Tokenizer, wanted: str, *, as_json: bool) -> None:
    """Print the tokens whose id or vocabulary entry is `wanted`; if there are none, the token that `wanted` encodes to.

    Raise OptionError if the encoded text does not have exactly one token.
    """
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == wanted or str(i) == wanted]
    if not ids:
        ids = tokenizer.encode(wanted, special=True)
        if len(ids) != 1:
            message = f"--lookup: {wanted!r} is neither the text nor the id of one token"
            raise OptionError(message, option="--lookup", found=wanted)
    if as_json:
        rows = [{"id": i, "token": tokenizer.token(i), "text": tokenizer.decode([i], at_start=False)} for i in ids]
        print_json({"lookup": wanted, "found": rows})
    else:
        print_tokens(tokenizer, ids)


def as_json(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the properties and the special tokens of a tokenizer."""
    return {
        "kind": tokenizer.kind,
        "pre": tokenizer.pre,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "eog_ids": sorted(tokenizer.eog_ids),
        "add_bos": tokenizer.add_bos,
        "special_tokens": tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
    }


def print_info(tokenizer: Tokenizer) -> None:
    """Print the properties of a tokenizer."""
    ends = "none" if not tokenizer.eog_ids else ", ".join(named(tokenizer, i) for i in sorted(tokenizer.eog_ids))
    template = tokenizer.chat_template
    rows = [
        ("kind", tokenizer.kind),
        ("pre-tokenizer", plain(tokenizer.pre or "") or "as tokenizer.json defines it"),
        ("vocabulary", f"{tokenizer.vocab_size:,} tokens"),
        ("BOS", named(tokenizer, tokenizer.bos_id) + (", added before prompts" if tokenizer.add_bos else "")),
        ("EOS", named(tokenizer, tokenizer.eos_id)),
        ("end of text", ends),
        ("chat template", "none" if template is None else f"{len(template):,} characters"),
        ("special tokens", f"{len(tokenizer.special_tokens):,}"),
    ]
    print("\n".join(columns(rows, "<<")))
    special = [(f"  {token_id}", plain(token)) for token, token_id in tokenizer.special_tokens.items()]
    for line in columns(special, "><"):
        print(line)


def named(tokenizer: Tokenizer, token_id: int | None) -> str:
    """Format a token's id and its vocabulary entry; "none" for None."""
    return "none" if token_id is None else f"{token_id} {plain(tokenizer.token(token_id))}"
