"""Kernel parameters of a mixture of experts: the blocks of its matrices, and the memory that it needs."""

from __future__ import annotations

import numpy as np

from mlx_engine.backends.cpu.host_memory import address
from mlx_engine.backends.cpu.matrices import Block, write_norm
from mlx_engine.backends.experts import Experts
from mlx_engine.backends.parameters import Norm
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.kernels.cpu.build.library import Library


class ExpertBlock:
    """A mixture of experts, encoded for the entry `run_experts`: with norm and residual after the sum, or without."""

    def __init__(self, experts: Experts, norm: Norm, activation: int, library: Library, *, adds: bool = True) -> None:
        # Keep the arrays alive: the words only have their addresses.
        self.norm, self.router = norm, Block((experts.router,), None, 0, library)
        pairs = zip(experts.gate.weights, experts.up.weights, experts.down.weights, strict=True)
        self.blocks = [
            (Block((gate, up), None, activation, library), Block((down,), None, 0, library)) for gate, up, down in pairs
        ]
        self.inner, self.width = experts.gate.shape
        shared, self.shared = experts.shared, list[Block]()
        if shared is not None:
            self.inner = max(self.inner, shared.gate.weight.shape[0])
            of = (((shared.gate, shared.up), layout.SILU), ((shared.down,), 0), ((shared.weight,), 0))
            self.shared = [Block(linears, None, kind, library) for linears, kind in of]
        self.n_experts, self.n_used = experts.n_experts, experts.routing.n_used
        self.words = words = np.zeros(layout.EX_TABLE + 2 * self.n_experts, dtype=np.int64)
        self.address = address(words)
        write_norm(words[layout.EX_NORM_WEIGHT : layout.EX_NORM_BIAS + 1], norm)
        words[layout.EX_PROJECT], words[layout.EX_ROUTER] = library.address("project"), self.router.address
        words[layout.EX_COUNT], words[layout.EX_USED] = self.n_experts, self.n_used
        words[layout.EX_NORMALIZE] = experts.routing.normalize
        words[layout.EX_WIDTH], words[layout.EX_INNER] = self.width, self.inner
        words[layout.EX_ADDS] = adds
        self.norms = (experts.router_norm, experts.post_norm if adds else None)
        self.scales = experts.routing.scales
        for first, own in zip((layout.EX_ROUTER_NORM, layout.EX_POST_NORM), self.norms, strict=True):
            if own is not None:
                write_norm(words[first : first + 2], own)
        words[layout.EX_SCALES] = 0 if self.scales is None else address(self.scales)
        if self.shared:
            words[layout.EX_SHARED : layout.EX_ADDS] = [block.address for block in self.shared]
        words[layout.EX_TABLE :] = [block.address for pair in self.blocks for block in pair]

    def floats(self, n_tokens: int) -> int:
        """Return the floats of scratch memory for a pass of `n_tokens` tokens, with those that products need."""
        own = layout.expert_scratch(n_tokens, self.n_experts, self.n_used, self.width, self.inner)
        return own + n_tokens * layout.whole_vectors(max(self.width, self.inner))
