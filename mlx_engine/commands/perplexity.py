"""The command `perplexity`: score a text with a model, and compare the model with a reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import BOM, notice, progress_bar, read_text, reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import (
    AdapterPaths,
    Backend,
    ComputeOptions,
    Model,
    Strict,
    choose_backend,
    one_adapter,
)
from mlx_engine.commands.values import columns, print_json
from mlx_engine.errors import OptionError
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.bench.perplexity import Text
    from mlx_engine.engine import Engine

# Tokens per window without --context, if the model's context is not shorter. Longer windows need more memory and time,
# and seldom change the perplexity much.
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class WindowOptions:
    """Windows of the text."""

    context: int | None = option(
        None, "Tokens per window.", flags=("--context", "-c"), unset="the model's, at most 2048", least=2
    )
    stride: int | None = option(
        None,
        "Tokens between the beginnings of two windows; a token is scored in the first window that has it.",
        unset="half a window",
        least=1,
    )
    bos: bool = option(
        False,
        "Begin every window, not only the first, with the BOS token. Gemma needs this in long texts.",
        flags=("--bos/--no-bos",),
    )


@dataclass(frozen=True)
class ReferenceOptions:
    """Reference and output."""

    reference: str | None = option(
        None,
        "Compare with this model, or with a file that --save wrote: report the KL divergence, and how often both have "
        "the same likeliest token. --quant, --activations and --kv-type apply only to --model.",
        flags=("--reference", "-r"),
        metavar="MODEL|FILE",
    )
    save: Path | None = option(
        None,
        "Write a file for --reference: the log-probabilities of the whole vocabulary at each scored token, "
        "2 bytes each.",
        metavar="FILE",
    )
    json: bool = option(False, "Print one JSON object.")


@reports_errors
@takes_groups
def perplexity(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Text in UTF-8; - reads stdin.")],
    model: Model = "builtin",
    backend: Backend = "auto",
    windows: WindowOptions,
    to: ReferenceOptions,
    compute: ComputeOptions,
    strict: Strict = False,
    adapter: AdapterPaths = None,
) -> None:
    """Measure a model's perplexity on a text, and compare its probabilities with those of a reference."""
    from mlx_engine.backends import EXACT, types_of
    from mlx_engine.bench.perplexity import is_saved, measure

    if to.save is not None and to.save.exists() and file.exists() and to.save.samefile(file):
        raise OptionError(f"--save: {file} is the text itself; name another file", option="save", found=str(file))
    used = choose_backend(backend, strict=strict)
    text = read_text("-", None, "FILE") if str(file) == "-" else read_text(None, file, "FILE")
    how = {**compute.machine(), **compute.changes(windows.context), "adapters": one_adapter(adapter)}
    engine = _load(model, used, how, quiet=to.json)
    reference: Engine | Path | None = None
    if to.reference is not None:
        is_file = is_saved(Path(to.reference))
        as_stored = {**compute.options(), "activations": EXACT, "kv_type": None}
        as_stored |= {} if windows.context is None else {"context": windows.context}
        reference = Path(to.reference) if is_file else _load(to.reference, used, as_stored, quiet=to.json)
    cut = _windows(engine, text.removeprefix(BOM), windows)
    with progress_bar("scoring", quiet=to.json) as progress:
        found = measure(engine, cut, reference=reference, save=to.save, progress=progress)
    be = engine.backend
    about: dict[str, Any] = {"context": cut.context, "stride": cut.stride, "bos": cut.bos, "n_tokens": len(cut.ids)}
    about |= types_of(be)
    summary = found.summary()
    if to.json:
        print_json({**summary, **about, "model": model, "backend": be.name, "digest": found.digest})
    else:
        print(report(summary, about))
    if to.save is not None:
        notice(f"log-probabilities are in {to.save}")


def _load(model: str, backend: str, how: dict[str, Any], *, quiet: bool) -> Engine:
    from mlx_engine.engine import Engine, open_source

    with progress_bar("opening", quiet=quiet) as progress:
        opened = open_source(model, backend, progress=progress, **how)
    with progress_bar("loading", quiet=quiet) as progress:
        engine = Engine(opened, progress)
    for line in () if quiet else engine.notes:
        notice(line)
    return engine


def _windows(engine: Engine, text: str, options: WindowOptions) -> Text:
    """Return the text's tokens and the sizes of its windows.

    Raises:
        OptionError: the context is longer than the model's, the stride is longer than the context, the text has fewer
            than two tokens, or --bos is given and the model has no BOS token.
    """
    from mlx_engine.bench.perplexity import Text

    longest: int = engine.config.context_length
    if options.context is not None and options.context > longest:
        message = f"--context must be at most the model's {longest:,}, not {options.context:,}"
        raise OptionError(message, option="context", found=options.context)
    context = options.context or min(longest, DEFAULT_CONTEXT)
    bos = engine.tokenizer.bos_id if options.bos else None
    if options.bos and bos is None:
        raise OptionError("--bos: the model has no BOS token", option="bos")
    return Text(engine.prompt_ids(text), context, options.stride or max(1, context // 2), bos)


def report(found: dict[str, Any], about: dict[str, Any]) -> str:
    """Format the results `found` as a table. `about` has the size of windows, and the types of activations and KV."""
    rows = [
        ("perplexity", f"{found['perplexity']:.4f}", _plus_minus(found["standard_error"], ".4f")),
        ("mean NLL", f"{found['nll']:.6f}", _plus_minus(found["nll_standard_error"], ".6f")),
        ("tokens scored", f"{found['n_scored']:,}", f"in {found['n_windows']:,} windows of up to {about['context']:,}"),
    ]
    kinds = {"activations": about["activations"], "keys and values": about["kv_type"]}
    rows += [(what, type_, "") for what, type_ in kinds.items() if type_ != "f32"]
    against = found.get("reference")
    if against is not None:
        kl, shift, error = against["kl"], against["probability_difference"], against["logits_error"]
        ratio, same = against["log_ratio_standard_error"], against["top_1_standard_error"]
        rows += [
            ("reference's perplexity", f"{against['perplexity']:.4f}", ""),
            ("log of perplexity ratio", f"{against['log_ratio']:.6f}", _plus_minus(ratio, ".6f")),
            *([] if error is None else [("error of the logits", f"{error:.2e}", "relative, root mean square")]),
            ("KL divergence", f"{kl['mean']:.3g}", _plus_minus(kl["standard_error"], ".2g")),
            *((f"  {p} % of tokens below", f"{value:.3g}", "") for p, value in kl["percentiles"].items()),
            ("  largest", f"{kl['maximum']:.3g}", ""),
            ("same likeliest token", f"{against['top_1_agreement']:.3%}", _plus_minus(same, ".3%")),
            ("change of probability", f"{shift['mean']:.3%}", f"root mean square {shift['rms']:.3%}"),
        ]
    return "\n".join(columns(rows, "<><"))


def _plus_minus(error: float | None, form: str) -> str:
    return "" if error is None else f"± {error:{form}}"
