"""The command `inspect`: show and verify the contents of a model file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import FAILED, notice, progress_bar, reports_errors, safe_for
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import AllowSetting
from mlx_engine.commands.values import bytes_of, columns, exact, experts_text, plain, print_json, shown
from mlx_engine.errors import EngineError, OptionError, UnsupportedTypeError, size
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.checkpoint.listing import Listing, TensorRow


@dataclass(frozen=True)
class ShowOptions:
    """Options. What is printed about the model."""

    tensors: bool = option(False, "Print only the list of tensors.")
    filter: str | None = option(None, "Print only tensors whose name contains this text or matches this glob.")
    stats: bool = option(False, "Also print each tensor's min, max, mean and standard deviation.")
    head: int | None = option(None, "Also print the first N values of each tensor.", least=0)
    meta: str | None = option(None, "Print only the value of this metadata key, in full.")
    backend: str = option("auto", "Print the memory and the decode speed on this backend.", flags=("--backend", "-b"))
    context: int | None = option(
        None,
        "Print the memory and the decode speed for a conversation of N tokens.",
        least=1,
        unset="the model's, at most 4,096",
    )
    experts_memory: str | None = option(
        None,
        "Print how much a token reads from the file if experts take at most SIZE of memory, such as 8GiB.",
        metavar="SIZE",
        unset="the free memory",
    )
    verify: bool = option(False, "Check that the model is complete and can be run, and that all its values are finite.")

    @property
    def lists_tensors(self) -> bool:
        """Whether only tensors are printed."""
        return self.tensors or self.filter is not None or self.stats or self.head is not None


@reports_errors
@takes_groups
def inspect(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="GGUF file, safetensors file, Hugging Face folder, hub id org/repo[:file], or builtin.",
            show_default="builtin",
        ),
    ] = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="The same as the argument. If given several times, print a line per model and their total memory.",
        ),
    ] = None,
    show: ShowOptions,
    allow_setting: AllowSetting = None,
    json: bool = option(False, "Print one JSON object."),
) -> None:
    """Show the header, metadata and tensors of a model without loading it, and how it would run here."""
    from mlx_engine.checkpoint.listing import open_listing
    from mlx_engine.checkpoint.sources import resolve

    if show.lists_tensors + (show.meta is not None) + show.verify > 1:
        raise OptionError("--tensors, --meta and --verify exclude each other", option="--tensors")
    if allow_setting and not show.verify:
        raise OptionError("--allow-setting needs --verify", option="--allow-setting", found=allow_setting)
    if model is not None and model_option is not None:
        raise OptionError("give the model either as an argument or with --model", option="--model", found=model_option)
    most = None if show.experts_memory is None else bytes_of("--experts-memory", show.experts_memory)
    names = model_option or ["builtin" if model is None else model]
    if len(names) > 1:
        if show.lists_tensors or show.meta is not None or show.verify:
            message = "--tensors, --meta and --verify show a single model; give --model once"
            raise OptionError(message, option="--model", found=names)
        print_several(
            {name: run_facts(resolve(name), show.backend, show.context, most) for name in names}, as_json=json
        )
        return
    path = resolve(names[0])
    if show.verify:
        raise typer.Exit(print_findings(path, allow_setting or (), as_json=json))
    listing = open_listing(path)
    if show.meta is not None:
        print_value(listing, show.meta, as_json=json)
    elif show.lists_tensors:
        rows = listing.select(show.filter)
        if not rows and listing.tensors:
            notice(f"{path}: none of the {len(listing.tensors):,} tensors matches {show.filter!r}")
        print_tensors(listing, rows, stats=show.stats, head=show.head, as_json=json)
    else:
        print_all(listing, run_facts(path, show.backend, show.context, most), as_json=json)


def print_findings(path: Path, allow_settings: Sequence[str], *, as_json: bool) -> int:
    """Print the outcome of every check and return the exit code."""
    from mlx_engine.convert.verify import Level
    from mlx_engine.convert.verify import verify as verified

    with progress_bar("checking tensors") as progress:
        findings = verified(path, allow_settings, progress=progress)
    counts = {level.value: sum(finding.level is level for finding in findings) for level in Level}
    code = FAILED if counts["FAIL"] else 0
    if as_json:
        rows = [{"level": f.level.value, "check": f.check, "detail": f.detail} for f in findings]
        print_json({"path": str(path), "ok": not code, "counts": counts, "findings": rows})
        return code
    colors = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}
    for finding in findings:
        level = typer.style(finding.level.value, fg=colors[finding.level.value])
        typer.echo(f"{level}  {finding.check:<10} {safe_for(sys.stdout, finding.detail)}")
    print(f"{plain(str(path))}: {counts['PASS']} passed, {counts['WARN']} to note, {counts['FAIL']} failed")
    return code


TITLES = {
    "n_parameters": "parameters",
    "n_layers": "layers",
    "hidden_size": "hidden size",
    "n_heads": "heads",
    "n_kv_heads": "key/value heads",
    "head_dim": "head width",
    "intermediate_size": "feed-forward size",
    "vocab_size": "vocabulary",
    "context_length": "context",
    "rope_theta": "rope theta",
    "norm_eps": "norm epsilon",
    "sliding_window": "sliding window",
}


def print_all(listing: Listing, run: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the header, the model's sizes, `run` (the result of `run_facts`), metadata, tensors and totals by type."""
    from mlx_engine.checkpoint.listing import summary

    sizes, totals = summary(listing), listing.totals()
    if as_json:
        print_json(
            {
                "path": str(listing.path),
                "format": listing.format,
                "header": listing.header,
                "model": sizes,
                "run": run,
                "metadata": listing.metadata,
                "tensors": [asdict(row) for row in listing.tensors],
                "totals": {name: asdict(total) for name, total in totals.items()},
            }
        )
        return
    print("\n".join(columns([*header_rows(listing), *size_rows(sizes), *run_rows(run)], "<<")))
    if listing.metadata:
        print(f"\nmetadata ({len(listing.metadata):,})")
        kinds = {key: listing.kinds.get(key, "") for key in listing.metadata}
        rows = [(f"  {plain(key)}", kinds[key], shown(value, kinds[key])) for key, value in listing.metadata.items()]
        print("\n".join(columns(rows, "<<<")))
    if totals:
        print(f"\ntensors ({len(listing.tensors):,})")
        print("\n".join(tensor_lines(listing.tensors, indent="  ")))
        print("\ntotals")
        cells = [
            (
                f"  {plain(name)}",
                f"{t.n_tensors:,} tensors",
                f"{t.n_elements:,} values",
                exact(t.nbytes),
                size(t.nbytes),
            )
            for name, t in totals.items()
        ]
        print("\n".join(columns(cells, "<>>>>")))


