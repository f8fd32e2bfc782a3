"""The start of a process: help and version import no library that computes."""

import subprocess
import sys

import pytest

from mlx_engine.commands import SUMMARIES
from tests.patience import PATIENCE
from tests.unit.test_command_generate import ROOT

HEAVY = ("numpy", "mlx", "numba", "llvmlite", "msgspec", "starlette", "prompt_toolkit", "matplotlib", "jinja2")

RUN = """
import sys
sys.argv = ["cli.py", *sys.argv[1:]]
from mlx_engine.commands import main
try:
    main()
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


@pytest.mark.some(2)
@pytest.mark.parametrize("words", ["--version", "--help", *(f"{name} --help" for name in SUMMARIES)])
def test_help_imports_no_library_that_computes(words):
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0
    assert [name for name in HEAVY if repr(name) in done.stderr] == []


def test_the_help_of_generate_has_at_most_60_lines_and_a_panel_per_group():
    run = [sys.executable, "cli.py", "generate"]
    env = {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    text, whole = (
        subprocess.run([*run, flag], cwd=ROOT, env=env, capture_output=True, text=True, encoding="utf-8").stdout
        for flag in ("--help", "--help-all")
    )
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) == 80
    titles = [line.split()[1] for line in text.splitlines() if line.startswith("╭")]
    assert titles == ["Prompt", "Model", "Limits", "Sampling", "Output", "Help"]
    assert ("--presence-penalty" in text, "--presence-penalty" in whole) == (False, True)
    assert ("--n-predict" in text, "--n-predict" in whole) == (False, True)
