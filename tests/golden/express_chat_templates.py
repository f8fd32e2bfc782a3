"""Print what the chat templates of a folder can write, and which conversations of agents they write whole.

    python -m tests.golden.express_chat_templates FOLDER

FOLDER has templates as files that end in .jinja, such as those of llama.cpp (models/templates). A row per template: a
cell per conversation of tests/unit/test_conversation_template.py, "=" for a prompt that has every part and "n" for a
refusal by name; then what the template cannot write in the form of OpenAI's API.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from mlx_engine.conversation.dialect import Dialect
from mlx_engine.conversation.template import chat_ids, dialect_of
from mlx_engine.errors import ChatTemplateError
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.tokenizer.chat_prompt import ChatPrompt, reads
from tests.unit.test_conversation_template import CONVERSATIONS, TOOL, tokenizer_of


def cell(tokenizer: Tokenizer, title: str) -> str:
    """Return the letter of a conversation."""
    tools = [TOOL] if reads(tokenizer.chat_template or "", "tools") else []
    try:
        chat_ids(tokenizer, ChatPrompt(CONVERSATIONS[title], tools=tools))
    except ChatTemplateError:
        return "n"
    return "="


def changes(dialect: Dialect) -> str:
    """Return the forms that differ from those of OpenAI's API."""
    usual = Dialect()
    given = {field.name: getattr(dialect, field.name) for field in fields(Dialect)}
    each = (f"{name}={sorted(v) if name == 'runs' else v}" for name, v in given.items() if v != getattr(usual, name))
    return " ".join(each)


def main() -> None:
    """Print a row per template, and how many write each conversation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    counts = dict.fromkeys(CONVERSATIONS, 0)
    paths = sorted(parser.parse_args().folder.glob("*.jinja"))
    for path in paths:
        tokenizer = tokenizer_of(path.read_text(encoding="utf-8"))
        cells = {title: cell(tokenizer, title) for title in CONVERSATIONS}
        counts = {title: n + (cells[title] == "=") for title, n in counts.items()}
        print(f"{path.name:60} {''.join(cells.values())} {changes(dialect_of(tokenizer))}", flush=True)
    for title, n in counts.items():
        print(f"{n:3} of {len(paths)}  {title}")


if __name__ == "__main__":
    main()
