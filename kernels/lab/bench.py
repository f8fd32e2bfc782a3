"""`bench`: measure a kernel with cold caches on a GPU, or count its operations in the emulator.

A kernel's rate is compared with the memory bandwidth that Apple specifies for the chip, and with the measured rate of a
kernel that only reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ..launch import ExecutorName, ExecutorUnavailableError, Launch, require
from ..launch import executor as default_executor
from ..metal.layout import BLOCK
from ..metal.reference import Expected
from .arrays import STORED, Sizes, in_numpy
from .check import EPSILON, compare
from .experiment import Experiment
from .run import counted, promise, run

# If the inputs have more elements than this, results are not compared with the float64 reference: computing the
# reference would take longer than the measurement.
MOST_CHECKED = 1 << 25


@dataclass(frozen=True)
class Timing:
    """The measured time of a launch on a GPU.

    Attributes:
        shape: the sizes of the axes.
        seconds: seconds per launch, the median of samples.
        nbytes: bytes of all inputs and outputs.
        is_cold: whether the launches together read at least `COLD_BYTES` bytes, so that caches were cold.
        nominal_gbs: the chip's specified memory bandwidth, if known.
        read_gbs: measured memory bandwidth of a kernel that only reads, on this chip.
        stock_seconds: seconds of `mx.quantized_matmul` for the same product; None if the kernel is not a product
            with a Q8_0 matrix.
        wrong: description of the first wrong element (the time is then meaningless); None if all elements are right, or
            are not checked because the inputs have more than `MOST_CHECKED` elements.
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
        """Gigabytes of inputs and outputs per second."""
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
        simd_operations: operations such as `simd_sum`, counted once per SIMD-group.
        barriers: barriers, counted once per threadgroup.
        threadgroup_bytes: bytes of threadgroup memory.
        nbytes: bytes of all inputs and outputs, each counted once.
        weight_bytes: bytes per weight of the quantised inputs; without quantised inputs, bytes per element of the
            largest input.
        threads_per_output: threads per element of the outputs.
        shape, wrong: as in `Timing`.
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

    Launches are submitted together, and a GPU may overlap the end of one launch with the start of the next. So the time
    per launch is a measure of throughput, not the latency of a single launch.

    `sizes` maps each axis to its size, such as {"N": 4096, "K": 1024}. `dtype` is the type that T stands for. The
    default `executor` is the machine's GPU, "metal" or "cuda"; "emulator" counts operations instead.

    Raises:
        ValueError: the experiment does not support the sizes.
        ExecutorUnavailableError: the machine lacks the executor, or it has no GPU and `executor` is None.
    """
    chosen = executor or default_executor()
    if executor is None and chosen == "emulator":
        raise ExecutorUnavailableError(
            "there is no GPU here, and the emulator's times do not predict a GPU's; "
            "executor='emulator' counts the kernel's operations"
        )
    require(chosen)
    launch, numbers = experiment.launch(sizes, dtype)
    shape = experiment.label(sizes, dtype)
    wrong: str | None = None
    if sum(x.size for x in numbers.values()) <= MOST_CHECKED:
        expected = [Expected(v, experiment.bound * EPSILON * m) for v, m in experiment.expected(sizes, numbers)]
        found = compare(launch, [in_numpy(output) for output in run(launch, chosen)], expected)[1]
        wrong = found.text if found else None
    if chosen == "emulator":
        return _counts(experiment, launch, sizes, shape, wrong)

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
    """If the experiment is `y (..., N) = x (..., K) @ w (N, K).T` with `w` in Q8_0, return a function, else None.

    The function takes the inputs of a launch, and returns a second function, without parameters, which computes the
    product with MLX. The first function makes scales and biases of the type of x, because otherwise MLX
    would convert them in each call.
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
        vectors, quants, scales = (inputs[place] for place in places)
        scales = scales.astype(vectors.dtype)
        biases = -128 * scales
        mx.eval(scales, biases)
        return partial(mlx_product, vectors, quants, scales, biases)

    return product_of


def mlx_product(x: mx.array, quants: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """Return MLX's product of x and a Q8_0 matrix in MLX's affine format (8 bits, groups of 32)."""
    return mx.quantized_matmul(x, quants, scales, biases, group_size=BLOCK, bits=8)


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
        **found,
        nbytes=nbytes(launch),
        weight_bytes=sum(x.nbytes for x in of_weights) / weights,
        threads_per_output=found["threads"] / outputs,
        wrong=wrong,
    )


# ---- timing with cold caches: consecutive launches read different memory ----

# The inputs of a launch are copied until all sets of inputs together have this number of bytes, or there are
# `MOST_LAUNCHES` sets. The caches of any chip hold less. So if this number is reached, a set of inputs is in no cache
# when a launch reads the set again.
COLD_BYTES = 256 << 20
# The smallest and largest number of launches per sample. Fewer launches would not hide the time to submit the first
# one. More launches could need more copies of the inputs, and copying takes time.
LEAST_LAUNCHES, MOST_LAUNCHES = 8, 512
# The smallest number of samples, and the smallest number of seconds that they take together.
SAMPLES, SECONDS = 5, 0.25


