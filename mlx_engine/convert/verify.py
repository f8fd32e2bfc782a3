"""Verify that a checkpoint is complete and supported, for `inspect --verify`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from mlx_engine.checkpoint.listing import Listing, open_listing
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.errors import EngineError, FormatError, ModelError, TensorMismatchError
from mlx_engine.quant import readable_types
from mlx_engine.quant.groups import GroupType
from mlx_engine.quant.statistics import not_finite
from mlx_engine.weights.model import allow, architecture_of
from mlx_engine.weights.plan import Plan, check

Progress = Callable[[int, int], None]


class Level(str, Enum):
    """The level of a finding. FAIL: the model cannot run. WARN: it can run, but something is unusual or ignored."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """A result of a check. One check may have several findings."""

    level: Level
    check: str
    detail: str


def verify(
    path: Path, allow_settings: Sequence[str] = (), *, progress: Progress = lambda done, total: None
) -> list[Finding]:
    """Check a GGUF file or a Hugging Face folder: the file, its settings, tensors and tokenizer.

    If no finding is FAIL, the model loads and generates, given enough memory. All weights are read, a piece at a time.

    Args:
        path: the file or folder.
        allow_settings: settings that are ignored if they are not implemented; each ignored setting gives a WARN.
        progress: called before each tensor is checked, with (number of this tensor, from 1, tensors in total).

    Raises:
        SourceError: the file or folder does not exist, or cannot be opened.
        OptionError: a name in `allow_settings` is not the name of a setting of the model.
    """
    try:
        listing = open_listing(path)
    except FormatError as error:
        return [Finding(Level.FAIL, "file", str(error))]
    findings = [_file(listing), *_types(listing)]
    try:
        checkpoint = open_checkpoint(path)
        checkpoint = allow(checkpoint, allow_settings) if allow_settings else checkpoint
    except (FormatError, ModelError) as error:
        return [*findings, Finding(Level.FAIL, "settings", str(error))]
    findings += [Finding(Level.WARN, "settings", note) for note in checkpoint.notes]
    model, vocab_size = _model(checkpoint, progress)
    return [*findings, *model, *_tokenizer(checkpoint, path, vocab_size)]


def _file(listing: Listing) -> Finding:
    """Warn if a GGUF file has bytes that belong to no tensor. `open_listing` has checked that no tensor is cut off."""
    size, n_tensors = listing.header["file_bytes"], len(listing.tensors)
    what = f"{listing.format}: {n_tensors:,} tensors and {len(listing.metadata):,} settings in {size:,} bytes"
    if listing.format != "GGUF":
        return Finding(Level.PASS, "file", what)
    step = listing.header["alignment"]
    data = sum(-(-(row.nbytes or 0) // step) * step for row in listing.tensors)
    rest = size - listing.header["data_offset"] - data
    if rest:
        return Finding(Level.WARN, "file", f"{what}, of which the last {rest:,} belong to no tensor")
    return Finding(Level.PASS, "file", what)


def _types(listing: Listing) -> Iterator[Finding]:
    readable = {type_.name for type_ in readable_types()}
    refused = [row for row in listing.tensors if row.type not in readable]
    for row in refused:
        yield Finding(Level.FAIL, "types", f"{row.name} is {row.type}, which cannot be read here")
    if listing.tensors and not refused:
        counts = Counter(row.type for row in listing.tensors)
        detail = ", ".join(f"{n:,} {name}" for name, n in counts.most_common())
        yield Finding(Level.PASS, "types", f"all can be read: {detail}")


def _model(checkpoint: Checkpoint, progress: Progress) -> tuple[list[Finding], int | None]:
    """Return the findings about settings and tensors, and the number of embedding rows (None if it is unknown)."""
    if not checkpoint.shapes:
        detail = "none: the file has a vocabulary alone, which only `tokenize` can use"
        return [Finding(Level.FAIL, "tensors", detail)], None
    try:
        plan: Plan = architecture_of(checkpoint).plan(checkpoint)
    except ModelError as error:
        return [Finding(Level.FAIL, "settings", str(error))], None
    settings = Finding(Level.PASS, "settings", f"{checkpoint.architecture}, all understood")
    return [settings, *_tensors(checkpoint, plan, progress)], plan.config.vocab_size


def _tensors(checkpoint: Checkpoint, plan: Plan, progress: Progress) -> Iterator[Finding]:
    try:
        found = check(checkpoint, plan)
    except TensorMismatchError as error:
        groups = (("missing", error.missing), ("unexpected", error.unexpected), ("misshapen", error.misshapen))
        for problem, tensors in groups:
            yield from (Finding(Level.FAIL, "tensors", f"{problem}: {tensor}") for tensor in tensors)
        return
    stored = {tensor.stored(checkpoint.naming).name: tensor for tensor in found.values()}
    yield Finding(Level.PASS, "tensors", f"{len(stored):,}, with the names and shapes that the settings require")
    if "output.weight" not in found:
        yield Finding(Level.PASS, "head", "tied: it uses the matrix of the embedding table")
    yield from _values(checkpoint, list(stored), progress)


def _values(checkpoint: Checkpoint, names: Sequence[str], progress: Progress) -> Iterator[Finding]:
    readable, n_read, n_bad = {type_.name for type_ in readable_types()}, 0, 0
    for done, name in enumerate(names, start=1):
        progress(done, len(names))
        try:
            weight = checkpoint.weight(name)
        except FormatError:
            continue  # reported by the check of types
        if not isinstance(weight.type, GroupType) and weight.type.name not in readable:
            continue  # reported by the check of types
        n_read += 1
        found = not_finite(weight)
        if found is not None:
            n_bad += 1
            place = [int(i) for i in np.unravel_index(found.first, weight.shape)]
            what = f"{found.count:,} of {math.prod(weight.shape):,}, the first at {place}"
            detail = f"{name} has values that are not finite: {what}; download the file again"
            yield Finding(Level.FAIL, "values", detail)
    if not n_bad:
        which = "all" if n_read == len(names) else f"{n_read:,} of"
        yield Finding(Level.PASS, "values", f"the values of {which} {len(names):,} tensors are finite")


def _tokenizer(checkpoint: Checkpoint, path: Path, vocab_size: int | None) -> Iterator[Finding]:
    from mlx_engine import tokenizer  # imported here because the tokenizers library loads slowly

    try:
        if checkpoint.naming == "hf":
            found = tokenizer.load_tokenizer(path)
        else:
            found = tokenizer.from_gguf(checkpoint.metadata, where=checkpoint.where)
    except EngineError as error:
        yield Finding(Level.FAIL, "tokenizer", str(error))
        return
    what = f"{found.kind}, {found.vocab_size:,} tokens"
    if vocab_size is None or found.vocab_size == vocab_size:
        yield Finding(Level.PASS, "tokenizer", what if vocab_size is None else f"{what}, one per embedding row")
    elif found.vocab_size > vocab_size:
        yield Finding(Level.FAIL, "tokenizer", f"{what}, but the embedding table has {vocab_size:,} rows")
    else:
        detail = f"{what}; the other {vocab_size - found.vocab_size:,} rows of the embedding table are padding"
        yield Finding(Level.WARN, "tokenizer", detail)
