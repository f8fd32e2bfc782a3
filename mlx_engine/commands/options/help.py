"""The help of the command line: options in titled panels. `--help-all` also lists rarely needed options."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from mlx_engine.commands.console import is_plain

# The greatest widths, in characters, of a panel and of its column of flags. If an option's flags are longer than the
# column, its help begins on the next line.
MOST_COLUMNS, MOST_FLAGS = 100, 28

HELP_ALL = "help_all"

Row = tuple[str, str]


def show_all(context: typer.Context, wanted: bool) -> None:
    """Print the help of a command with all options, and exit: the callback of `--help-all`."""
    if wanted and not context.resilient_parsing:
        context.meta[HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


class Command(TyperCommand):
    """A command whose help has a panel for each group of options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description and panels."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        rare: set[str] = set() if ctx.meta.get(HELP_ALL) else getattr(self.callback, "rare", set())
        panels: dict[str, list[Row]] = {}
        for parameter in self.get_params(ctx):
            if parameter.name not in rare and not getattr(parameter, "hidden", False):
                title = getattr(parameter, "rich_help_panel", None) or title_of(parameter)
                panels.setdefault(title, []).append((name_of(parameter), text_of(parameter, ctx)))
        formatter.write("\n")
        for title, rows in panels.items():
            write_panel(formatter, title, rows)


class Group(TyperGroup):
    """A group of commands. Its help has a panel of options, and a panel of the commands' names and summaries."""

    summaries: ClassVar[dict[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the help if no command is given. Typer expects `format_help` to print it, but ours only formats it."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(2)
        return list(super().parse_args(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, options and commands."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        formatter.write("\n")
        write_panel(formatter, "Options", [(name_of(p), text_of(p, ctx)) for p in self.get_params(ctx)])
        summaries = self.summaries or {name: first_sentence(self.commands[name].help) for name in self.commands}
        write_panel(formatter, "Commands", list(summaries.items()))


def title_of(parameter: Any) -> str:
    """Return the title of the panel for a parameter that is in no group."""
    if parameter.param_type_name == "argument":
        return "Arguments"
    return "Help" if parameter.name in ("help", HELP_ALL) else "Options"


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a text."""
    return (text or "").strip().partition(". ")[0].partition("\n")[0].rstrip(".")


def name_of(parameter: Any) -> str:
    """Return an option's main names and the placeholder of its value: "-n, --max-tokens N"."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name).upper()
    short = [name for name in parameter.opts if not name.startswith("--")]
    long = [name for name in parameter.opts if name.startswith("--")][:1]
    names = ", ".join([*short, "/".join([*long, *parameter.secondary_opts])] if long else short)
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.upper()}"


def text_of(parameter: Any, ctx: Any) -> str:
    """Return the help of a parameter with its default; with `--help-all` also its other names."""
    notes = []
    others = [name for name in parameter.opts if name.startswith("--")][1:]
    if others and ctx.meta.get(HELP_ALL):
        notes.append(f"also {', '.join(others)}")
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str) and shown not in ("off", "none"):
        notes.append(f"default: {shown}")
    elif shown is True and parameter.default not in (None, False, "", [], ()) and not callable(parameter.default):
        default = parameter.default
        notes.append(f"default: {'on' if default is True else default}")
    if getattr(parameter, "show_envvar", False) and parameter.envvar:
        notes.append(f"env: {parameter.envvar}")
    return " ".join([parameter.help or "", *([f"[{'; '.join(notes)}]"] if notes else [])])


def write_panel(formatter: Any, title: str, rows: Sequence[Row]) -> None:
    """Write rows of names and texts in a box with a title."""
    for line in panel(title, rows, min(shutil.get_terminal_size().columns, MOST_COLUMNS)):
        formatter.write(line + "\n")


def panel(title: str, rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the lines of a box, `width` columns wide."""
    plain, inner = is_plain(sys.stdout), width - 4
    top, bottom, side, rule = ("╭╮", "╰╯", "│", "─") if _can_draw() else ("++", "++", "|", "-")
    left = max(len(name) for name, _ in rows)
    left = max(len(name) for name, _ in rows if len(name) <= MOST_FLAGS) if left > MOST_FLAGS else left
    yield f"{top[0]}{rule} {title} {rule * (width - len(title) - 5)}{top[1]}"
    for name, text in rows:
        lines = textwrap.wrap(text, max(inner - left - 2, 20)) or [""]
        names = [name] + [""] * (len(lines) - 1)
        if len(name) > left:
            lines, names = ["", *lines], [name, *[""] * len(lines)]
        for first, second in zip(names, lines, strict=True):
            cell = f"{first:{left}}"
            cell = cell if plain else typer.style(cell, fg="cyan", bold=True)
            rest = inner - max(left, len(first)) - 2
            yield f"{side} {cell}  {second:{rest}} {side}"
    yield f"{bottom[0]}{rule * (width - 2)}{bottom[1]}"


def _can_draw() -> bool:
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return encoding.lower().startswith("utf")
