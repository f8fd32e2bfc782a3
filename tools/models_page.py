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
from mlx_engine.config.catalog import architectures
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
    stored = {name: stored_types(create()) for name, create in BACKENDS.items()}
    lines += ["", f"| Types that are read | {' | '.join(f'as stored on `{name}`' for name in BACKENDS)} |"]
    lines.append("|---|" + "---|" * len(BACKENDS))
    groups: dict[tuple[bool, ...], list[str]] = {}
    for type_ in readable_types():
        groups.setdefault(tuple(type_.name in stored[name] for name in BACKENDS), []).append(type_.name)
    for marks, types in sorted(groups.items(), reverse=True):
        cells = " | ".join("yes" if mark else "expanded" for mark in marks)
        lines.append(f"| {', '.join(types)} | {cells} |")
    return "\n".join([*lines, ""])


def written(text: str) -> str:
    """Return the text of docs/models.md with an updated region."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{region()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
