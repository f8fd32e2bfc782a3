"""Mutants of runs by tensors: slices, sums, exchanged logits."""

from tests.mutants.plant import Mutant

DECODER, DEALS, SLICES = (
    "mlx_engine/models/decoder.py",
    "mlx_engine/distributed/deals.py",
    "mlx_engine/distributed/slices.py",
)
TENSOR, PROGRAM = "mlx_engine/distributed/tensor.py", "mlx_engine/backends/cpu/program.py"

MUTANTS = [
    Mutant("parts of a product are not added", DECODER, "whole_product",
           "be.all_sum(be.linear(x, projection))", "be.linear(x, projection)"),
    Mutant("every rank adds the residual of a mixture", DECODER, "mixture_add",
           "experts.down.is_partial", "False"),
    Mutant("every rank adds the bias of a sum", TENSOR, "RankSlices.has",
           "self.rank == 0 or not self.slices.is_bias_of_sum(name)", "True"),
    Mutant("a norm of whole rows reads one rank's columns", DECODER, "_normed_row",
           "be.all_columns(be.linear(x, linear), own.of)", "be.linear(x, linear)"),
    Mutant("copies of a KV head are normed as further heads", DEALS, "OfHeads.ranges",
           "self.are_normed and size > self.heads.n_kv_heads", "False"),
    Mutant("every rank uses the first of the normed KV heads", TENSOR, "RankSlices._columns",
           "Columns(first, last, of, are_all_here=held == of)",
           "Columns(0, last - first, of, are_all_here=held == of)"),
    Mutant("KV heads of another rank", DEALS, "Heads.keys", "first // self.ratio", "0"),
    Mutant("sections are not cut alike", DEALS, "Pieces.ranges", "self.n * width", "width"),
    Mutant("columns are cut inside of blocks", SLICES, "_Deals._types",
           "planned.conversion.type_of(name.removesuffix('.weight'), tensor.shape, stored)[0]", "stored"),
    Mutant("the state of a delta net has all heads", TENSOR, "RankSlices._mixer",
           "(n_values, *head)", "(rule.n_value_heads * 2, *head)"),
    Mutant("a compiled program leaves exchanges out", PROGRAM, "_Steps.run", "last in self._exchanges", "False"),
    Mutant("the largest logits of a rank lie in the columns of the first", "mlx_engine/backends/best.py", "unpacked",
           "rank * -(-n // size) + here", "here"),
    Mutant("the largest logit is enough for penalties", "mlx_engine/decode/sampler.py", "Sampler.best",
           "sampling.repetition_penalty != 1", "False"),
    Mutant("log-probabilities of few logits", "mlx_engine/decode/sampler.py", "best_of",
           "len(known) == len(needs)", "True"),
]  # fmt: skip
