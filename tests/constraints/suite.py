"""JSON-Schema-Test-Suite: what a mask accepts is valid, what is valid is accepted, other keywords are refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_engine import Constraint
from mlx_engine.constraint import FORMATS, UNSUPPORTED
from mlx_engine.errors import ConstraintError, OptionError
from mlx_engine.loop.constraint import Grammars

DRAFT = "draft2020-12"
# By default `format` is an annotation in the suite, and the masks assert it; the cases of each format are apart.
LEFT_OUT = ("format.json",)


@dataclass
class Found:
    """What came out of the suite.

    Attributes:
        counts: how many instances were accepted or rejected, rightly or wrongly, and how many schemas refused.
        wrong: instances that were accepted and are invalid, or whose schema should have been refused.
        unreachable: valid instances that no sequence of tokens reaches.
        refused: the reasons why schemas were refused, with their numbers.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def run(folder: Path, grammars: Grammars, encode: Any) -> Found:
    """Run all cases of a folder of the suite's repository."""
    found = Found()
    for file in files(folder / "tests" / DRAFT):
        for group in json.loads(file.read_text(encoding="utf-8")):
            one_schema(f"{file.stem}: {group['description']}", group, grammars, encode, found)
    return found


def files(folder: Path) -> Iterator[Path]:
    """Yield the files of the keywords, and of the formats that masks implement."""
    yield from (file for file in sorted(folder.glob("*.json")) if file.name not in LEFT_OUT)
    yield from (folder / "optional" / "format" / f"{name}.json" for name in FORMATS)


def one_schema(name: str, group: Mapping[str, Any], grammars: Grammars, encode: Any, found: Found) -> None:
    schema = group["schema"]
    try:
        start = grammars.matcher(Constraint.json_schema(schema))
    except OptionError as error:
        is_empty = not any(test["valid"] for test in group["tests"])
        found.counts["schemas that allow nothing, refused" if is_empty else "schemas refused"] += 1
        found.refused[reason(str(error))] += 1
        return
    found.counts["schemas compiled"] += 1
    if used := {name for name in UNSUPPORTED & set(schema) if schema[name] is not False}:
        found.wrong.append(f"{name}: {', '.join(sorted(used))} was not refused")
    for test in group["tests"]:
        text = json.dumps(ordered(test["data"], schema, schema), ensure_ascii=False)
        is_accepted, is_valid = accepts(start, encode(text)), test["valid"]
        found.counts[f"{'valid' if is_valid else 'invalid'}, {'accepted' if is_accepted else 'rejected'}"] += 1
        if is_accepted and not is_valid and schema.get("format") == "hostname":
            found.counts["host names that are too long or not in Unicode's rules, accepted"] += 1
        elif is_accepted and not is_valid:
            found.wrong.append(f"{name}: {text:.80} is accepted, and is not valid: {test['description']}")
        elif is_valid and not is_accepted:
            found.unreachable.append(f"{name}: {text:.80} is not reached: {test['description']}")


def accepts(start: Any, ids: Sequence[int]) -> bool:
    """Return whether a matcher takes ids, and the text may end after them."""
    matcher = start.copy()
    try:
        for i in ids:
            if not matcher.mask()[i]:
                return False
            matcher.advance(i)
        return bool(matcher.is_complete or matcher.mask()[matcher._grammars.end_ids].any())
    except ConstraintError:
        return False


def ordered(value: Any, schema: Any, root: Any) -> Any:
    """Return an instance with the properties of objects in the schema's order, as masks write them."""
    seen: list[Any] = []
    parts = list(_applied(schema, root, seen))
    if isinstance(value, list):
        firsts = [part.get("prefixItems", []) for part in parts]
        rest = next((part["items"] for part in parts if "items" in part), {})
        before = next((first for first in firsts if first), [])
        return [ordered(one, before[i] if i < len(before) else rest, root) for i, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    names = [name for part in parts for name in part.get("properties", {})]
    names += [name for part in parts for name in part.get("required", [])]
    inner = {name: one for part in parts for name, one in part.get("properties", {}).items()}
    keys = [name for name in dict.fromkeys(names) if name in value] + [key for key in value if key not in names]
    return {key: ordered(value[key], inner.get(key, {}), root) for key in keys}


def _applied(schema: Any, root: Any, seen: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and those that apply to the same instance, in their order."""
    if not isinstance(schema, dict) or any(schema is one for one in seen):
        return
    seen.append(schema)
    yield schema
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            target: Any = root
            for part in value[1:].split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~").replace("%25", "%").replace("%22", '"')
                target = target[int(key)] if isinstance(target, list) else target.get(key, {})
            yield from _applied(target, root, seen)
        if name in ("allOf", "anyOf", "oneOf"):
            for one in value:
                yield from _applied(one, root, seen)


def reason(message: str) -> str:
    """Return why a schema was refused, without its names."""
    text = message.removeprefix("constraint: ")
    if text.startswith("$"):
        path, _, why = text.partition(": ")
        return f"{path.rpartition('.')[2]}: {why.partition(';')[0]}"
    for part in ("failed to compile JSON schema: ",):
        text = text.partition(part)[2] or text
    return " ".join(text.split()[:7])


def report(found: Found) -> int:
    """Print the counts, and what is wrong; return how much is."""
    for name, n in sorted(found.counts.items()):
        print(f"{n:5}  {name}")
    print("\nschemas were refused because of:")
    for why, n in found.refused.most_common():
        print(f"{n:5}  {why}")
    print(f"\nvalid and not reached: {len(found.unreachable)}")
    for line in found.unreachable:
        print(f"       {line}")
    print(f"\nwrong: {len(found.wrong)}")
    for line in found.wrong:
        print(f"       {line}")
    return len(found.wrong)
