"""Compare chat templates of a folder with transformers, on ten conversations each, and print a table.

    python -m tests.golden.compare_chat_templates FOLDER [--vocab FILE.gguf] [--all]    # needs transformers

FOLDER has templates as files that end in .jinja, such as those of model repositories and of llama.cpp
(models/templates). The texts are compared; with --vocab, so are the token ids that `chat_ids` returns with this
vocabulary. Cells: "=" the same text, "x" both refuse, "n" refused by name here, because the template does not read what
was given (transformers leaves it out), "D" anything else. The exit code is 1 if there is a "D"; --all prints its texts.
"""

from __future__ import annotations

import argparse
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.errors import EngineError
from mlx_engine.tokenizer import Tokenizer, from_gguf, sandbox
from mlx_engine.tokenizer.chat import chat_ids
from mlx_engine.tokenizer.chat_prompt import READS_PARTS, ChatPrompt, reads
from tests.golden.chat_conversations import CONVERSATIONS

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CHARACTERS = 1 << 24


def given(template: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return a case with the variables that the template reads, and with text parts joined if it reads no parts."""
    variables = {name: value for name, value in case.get("variables", {}).items() if reads(template, name)}
    documents = case.get("documents", []) if reads(template, "documents") else []
    return {**case, "variables": variables, "documents": documents}


def as_the_template_reads(template: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form that the template is made for, which transformers leaves to its caller."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list) and not READS_PARTS.search(template):
        message["content"] = " ".join(part["text"] for part in content)
    if message["role"] == "developer" and "developer" not in template:
        message["role"] = "system"
    return message


def theirs(template: str, case: dict[str, Any], names: dict[str, str]) -> str:
    """Return the text of transformers; raise what the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [as_the_template_reads(template, message) for message in case["messages"]]
    more = {name: case.get(name) or None for name in ("tools", "documents")}
    (text,), _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, **more, **names, **case["variables"]
    )
    return str(text)


def ours(template: str, case: dict[str, Any], names: dict[str, str]) -> str:
    """Return our text.

    Raises:
        EngineError: the input is refused by name.
        Exception: what the template raises.
    """
    prepared = ChatPrompt(**case).for_template(template, "the template")
    return sandbox.render(template, [prepared.names()], names, CHARACTERS)[0]


def outcome(template: str, case: dict[str, Any], names: dict[str, str] = NAMES) -> tuple[str, str, str]:
    """Return the letter of a cell, and both texts or errors."""
    try:
        expected, is_refused = theirs(template, case, names), False
    except Exception as error:  # a template raises anything
        expected, is_refused = f"{type(error).__name__}: {error}", True
    try:
        found = ours(template, case, names)
    except EngineError as error:
        return "x" if is_refused else "n", expected, str(error)
    except Exception as error:
        return "x" if is_refused else "D", expected, f"{type(error).__name__}: {error}"
    return "=" if found == expected and not is_refused else "D", expected, found


@lru_cache(maxsize=1)
def tokenizer_with(vocab: Path, template: str) -> Tokenizer:
    """Return the tokenizer of a GGUF file with another chat template."""
    with open_gguf(vocab) as file:
        return from_gguf({**file.metadata, "tokenizer.chat_template": template}, where=str(vocab))


def same_ids(tokenizer: Tokenizer, template: str, case: dict[str, Any]) -> bool:
    """Return whether `chat_ids` gives the ids of transformers' text."""
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    text = theirs(template, case, {name: tokenizer.token(i) for name, i in roles.items() if i is not None})
    ids = tokenizer.encode(text, special=True)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and ids[:1] != [tokenizer.bos_id] else []
    return chat_ids(tokenizer, ChatPrompt(**case)) == [*bos, *ids]


def main() -> int:
    """Print a row per template."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab", type=Path)
    parser.add_argument("--all", action="store_true")
    asked = parser.parse_args()
    counts: dict[str, int] = {}
    for path in sorted(asked.folder.glob("*.jinja")):
        template, cells = path.read_text(encoding="utf-8"), ""
        for title, raw in CONVERSATIONS.items():
            case = given(template, raw)
            cell, expected, found = outcome(template, case)
            if cell == "=" and asked.vocab is not None:
                cell = "=" if same_ids(tokenizer_with(asked.vocab, template), template, case) else "D"
            if cell == "D" and asked.all:
                print(f"--- {path.name}: {title}\nexpected {expected!r}\nfound    {found!r}")
            cells += cell
            counts[cell] = counts.get(cell, 0) + 1
        print(f"{path.name:60} {cells}", flush=True)
    print(", ".join(f"{n} {cell}" for cell, n in sorted(counts.items())))
    return 1 if "D" in counts else 0


if __name__ == "__main__":
    sys.exit(main())
