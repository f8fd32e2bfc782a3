"""`bench`: measure a kernel with cold caches on a GPU, or count its operations in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import mlx.core as mx

from ..launch import ExecutorName, ExecutorUnavailableError, Launch
from ..launch import executor as default_executor
from ..metal.layout import BLOCK
from ..metal.reference import Expected
from .arrays import STORED, Sizes, in_numpy
from .check import EPSILON, compare
from .chips import are_cold, cold_inputs, nbytes, seconds_per_call, seconds_per_launch
from .experiment import Experiment
from .run import counted, require, run

# The most elements for which the result is compared with the reference. For more elements the reference in float64
# takes longer than the measurement.
MOST_CHECKED = 1 << 25


@dataclass(frozen=True)
class Timing:
    """The measured time of a launch on a GPU.

    Attributes:
        name: name of the kernel.
        executor: the executor.
        chip: the GPU.
        shape: the sizes of the axes.
        seconds: seconds per launch, the median of samples.
        nbytes: bytes of all inputs and outputs.
        is_cold: whether caches were cold: all copies of the inputs together are larger than a cache.
        nominal_gbs: the chip's specified memory bandwidth, if known.
        read_gbs: memory bandwidth that a kernel without arithmetic reaches on this chip.
        stock_seconds: seconds of `mx.quantized_matmul` with the same values, if the kernel is a product with a Q8_0
            matrix.
        wrong: the first wrong element, if any; the time of a wrong kernel is meaningless.
    """

    name: str
    executor: str
    chip: str
    shape: str
    seconds: float
    nbytes: int
    is_cold: bool
    nominal_gbs: float | None
    read_gbs: float
    stock_seconds: float | None
    wrong: str | None

    @property
    def gbs(self) -> float:
        """Gigabytes per second."""
        return self.nbytes / self.seconds / 1e9

    def __str__(self) -> str:
        share = f"{self.gbs / self.read_gbs:.0%} of a plain read ({self.read_gbs:.1f} GB/s)"
        if self.nominal_gbs is not None:
            share += f", {self.gbs / self.nominal_gbs:.0%} of the nominal {self.nominal_gbs:g} GB/s"
        lines = [f"{self.name} ({self.executor}, {self.chip}) {self.shape}"]
        lines.append(f"  {self.seconds * 1e6:.1f} us, {self.gbs:.1f} GB/s: {share}")
        if self.stock_seconds is not None:
            factor = self.stock_seconds / self.seconds
            lines.append(f"  mx.quantized_matmul takes {self.stock_seconds * 1e6:.1f} us: x{factor:.2f}")
        if not self.is_cold:
            lines.append("  its arrays are so small that they stay in a cache: this is not memory bandwidth")
        if self.wrong is not None:
            lines.append(f"  the result is WRONG: {self.wrong}")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Counts:
    """Operation counts of a launch. They do not predict time.

    Attributes:
        name: name of the kernel.
        shape: the sizes of the axes.
        threads: number of threads.
        threadgroups: number of threadgroups.
        simd_operations: operations such as `simd_sum`, counted once per SIMD-group.
        barriers: barriers, counted once per threadgroup.
        threadgroup_bytes: bytes of threadgroup memory.
        nbytes: bytes of all inputs and outputs, each once.
        weight_bytes: bytes per weight of the inputs of stored types; without such inputs, per element of the largest.
        threads_per_output: threads per element that is written.
        wrong: the first wrong element, if any.
    """

    name: str
    shape: str
    threads: int
    threadgroups: int
    simd_operations: int
    barriers: int
    threadgroup_bytes: int
    nbytes: int
    weight_bytes: float
    threads_per_output: float
    wrong: str | None

    def __str__(self) -> str:
        lines = [
            f"{self.name} (emulator) {self.shape}: counts; times need a GPU",
            f"  {self.threads:,} threads in {self.threadgroups:,} threadgroups",
            f"  {self.simd_operations:,} SIMD operations, {self.barriers:,} barriers, "
            f"{self.threadgroup_bytes:,} bytes of threadgroup memory",
            f"  {self.nbytes:,} bytes in all arrays, {self.weight_bytes:.4g} bytes per weight, "
            f"{self.threads_per_output:.4g} threads per output",
        ]
        if self.wrong is not None:
            lines.append(f"  the result is WRONG: {self.wrong}")
        return "\n".join(lines)

    __repr__ = __str__


def bench(
    experiment: Experiment, sizes: Sizes, *, dtype: str = "float32", executor: ExecutorName | None = None
) -> Timing | Counts:
    """Measure a kernel. Consecutive launches read different copies of the inputs, so that caches are cold.

    Launches are submitted together, and a GPU may overlap the end of a launch with the start of the next. So this
    measures throughput, not the latency of a single launch.

    Args:
        experiment: the kernel.
        sizes: sizes of the axes, {"N": 4096, "K": 1024}.
        dtype: the type that T stands for.
        executor: "metal" or "cuda", by default the one that this machine has; "emulator" counts operations.

    Raises:
        ValueError: the sizes do not fit the experiment.
        ExecutorUnavailableError: the machine lacks the executor, or has no GPU and the emulator was not asked for.
    """
    chosen = executor or default_executor()
    if executor is None and chosen == "emulator":
        raise ExecutorUnavailableError(
            "there is no GPU here, and the emulator's times do not predict a GPU's; "
            "executor='emulator' counts the kernel's operations"
        )
    require(chosen)
    launch, numbers = experiment.launch(sizes, dtype)
    shape = " ".join(f"{name}={size}" for name, size in sizes.items()) + (
        f" T={dtype}" if experiment.has_choice else ""
    )
    wrong: str | None = None
    if sum(x.size for x in numbers.values()) <= MOST_CHECKED:
        expected = [Expected(v, experiment.bound * EPSILON * m) for v, m in experiment.expected(sizes, numbers)]
        found = compare(launch, [in_numpy(output) for output in run(launch, chosen)], expected)[1]
        wrong = found.text if found else None
    if chosen == "emulator":
        return _counts(experiment, launch, sizes, shape, wrong)
    from .chips import chip, nominal_gbs, read_gbs

    sets = cold_inputs(launch.inputs)
    stock = stock_product(experiment, launch)
    return Timing(
        name=experiment.name,
        executor=chosen,
        chip=chip(),
        shape=shape,
        seconds=seconds_per_launch(launch, sets, chosen),
        nbytes=nbytes(launch),
        is_cold=are_cold(sets),
        nominal_gbs=nominal_gbs(),
        read_gbs=read_gbs(chosen),
        stock_seconds=None if stock is None else seconds_per_call([stock(inputs) for inputs in sets]),
        wrong=wrong,
    )


def stock_product(
    experiment: Experiment, launch: Launch
) -> Callable[[Sequence[mx.array]], Callable[[], mx.array]] | None:
    """Return MLX's own product for an experiment `y (..., N) = x (..., K) @ w (N, K).T`; None for any other experiment.

    The returned function takes the inputs of a launch and returns a function that computes the product. Scales and
    biases get the type of x, because MLX would otherwise convert them in each call.
    """
    given, made = experiment.arrays
    matrices = [array for array in given if array.type == "q8_0"]
    if len(matrices) != 1 or len(given) != 2 or len(made) != 1:
        return None
    (x,) = (array for array in given if array.type != "q8_0")
    rows, columns = (axis.text for axis in matrices[0].axes)
    if [axis.text for axis in x.axes[-1:]] != [columns] or [axis.text for axis in made[0].axes[-1:]] != [rows]:
        return None
    places = [launch.kernel.input_names.index(name) for name in (x.name, *matrices[0].parts)]

    def product_of(inputs: Sequence[mx.array]) -> Callable[[], mx.array]:
        vectors, codes, scales = (inputs[place] for place in places)
        scales = scales.astype(vectors.dtype)
        biases = -128 * scales
        mx.eval(scales, biases)
        return partial(mlx_product, vectors, codes, scales, biases)

    return product_of


def mlx_product(x: mx.array, codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """Return MLX's product with a Q8_0 matrix in its affine format."""
    return mx.quantized_matmul(x, codes, scales, biases, group_size=BLOCK, bits=8)


def _counts(experiment: Experiment, launch: Launch, sizes: Sizes, shape: str, wrong: str | None) -> Counts:
    found = counted(launch)
    matrices = [array for array in experiment.arrays[0] if array.type in STORED]
    weights = sum(prod(array.shape(sizes)) for array in matrices)
    parts = {part for array in matrices for part in array.parts}
    of_weights = [x for name, x in zip(launch.kernel.input_names, launch.inputs, strict=True) if name in parts]
    if not weights:
        of_weights = [max(launch.inputs, key=lambda x: x.nbytes)]
        weights = of_weights[0].size
    outputs = sum(prod(shape) for shape in launch.output_shapes)
    return Counts(
        name=experiment.name,
        shape=shape,
        threads=found["threads"],
        threadgroups=found["threadgroups"],
        simd_operations=found["simd_operations"],
        barriers=found["barriers"],
        threadgroup_bytes=found["threadgroup_bytes"],
        nbytes=nbytes(launch),
        weight_bytes=sum(x.nbytes for x in of_weights) / weights,
        threads_per_output=found["threads"] / outputs,
        wrong=wrong,
    )
