"""States on the compiled CPU backend: the blocks of short convolutions, delta nets and sigmoid gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.cpu.host_memory import address, aligned, contiguous, strided_rows
from mlx_engine.backends.cpu.kernel_limits import convolution_fits, rule_fits
from mlx_engine.backends.cpu.matrices import write_norm
from mlx_engine.backends.mixers import Convolution, DeltaNet
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.parameters import Native
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.kernels.cpu.build.library import Library
from mlx_engine.kernels.cpu.build.pool import Pool


class CompiledStates(SimdBackend):
    """A state of convolutions and delta nets is read and written in its slots, without a copy."""

    library: Library
    pool: Pool
    run_entry: Callable[..., None]
    # Kernel parameters of convolutions and delta rules (int64 words), by the parameters, compared by identity.
    _mixer_words: dict[tuple[object, ...], np.ndarray]

    def sigmoid_gate(self, x: Native, gate: Native) -> Native:
        if x.shape[1] % layout.LANES:
            return super().sigmoid_gate(x, gate)
        x, gate, out = strided_rows(x), strided_rows(gate), aligned(*x.shape)
        self.run_entry(
            self.library.sigmoid_gate, self.library.address("gate_span"), *x.shape, address(x), x.strides[0] // 4,
            address(gate), gate.strides[0] // 4, address(out),
        )  # fmt: skip
        return out

    def short_conv(self, batch: Batch, layer: int, b: Native, c: Native, x: Native, conv: Convolution) -> Native:
        if not convolution_fits(conv):
            return super().short_conv(batch, layer, b, c, x, conv)
        return self._convolved(batch, layer, x, conv, self.convolution_words(conv, False), before=b, after=c)

    def delta_net(
        self, batch: Batch, layer: int, x: Native, gate: Native, beta: Native, step: Native, net: DeltaNet
    ) -> Native:
        if not convolution_fits(net.conv) or not rule_fits(net.rule):
            return super().delta_net(batch, layer, x, gate, beta, step, net)
        mixed = self._convolved(batch, layer, x, net.conv, self.convolution_words(net.conv, True))
        store, runs = cast(np.ndarray, batch.stores.states[layer][1]), contiguous(batch.runs)
        gate, beta, step, out = strided_rows(gate), strided_rows(beta), strided_rows(step), aligned(*gate.shape)
        self.run_entry(
            self.library.delta_net, self.rule_words(net), address(mixed), address(gate), gate.strides[0] // 4,
            address(beta), beta.strides[0] // 4, address(step), step.strides[0] // 4, address(store), address(runs),
            len(runs), address(out),
        )  # fmt: skip
        return out

    def _convolved(
        self, batch: Batch, layer: int, x: Native, conv: Convolution, block: int, before: Native | None = None,
        after: Native | None = None,
    ) -> Native:  # fmt: skip
        gates: list[int] = []
        kept = [None if gate is None else strided_rows(gate) for gate in (before, after)]
        for gate in kept:
            gates += (0, 0) if gate is None else (address(gate), gate.strides[0] // 4)
        store, runs = cast(np.ndarray, batch.stores.states[layer][0]), contiguous(batch.runs)
        x, out = strided_rows(x), aligned(*x.shape)
        self.run_entry(
            self.library.short_conv, block, len(x), address(x), x.strides[0] // 4, *gates, address(store),
            address(runs), len(runs), address(out),
        )  # fmt: skip
        return out

    def convolution_words(self, conv: Convolution, activated: bool) -> int:
        """Return the address of a convolution's kernel parameters, which are made once and kept."""
        found = self._mixer_words.get((conv, activated))
        if found is None:
            taps, channels = conv.weight.shape
            values = (self.library.address("convolve_span"), address(conv.weight), taps, channels, int(activated))
            found = self._mixer_words[conv, activated] = np.array(values, dtype=np.int64)
        return address(found)

    def rule_words(self, net: DeltaNet) -> int:
        """Return the address of a delta rule's kernel parameters, which are made once and kept."""
        rule, found = net.rule, self._mixer_words.get((net,))
        if found is None:
            found = self._mixer_words[net,] = np.zeros(layout.DELTA_WIDTH, dtype=np.int64)
            found[: layout.DELTA_VALUE_DIM + 1] = (
                self.library.address("delta_head"), address(rule.rate), address(rule.dt_bias), rule.n_key_heads,
                rule.key_dim, rule.n_value_heads, rule.value_dim,
            )  # fmt: skip
            write_norm(found[layout.DELTA_NORM :], net.norm)
        return address(found)
