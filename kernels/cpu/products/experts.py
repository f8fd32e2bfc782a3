"""A mixture of experts in one call: norm, router, choice of experts, and the products of each chosen expert.

The rows that use an expert are multiplied together, so the expert's matrices are read at most once. The outputs of a
row's experts are added in ascending order of the experts, so the bits of a row do not depend on the other rows.

If not all experts fit into memory, a thread reads experts from the file ahead of their use. For this thread, the
kernel writes notes of the experts that it will multiply, and of those that the next layer will probably choose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.exponentials import exp
from ..build.jit import entry, jit
from ..build.layout import (
    EX_ADDS,
    EX_CHOICE_BIAS,
    EX_COUNT,
    EX_GROUPS,
    EX_GROUPS_USED,
    EX_INNER,
    EX_NEXT,
    EX_NORM_BIAS,
    EX_NORM_EPS,
    EX_NORM_WEIGHT,
    EX_NORMALIZE,
    EX_NOTE,
    EX_PIPE,
    EX_POST_EPS,
    EX_POST_NORM,
    EX_PROJECT,
    EX_ROUTER,
    EX_ROUTER_EPS,
    EX_ROUTER_NORM,
    EX_SCALES,
    EX_SHARED,
    EX_SHARED_DOWN,
    EX_SHARED_WEIGHT,
    EX_SIGMOID,
    EX_SUM_EPS,
    EX_TABLE,
    EX_USED,
    EX_WEIGHS_INPUTS,
    EX_WIDTH,
    EX_WRITE,
    LANES,
    NOTE_BITS,
    NOTE_GUESS,
    NOTE_WIDTH,
)
from ..build.memory import floats, invoke, number, words
from ..build.vectors import add, div, fma, get, load, put, splat, store, sub, zeros
from .linear_job import ceil_div
from .norms import norm_rows

# Bytes of LANES floats.
_VECTOR = 4 * LANES


@jit
def _vectors(n: int) -> Any:
    """Return the bytes of n floats, rounded up to whole vectors."""
    return ceil_div(n, LANES) * _VECTOR


@jit
def choose(logits: Any, at: int, n_experts: int, n_used: int, ids: Any, to: int) -> None:
    """Write the ids of the `n_used` largest of `logits[at:]` to `ids[to:]`; of equal logits, the first is chosen."""
    n = 0
    for e in range(n_experts):
        value = get(logits, at + e)
        # ids[to : to + n] are in descending order of their logits here.
        if n == n_used and not value > get(logits, at + ids[to + n - 1]):
            continue
        i = n if n < n_used else n - 1
        n = i + 1
        while i > 0 and value > get(logits, at + ids[to + i - 1]):
            ids[to + i] = ids[to + i - 1]
            i -= 1
        ids[to + i] = e


@jit
def sigmoids(logits: Any, at: int, n: int, out: Any) -> None:
    """Write the sigmoids of `logits[at:]`, n of them. Reads and writes extend to the end of the last SIMD vector."""
    for e in range(0, n, LANES):
        store(out, e, div(splat(1.0), add(splat(1.0), exp(sub(zeros(), load(logits, at + e))))))


@jit
def score(logits: Any, at: int, n_experts: int, sigmoid: int, bias: int, groups: int, scores: Any) -> None:
    """Write the score of each expert: the sigmoid of its logit, or `exp(logit - largest logit)` for a softmax.

    Afterwards `choose` takes the experts with the largest numbers in `logits`. So if the choice depends on other
    numbers than the logits, replace the logits: with sigmoids by the sigmoids; with a softmax and a bias or groups by
    the probabilities; and add the bias if there is one. `bias` is the address of a number for each expert, or 0;
    `groups` is the number of groups, or 0. `logits` and `scores` have n_experts floats, rounded up to whole SIMD
    vectors.
    """
    total = np.float32(1)
    if sigmoid != 0:
        sigmoids(logits, at, n_experts, scores)
    else:
        top = get(logits, at)
        for e in range(1, n_experts):
            top = max(top, get(logits, at + e))
        for e in range(0, n_experts, LANES):
            store(scores, e, exp(sub(load(logits, at + e), splat(top))))
        if bias == 0 and groups == 0:
            return
        total = np.float32(0)
        for e in range(n_experts):
            total += get(scores, e)
    for e in range(n_experts):
        value = get(scores, e) / total
        put(logits, at + e, value if bias == 0 else value + get(floats(bias), e))


@jit
def keep_groups(values: Any, at: int, n_experts: int, n_groups: int, n_kept: int, sums: Any) -> None:
    """Replace the values of experts outside of the `n_kept` best groups by minus infinity.

    A group is ranked by the sum of its two largest values, or by its only value. Of groups with equal sums, the first
    is better. `sums` is scratch memory of n_groups floats.
    """
    size = n_experts // n_groups
    for g in range(n_groups):
        best, second = np.float32(-np.inf), np.float32(-np.inf)
        for e in range(g * size, (g + 1) * size):
            value = get(values, at + e)
            if value > best:
                best, second = value, best
            elif value > second:
                second = value
        put(sums, g, best + second if size > 1 else best)
    for g in range(n_groups):
        n_before = 0
        for other in range(n_groups):
            n_before += get(sums, other) > get(sums, g) or (get(sums, other) == get(sums, g) and other < g)
        if n_before >= n_kept:
            for e in range(g * size, (g + 1) * size):
                put(values, at + e, np.float32(-np.inf))


@jit
def weigh(
    scores: Any, n_experts: int, n_used: int, normalize: int, sigmoid: int, sum_eps: float, scales: int, ids: Any,
    weights: Any, to: int,
) -> None:  # fmt: skip
    """Write the weights of the chosen experts to `weights[to ...]`: their scores, normalised.

    With `normalize`, divide the scores by `sum_eps` plus the sum of the chosen experts' scores. Without `normalize`,
    divide the scores of a softmax by their sum over all experts, and leave sigmoids as they are. `scales` is the
    address of a factor for each expert's weight, or 0.
    """
    total = np.float32(0)
    if normalize != 0:
        for c in range(n_used):
            total += get(scores, ids[to + c])
        total += sum_eps
    elif sigmoid != 0:
        total = np.float32(1)
    else:
        for e in range(n_experts):
            total += get(scores, e)
    for c in range(n_used):
        weight = get(scores, ids[to + c]) / total
        put(weights, to + c, weight if scales == 0 else weight * get(floats(scales), ids[to + c]))


@jit
def _group(ids: Any, n_pairs: int, n_experts: int, first: Any, pairs: Any) -> None:
    """Sort the pairs of rows and experts by expert: `pairs[first[e] : first[e + 1]]` are the indices of e in `ids`."""
    for e in range(n_experts + 1):
        first[e] = 0
    for i in range(n_pairs):
        first[ids[i] + 1] += 1
    for e in range(n_experts):
        first[e + 1] += first[e]
    # Afterwards first[e] is the end of expert e's pairs, which is the start of the next expert's pairs.
    for i in range(n_pairs):
        pairs[first[ids[i]]] = i
        first[ids[i]] += 1
    for e in range(n_experts, 0, -1):
        first[e] = first[e - 1]
    first[0] = 0


@jit
def _gather(x: Any, width: int, pairs: Any, first: int, n: int, n_used: int, out: Any) -> None:
    """Copy the input rows of n pairs, from `pairs[first]` on, to contiguous rows of `out`."""
    for i in range(n):
        row = pairs[first + i] // n_used * width
        for j in range(width):
            put(out, i * width + j, get(x, row + j))


@jit
def _weigh_inputs(x: Any, width: int, pairs: Any, first: int, n: int, weights: Any) -> None:
    """Multiply the gathered rows of n pairs by the pairs' weights, and set these weights to 1 for `_add`."""
    for i in range(n):
        pair = pairs[first + i]
        for j in range(width):
            put(x, i * width + j, get(x, i * width + j) * get(weights, pair))
        put(weights, pair, np.float32(1))


