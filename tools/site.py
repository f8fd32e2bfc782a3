"""Hooks of mkdocs for the documentation site: add pages of the root folder, write references, and convert links.

The references are the tables of all commands and of all options.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/mlx-engine/mlx-engine/blob/main/"
# Pages of the root folder, by their name on the site.
PAGES = {
    "index.md": "README.md", "architecture.md": "ARCHITECTURE.md", "contributing.md": "CONTRIBUTING.md",
    "figures.md": "BENCHMARKS.md", "changes.md": "CHANGELOG.md",
}  # fmt: skip
COMMANDS = "<!-- commands: written by `tools/site.py` when the site is built -->"
OPTIONS = "<!-- options: written by `tools/site.py` when the site is built -->"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def commands() -> str:
    """Return the reference of all commands and options, in Markdown."""
    from mlx_engine.commands import app

    lines = list[str]()

    def write(command: Any, name: str) -> None:
        lines.extend((f"### {name}", "", command.help or command.callback.__doc__ or "", ""))
        rows = [parameter.get_help_record(context(command)) for parameter in command.params]
        if found := [row for row in rows if row]:
            lines.extend(("| option | |", "|---|---|"))
            lines.extend(f"| `{option}` | {text(words)} |" for option, words in found)
            lines.append("")
        for below, each in getattr(command, "commands", {}).items():
            write(each, f"{name} {below}")

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if not command.hidden:
            write(command, name)
    return "\n".join(lines)


def options() -> str:
    """Return a table of the options of a run, in Markdown."""
    from mlx_engine.options import declared

    rows = [(f.name, about.unset or f"`{f.default}`", text(about.help)) for f, about in declared()]
    return "\n".join(["| option | default | |", "|---|---|---|", *(f"| `{a}` | {b} | {c} |" for a, b, c in rows)])


def context(command: Any) -> Any:
    """Return a context in which a command prints its help."""
    return command.context_class(command, info_name=command.name)


def text(words: str) -> str:
    """Return the help of an option as one cell of a table."""
    return re.sub(r"\s+", " ", words).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def moved(match: re.Match[str], folder: Path) -> str:
    """Return the target that a link gets on the site: a page of the site, or a file of the repository on GitHub."""
    target = (folder / match[1]).resolve()
    anchor = match[2] or ""
    if not target.is_relative_to(ROOT):
        return match[0]
    if target.is_relative_to(ROOT / "docs") and target.exists():
        return f"{target.relative_to(ROOT / 'docs')}{anchor}"
    path = str(target.relative_to(ROOT))
    for page, source in PAGES.items():
        if path == source:
            return f"{page}{anchor}"
    return f"{REPOSITORY}{path}{anchor}" if target.exists() else match[0]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the markers by the reference of commands and options, and convert the links of the page."""
    folder = ROOT if page.file.src_uri in PAGES else ROOT / "docs"
    for marker, written in ((COMMANDS, commands), (OPTIONS, options)):
        if marker in markdown:
            markdown = markdown.replace(marker, written())
    return LINK.sub(lambda match: moved(match, folder), markdown)
