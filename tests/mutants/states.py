"""Mutants of states: their slots, passes and snapshots, and the layers that have them."""

from tests.mutants.plant import Mutant

STATES, RADIX, PREFIX = "mlx_engine/cache/states.py", "mlx_engine/cache/radix.py", "mlx_engine/cache/prefix.py"
SIMD, DELTA, CONVOLUTION = (
    "mlx_engine/backends/numpy/simd.py",
    "kernels/cpu/states/delta_rule.py",
    "kernels/cpu/states/convolution.py",
)

MUTANTS = [
    Mutant("a pass writes over the state that it reads", STATES, "SequenceState.begin",
           "self._pool.take()", "source.slot"),
    Mutant("the state of a pass that was rolled back is read", STATES, "SequenceState.roll_back",
           "self._pending[-1].length > length", "False"),
    Mutant("a pass begins with the committed state, not with the newest", STATES, "SequenceState.newest",
           "self._pending[-1] if self._pending else self.committed", "self.committed"),
    Mutant("a committed state keeps its slot for ever", STATES, "SequenceState.commit",
           "self._pool.give_back(self.committed.slot)", "pass"),
    Mutant("a closed sequence keeps its state's slot", STATES, "SequenceState.close",
           "self._pool.give_back(self.committed.slot)", "pass"),
    Mutant("states are not counted in the memory", "mlx_engine/cache/size.py", "pool_nbytes",
           "n_slots(n_sequences) * state_nbytes(layers)", "0"),
    Mutant("a prefix is reused with the state of another length", RADIX, "RadixTree.usable",
           "snapshot.length <= n", "snapshot.length <= n + 1"),
    Mutant("a state that was cut off stays held", RADIX, "RadixTree.cut", "length > leaf.end", "False"),
    Mutant("a split node keeps the states of its beginning", RADIX, "RadixTree._split", "length <= at", "False"),
    Mutant("states that a sequence holds are dropped from the cache", PREFIX, "PrefixCache._reclaim_states",
           "states.references(node.states[length]) == 1", "True"),
    Mutant("a missing state is explained by a window", PREFIX, "PrefixCache._match",
           '"state" if self.pool.states.n_slots else "window"', '"window"'),
    Mutant("the convolution forgets the inputs before the pass", SIMD, "SimdStates.convolve",
           "state.store[source]", "state.store[0]"),
    Mutant("the delta rule forgets the state before the pass", SIMD, "SimdStates.delta_rule",
           "state.store[source]", "state.store[0]"),
    Mutant("the delta rule does not decay", DELTA, "_one",
           "mul(decay, load(m, at + e * apart))", "load(m, at + e * apart)"),
    Mutant("value heads read the wrong key head", DELTA, "_prepare", "head % n_keys * n", "head // n_keys * n"),
    Mutant("a convolution reads one token too few", CONVOLUTION, "_channels", "t + w - taps + 1", "t + w - taps + 2"),
    Mutant("the gate is the query", "mlx_engine/models/qwen3_5.py", "_attention",
           "_rows(range(H), 2 * E, range(E), first=E)", "_rows(range(H), 2 * E, range(E))"),
    Mutant("value heads in the order of folders", "mlx_engine/models/qwen3_5.py", "value_head_order",
           "h % n_key_heads * (n_value_heads // n_key_heads) + h // n_key_heads", "h"),
]  # fmt: skip