@jit
def _add(y: Any, width: int, pairs: Any, first: int, n: int, n_used: int, weights: Any, out: Any) -> None:
    """Add the results `y` of one expert, times the weights, to the rows of its n pairs in `out`."""
    whole = width // LANES * LANES
    for i in range(n):
        pair = pairs[first + i]
        row, weight = pair // n_used * width, get(weights, pair)
        for j in range(0, whole, LANES):
            store(out, row + j, fma(load(y, i * width + j), splat(weight), load(out, row + j)))
        for j in range(whole, width):
            put(out, row + j, get(out, row + j) + get(y, i * width + j) * weight)


@jit
def _tell(of: Any, ids: Any, n: int, guess: int) -> None:
    """Write a note of n experts to the pipe of the thread that reads them ahead; a full pipe drops the note."""
    note, one = words(of[EX_NOTE]), np.int64(1)
    note[NOTE_GUESS] = guess
    for i in range(NOTE_BITS, NOTE_WIDTH):
        note[i] = 0
    for i in range(n):
        note[NOTE_BITS + ids[i] // 64] |= one << (ids[i] % 64)
    invoke(of[EX_WRITE], (of[EX_PIPE], of[EX_NOTE], 8 * NOTE_WIDTH))


@jit
def _guess(address: int, of: Any, n_tokens: int, x: int, h: int, logits: int, scores: int, ids: int, rest: int) -> None:
    """Write a note of the experts that the router of mixture `of`, in the next layer, chooses for this layer's input x.

    The next layer's own input is similar, so most of its experts are among them.
    """
    n_experts, n_used = of[EX_COUNT], of[EX_USED]
    weight, bias, eps = of[EX_NORM_WEIGHT], of[EX_NORM_BIAS], np.float32(number(of[EX_NORM_EPS]))
    if of[EX_ROUTER_NORM] != 0:
        weight, bias, eps = of[EX_ROUTER_NORM], np.int64(0), np.float32(number(of[EX_ROUTER_EPS]))
    norm_rows(floats(x), n_tokens, of[EX_WIDTH], weight, bias, eps, floats(h))
    invoke(of[EX_PROJECT], (address, of[EX_ROUTER], n_tokens, h, 0, rest, logits))
    for t in range(n_tokens):
        at, groups = t * n_experts, of[EX_GROUPS]
        score(floats(logits), at, n_experts, of[EX_SIGMOID], of[EX_CHOICE_BIAS], groups, floats(scores))
        if groups != 0:
            keep_groups(floats(logits), at, n_experts, groups, of[EX_GROUPS_USED], floats(scores))
        choose(floats(logits), at, n_experts, n_used, words(ids), t * n_used)
    _tell(of, words(ids), n_tokens * n_used, 1)


@entry
def run_experts(address: int, block: int, n_tokens: int, x: int, residual: int, scratch: int, y: int) -> None:
    """Write `y = residual + norm(s)`, where s is the sum of `weight * expert(h)` over the experts of each row.

    h is the normed x, and `expert(h) = down(activation(gate(h)) * up(h))`, or `down(activation(up(h)))` without a gate.
    With EX_WEIGHS_INPUTS, a term is `expert(weight * h)`. Residual and norm may be absent. If there is a shared expert,
    all rows use it; its weight is the sigmoid of a product, or 1.

    Args:
        address: address of the pool's control block.
        block: address of the words of the mixture (`layout.py`).
        n_tokens: T.
        x: address of the input, (T, D).
        residual: address of the residual, (T, D); 0 if the input is the residual. The residual is added only if EX_ADDS
            is set.
        scratch: address, a multiple of 64, of `layout.expert_scratch` floats, followed by the scratch of `project`.
        y: address of the output, (T, D), other than the inputs.
    """
    b = words(block)
    n_experts, n_used, width, inner = b[EX_COUNT], b[EX_USED], b[EX_WIDTH], b[EX_INNER]
    n_pairs = n_tokens * n_used
    normed = scratch
    some = normed + _vectors(n_tokens * width)
    middle = some + _vectors(n_tokens * width)
    results = middle + _vectors(n_tokens * inner)
    logits = results + _vectors(n_tokens * width)
    scores = logits + _vectors(n_tokens * n_experts + LANES)
    weights = scores + _vectors(n_experts)
    ids = weights + _vectors(n_pairs)
    pairs = ids + _vectors(2 * n_pairs)
    first = pairs + _vectors(2 * n_pairs)
    rest = first + _vectors(2 * n_experts + 2)

    h, eps = floats(normed), np.float32(number(b[EX_NORM_EPS]))
    norm_rows(floats(x), n_tokens, width, b[EX_NORM_WEIGHT], b[EX_NORM_BIAS], eps, h)
    routed = normed
    if b[EX_ROUTER_NORM] != 0:
        eps = np.float32(number(b[EX_ROUTER_EPS]))
        norm_rows(floats(x), n_tokens, width, b[EX_ROUTER_NORM], 0, eps, floats(some))
        routed = some
    invoke(b[EX_PROJECT], (address, b[EX_ROUTER], n_tokens, routed, 0, rest, logits))
    sum_eps = np.float32(number(b[EX_SUM_EPS]))
    for t in range(n_tokens):
        score(
            floats(logits), t * n_experts, n_experts, b[EX_SIGMOID], b[EX_CHOICE_BIAS], b[EX_GROUPS], floats(scores)
        )  # fmt: skip
        if b[EX_GROUPS] != 0:
            keep_groups(floats(logits), t * n_experts, n_experts, b[EX_GROUPS], b[EX_GROUPS_USED], floats(first))
        choose(floats(logits), t * n_experts, n_experts, n_used, words(ids), t * n_used)
        weigh(
            floats(scores), n_experts, n_used, b[EX_NORMALIZE], b[EX_SIGMOID], sum_eps, b[EX_SCALES], words(ids),
            floats(weights), t * n_used,
        )  # fmt: skip
    if b[EX_NOTE] != 0:
        _tell(b, words(ids), n_pairs, 0)
        if b[EX_NEXT] != 0:
            _guess(address, words(b[EX_NEXT]), n_tokens, x, some, logits, scores, pairs, rest)
    _group(words(ids), n_pairs, n_experts, words(first), words(pairs))
    out = floats(y)
    out[: n_tokens * width] = 0
    for e in range(n_experts):
        begin = words(first)[e]
        n = words(first)[e + 1] - begin
        if n == 0:
            continue
        source = normed
        if n < n_tokens or b[EX_WEIGHS_INPUTS] != 0:
            _gather(h, width, words(pairs), begin, n, n_used, floats(some))
            source = some
        if b[EX_WEIGHS_INPUTS] != 0:
            _weigh_inputs(floats(some), width, words(pairs), begin, n, floats(weights))
        invoke(b[EX_PROJECT], (address, b[EX_TABLE + 2 * e], n, source, 0, rest, middle))
        invoke(b[EX_PROJECT], (address, b[EX_TABLE + 2 * e + 1], n, middle, 0, rest, results))
        _add(floats(results), width, words(pairs), begin, n, n_used, floats(weights), out)
    if b[EX_SHARED] != 0:
        invoke(b[EX_PROJECT], (address, b[EX_SHARED], n_tokens, normed, 0, rest, middle))
        invoke(b[EX_PROJECT], (address, b[EX_SHARED_DOWN], n_tokens, middle, 0, rest, results))
        if b[EX_SHARED_WEIGHT] != 0:
            invoke(b[EX_PROJECT], (address, b[EX_SHARED_WEIGHT], n_tokens, normed, 0, rest, logits))
            sigmoids(floats(logits), 0, n_tokens, floats(weights))
        for t in range(n_tokens):
            words(pairs)[t] = t
            if b[EX_SHARED_WEIGHT] == 0:
                put(floats(weights), t, np.float32(1))
        _add(floats(results), width, words(pairs), 0, n_tokens, 1, floats(weights), out)
    if b[EX_POST_NORM] != 0:
        norm_rows(out, n_tokens, width, b[EX_POST_NORM], 0, np.float32(number(b[EX_POST_EPS])), out)
    if b[EX_ADDS] != 0:
        added = floats(residual if residual != 0 else x)
        for i in range(n_tokens * width):
            put(out, i, get(added, i) + get(out, i))