def header_rows(listing: Listing) -> list[tuple[str, str]]:
    """Return the header of the file as rows (title, text)."""
    header = listing.header
    version = f" version {header['version']}" if "version" in header else ""
    n_metadata, n_tensors = len(listing.metadata), len(listing.tensors)
    rows = [("file", plain(str(listing.path)))]
    rows.append(("format", f"{listing.format}{version}, {n_metadata:,} metadata values, {n_tensors:,} tensors"))
    rows.append(("size", f"{size(header['file_bytes'])} ({exact(header['file_bytes'])} bytes)"))
    if listing.format == "GGUF" and n_tensors:
        rows.append(("data", f"from byte {header['data_offset']:,}, aligned to {header['alignment']:,}"))
    return rows


def size_rows(sizes: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the sizes of the model as rows (title, text)."""
    rows = []
    for name, value in sizes.items():
        text = f"{value:,}" if isinstance(value, int) else shown(value, "float32").strip("'")
        rows.append((TITLES.get(name, name), text))
    return rows


def print_value(listing: Listing, key: str, *, as_json: bool) -> None:
    """Print a metadata value in full, one line per element of an array; raise FormatError for an unknown key."""
    value = listing.value(key)
    if as_json:
        print_json({"key": key, "type": listing.kinds.get(key) or None, "value": value})
    elif isinstance(value, str):
        print(safe_for(sys.stdout, value))
    elif isinstance(value, list | tuple) or hasattr(value, "tolist"):
        for item in value if isinstance(value, list | tuple) else value.tolist():
            print(plain(item) if isinstance(item, str) else item)
    else:
        print_json(value) if isinstance(value, dict) else print(shown(value, listing.kinds.get(key, "")))


def run_facts(path: Path, backend: str, context: int | None, experts_memory: int | None = None) -> dict[str, Any]:
    """Return whether the model is supported; if so, also its memory and speed, otherwise the `reason`."""
    from mlx_engine.bench.outlook import machine_bandwidth, outlook
    from mlx_engine.machine.memory import usable_cores

    if path.suffix == ".safetensors" and path.is_file():
        return {"supported": False, "reason": "a file of tensors without a config.json; give the folder of the model"}
    try:
        found = outlook(path, backend, context, experts_memory)
    except EngineError as error:
        return {"supported": False, "reason": str(error)}
    bandwidth = machine_bandwidth(1 if found.backend == "simd" else usable_cores())
    rates = {"bandwidth_bytes_per_second": bandwidth, "decode_tokens_per_second": found.rate(bandwidth)}
    return {"supported": True, "reason": None, **found.summary(), **rates}


def run_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the result of `run_facts` as rows (title, text)."""
    if not facts["supported"]:
        return [("runs here", f"no: {plain(facts['reason'])}")]
    needed, available = facts["weights_bytes"] + facts["kv_bytes"], facts["available_bytes"]
    state = "yes" if facts["fits"] else f"does not fit into memory: {size(needed)} needed, {size(available)} available"
    left = f" (and {size(facts['left_bytes'])} left in the file)" if facts["left_bytes"] else ""
    kv = f"{size(facts['kv_bytes'])} of keys and values for {facts['context']:,} tokens"
    rows = [
        ("runs here", f"{state}, on {facts['backend']}"),
        ("memory", f"{size(facts['weights_bytes'])} of weights{left}, {kv}"),
    ]
    if facts["experts_bytes"]:
        rows.append(("experts", experts_text(*(facts[f"experts_{key}bytes"] for key in ("", "held_", "read_")))))
    rate, bandwidth = facts["decode_tokens_per_second"], facts["bandwidth_bytes_per_second"]
    if rate is not None:
        digits = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
        read = f"{size(facts['decode_bytes'])} read per token at {bandwidth / 1e9:.1f} GB/s, measured"
        rows.append(("decode", f"about {digits} tokens/s after {facts['context']:,} tokens: {read}"))
    return rows


def print_several(found: Mapping[str, Mapping[str, Any]], *, as_json: bool) -> None:
    """Print whether each model runs here, and its memory; then whether all supported models fit in memory together."""
    models = [facts for facts in found.values() if facts["supported"]]
    needed = sum(facts["weights_bytes"] + facts["kv_bytes"] for facts in models)
    available = min((facts["available_bytes"] for facts in models), default=0)
    fits = needed <= available
    if as_json:
        together = {"needed_bytes": needed, "available_bytes": available, "fits": fits}
        print_json({"models": [{"model": name, "run": facts} for name, facts in found.items()], "together": together})
        return
    cells = [(plain(name), *(text for _, text in run_rows(facts)[:2])) for name, facts in found.items()]
    print("\n".join(columns([(*row, "")[:3] for row in cells], "<<<")))
    if models:
        what = "`serve` keeps all of them" if fits else "`serve` unloads a model if another one needs its memory"
        print(f"together: {size(needed)} of {size(available)} available; {what}")


def print_tensors(listing: Listing, rows: Sequence[TensorRow], *, stats: bool, head: int | None, as_json: bool) -> None:
    """Print the list of tensors, with statistics and first values if requested."""
    values: list[dict[str, Any]] = [{} for _ in rows]
    if stats or head is not None:
        with progress_bar("reading tensors") as progress:
            for done, row in enumerate(rows):
                progress(done, len(rows))
                values[done] = tensor_values(listing, row, stats=stats, head=head)
    if as_json:
        found = [{**asdict(row), **extra} for row, extra in zip(rows, values, strict=True)]
        print_json({"path": str(listing.path), "tensors": found})
        return
    for line, extra in zip(tensor_lines(rows), values, strict=True):
        print(line)
        if "error" in extra:
            print(f"    {plain(extra['error'])}")
        if "stats" in extra:
            known = ((name, value) for name, value in extra["stats"].items() if name != "n_not_finite" or value)
            print("    " + "  ".join(f"{name} {number(value)}" for name, value in known))
        if "head" in extra:
            print(f"    [{', '.join(map(number, extra['head']))}]")


def tensor_values(listing: Listing, row: TensorRow, *, stats: bool, head: int | None) -> dict[str, Any]:
    """Return a tensor's `stats` and `head` if requested, or `error` if its values cannot be read."""
    from mlx_engine.quant.statistics import first_values, statistics

    found: dict[str, Any] = {}
    try:
        if stats:
            found["stats"] = asdict(statistics(listing.weight(row.name)))
        if head is not None:
            found["head"] = first_values(listing.weight(row.name), head).tolist()
    except UnsupportedTypeError as error:
        return {"error": str(error)}
    return found


def number(value: float | None) -> str:
    """Format a count in full, a float with 7 significant digits, and None as a dash."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.7g}"


def tensor_lines(rows: Sequence[TensorRow], indent: str = "") -> list[str]:
    """Format each tensor's name, shape, type and bytes as a line, in aligned columns."""
    cells = []
    for row in rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        cells.append((indent + plain(row.name), shape, plain(row.type), exact(row.nbytes), size(row.nbytes)))
    return columns(cells, "<<<>>")
