"""Mutants of the server's patience with its clients, and of its end."""

from tests.mutants.plant import Mutant

CONNECTION, SERVER = "mlx_engine/serve/server.py", "mlx_engine/serve/server.py"

MUTANTS = [
    Mutant("half a head is waited for without an end", CONNECTION, "Connection.check", "patience.head", "float('inf')"),
    Mutant(
        "a reader that does not read keeps its connection",
        CONNECTION,
        "Connection.check",
        "patience.read",
        "float('inf')",
    ),
    Mutant(
        "a slow reader that reads loses its connection",
        CONNECTION,
        "Connection.check",
        "not n_unsent or n_unsent < self._n_unsent",
        "not n_unsent",
    ),
    Mutant("a long head that arrives at once is accepted", CONNECTION, "", "1 << 14", "1 << 20"),
    Mutant("every refusal is 400", CONNECTION, "Connection.send_400_response", "error.error_status_hint", "400"),
    Mutant(
        "a refused connection is closed before its reply is read",
        "mlx_engine/serve/app.py",
        "refuse",
        '"connection" in response.headers',
        "False",
    ),
    Mutant(
        "answers that end too late get no error", SERVER, "Server.on_tick", "is_late and self._worker.n_open", "False"
    ),
    Mutant(
        "the exit code of a dead engine is that of its SystemExit",
        "mlx_engine/commands/serve.py",
        "answer_requests",
        "isinstance(fault, EngineError)",
        "fault is not None",
    ),
    Mutant(
        "the server collects garbage as rarely as a short command",
        "mlx_engine/commands/serve.py",
        "collect_garbage_again",
        "gc.set_threshold(*GARBAGE_THRESHOLD)",
        "pass",
    ),
    Mutant(
        "pages of the prefix cache count as pages of answers",
        "mlx_engine/serve/worker.py",
        "Load.of",
        "sum(used) - sum(cached)",
        "sum(used)",
    ),
]
