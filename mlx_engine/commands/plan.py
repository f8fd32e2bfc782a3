"""The command `plan`: a model on machines that one need not have, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import FAILED, reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import Backend, LoadOptions, Model
from mlx_engine.commands.plan_options import HostOptions, LinkOptions
from mlx_engine.commands.plan_rows import print_plan
from mlx_engine.commands.values import print_json
from mlx_engine.errors import OptionError, SourceError, Words, require

if TYPE_CHECKING:
    from mlx_engine.checkpoint.model_files import Checkpoint
    from mlx_engine.distributed.summary import Summary
    from mlx_engine.distributed.times import ShardKind


@reports_errors
@takes_groups
def plan(
    *,
    model: Model = "builtin",
    hosts: HostOptions,
    links: LinkOptions,
    backend: Backend = "auto",
    shard: Annotated[
        str, typer.Option("--shard", help="pipeline: each rank has some layers. tensor: a slice of every matrix.")
    ] = "pipeline",
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="N,N", help="Layers of each rank of a pipeline.", show_default="by speed"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="Tokens of each conversation.", show_default="the model's, at most 4,096"
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            "--prompt", "-p", min=1, help="Tokens of a prompt, for its rate.", show_default="512, at most the context"
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=1, help="Conversations at the same time.", show_default="as many as ranks"),
    ] = None,
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", min=0, help="Logits that a token is chosen from: 1 if greedy, K with top-k, 0 for all (serve)."
        ),
    ] = 1,
    load: LoadOptions,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what would lie where on several machines, what their links would carry, and the expected tokens/s.

    Nothing is run or downloaded, and no weights are read. MODEL may also be a config.json, or a folder that has only
    that. Exit code 1: the model does not fit.
    """
    kind = shard_of(shard)
    if split is not None and shard != "pipeline":
        raise OptionError(option="--split", expected="--shard pipeline with it", found=Words(shard))
    hosts.check()
    link = links.link_of()
    asked = {"context": context, "prompt": prompt, "slots": slots, "best": top_k or None}
    found = planned(model, backend, load, hosts, shard=kind, split=split, asked=asked, link=link)
    if json:
        print_json(found.facts())
    else:
        print_plan(found)
    raise typer.Exit(0 if found.fits else FAILED)


def shard_of(text: str) -> ShardKind:
    """Return a way of sharing a model; raise OptionError if there is none of this name."""
    kinds: dict[str, ShardKind] = {"pipeline": "pipeline", "tensor": "tensor"}
    require(text in kinds, option="--shard", expected=" or ".join(kinds), found=text)
    return kinds[text]


def planned(
    model: str, backend: str, load: LoadOptions, hosts: HostOptions, *, shard: ShardKind, split: str | None, asked: Any,
    link: Any,
) -> Summary:  # fmt: skip
    """Return the plan of a model.

    Raises:
        EngineError: loading the model would fail in the same way, or an option is invalid.
    """
    from mlx_engine.backends import auto, create_backend
    from mlx_engine.bench.outlook import USUAL_CONTEXT
    from mlx_engine.cache.pool import LONGEST_PASS
    from mlx_engine.distributed.model_parts import model_parts
    from mlx_engine.distributed.plan import Asked
    from mlx_engine.distributed.split import parsed
    from mlx_engine.distributed.summary import Summary
    from mlx_engine.distributed.tensor import sliced
    from mlx_engine.observe import log
    from mlx_engine.weights.model import plan_model
    from mlx_engine.weights.need import expansions
    from mlx_engine.weights.outline import outlined

    checkpoint = opened(model, load)
    name = auto() if backend == "auto" else backend
    made = create_backend(name, threads=load.threads)
    whole = plan_model(checkpoint, load.conversion())
    outline, longest = outlined(whole, made), int(whole.config.context_length)
    context = min(longest, USUAL_CONTEXT) if asked["context"] is None else asked["context"]
    require(context <= longest, option="--context", expected=f"at most {longest:,} tokens", found=context)
    prompt = min(LONGEST_PASS, context) if asked["prompt"] is None else asked["prompt"]
    require(prompt <= context, option="--prompt", expected=f"at most {context:,} tokens, the context", found=prompt)
    for line in expansions(outline, name):
        log.warn(line)
    machines = hosts.ranks(made, outline)
    wanted = Asked(context, asked["slots"] or len(machines), prompt, asked["best"])
    size = len(machines) if shard == "tensor" else 0
    slices = [whole, *(sliced(whole, rank, size) for rank in range(size))]
    of_slices = [model_parts(outlined(each, made)) for each in slices]
    layers = None if split is None else parsed(split)
    about = {"where": checkpoint.where, "architecture": checkpoint.architecture, "backend": name}
    return Summary.of(
        of_slices, machines, link, wanted, shard, layers, chunk=LONGEST_PASS, measured=hosts.measured, **about
    )


def opened(model: str, load: LoadOptions) -> Checkpoint:
    """Return a model's checkpoint; a config.json is enough.

    Raises:
        SourceError: the model is not on this machine.
        EngineError: it cannot be opened, or the types of its weights are known only when they are read.
    """
    from mlx_engine.checkpoint.sources import is_cached, resolve
    from mlx_engine.weights.allowed import allow, open_model
    from mlx_engine.weights.from_config import is_config_alone, open_config

    if is_cached(model) is False:
        raise SourceError(
            f"{model}: expected a model on this machine, found a name on the hub; `plan` downloads nothing: download "
            "the model's config.json and name it"
        )
    path = resolve(model)
    if is_config_alone(Path(path)):
        found = open_config(path)
        return allow(found, load.allow_settings) if load.allow_settings else found
    found = open_model(path, load.allow_settings)
    if found.is_converted:
        raise OptionError(
            option="--model",
            expected="types that headers tell, such as those of the original model's config.json with --quant q4_0",
            found=Words(f"{found.where}, whose quantised layers are converted when they are read"),
        )
    return found
