"""Mutants of plans for several machines: bytes, messages, rates, splits."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant(
        "a shared array counts twice",
        "mlx_engine/distributed/model_parts.py",
        "held",
        "sum({id(array): array.nbytes for part in parts for array in part.arrays}.values())",
        "sum([array.nbytes for part in parts for array in part.arrays])",
    ),
    Mutant(
        "a split ignores memory",
        "mlx_engine/distributed/plan.py",
        "pipeline",
        "runs.needed(first, end) <= host.memory",
        "True",
    ),
    Mutant(
        "the head has no place in the smallest number of hosts",
        "mlx_engine/distributed/plan.py",
        "_Runs.needed",
        "[self._model.head] if is_last else []",
        "[]",
    ),
    Mutant(
        "a cut parts layers from the keys that they share",
        "mlx_engine/distributed/model_parts.py",
        "model_parts",
        "w.shares is None or w.shares >= c",
        "True",
    ),
    Mutant(
        "a rank without the head holds the embedding table",
        "mlx_engine/distributed/plan.py",
        "_rank",
        "model.tables if is_last else model.tables.without_tables()",
        "model.tables",
    ),
    Mutant(
        "attention reads beyond its window",
        "mlx_engine/distributed/model_parts.py",
        "Part.work",
        "min(at_once, window - 1 + of.n_tokens)",
        "at_once",
    ),
    Mutant(
        "slices need one step for every number of ranks",
        "mlx_engine/distributed/times.py",
        "Timing.messages",
        "exchanges * others",
        "exchanges",
    ),
    Mutant(
        "waiting ranks take no core",
        "mlx_engine/distributed/hosts.py",
        "Host.among_waiting",
        "self.threads + self.ranks - 1",
        "self.threads",
    ),
    Mutant(
        "bytes are bits",
        "mlx_engine/distributed/hosts.py",
        "Link.occupied",
        "nbytes * BITS / self.rate",
        "nbytes / self.rate",
    ),
    Mutant(
        "several requests wait for no rank",
        "mlx_engine/distributed/times.py",
        "Timing.turn",
        "n_parts * busiest",
        "busiest",
    ),
    Mutant(
        "a relay forgets its latency",
        "benchmarks/relay.py",
        "Wire.read",
        "self.free + self.latency",
        "self.free",
    ),
]
