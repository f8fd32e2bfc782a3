"""Schemas: random ones, and twenty that applications have."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "tags", "is_open", "price", "id", "note", "kind", "next")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of the keywords that masks implement, with at most three levels."""
    makers = (
        [_string, _number, _boolean, _choice] if depth >= 2 else [_object, _object, _array, _either, _string, _number]
    )
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema["additionalProperties"] = random_schema(rng, 2)
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(1, 3)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, schema["maxItems"])
    if rng.random() < 0.2:
        schema["prefixItems"] = [random_schema(rng, 2)]
    return schema


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": "^[a-z]{1,8}$"},
            {"type": "string", "pattern": r"^\d{3}-\d{2}$"},
            {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
        ]
    )


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 100)
    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if rng.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": low, "maximum": low + 60, "multipleOf": rng.choice([2, 5, 10])}
    return schema


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"enum": ["red", "green", 3, None, {"a": [1]}]}, {"const": rng.choice(["x y", 7, [True]])}])


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 60}
COUNT = {"type": "integer", "minimum": 0, "maximum": 10000}

TWENTY: dict[str, dict[str, Any]] = {
    "Describe a person named Anna who is 30 years old.": closed(name=SHORT, age=COUNT),
    "Give the weather in Paris: 18 degrees and sunny.": closed(
        city=SHORT, degrees={"type": "integer", "minimum": -60, "maximum": 60}, sky={"enum": ["sunny", "rain"]}
    ),
    "Is the text 'I love this phone' positive or negative?": closed(
        sentiment={"enum": ["positive", "negative", "neutral"]}
    ),
    "List three fruits.": closed(fruits={"type": "array", "items": SHORT, "minItems": 3, "maxItems": 3}),
    "Give the date of New Year's Day of 2024.": closed(date={"type": "string", "format": "date"}),
    "Invent a user with an e-mail address.": closed(
        user=SHORT, email={"type": "string", "pattern": r"^[a-z]{2,12}@[a-z]{2,12}\.com$"}
    ),
    "Is 7 a prime number?": closed(number=COUNT, prime={"type": "boolean"}),
    "Give a colour as RGB.": closed(
        red={"type": "integer", "minimum": 0, "maximum": 255}, green={"type": "integer", "minimum": 0, "maximum": 255},
        blue={"type": "integer", "minimum": 0, "maximum": 255},
    ),
    "Write a recipe for pancakes.": closed(
        title=SHORT, steps={"type": "array", "items": SHORT, "minItems": 2, "maxItems": 5}, minutes=COUNT
    ),
    "Describe a book and its author.": closed(title=SHORT, author=closed(first=SHORT, last=SHORT), year=COUNT),
    "Make a shopping list with prices.": closed(
        items={"type": "array", "items": closed(name=SHORT, euros=COUNT), "minItems": 1, "maxItems": 4}
    ),
    "Call the search tool for 'cats'.": closed(tool={"const": "search"}, arguments=closed(query=SHORT, limit=COUNT)),
    "Name an optional nickname of Robert.": {
        **closed(name=SHORT, nickname={"anyOf": [SHORT, {"type": "null"}]})
    },
    "Give a version number.": closed(version={"type": "string", "pattern": r"^\d{1,2}\.\d{1,2}\.\d{1,2}$"}),
    "Give an address in London.": closed(
        street=SHORT, city={"const": "London"}, zip={"type": "string", "pattern": "^[A-Z0-9 ]{5,8}$"}
    ),
    "Write a tree of two levels.": {
        "$defs": {"leaf": closed(value=COUNT)}, **closed(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"})
    },
    "Describe a circle or a square.": {
        "anyOf": [closed(shape={"const": "circle"}, radius=COUNT), closed(shape={"const": "square"}, side=COUNT)]
    },
    "Give a time of day.": closed(time={"type": "string", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"}),
    "Rate the film from 1 to 5 and say why.": closed(stars={"type": "integer", "minimum": 1, "maximum": 5}, why=SHORT),
    "Give two points of a line.": {
        "type": "array", "minItems": 2, "maxItems": 2,
        "items": {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 2},
    },
}  # fmt: skip
