"""Mutants of files that are written, refused, removed and printed."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant("drafts without a lock", "kernels/drafts.py", "_created", "_locked(lock)", "lock"),
    Mutant("drafts of living processes are removed", "kernels/drafts.py", "remove_dead", "_locked(lock)", "True"),
    Mutant("SIGTERM ends with 1", "mlx_engine/commands/console.py", "EndedBySignal.__init__", "128 + number", "1"),
    Mutant(
        "signals that are ignored end the process",
        "mlx_engine/commands/console.py",
        "exit_on_signals",
        "signal.getsignal(number) == signal.SIG_DFL",
        "True",
    ),
    Mutant(
        "holes in safetensors",
        "mlx_engine/checkpoint/safetensors.py",
        "_check_order",
        "entry.start != end",
        "entry.start < end",
    ),
    Mutant(
        "bytes after the last tensor of safetensors",
        "mlx_engine/checkpoint/safetensors.py",
        "_check_order",
        "end != size",
        "end > size",
    ),
    Mutant(
        "names of files that lead out of a repository",
        "mlx_engine/checkpoint/hub.py",
        "_check_file_name",
        '".." in path.parts',
        "False",
    ),
    Mutant("notices unescaped", "mlx_engine/commands/console.py", "notice", "safe_for(sys.stderr, text)", "text"),
    Mutant(
        "folders of Numba in the cache",
        "mlx_engine/checkpoint/on_disk.py",
        "_kernels",
        "_DIGEST.fullmatch(folder.name)",
        "True",
    ),
]
