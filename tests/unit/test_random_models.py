"""Every architecture has a random model, from which the tests of bits, batches and ranks take theirs."""

from __future__ import annotations

from mlx_engine.commands.models import architectures
from tests.random_models import SETTINGS


def test_every_architecture_is_in_the_random_models():
    missing = [of.file for of in architectures() if not {of.file, *of.names} & set(SETTINGS)]
    assert missing == [], f"add {missing} to SETTINGS of tests/random_models.py"
