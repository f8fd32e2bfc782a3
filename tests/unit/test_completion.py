"""Shell completion: it is installed for the command `mlx-engine`, whatever was called, and completes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.unit.test_command_generate import ROOT

RUN = f"#!{sys.executable}\nfrom mlx_engine.commands import main\nmain()\n"

COMPLETE = """
source "$HOME/.bashrc"
complete -p mlx-engine
for words in "mlx-engine gen" "mlx-engine generate --n-p"; do
    COMP_WORDS=($words) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _mlx_engine_completion "$HOME/mlx-engine"
    echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="completion of bash")
def test_what_is_installed_completes_commands_and_options(tmp_path: Path):
    script = tmp_path / "mlx-engine"
    script.write_text(RUN)
    script.chmod(0o755)
    # Typer finds out which shell runs it, unless this variable is set: then the shell is an argument.
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    install = [sys.executable, "cli.py", "--install-completion", "bash"]
    subprocess.run(install, cwd=ROOT, env=env, check=True, capture_output=True, timeout=PATIENCE)
    done = subprocess.run(
        ["bash", "-c", COMPLETE], env=env, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    registered, commands, options = done.stdout.splitlines()
    assert registered == "complete -o default -F _mlx_engine_completion mlx-engine"
    assert (commands, options) == ("generate", "--n-predict")
