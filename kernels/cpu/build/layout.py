"""The binary interface between Python and the compiled kernels: descriptors of blocks, jobs and programs, and sizes.

A descriptor is an array of words. A word is an int64: a number, an address, or the bits of a float64. This module needs
no compiler: a process that loads machine code from disk imports only this module and `library.py`.
"""

from __future__ import annotations

# Floats of a vector.
LANES = 16


def whole_vectors(n: int) -> int:
    """Return n rounded up to a multiple of LANES."""
    return -(-n // LANES) * LANES


# Bytes of a cache line.
LINE_BYTES = 64

# Activations of a product, or of the gate of a gated feed-forward network; 0 is none. The last is for a gate only.
SILU, GELU, CLAMPED_SWIGLU, GELU_ERF, RELU2 = 1, 2, 3, 4, 5

# ---- a pool's control block ----

# Words of the control block. Words that threads write are on cache lines of their own. SCRATCH is the address of the
# threads' scratch memory. The words of the job begin at JOB. From LEFT on each thread has one cache line, whose first
# word is the number of chunks left in the thread's range. While ON is 1, more jobs follow and no thread parks. After
# SPINS polls without work a thread sleeps between polls, by the function of the system at the address SLEEP.
DONE, STOP, ON = 0, 16, 17
TASK, CHUNKS, THREADS, SCRATCH, SPINS, SLEEP, JOB, LEFT = 32, 33, 34, 35, 36, 37, 40, 256
LINE = 16
# The system adds about 50 microseconds to a sleep.
SLEEP_MICROSECONDS = 20
# Bytes of scratch memory of each thread. The last scratch memory is that of the thread that submits a job.
SCRATCH_BYTES = 4 << 20

# ---- a block: linear layers that share one input ----

# Words of a block: tasks for gemv, gemm and the preparation of gemm's input. NORM_WEIGHT, NORM_EPS and NORM_BIAS are a
# norm of the input: none if NORM_WEIGHT is 0, an RMS norm if NORM_BIAS is 0, else a layer norm. N and K are those of
# all matrices together. CHUNK_GEMV and CHUNK_GEMM are rows of a chunk; HAND_OUT is 0 if one thread runs a small batch
# faster than several. MATRICES is the number of matrices. The POST_NORM words are a norm of the output. HAS_GEMV is 0
# if rows cannot be multiplied as they are stored. FIXED is the number of matrices whose products are in fixed point,
# by the tasks FIXED_GEMM and FIXED_PREPARE, or for a few tokens FIXED_GEMV and FIXED_RECORDS. From TABLE on each matrix
# has WIDTH words: WEIGHTS (its address), ROWS, BIAS (an address or 0), COLUMN (the first column of its products in the
# output), CHUNK (the number of its first chunk in a job), and from FORMAT on the words of its format.
(
    TASK_GEMV, TASK_GEMM, TASK_PREPARE, NORM_WEIGHT, NORM_EPS, NORM_BIAS, N, K, ACTIVATION, CHUNK_GEMV, CHUNK_GEMM,
    HAND_OUT, MATRICES, POST_NORM_WEIGHT, POST_NORM_EPS, POST_NORM_BIAS, HAS_GEMV,
    FIXED, FIXED_GEMM, FIXED_PREPARE, FIXED_GEMV, FIXED_RECORDS,
) = range(22)  # fmt: skip
# From OWN on, words that each job sets itself.
OWN, TABLE = 22, 32
WEIGHTS, ROWS, BIAS, COLUMN, CHUNK, FORMAT = range(6)
# Words of a format (`format.py`): the addresses of its kernels, weights and bytes of a block, and the most vectors
# that are multiplied with its rows as they are stored. Words of a matrix that is multiplied in fixed point follow:
# PANEL, the address of the kernel that expands rows to panels (0 for other matrices); PANEL_KIND, the kind of the
# format (`panels.py`); PANEL_MOST, the most tokens that are multiplied with rows as they are stored; EIGHT_ROWS, the
# address of the kernel that does this (`fixed_rows.py`).
FOUR_ROWS, EXPAND, BLOCK_WEIGHTS, BLOCK_BYTES, MOST_STORED, FORMAT_WIDTH = range(6)
PANEL = FORMAT + FORMAT_WIDTH
PANEL_KIND, PANEL_MOST, EIGHT_ROWS, WIDTH = range(PANEL + 1, PANEL + 5)
MOST_MATRICES = 8

# Columns that a dot product sums before it adds their sum to its total: part of the order of summation (`tile.py`). A
# smaller number spends more time on totals; a larger one loses precision and expands rows into more memory.
STRETCH = 1024
# Rows of a register tile.
TILE_ROWS = 4

# A forward pass of at most this many tokens runs all layers in one call. A larger pass makes one call per step, and
# Python handles Ctrl-C between calls.
PROGRAM_TOKENS = 32
# The most vectors that are multiplied with rows as they are stored. Scratch memory holds these vectors after the norm.
PANEL_TOKENS = 18
# The most tokens for which one thread prepares the input of gemm, and attention runs its decode task.
SMALL_BATCH = 8
# A core reads four streams of memory faster than one (benchmarks/ways.py). So a gemv chunk has rows from up to MAX_WAYS
# ranges of its matrix.
MAX_WAYS = 4
# Bytes of stored rows in a gemv chunk, and the largest matrix that one thread multiplies alone: measured by
# benchmarks/chunks.py. Smaller chunks cost more to distribute than they gain by an even distribution.
CHUNK_BYTES = 64 * 1024
# Chunks of long jobs are larger: 1 / LONG_JOB of the job's bytes, up to MOST_CHUNK_BYTES. This makes decode of a 0.6B
# model 3 to 5 % faster; a small model would be slower, because threads would have too few chunks.
MOST_CHUNK_BYTES, LONG_JOB = 128 * 1024, 16
# Rows and vectors of a gemm chunk. STRETCH columns of 64 expanded rows fit into a core's L2 cache. With more rows, the
# vectors are read less often; with more vectors, the rows are expanded less often. A job with fewer than GEMM_CHUNKS
# chunks per thread has chunks of fewer rows, because threads wait for the last chunk of a job.
GEMM_ROWS, GEMM_TOKENS, GEMM_CHUNKS = 64, 128, 8
# The most vectors for which gemm expands four rows at a time: the rows stay in the L1 cache, and the vectors are read
# from the L2 cache.
GEMM_NEAR = 48

# ---- a block of query and key heads ----

# Words: the task, the numbers of query and key heads, their head dim, and the norms of both; a weight of 0 is no norm.
HEADS_TASK, Q_HEADS, K_HEADS, HEAD_DIM, Q_NORM_WEIGHT, Q_NORM_EPS, K_NORM_WEIGHT, K_NORM_EPS = range(8)

# ---- a mixture of experts ----

# Words, in order: the entry `project`; a norm of the input as in a block; the router's block; the number of experts X;
# how many a row uses; whether the weights of a row add up to 1; D; the largest F; RMS norms of the router's input and
# of the sum of the experts (a weight of 0 is no norm); the address of factors (X,) of the weights, or 0; three blocks
# of a shared expert (gate and up, down, its weight; 0 for none); whether the residual is added; whether scores are
# sigmoids; the address of a bias (X,) for the choice of experts, or 0; the number of groups of experts and how many are
# kept, or 0; a float64 that is added to the sum of weights; whether weights are multiplied with inputs (of one
# expert). Two words are 0 unless some experts are in memory and a thread reads the others: the address of the state
# (below), and the words of the next layer's mixture, or 0. From EX_TABLE on each expert has two words, its block of
# gate and up and its block of down.
(
    EX_PROJECT, EX_NORM_WEIGHT, EX_NORM_EPS, EX_NORM_BIAS, EX_ROUTER, EX_COUNT, EX_USED, EX_NORMALIZE, EX_WIDTH,
    EX_INNER, EX_ROUTER_NORM, EX_ROUTER_EPS, EX_POST_NORM, EX_POST_EPS, EX_SCALES, EX_SHARED, EX_SHARED_DOWN,
    EX_SHARED_WEIGHT, EX_ADDS, EX_SIGMOID, EX_CHOICE_BIAS, EX_GROUPS, EX_GROUPS_USED, EX_SUM_EPS,
    EX_WEIGHS_INPUTS, EX_STATE, EX_NEXT, EX_TABLE,
) = range(28)  # fmt: skip
# Words of the state of a mixture's experts: the note that is written to the reading thread; the number of the mixture;
# whether reading has failed; the system's functions `write` and `read`; the pipes to the thread and from it; 8 words
# for what comes from it; then, from STATE_ROWS on, four words for each expert: whether it is in memory, whether a pass
# uses it (USE_*), how many tokens have chosen it, and whether the mixture before has guessed it.
(
    STATE_NOTE, STATE_NUMBER, STATE_FAILED, STATE_WRITE, STATE_READ, STATE_PIPE, STATE_ANSWERS, STATE_ANSWER,
) = range(8)  # fmt: skip
ANSWER_WORDS = 8
STATE_ROWS = STATE_ANSWER + ANSWER_WORDS
# An expert that is wanted may be replaced in memory until it is held.
USE_NONE, USE_WANTED, USE_HELD = range(3)
# A note is the number of the mixture times NOTE_KINDS plus one of these: few tokens have chosen experts, which are
# multiplied in the order in which they are read; many have, and their experts are multiplied in ascending order; the
# experts of the next mixture are guessed; the kernel waits for an expert. A negative note ends the thread.
NOTE_FEW, NOTE_MANY, NOTE_GUESS, NOTE_WAITS, NOTE_KINDS = range(5)


def expert_scratch(n_tokens: int, n_experts: int, n_used: int, width: int, inner: int, *, waits: bool = False) -> int:
    """Return how many floats of memory a mixture needs: for rows, logits, weights, and int64 numbers of pairs.

    With `waits`, experts may be read while the mixture runs. The results of few tokens are then kept for each pair.
    """
    results = width * n_used if waits and n_tokens <= PROGRAM_TOKENS else width
    per_token = (width, width, inner, results, n_experts, n_used, 2 * n_used, 2 * n_used)
    fixed = (LANES, n_experts, 2 * n_experts + 2)
    return sum(whole_vectors(n) + LANES for n in (*(n_tokens * size for size in per_token), *fixed))


# ---- a program: the steps of a model's layers ----

# Words of a program: the addresses of the entries and tasks that its steps call, 0 for those that no step calls, then
# from STEPS on the steps, STEP_WIDTH words each.
(
    ENTRY_PROJECT, ENTRY_ATTEND, TASK_ATTEND_DECODE, TASK_ATTEND_PREFILL, ENTRY_HEADS, ENTRY_PUT, TASK_PUT_SPAN,
    ENTRY_NORM_ADD, ENTRY_EXPERTS, ENTRY_GATE, TASK_GATE, ENTRY_CONVOLVE, ENTRY_DELTA, ENTRY_SPACE, STEPS,
) = range(15)  # fmt: skip
# Operations of a step (OP).
PROJECT, HEADS, KV_APPEND, ATTENTION, COPY, GATE, CONVOLVE, DELTA, EXPERTS, MULTIPLY, SCALE, NORM_ADD = range(12)
# Steps that run between two calls of the kernels: sum the values of all ranks, or concatenate their columns.
ALL_SUM, ALL_COLUMNS = 12, 13
# The state space of Mamba2; a product of each head, N_HEADS blocks at STEP_BLOCK, which reads N_KV_HEADS elements of a
# head and writes ROW_WIDTH; the elements of each head of A, ROW_WIDTH, and then those of B, N_KV_HEADS.
SPACE, HEAD_LINEAR, JOIN = 14, 15, 16
# Words of a step. All values are in one array: a value begins T * AT floats after its start, or COLUMN floats later if
# it is some columns of a wider value. ROW is the distance of rows of an input, in floats. An input whose AT is -1 is
# absent. A step with WANTED processes only the wanted rows; FROM_ALL means that its input still has all rows. ROW_WIDTH
# is the head dim, or the width of copied, multiplied or scaled rows. STEP_SCALE (also the factor of SCALE) and
# STEP_SOFTCAP are the bits of float64 numbers; 0 is no soft cap. STEP_SINKS is the address of sinks (H,), or 0.
(
    OP, WANTED, A_AT, A_COLUMN, A_ROW, B_AT, B_COLUMN, B_ROW, OUT, OUT_2, STEP_BLOCK, LAYER, COS, SIN, N_HEADS,
    N_KV_HEADS, ROW_WIDTH, FROM_ALL, STEP_SCALE, STEP_SOFTCAP, STEP_SINKS, C_AT, C_COLUMN, C_ROW, D_AT, D_COLUMN,
    D_ROW, STEP_WIDTH,
) = range(28)  # fmt: skip
# Words of a forward pass: the numbers of tokens, of wanted rows and of sequences; tokens per page; the addresses of the
# tokens' positions (T,) and of the indices of the wanted rows (R,), both int64; the address and the number of the runs.
(
    PASS_TOKENS, PASS_ROWS, PASS_SEQUENCES, PASS_PAGE, PASS_POSITIONS, PASS_WANTED, PASS_RUNS, PASS_N_RUNS, PASS_WIDTH,
) = range(9)  # fmt: skip
# Words of a layer's keys and values: the address of its store, the store's slots per head, the layer's window or 0,
# the address of the words of its group (the addresses of the sequences' words and of the new tokens' slots (T,)), and
# the type of the store; its number of arrays, 1 if keys are values, too. A layer with a state has the addresses of the
# stores of its one or two arrays instead.
KV_STORE, KV_SLOTS, KV_WINDOW, KV_GROUP, KV_TYPE, STATE_STORE, STATE_STORE_2, KV_ARRAYS, KV_WIDTH = range(9)
GROUP_SEQUENCES, GROUP_SLOTS, GROUP_WIDTH = range(3)

# ---- states ----

# Words of a convolution: the task, the address of its weights (taps, C), the numbers of taps and channels, whether
# SiLU is applied to its output, and the address of its bias (C,), or 0.
CONV_TASK, CONV_WEIGHT, CONV_TAPS, CONV_CHANNELS, CONV_SILU, CONV_BIAS, CONV_WIDTH = range(7)
# Words of a delta rule: the task, the addresses of rates and biases of the time step, the number and width of key
# heads, the number and width of value heads, SHARED, and the norm of the output. Value head h uses key head
# h // SHARED, modulo the number of key heads.
(
    DELTA_TASK, DELTA_RATE, DELTA_BIAS, DELTA_KEYS, DELTA_KEY_DIM, DELTA_VALUES, DELTA_VALUE_DIM, DELTA_SHARED,
    DELTA_NORM, DELTA_EPS, DELTA_WIDTH,
) = range(11)  # fmt: skip
# Words of a state space: its task, the task of the norm of its output, the addresses of rates, of biases of the time
# step and of skips, the number and width of heads, the number and width of groups, and for the norm: the address of its
# weight or 0, its epsilon (a float64), and its number of groups.
(
    SPACE_TASK, SPACE_NORM_TASK, SPACE_RATE, SPACE_BIAS, SPACE_SKIP, SPACE_HEADS, SPACE_HEAD_DIM, SPACE_GROUPS,
    SPACE_STATE_DIM, SPACE_NORM, SPACE_EPS, SPACE_NORM_GROUPS, SPACE_WIDTH,
) = range(13)  # fmt: skip
# Words of a run, which is consecutive rows of one sequence: its first row, its number of rows, and the slots of the
# states before and after these rows.
RUN_FIRST, RUN_ROWS, RUN_SOURCE, RUN_TARGET, RUN_WIDTH = range(5)

# ---- attention ----

# Types of a KV store. A row is E elements: one head of one token.
KV_F32, KV_F16, KV_BF16, KV_Q8_0 = range(4)
KV_TYPES = {"f32": KV_F32, "f16": KV_F16, "bf16": KV_BF16, "q8_0": KV_Q8_0}
# Keys of a block, counted from position 0: part of the order of summation (`attention.py`).
BLOCK = 128
# Words of a sequence: the address of its page table, which has the slot of each page's first token; the number of its
# tokens, including those of the pass; how many of its last tokens are new, and how many are wanted. A job sets the
# other words: its first row, its first chunk, its first block of keys, its first row of results of blocks, and its
# number of blocks.
(
    SEQ_PAGES, SEQ_LENGTH, SEQ_NEW, SEQ_WANTED, SEQ_ROW, SEQ_CHUNK, SEQ_BEGIN, SEQ_PART, SEQ_BLOCKS, SEQ_WIDTH,
) = range(10)  # fmt: skip
# Queries of a prefill chunk, counting all heads that share a KV head. These queries and their sums fit into a part of a
# core's L2 cache.
QUERIES = 192
# Distance in floats between the scores of one query and of the next.
SCORES = BLOCK + LANES


def attention_span(group: int) -> int:
    """Return the number of tokens of a prefill chunk, with `group` query heads per KV head.

    With many heads it is less than LANES, because queries and sums of LANES tokens would not fit into the cache.
    """
    tokens = QUERIES // group
    return tokens // LANES * LANES if tokens >= LANES else max(1, tokens)


def attention_scratch(group: int, width: int, type_: int = KV_F32) -> int:
    """Return the bytes of scratch memory of a chunk with `group` query heads of head dim `width` per KV head.

    Keys and values of a block that are not float32 are expanded there.
    """
    prefill, decode = attention_span(group) * group * (2 * width + LANES), SMALL_BATCH * group * width
    expanded = 0 if type_ == KV_F32 else 2 * BLOCK * width
    return 4 * (max(prefill, decode) + LANES * (SCORES + width + LANES) + expanded + LANES)
