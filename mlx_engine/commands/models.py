"""The command `models`: list the architectures and the types that are supported, from the model files themselves."""

from __future__ import annotations

from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.values import columns, print_json
from mlx_engine.errors import OptionError, listed

if TYPE_CHECKING:
    from mlx_engine.config.catalog import Keys


@reports_errors
@takes_groups
def models(
    keys: Annotated[
        str | None,
        typer.Option("--keys", metavar="NAME", help="Print the settings that an architecture reads, by their keys."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the supported architectures, and the types of weights that each backend multiplies as they are stored."""
    from mlx_engine.config.catalog import architectures, keys_of

    found = architectures()
    if keys is not None:
        of = keys_of(keys)
        names = sorted({name for each in found for name in each.names})
        if of is None:
            message = f"--keys: no architecture {keys!r}; choose {listed(names)}"
            raise OptionError(message, option="--keys", found=keys)
        print_json(of.summary()) if json else print_keys(of)
        return
    types = types_by_backend()
    if json:
        print_json({"architectures": [asdict(each) for each in found], "types": types})
        return
    head = ("model_type, architecture", "GGUF", "")
    print("\n".join(columns([head, *((", ".join(a.names), a.gguf, a.title) for a in found)], "<<<")))
    print("\ntypes that are read, and multiplied as they are stored on")
    backends = list(next(iter(types.values())))
    rows = [(f"  {name}", *("yes" if on[b] else "-" for b in backends)) for name, on in types.items()]
    print("\n".join(columns([("", *backends), *rows], "<" * (1 + len(backends)))))
    print("Other types are expanded to float32 on load. --keys NAME lists the settings that an architecture reads.")


def types_by_backend() -> dict[str, dict[str, bool]]:
    """Return for each readable type whether each backend of this machine multiplies it as it is stored."""
    from mlx_engine.backends import backend_names, create_backend, unavailable
    from mlx_engine.quant import readable_types
    from mlx_engine.weights.outline import stored_types

    there = [name for name in backend_names() if unavailable(name) is None]
    stored = {name: stored_types(create_backend(name)) for name in there}
    return {type_.name: {name: type_.name in stored[name] for name in there} for type_ in readable_types()}


def print_keys(keys: Keys) -> None:
    """Print the fields of a config with the keys that they are read from."""
    about = keys.architecture
    print(f"{about.title} (mlx_engine/models/{about.file}.py)\n")
    prefix = f"{about.gguf}."
    rows: list[tuple[Any, ...]] = [("field", "config.json", f"GGUF, below {prefix}")]
    for f in keys.fields:
        pairs = zip_longest(f.hf, f.gguf, fillvalue="")
        rows += [("" if i else f.field, *pair) for i, pair in enumerate(pairs)] or [(f.field, "", "")]
    print("\n".join(columns(rows, "<<<")))
    for title, checked in (("config.json", keys.checked_hf), ("GGUF", keys.checked_gguf)):
        if checked:
            print(f"\nchecked in {title}, because only some values are implemented: {', '.join(checked)}")
