"""Mutants of mixtures of experts: the choice of experts, their products, how files store them."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant(
        "of equal logits the last expert",
        "kernels/cpu/experts.py",
        "choose",
        "not value > get(logits, at + ids[to + n - 1])",
        "not value >= get(logits, at + ids[to + n - 1])",
    ),
    Mutant(
        "weights always normalised",
        "kernels/cpu/experts.py",
        "weigh",
        "normalize != 0",
        "True",
    ),
    Mutant(
        "an expert reads the first rows",
        "kernels/cpu/experts.py",
        "_gather",
        "pairs[first + i] // n_used * width",
        "i * width",
    ),
    Mutant(
        "the weight of the row's first expert for all",
        "kernels/cpu/experts.py",
        "_add",
        "get(weights, pair)",
        "get(weights, pair // n_used * n_used)",
    ),
    Mutant(
        "norm of the first row for all",
        "kernels/cpu/experts.py",
        "run_experts",
        "norm(floats(x), t * width, width, b[EX_NORM_WEIGHT], b[EX_NORM_BIAS], eps, h, t * width)",
        "norm(floats(x), 0, width, b[EX_NORM_WEIGHT], b[EX_NORM_BIAS], eps, h, t * width)",
    ),
    Mutant(
        "of equal logits any expert on a GPU",
        "mlx_engine/backends/mlx_experts.py",
        "route",
        "mx.cumsum(equal, axis=-1) <= n_left",
        "mx.cumsum(equal, axis=-1) <= n_left + 1",
    ),
    Mutant(
        "rows not put back after sorting",
        "mlx_engine/backends/mlx_experts.py",
        "multiply",
        "y.squeeze(1)[mx.argsort(order)]",
        "y.squeeze(1)",
    ),
    Mutant(
        "gate and up of an expert exchanged",
        "mlx_engine/models/experts.py",
        "_fused",
        "0 if part == 'gate' else width",
        "width if part == 'gate' else 0",
    ),
    Mutant(
        "the first expert for all",
        "mlx_engine/models/stored.py",
        "Stored.take",
        "data[data.size // n * e:data.size // n * (e + 1)]",
        "data[:data.size // n]",
    ),
    Mutant(
        "experts are read ahead",
        "mlx_engine/backends/compiled.py",
        "CompiledBackend.stack",
        "id(data) not in unread",
        "True",
    ),
    Mutant(
        "all experts count as read",
        "mlx_engine/backends/experts.py",
        "share_read",
        "1 - (1 - share) ** n_tokens",
        "1",
    ),
]