def nbytes(launch: Launch) -> int:
    """Return the bytes of all inputs and outputs."""
    outputs = zip(launch.output_shapes, launch.output_dtypes, strict=True)
    return sum(x.nbytes for x in launch.inputs) + sum(prod(shape) * dtype.size for shape, dtype in outputs)


def cold_inputs(inputs: Sequence[mx.array]) -> list[list[mx.array]]:
    """Return a list of `inputs` and copies of `inputs`, in all at least two sets and at most `MOST_LAUNCHES`.

    Within these limits, make enough copies that the sets together have `COLD_BYTES` bytes.
    """
    read = sum(x.nbytes for x in inputs)
    copies = min(max(-(-COLD_BYTES // max(read, 1)), 2), MOST_LAUNCHES)
    return [list(inputs), *([copy_of(x) for x in inputs] for _ in range(copies - 1))]


def are_cold(sets: Sequence[Sequence[mx.array]]) -> bool:
    """Return whether the sets together have at least `COLD_BYTES` bytes."""
    return sum(x.nbytes for inputs in sets for x in inputs) >= COLD_BYTES


def copy_of(x: mx.array) -> mx.array:
    """Return a copy in newly allocated memory."""
    if x.dtype == mx.bfloat16:
        return mx.array(np.array(x.astype(mx.float32))).astype(mx.bfloat16)
    return mx.array(np.array(x))


def seconds_per_launch(launch: Launch, sets: Sequence[list[mx.array]], executor: ExecutorName) -> float:
    """Return the seconds per launch; consecutive launches use different sets of inputs."""
    return seconds_per_call([partial(promise, replace(launch, inputs=inputs), executor) for inputs in sets])


def seconds_per_call(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the seconds per call, the median of samples. A sample calls each function equally often."""
    rounds = -(-LEAST_LAUNCHES // len(calls))
    mx.eval([call() for call in calls])
    samples: list[float] = []
    while len(samples) < SAMPLES or sum(samples) * len(calls) * rounds < SECONDS:
        started = time.perf_counter()
        mx.eval([call() for _ in range(rounds) for call in calls])
        samples.append((time.perf_counter() - started) / (rounds * len(calls)))
    return statistics.median(samples)


# Maps MLX's name of a chip to the GB/s that Apple specifies. If a chip is sold with several bandwidths,
# this is the largest one.
NOMINAL = {
    "Apple M1": 68.25,
    "Apple M1 Pro": 204.8,
    "Apple M1 Max": 409.6,
    "Apple M1 Ultra": 819.2,
    "Apple M2": 102.4,
    "Apple M2 Pro": 204.8,
    "Apple M2 Max": 409.6,
    "Apple M2 Ultra": 819.2,
    "Apple M3": 102.4,
    "Apple M3 Pro": 153.6,
    "Apple M3 Max": 409.6,
    "Apple M3 Ultra": 819.2,
    "Apple M4": 120.0,
    "Apple M4 Pro": 273.0,
    "Apple M4 Max": 546.0,
    "Apple M5": 153.6,
    "Apple M5 Pro": 307.0,
    "Apple M5 Max": 614.0,
}

# Bytes that `READ` reads.
READ_BYTES = 64 << 20

READ = Experiment(
    name="plain_read",
    source="""
    // Sixteen loads of 16 bytes per thread; adjacent threads load adjacent bytes.
    const uint i = thread_position_in_grid.x;
    uint sum = 0u;
    for (uint load = 0u; load < 16u; load++) {
      const uint4 v = ((const device uint4*)x)[load * (N / 64u) + i];
      sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    y[i] = sum;
""",
    inputs={"x": "uint32 N"},
    outputs={"y": "uint32 N/64"},
    reference=lambda x, N: np.bitwise_xor.reduce(x.reshape(16, N // 64, 4), axis=(0, 2)),
    threads=lambda N: N // 64,
    threadgroup=256,
)


def chip() -> str:
    """Return the device name that MLX reports."""
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        return "no GPU"
    information: dict[str, Any] = mx.device_info()
    return str(information.get("device_name", "unknown GPU"))


def nominal_gbs() -> float | None:
    """Return the specified bandwidth of the chip; None if it is unknown."""
    return NOMINAL.get(chip())


@cache
def read_gbs(executor: ExecutorName) -> float:
    """Return the GB/s that the kernel `READ` reaches on this machine."""
    launch, _ = READ.launch({"N": READ_BYTES // 4})
    return nbytes(launch) / seconds_per_launch(launch, cold_inputs(launch.inputs), executor) / 1e9
