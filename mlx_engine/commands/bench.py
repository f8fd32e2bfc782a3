"""`bench`: tokens per second of prefill and decode, in llama-bench's habits."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.errors import OptionError, SourceError, is_number, require

if TYPE_CHECKING:
    from mlx_engine.bench.cells import Test


@reports_errors
def bench(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A GGUF file, a Hugging Face folder, org/repo[:file], or builtin.")
    ] = "builtin",
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", "-b", help="May be given several times; all lists every one.", show_default="auto"),
    ] = None,
    n_prompt: Annotated[
        list[str] | None,
        typer.Option("--n-prompt", "-p", help="Tokens to read: 512, 128,512 or 64-256+64.", show_default="512"),
    ] = None,
    n_gen: Annotated[
        list[str] | None, typer.Option("--n-gen", "-n", help="Tokens to write.", show_default="64")
    ] = None,
    both: Annotated[
        list[str] | None, typer.Option("-pg", help="Tokens to read and then write: 512,64.", metavar="P,N")
    ] = None,
    depth: Annotated[
        list[str] | None, typer.Option("--n-depth", "-d", help="Tokens of context before each test.", show_default="0")
    ] = None,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Of every test.")] = 5,
    kv: Annotated[
        bool | None, typer.Option("--kv/--no-kv", help="With a cache, or without.", show_default="kv")
    ] = None,
    quant: Annotated[
        str, typer.Option("--quant", help="Linear layers on load: keep, f32, q8_0, q4_0 or q4_1.")
    ] = "keep",
    threads: Annotated[int | None, typer.Option("--threads", "-t", help="For backends with threads.")] = None,
    no_jit: Annotated[bool, typer.Option("--no-jit", help="Plain NumPy where compiled kernels exist.")] = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget", help="Seconds per cell; what does not fit is estimated, and marked with ~."),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="md, csv, json or jsonl.")] = "md",
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write every sample to this folder, as JSON and as Markdown.")
    ] = None,
) -> None:
    """Measure prefill and decode. Tokenisation is left out; a first run of every cell is not timed."""
    from mlx_engine.backends import backend_names
    from mlx_engine.bench.run import rows
    from mlx_engine.bench.tables import FORMATS
    from mlx_engine.engine import check_load_options

    sound = budget is None or (is_number(budget) and budget >= 0)
    require(sound, option="budget", expected="a finite number of seconds >= 0", found=budget)
    require(output in FORMATS, option="output", expected=" or ".join(FORMATS), found=output)
    check_load_options(quant, threads)
    tests = tests_of(n_prompt, n_gen, both, depth)
    names = [n for name in backend or ["auto"] for n in (backend_names() if name == "all" else [name])]
    if out is not None:
        make_folder(out)
    found: list[dict[str, Any]] = []
    measured = rows(
        model, names, tests, kv=(kv is not False,), quant=quant, threads=threads, repetitions=repetitions,
        budget=budget, jit=not no_jit,
    )  # fmt: skip
    try:
        with progress_bar("measuring") as report:
            for row in measured:
                found.append(row)
                report(len(found), len(names) * len(tests))
    finally:
        # What was measured before an error or an interruption is worth no less for it.
        if found:
            print_found(found, output, out)


def print_found(found: list[dict[str, Any]], output: str, out: Path | None) -> None:
    """The rows on stdout, and every sample in a folder."""
    from mlx_engine.bench.tables import FORMATS, as_json, markdown

    print(FORMATS[output](found))
    if output == "md":
        print(f"\nbuild: {found[0]['commit'] or found[0]['versions']['mlx-engine']}")
    if out is not None:
        (out / "bench.json").write_text(as_json(found) + "\n", encoding="utf-8")
        (out / "bench.md").write_text(markdown(found) + "\n", encoding="utf-8")
        notice(f"every sample is in {out / 'bench.json'}")


def make_folder(path: Path) -> None:
    """Before anything is measured for nothing.

    Raises:
        SourceError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"{path}: expected a folder to write to, found {error.strerror or error}") from error


def tests_of(
    n_prompt: list[str] | None, n_gen: list[str] | None, both: list[str] | None, depth: list[str] | None
) -> list[Test]:
    """Every combination, as llama-bench makes them: prompts, then generations, then both, each at every depth.

    Raises:
        OptionError: a list cannot be understood, or there is nothing to measure.
    """
    from mlx_engine.bench.cells import Test

    prompts, gens = numbers("-p", n_prompt, [512]), numbers("-n", n_gen, [64])
    if both and not (n_prompt or n_gen):
        prompts, gens = [], []
    pairs = [(p, 0) for p in prompts if p] + [(0, g) for g in gens if g] + [pair(text) for text in both or []]
    tests = [Test(p, g, d) for d, (p, g) in itertools.product(numbers("-d", depth, [0]), pairs)]
    require(len(tests) > 0, option="-p, -n, -pg", expected="something to measure", found="nothing")
    return tests


def numbers(option: str, texts: list[str] | None, default: list[int]) -> list[int]:
    """`512`, `128,512`, `128-512`, `128-512+128` or `128-512*2`, any of them several times."""
    return [n for text in texts for part in text.split(",") for n in span(option, part)] if texts else default


def span(option: str, text: str) -> list[int]:
    """A number, or a range with a step that is added or multiplied."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", text.strip())
    if found is None:
        raise OptionError(option=option, expected="numbers as 512, 128,512, 128-512+128 or 128-512*2", found=text)
    first, last, step, by = int(found[1]), int(found[2] or found[1]), found[3] or "+", int(found[4] or 1)
    leads_on = by >= 1 and (step == "+" or (by >= 2 and first >= 1))
    require(leads_on and first <= last, option=option, expected="a range that leads upwards", found=text)
    n_most = 1000
    require(step == "*" or (last - first) // by < n_most, option=option, expected=f"at most {n_most} tests", found=text)
    out = []
    while first <= last:
        out.append(first)
        first = first + by if step == "+" else first * by
    return out


def pair(text: str) -> tuple[int, int]:
    """`512,64`."""
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text.strip())
    if found is None or not (int(found[1]) and int(found[2])):
        raise OptionError(option="-pg", expected="tokens to read and to write, as 512,64", found=text)
    return int(found[1]), int(found[2])
