"""A mixture of experts in one call: norm, router, choice of experts, and the products of each chosen expert.

The rows (tokens) that use an expert are multiplied together, so the expert's matrices are read at most once. The
outputs of a row's experts are added in ascending order of the experts, so the bits of a row do not depend on the other
rows.

If only some experts are in memory, a thread reads the others from the file (`EX_STATE` in `build/layout.py`). The
kernel tells this thread which experts have been chosen. In a pass of at most PROGRAM_TOKENS tokens, the kernel also
tells the thread which experts the next layer will probably choose. In such a pass, it multiplies first with the
experts in memory, then with each of the others as soon as the thread has read it. It adds all outputs at the end, in
ascending order of the experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.exponentials import exp
from ..build.jit import entry, jit
from ..build.layout import (
    ANSWER_WORDS,
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
    EX_STATE,
    EX_SUM_EPS,
    EX_TABLE,
    EX_USED,
    EX_WEIGHS_INPUTS,
    EX_WIDTH,
    LANES,
    NOTE_FEW,
    NOTE_GUESS,
    NOTE_KINDS,
    NOTE_MANY,
    NOTE_WAITS,
    PROGRAM_TOKENS,
    STATE_ANSWER,
    STATE_ANSWERS,
    STATE_FAILED,
    STATE_NOTE,
    STATE_NUMBER,
    STATE_PIPE,
    STATE_READ,
    STATE_ROWS,
    STATE_WRITE,
    USE_HELD,
    USE_NONE,
    USE_WANTED,
)
from ..build.memory import floats, invoke, number, read, words, write
from ..build.vectors import add, div, fma, get, load, put, splat, store, sub, zeros
from .linear_job import ceil_div
from .norms import norm_rows


@jit
def _vector_bytes(n: int) -> Any:
    """Return the bytes of n floats, with n rounded up to whole SIMD vectors."""
    return ceil_div(n, LANES) * 4 * LANES


@jit
def choose(logits: Any, at: int, n_experts: int, n_used: int, ids: Any, to: int) -> None:
    """Write the ids of the experts with the `n_used` largest logits to `ids[to:]`; of equal logits, choose the first.

    The logits are `logits[at : at + n_experts]`.
    """
    n = 0
    for e in range(n_experts):
        value = get(logits, at + e)
        # Here, the n ids in ids[to : to + n] are in descending order of their logits.
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
    """Write the sigmoids of n logits from `logits[at]` on. Reads and writes extend to the end of a SIMD vector."""
    for e in range(0, n, LANES):
        store(out, e, div(splat(1.0), add(splat(1.0), exp(sub(zeros(), load(logits, at + e))))))


@jit
def score(logits: Any, at: int, n_experts: int, sigmoid: int, bias: int, groups: int, scores: Any) -> None:
    """Write the score of each expert: the sigmoid of its logit, or `exp(logit - largest logit)` for a softmax.

    Also replace the logits by the values by which `choose` ranks the experts: the sigmoids, or the probabilities of the
    softmax, plus the bias, if any. For a softmax without bias and groups, leave the logits unchanged: they rank the
    experts in the same order as the probabilities.

    `sigmoid` is 1 for sigmoids, 0 for a softmax. `bias` is the address of a number for each expert, or 0; `groups` is
    the number of groups, or 0. `logits[at:]` and `scores` have n_experts floats, rounded up to whole SIMD vectors.
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

    A group is ranked by the sum of its two largest values, or, if it has one expert, by the value of this expert. Of
    groups with equal sums, the first is better. `sums` is scratch memory of n_groups floats.
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
    """Compute the weights of the chosen experts from their scores, and write them to `weights[to:]`.

    With `normalize`, divide the scores by `sum_eps` plus the sum of the chosen experts' scores. Without `normalize`,
    divide the scores of a softmax by their sum over all experts, and leave sigmoids as they are. `scales` is 0, or the
    address of a number per expert, by which the expert's weight is multiplied.
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
    """Sort pairs of a row and an expert by their expert. Pair i has row `i // n_used` and expert `ids[i]`.

    Write to `first` and `pairs`, so that `pairs[first[e] : first[e + 1]]` has the numbers i of expert e's pairs.
    """
    for e in range(n_experts + 1):
        first[e] = 0
    for i in range(n_pairs):
        first[ids[i] + 1] += 1
    for e in range(n_experts):
        first[e + 1] += first[e]
    # After this loop, first[e] is the end of expert e's pairs, which is the start of the next expert's pairs.
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
    """Multiply the gathered rows of n pairs by their weights. Set the weights to 1, as `_add` multiplies by them."""
    for i in range(n):
        pair = pairs[first + i]
        for j in range(width):
            put(x, i * width + j, get(x, i * width + j) * get(weights, pair))
        put(weights, pair, np.float32(1))


@jit
def _add(results: Any, width: int, pairs: Any, first: int, n: int, n_used: int, weights: Any, out: Any) -> None:
    """Multiply the n `results` of one expert by the weights of their pairs; add them to the pairs' rows of `out`."""
    whole = width // LANES * LANES
    for i in range(n):
        pair = pairs[first + i]
        row, weight = pair // n_used * width, get(weights, pair)
        for j in range(0, whole, LANES):
            store(out, row + j, fma(load(results, i * width + j), splat(weight), load(out, row + j)))
        for j in range(whole, width):
            put(out, row + j, get(out, row + j) + get(results, i * width + j) * weight)


