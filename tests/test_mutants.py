"""The list of planted bugs stays applicable; running it is `python -m tests.mutants`."""

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_bug_can_be_planted(mutant: Mutant):
    text = (ROOT / "mlx_engine" / mutant.file).resolve().read_text()
    assert mutant.old in text
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


def test_names_are_unique_and_there_are_many():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 12
