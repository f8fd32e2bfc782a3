"""Write the tables of docs/models.md that come from the code.

    python -m tools.models_page

The command replaces only the region between the two marks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.commands.models import architectures
from mlx_engine.config.known import LACKS, LLAMA_CPP, MLX_LM
from mlx_engine.quant import readable_types
from mlx_engine.weights.outline import stored_types

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN = "<!-- models: written by `python -m tools.models_page` -->"
END = "<!-- /models -->"
# `metal` runs in the emulator, which supports the same types and needs no GPU.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "parallel": partial(create_backend, "parallel"),
    "mlx": partial(create_backend, "mlx"),
    "metal": partial(MetalBackend, "emulator"),
}


def region() -> str:
    """Return the region between the marks."""
    lines = ["", "| Architecture | `model_type`, `general.architecture` | GGUF files are written as |", "|---|---|---|"]
    for each in architectures():
        names = ", ".join(f"`{name}`" for name in each.names)
        lines.append(f"| [{each.title}](../mlx_engine/models/{each.file}.py) | {names} | `{each.gguf}` |")
    lines += ["", *others(), ""]
    stored = {name: stored_types(create()) for name, create in BACKENDS.items()}
    lines += [f"| Types that are read | {' | '.join(f'as stored on `{name}`' for name in BACKENDS)} |"]
    lines.append("|---|" + "---|" * len(BACKENDS))
    groups: dict[tuple[bool, ...], list[str]] = {}
    for type_ in readable_types():
        groups.setdefault(tuple(type_.name in stored[name] for name in BACKENDS), []).append(type_.name)
    for marks, types in sorted(groups.items(), reverse=True):
        cells = " | ".join("yes" if mark else "expanded" for mark in marks)
        lines.append(f"| {', '.join(types)} | {cells} |")
    return "\n".join([*lines, ""])


def others() -> list[str]:
    """Return the lines about the architectures of mlx-lm and llama.cpp: how many are supported, and what is missing."""
    supported = {name for each in architectures() for name in each.names}
    programs = {"mlx-lm": MLX_LM, "llama.cpp": LLAMA_CPP}
    counts = (f"{len(supported & {*names})} of {program}'s {len(names)}" for program, names in programs.items())
    lines = [f"Supported are {' and '.join(counts)} architectures. The others would need:", ""]
    lines += [f"| What is missing | {' | '.join(f'in {program}' for program in programs)} |", "|---|---|---|"]
    for what in dict.fromkeys(LACKS.values()):
        cells = (", ".join(name for name in names if LACKS.get(name) == what) for names in programs.values())
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines


def written(text: str) -> str:
    """Return the text of docs/models.md with an updated region."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{region()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
