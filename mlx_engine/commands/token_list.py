"""Print tokens, and the facts of a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_engine.commands.values import columns, plain, print_json
from mlx_engine.errors import OptionError

if TYPE_CHECKING:
    from mlx_engine.tokenizer import Tokenizer


def print_tokens(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Print a line per id: the token as spelled in the vocabulary, and its text."""
    rows = [(str(i), plain(tokenizer.token(i)), repr(tokenizer.decode([i], at_start=False))) for i in ids]
    for line in columns(rows, "><<"):
        print(line)


def print_lookup(tokenizer: Tokenizer, wanted: str, *, as_json: bool) -> None:
    """Print the tokens that `wanted` may mean, by id and by text.

    Raises:
        OptionError: there is no such token.
    """
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == wanted or str(i) == wanted]
    if not ids:
        ids = tokenizer.encode(wanted, special=True)
        if len(ids) != 1:
            raise OptionError(option="--lookup", expected="the text or the id of one token", found=wanted)
    if as_json:
        rows = [{"id": i, "token": tokenizer.token(i), "text": tokenizer.decode([i], at_start=False)} for i in ids]
        print_json({"lookup": wanted, "found": rows})
    else:
        print_tokens(tokenizer, ids)


def as_json(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the properties of a tokenizer, without its tokens."""
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
    """Format an id with its token."""
    return "none" if token_id is None else f"{token_id} {plain(tokenizer.token(token_id))}"
