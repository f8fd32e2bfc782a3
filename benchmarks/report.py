"""Write BENCHMARKS.md from the committed results: `python -m benchmarks.report`. A test checks that it is current."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import (
    batch_section,
    bits,
    chunks_section,
    concurrency_section,
    crossover_section,
    emulator,
    llama_quants_section,
    ops_section,
    rows_section,
    server_section,
    states_section,
    ways_section,
)
from benchmarks.peers import folders
from benchmarks.peers import section as peers_section
from benchmarks.summary import summary
from benchmarks.text import Row, figure, model, source, table
from mlx_engine.bench.ladder import text as sweep_text

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "BENCHMARKS.md"

HEAD = """# Benchmarks

One figure for one thing, from the newest rows; the sections below have the spread of each. The model is the 0.6B shape
of Qwen3 with Q8_0 weights on the CPU; errors are those of a small Qwen3, bits those of the built-in model.
"""

LEGEND = """`python -m benchmarks.report` generates this page from the samples in `benchmarks/results/`. Tests are named
as in llama-bench: `pp64` is prefill of 64 tokens, `tg64` decode of 64 tokens, one per pass, and `@ d4096` after 4,096
tokens of context. A rate is the median of the samples, then the slowest and the fastest; `~` marks a rate that did not
fit its time budget and was extrapolated.

Every row records its commit and a hash of the code that it measures. **Measured by an older version**: the row has no
hash. **The measured code has changed since**: the hash differs from that of the code beside this page.

The built-in model fits into a processor's cache, so its rates say nothing about memory; the 0.6B shape does not fit.
We have no Mac: Apple GPU speed is unmeasured. `python cli.py bench -b all` measures it.
"""

LADDER_INTRO = "The factor is over `scalar` without a KV cache if it was measured, else over the first row of the test."


def read(path: Path) -> list[Row]:
    """Return all rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def results() -> list[Path]:
    """Return the files of results, in the order of the page."""
    order = {stem: place for place, stem in enumerate(SECTIONS)}
    return sorted(FOLDER.glob("*.jsonl"), key=lambda path: (order.get(path.stem, len(order)), path.stem))


def page(files: Iterable[Path]) -> str:
    """Return the whole page: the summary, then a section per file."""
    rows = {path.stem: read(path) for path in files}
    parts = [HEAD, summary(rows), LEGEND]
    for stem, of in rows.items():
        title, section = SECTIONS.get(stem, (stem.replace("-", " ").capitalize(), ladder))
        parts.append(f"## {title}\n\n{section(of)}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def ladder(rows: Sequence[Row]) -> str:
    """Return the rows of `cli.py bench`: a table per model, the newest measurement of each cell."""
    rows = newest(rows)
    parts = [f"{source(rows[0])}\n\n{LADDER_INTRO}\n"]
    for name in dict.fromkeys(row["model_name"] for row in rows):
        of = [row for row in rows if row["model_name"] == name]
        parts.append(f"### {model(of[0])}\n\n{cells(of)}\n")
    return "\n".join(parts)


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each cell."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        found[row["model_name"], row["backend"], row["kv"], row["test"]] = row
    return list(found.values())


def cells(rows: Sequence[Row]) -> str:
    """Return one line per cell of a model."""
    lines = []
    for test in dict.fromkeys(row["test"] for row in rows):
        of = [row for row in rows if row["test"] == test]
        base = min(of, key=lambda row: (row["backend"] != "scalar", row["kv"]))
        for row in of:
            rate, rates = figure(row["median_ts"]), row["samples_ts"]
            lines.append([
                test, row["backend"], "yes" if row["kv"] else "no", ("~" if row["estimated"] else "") + rate,
                f"{figure(min(rates))} to {figure(max(rates))}", figure(row["median_ts"] / base["median_ts"]),
            ])  # fmt: skip
    return table(["test", "backend", "cache", "tokens/s", "slowest to fastest", "factor"], lines, n_words=3)


def sweeps(rows: Sequence[Row]) -> str:
    """Return the newest sweep of each model, as `cli.py bench --sweep` prints it."""
    parts = []
    for name in dict.fromkeys(row["model_name"] for row in rows):
        of = [row for row in rows if row["model_name"] == name]
        newest_time = max(row["time"] for row in of)
        of = [row for row in of if row["time"] == newest_time]
        parts.append(f"### {model(of[0])}\n\n{source(of[0])}\n\n{sweep_text(of)}\n")
    return "\n".join(parts)


# Title and section by the name of the file, in the order of the page. Any other file has rows of `cli.py bench`, at the
# end of the page.
SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "peers": ("Beside other engines", peers_section.section),
    "folders": ("Hugging Face folders, beside transformers", folders.section),
    "llama_quants": ("Files quantised by llama.cpp", llama_quants_section.section),
    "states": ("A model with states, beside llama.cpp", states_section.section),
    "sweep": ("The ladder", sweeps),
    "rows": ("Several rows in one pass", rows_section.section),
    "batch": ("Several sequences in one decode step", batch_section.section),
    "concurrency": ("Several sequences beside llama.cpp", concurrency_section.section),
    "server": ("The server", server_section.section),
    "bits": ("Bits of the logits", bits.section),
    "ways": ("Memory read in several streams", ways_section.section),
    "chunks": ("The smallest job for several threads", chunks_section.section),
    "crossover": ("The width from which quantised layers are faster", crossover_section.section),
    "ops": ("Single operations", ops_section.section),
    "emulator": ("Metal kernels in the emulator", emulator.section),
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(results()))


if __name__ == "__main__":
    main()
