"""Mutants of the life of an engine: faults of a pass, closing, forks, and the exit of the interpreter."""

from tests.mutants.plant import Mutant

FINITE, PASSES, GUARD = (
    "mlx_engine/decode/finite.py", "mlx_engine/decode/passes.py", "mlx_engine/backends/session_guard.py"
)  # fmt: skip

MUTANTS = [
    Mutant(
        "a sum that overflows is a fault",
        FINITE,
        "FiniteCheck.bad_rows",
        "{r: row for r, row in rows.items() if not np.isfinite(row).all()}",
        "rows",
    ),
    Mutant(
        "the search begins with the last pass",
        FINITE,
        "_run_again",
        "range(0, len(ids), LONGEST_PASS)",
        "range((len(ids) - 1) // LONGEST_PASS * LONGEST_PASS, len(ids), LONGEST_PASS)",
    ),
    Mutant(
        "an eager backend chooses from NaN",
        PASSES,
        "Passes._choose",
        "logits = be.array(np.nan_to_num(be.host(logits), nan=0, posinf=0, neginf=0))",
        "pass",
    ),
    Mutant("the sums are begun too late", PASSES, "Passes._choose", "[*tokens, check.sums]", "tokens"),
    Mutant(
        "the error is that of a longer prompt",
        PASSES,
        "Passes._failed",
        "part.picks[0].ids[: choice.position]",
        "part.picks[0].ids",
    ),
    Mutant(
        "a failed request goes on",
        "mlx_engine/schedule/scheduler.py",
        "Scheduler._step",
        "self._fail(answer_of(part), error)",
        "pass",
    ),
    Mutant(
        "only the first piece of a weight is checked",
        "mlx_engine/quant/weight.py",
        "Weight.pieces",
        "math.prod(self.shape) // self.type.block_size",
        "step",
    ),
    Mutant(
        "a session begins after the backend was closed",
        GUARD,
        "SessionGuard.held",
        "self.check()",
        "pass",
    ),
    Mutant(
        "a closed backend keeps its stream of MLX",
        "mlx_engine/backends/mlx/backend.py",
        "MlxBackend.close",
        "self._lent.close()",
        "pass",
    ),
    Mutant(
        "each backend has a new stream of MLX",
        "mlx_engine/backends/mlx/device.py",
        "_take",
        "stream.device == device and process == os.getpid()",
        "False",
    ),
    Mutant(
        "the exit does not wait for daemon threads",
        "mlx_engine/backends/mlx/device.py",
        "_end_sessions",
        "used.guard.hold_for_ever(PATIENCE)",
        "False",
    ),
    Mutant(
        "a forked process waits for the threads of its parent",
        "kernels/cpu/build/pool.py",
        "Pool.renew",
        "self._process != os.getpid()",
        "False",
    ),
    Mutant(
        "a fork acquires inner locks first",
        "mlx_engine/machine/forks.py",
        "_acquire_all",
        "not of[1]",
        "of[1]",
    ),
    Mutant("MLX is used in a forked process", GUARD, "SessionGuard.check", "self._is_of_parent", "False"),
]
