"""Every key of every configuration class in transformers, for our architectures: read, refused or harmless.

tests/data/config-keys.json lists for each `model_type`: sizes of a small model; keys that are read, with a value that
makes another model; values that are refused; values that change nothing. `why` has the reason for each harmless key.
`python -m tests.golden.compare_config_keys` compares the list with transformers itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.commands.models import architectures
from mlx_engine.errors import UnsupportedConfigError
from tests.unit.test_published_settings import plan

PATH = Path(__file__).parents[1] / "data" / "config-keys.json"
KEYS: dict[str, Any] = json.loads(PATH.read_text())
TYPES: dict[str, Any] = KEYS["types"]


def made(kind: str, settings: dict[str, Any]) -> Any:
    found = plan({**settings, "model_type": kind})
    return found.config, [(tensor.name, tensor.shape) for tensor in found.tensors]


def decided(kind: str, sizes: dict[str, Any], key: str, value: object) -> bool:
    """Return whether a value makes another model."""
    return bool(made(kind, {**sizes, key: value}) != made(kind, sizes))


@pytest.mark.some(9)
@pytest.mark.parametrize("kind", TYPES)
def test_every_listed_key_is_read_refused_or_harmless_as_listed(kind: str):
    of = TYPES[kind]
    sizes, usual = of["sizes"], made(kind, of["sizes"])
    for key, value in of["read"].items():
        try:
            is_read = made(kind, {**sizes, key: value}) != usual
        except UnsupportedConfigError as error:
            # A number of layers may disagree with the list of their kinds, which is then the setting that is refused.
            is_read = f"expected {key} " not in str(error)
        assert is_read, key
    # All last values at once, and each other value alone: a value that makes another model does so beside the others.
    harmless = {key: list(values) for key, values in {**KEYS["everywhere"], **of["harmless"]}.items() if values}
    assert made(kind, sizes | {key: values.pop() for key, values in harmless.items()}) == usual
    for key, values in harmless.items():
        for value in values:
            assert made(kind, {**sizes, key: value}) == usual, (key, value)
    for key, values in of["refused"].items():
        for value in values:
            with pytest.raises(UnsupportedConfigError) as caught:
                made(kind, {**sizes, key: value})
            assert key in str(caught.value), (key, value)


def test_every_architecture_is_listed_and_every_harmless_key_has_a_reason():
    names = {name for of in architectures() for name in of.names}
    missing = names - set(TYPES) - set(KEYS["not listed"])
    assert not missing, f"add {sorted(missing)}: python -m tests.golden.compare_config_keys --write {min(missing)}"
    keys = {*KEYS["everywhere"], *(key for of in TYPES.values() for key in of["harmless"])}
    assert keys <= set(KEYS["why"])


@pytest.mark.slow
def test_the_list_agrees_with_transformers():
    pytest.importorskip("transformers")
    from tests.golden.compare_config_keys import main

    assert main([]) == 0