@jit
def _note(state: int, kind: int) -> None:
    """Write a note (NOTE_...), with the number of the mixture, to the pipe of the thread that reads experts."""
    s = words(state)
    s[STATE_NOTE] = s[STATE_NUMBER] * NOTE_KINDS + kind
    invoke(s[STATE_WRITE], (s[STATE_PIPE], state + 8 * STATE_NOTE, np.int64(8)))


@jit
def _want(state: int, ids: Any, n_pairs: int, n_experts: int, any_order: bool) -> None:
    """Tell the thread which experts the pass has chosen, and count the tokens of each expert.

    With `any_order`, also hold all of these experts, because the pass uses each of them as soon as it has been read. A
    held expert stays in memory.
    """
    s, uses = words(state), STATE_ROWS + n_experts
    for i in range(n_pairs):
        write(s, uses + ids[i], USE_HELD if any_order else USE_WANTED)
        s[uses + n_experts + ids[i]] += 1
    _note(state, NOTE_FEW if any_order else NOTE_MANY)


@jit
def _wait(state: int) -> None:
    """Block until the thread has read an expert, or has failed."""
    s = words(state)
    _note(state, NOTE_WAITS)
    invoke(s[STATE_READ], (s[STATE_ANSWERS], state + 8 * STATE_ANSWER, np.int64(8 * ANSWER_WORDS)))


@jit
def _any_held(state: int, n_experts: int) -> Any:
    """Return the first held expert that is in memory. If there is none, wait for one; return -1 if reading fails."""
    s = words(state)
    while read(s, STATE_FAILED) == 0:
        for e in range(n_experts):
            if s[STATE_ROWS + n_experts + e] == USE_HELD and read(s, STATE_ROWS + e) != 0:
                return e
        _wait(state)
    return -1


@jit
def _hold(state: int, n_experts: int, e: int) -> Any:
    """Mark expert e as held, and wait until it is in memory; return e, or -1 if reading fails."""
    s = words(state)
    # Mark e as held before checking whether e is in memory. The thread (`mark_expert`) marks e as absent before
    # checking whether e is held. So the pass sees that e is absent, or the thread sees that e is held, or both.
    write(s, STATE_ROWS + n_experts + e, USE_HELD)
    while read(s, STATE_FAILED) == 0:
        if read(s, STATE_ROWS + e) != 0:
            return e
        _wait(state)
    return -1


@entry
def mark_expert(state: int, n_experts: int, e: int, in_memory: int) -> None:
    """Mark an expert as in memory or as absent. If it is marked as absent while a pass holds it, undo the mark.

    The thread that reads experts calls this. A kernel that finds the expert marked as in memory also sees all that the
    thread wrote before this call.
    """
    s = words(state)
    write(s, STATE_ROWS + e, in_memory)
    if in_memory == 0 and read(s, STATE_ROWS + n_experts + e) == USE_HELD:
        write(s, STATE_ROWS + e, np.int64(1))


@jit
def _guess(address: int, of: Any, n_tokens: int, x: int, h: int, logits: int, scores: int, ids: int, rest: int) -> None:
    """Run the router of the next layer's mixture `of` on this layer's input x; mark the chosen experts as guessed.

    The next layer's input will be similar to x, so most guesses are right. The last five arguments are addresses of
    scratch memory.
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
    guesses = words(of[EX_STATE] + 8 * (STATE_ROWS + 3 * n_experts))
    for e in range(n_experts):
        guesses[e] = 0
    for i in range(n_tokens * n_used):
        guesses[words(ids)[i]] = 1


@entry
def run_experts(address: int, block: int, n_tokens: int, x: int, residual: int, scratch: int, y: int) -> None:
    """Write `y = residual + post_norm(s)`. A row of s is the sum of `weight * expert(h)` over the row's experts.

    h is the normed x, and `expert(h) = down(activation(gate(h)) * up(h))`, or `down(activation(up(h)))` without a gate.
    With EX_WEIGHS_INPUTS, a term is `expert(weight * h)`. Residual and post_norm may be absent. A shared expert is used
    by all rows; its weight is 1, or the sigmoid of the product of h and EX_SHARED_WEIGHT.

    Args:
        address: address of the thread pool's control block.
        block: address of the mixture's words, EX_... in `build/layout.py`.
        n_tokens: T.
        x: address of the input, (T, D).
        residual: address of the residual, (T, D); 0 if the input is the residual. The residual is added only if EX_ADDS
            is set.
        scratch: address, a multiple of 64, of `layout.expert_scratch` floats, followed by the scratch of EX_PROJECT.
        y: address of the output, (T, D), not x or the residual.
    """
    b = words(block)
    n_experts, n_used, width, inner = b[EX_COUNT], b[EX_USED], b[EX_WIDTH], b[EX_INNER]
    n_pairs = n_tokens * n_used
    normed = scratch
    some = normed + _vector_bytes(n_tokens * width)
    middle = some + _vector_bytes(n_tokens * width)
    results = middle + _vector_bytes(n_tokens * inner)
    state = b[EX_STATE]
    any_order = state != 0 and n_tokens <= PROGRAM_TOKENS
    logits = results + _vector_bytes((n_pairs if any_order else n_tokens) * width)
    scores = logits + _vector_bytes(n_tokens * n_experts + LANES)
    weights = scores + _vector_bytes(n_experts)
    ids = weights + _vector_bytes(n_pairs)
    pairs = ids + _vector_bytes(2 * n_pairs)
    first = pairs + _vector_bytes(2 * n_pairs)
    rest = first + _vector_bytes(2 * n_experts + 2)

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
    if state != 0:
        _want(state, words(ids), n_pairs, n_experts, any_order)
        if b[EX_NEXT] != 0 and any_order:
            _guess(address, words(b[EX_NEXT]), n_tokens, x, some, logits, scores, pairs, rest)
            _note(state, NOTE_GUESS)
    _group(words(ids), n_pairs, n_experts, words(first), words(pairs))
    out = floats(y)
    out[: n_tokens * width] = 0
    n_chosen = 0
    for e in range(n_experts):
        n_chosen += words(first)[e + 1] > words(first)[e]
    e = -1
    for _ in range(n_chosen):
        if any_order:
            e = _any_held(state, n_experts)
        else:
            e += 1
            while words(first)[e + 1] == words(first)[e]:
                e += 1
            if state != 0:
                e = _hold(state, n_experts, e)
        if e < 0:
            break
        begin = words(first)[e]
        n = words(first)[e + 1] - begin
        result = results + 4 * begin * width if any_order else results
        source = normed
        if n < n_tokens or b[EX_WEIGHS_INPUTS] != 0:
            _gather(h, width, words(pairs), begin, n, n_used, floats(some))
            source = some
        if b[EX_WEIGHS_INPUTS] != 0:
            _weigh_inputs(floats(some), width, words(pairs), begin, n, floats(weights))
        invoke(b[EX_PROJECT], (address, b[EX_TABLE + 2 * e], n, source, 0, rest, middle))
        invoke(b[EX_PROJECT], (address, b[EX_TABLE + 2 * e + 1], n, middle, 0, rest, result))
        if not any_order:
            _add(floats(result), width, words(pairs), begin, n, n_used, floats(weights), out)
        if state != 0:
            write(words(state), STATE_ROWS + n_experts + e, USE_NONE)
    for e in range(n_experts if any_order else 0):
        begin = words(first)[e]
        n = words(first)[e + 1] - begin
        _add(floats(results + 4 * begin * width), width, words(pairs), begin, n, n_used, floats(weights), out)
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
