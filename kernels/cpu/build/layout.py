"""The binary interface between Python and the compiled kernels: sizes, and descriptors of blocks, jobs and programs.

A descriptor is an array of words. A word is an int64: a number, an address, or the bits of a float64. Names that follow
a comment "Words of ..." are positions of words in a descriptor. A task is a compiled function that a pool's threads run
for each chunk of a job (`jobs.py`). An entry is a compiled function that Python or a program calls. Importing this
module needs neither Numba nor LLVM.
"""

from __future__ import annotations

# Number of floats of a SIMD vector, on every processor (`vectors.py`).
LANES = 16


def whole_vectors(n: int) -> int:
    """Return n rounded up to a multiple of LANES."""
    return -(-n // LANES) * LANES


def input_row(n: int) -> int:
    """Return the distance in floats between input rows of n elements in scratch memory.

    The distance is an odd number of SIMD vectors, so that the elements of a column are spread over the sets of
    the L1 cache. With rows 4,096 bytes apart (n = 1024), all elements of a column would be in one set.
    """
    return (n + LANES - 1) // LANES // 2 * 2 * LANES + LANES


def product_floats(n: int) -> int:
    """Return the number of floats of scratch memory that a product with n columns needs for each token.

    Products in fixed point with AMX need 40 floats per 32 columns (`fixed_tile.TOKEN_WORDS`), all other products at
    most `input_row(n)` floats.
    """
    return max(whole_vectors(n + n // 4), input_row(n))


# Bytes of a cache line.
LINE_BYTES = 64

# Activation functions of a product, or of the gate of a gated FFN; 0 is none. CLAMPED_SWIGLU is for a gate only.
SILU, GELU, CLAMPED_SWIGLU, GELU_ERF, RELU2 = 1, 2, 3, 4, 5

# ---- a thread pool's control block ----

# Words of the control block, which all threads of a pool share. A word that several threads write shares its cache line
# with no other word.
# - DONE: number of finished chunks; STOP: 1 to end the threads; ON: 1 while more jobs follow, so that no thread parks
#   (blocks until it is woken)
# - TASK, CHUNKS: address of the job's task, and number of its chunks; THREADS: number of threads
# - SCRATCH: address of the threads' scratch memory
# - SPINS: after this number of polls without work, a thread sleeps between polls; SLEEP: address of the C function
#   that sleeps
# - JOB: the first word of the job
# From LEFT on, each thread has LINE words (two cache lines); the first word is the number of chunks left in its range.
DONE, STOP, ON = 0, 16, 17
TASK, CHUNKS, THREADS, SCRATCH, SPINS, SLEEP, JOB, LEFT = 32, 33, 34, 35, 36, 37, 40, 256
LINE = 16
# The argument of the C function at address SLEEP. Each sleep takes about 50 microseconds longer than this.
SLEEP_MICROSECONDS = 20
# Bytes of a scratch memory. Each thread has one; the thread that submits a job has two (`jobs.scratch_of`).
SCRATCH_BYTES = 4 << 20

# ---- a block: linear layers that share one input ----

# Words of a block:
# - TASK_GEMV, TASK_GEMM, TASK_PREPARE: the tasks of gemv, of gemm, and of the preparation of gemm's input
# - NORM_WEIGHT, NORM_EPS, NORM_BIAS: a norm of the input. NORM_WEIGHT is 0 if there is no norm. NORM_BIAS is 0 for an
#   RMS norm, and an address for a layer norm. POST_NORM_...: a norm of the output, in the same form
# - N, K: columns of the output and of the input; ACTIVATION: an activation function, or 0
# - CHUNK_GEMV, CHUNK_GEMM: rows of a chunk; `linear.py` adapts them to the number of tokens
# - HAND_OUT: 0 if one thread runs a small batch faster than several threads
# - MATRICES: the number of matrices; HAS_GEMV: 0 if rows cannot be multiplied as they are stored
# - FIXED: the number of matrices that are multiplied in fixed point (`--activations i16`)
# - FIXED_GEMM, FIXED_PREPARE: the tasks of products in fixed point, and of the preparation of their input
# - FIXED_GEMV, FIXED_RECORDS: for few tokens, the tasks that replace FIXED_GEMM and FIXED_PREPARE
# From TABLE on, each matrix has WIDTH words: WEIGHTS (an address), ROWS, BIAS (an address or 0), COLUMN (the first
# column of its products in the output), CHUNK (the number of its first chunk in a job), and from FORMAT on the
# words of its format.
(
    TASK_GEMV, TASK_GEMM, TASK_PREPARE, NORM_WEIGHT, NORM_EPS, NORM_BIAS, N, K, ACTIVATION, CHUNK_GEMV, CHUNK_GEMM,
    HAND_OUT, MATRICES, POST_NORM_WEIGHT, POST_NORM_EPS, POST_NORM_BIAS, HAS_GEMV,
    FIXED, FIXED_GEMM, FIXED_PREPARE, FIXED_GEMV, FIXED_RECORDS,
) = range(22)  # fmt: skip
# The words from OWN to TABLE - 1 are set anew for each job (`linear_job.py`).
OWN, TABLE = 22, 32
WEIGHTS, ROWS, BIAS, COLUMN, CHUNK, FORMAT = range(6)
# Words of a format (`format.py`):
# - FOUR_ROWS, EXPAND: addresses of the kernel of gemv, and of the kernel that expands blocks to float32
# - BLOCK_WEIGHTS, BLOCK_BYTES: number of weights and of bytes of a quantised block
# - MOST_STORED: for at most this number of input vectors, rows are multiplied as they are stored
# The next words are 0, except for a matrix that is multiplied in fixed point:
# - PANEL: address of the kernel that expands rows to panels (interleaved quants, `panels.py`); PANEL_KIND: the kind of
#   the format, a sum of BIASED, HALVES, ...
# - PANEL_MOST: for at most this number of tokens, rows are multiplied as they are stored
# - EIGHT_ROWS: address of the kernel that multiplies rows as they are stored (`fixed_rows.py`)
FOUR_ROWS, EXPAND, BLOCK_WEIGHTS, BLOCK_BYTES, MOST_STORED, FORMAT_WIDTH = range(6)
PANEL = FORMAT + FORMAT_WIDTH
PANEL_KIND, PANEL_MOST, EIGHT_ROWS, WIDTH = range(PANEL + 1, PANEL + 5)
# The most matrices of a block.
MOST_MATRICES = 8

# A dot product sums this number of columns, and then adds the sum to its total. This is part of the order of summation
# (`tile.py`), so changing the number changes bits. A smaller number would take more time for totals; a larger one would
# lose precision, and expand rows into more memory.
STRETCH = 1024
# Number of matrix rows of a register tile (`tile.py`).
TILE_ROWS = 4

# A forward pass of at most this number of tokens runs all layers in one call. A larger pass makes one call per step, so
# that Python handles Ctrl-C between the calls.
PROGRAM_TOKENS = 32
# The most input vectors that any format multiplies with rows as they are stored. A scratch memory has space for this
# number of normed vectors.
PANEL_TOKENS = 18
# Up to this number of tokens, one thread prepares the input of gemm, attention runs its decode task, and a short
# convolution is a single chunk.
SMALL_BATCH = 8
# A core reads four streams of memory faster than one stream (benchmarks/ways.py). So a gemv chunk has rows from up to
# MAX_WAYS ranges of its matrix.
MAX_WAYS = 4
# A gemv chunk has about this number of bytes of stored rows. If the matrices of a block have at most this size
# together, one thread multiplies a small batch with them. Distributing smaller chunks costs more time than a more even
# distribution saves (benchmarks/chunks.py).
CHUNK_BYTES = 64 * 1024
# Chunks of long jobs are larger: 1 / LONG_JOB of the job's bytes, up to MOST_CHUNK_BYTES. This makes decode of a 0.6B
# model 3 to 5 % faster. Short jobs would have too few chunks of this size for all threads.
MOST_CHUNK_BYTES, LONG_JOB = 128 * 1024, 16
# In float32, a gemm chunk has GEMM_ROWS rows and up to GEMM_TOKENS input vectors. With a gate, half of the rows are of
# the gate matrix, and half of the up matrix. With more rows, vectors would be read less often. With more vectors, rows
# would be expanded less often. But STRETCH columns of the expanded rows must fit into a core's L2 cache. If a job has
# fewer than GEMM_CHUNKS chunks per thread, its chunks get fewer rows, because threads wait for the last chunk.
GEMM_ROWS, GEMM_TOKENS, GEMM_CHUNKS = 64, 128, 8
# Up to this number of vectors, gemm expands only four rows at a time, so that the rows stay in the L1 cache.
GEMM_NEAR = 48

# ---- a block of query and key heads ----

# Words of a block of heads: the task, the numbers of query heads and of key heads, their head dim, and the RMS norms of
# query and key heads. There is no norm if the address of its weight is 0.
HEADS_TASK, Q_HEADS, K_HEADS, HEAD_DIM, Q_NORM_WEIGHT, Q_NORM_EPS, K_NORM_WEIGHT, K_NORM_EPS = range(8)

# ---- a mixture of experts ----

# Words of a mixture:
# - EX_PROJECT: address of the entry `project`; EX_NORM_...: a norm of the input, as in a block
# - EX_ROUTER: address of the router's block; EX_ROUTER_NORM, EX_ROUTER_EPS: an RMS norm of the router's input (0: none)
# - EX_COUNT: the number of experts X; EX_USED: the number of experts per row
# - EX_NORMALIZE: whether the weights of a row's experts are divided by their sum; EX_SUM_EPS: a float64 added to this
#   sum
# - EX_WIDTH: the width D of a row; EX_INNER: the largest inner width of an expert; EX_POST_NORM, EX_POST_EPS: an RMS
#   norm of the sum of the experts (0: none)
# - EX_SCALES: address of factors (X,) of the weights, or 0
# - EX_SHARED, EX_SHARED_DOWN, EX_SHARED_WEIGHT: addresses of the blocks of a shared expert, or 0: gate and up; down;
#   the linear layer that computes the expert's weight
# - EX_ADDS: whether the residual is added; EX_SIGMOID: whether the router's scores are sigmoids, not a softmax
# - EX_CHOICE_BIAS: address of a bias (X,) that affects only the choice of experts, or 0
# - EX_GROUPS, EX_GROUPS_USED: the number of groups of experts, and in how many groups a row's experts may be;
#   both are 0 if experts have no groups
# - EX_WEIGHS_INPUTS: whether the weight multiplies an expert's input, not its output (only with one expert per row)
# - EX_STATE: address of the state (below) if a thread reads the experts that are not in memory, else 0
# - EX_NEXT: address of the words of the next layer's mixture if its experts are guessed, else 0
# From EX_TABLE on, each expert has two words: the addresses of its block of gate and up, and of its block of down.
(
    EX_PROJECT, EX_NORM_WEIGHT, EX_NORM_EPS, EX_NORM_BIAS, EX_ROUTER, EX_COUNT, EX_USED, EX_NORMALIZE, EX_WIDTH,
    EX_INNER, EX_ROUTER_NORM, EX_ROUTER_EPS, EX_POST_NORM, EX_POST_EPS, EX_SCALES, EX_SHARED, EX_SHARED_DOWN,
    EX_SHARED_WEIGHT, EX_ADDS, EX_SIGMOID, EX_CHOICE_BIAS, EX_GROUPS, EX_GROUPS_USED, EX_SUM_EPS,
    EX_WEIGHS_INPUTS, EX_STATE, EX_NEXT, EX_TABLE,
) = range(28)  # fmt: skip
# Words of the state of a mixture's experts, which kernels share with the thread that reads experts:
# - STATE_NOTE: the note (below) that a kernel sends to the thread; STATE_NUMBER: the number of the mixture
# - STATE_FAILED: whether reading has failed
# - STATE_WRITE, STATE_READ: addresses of the C functions `write` and `read`
# - STATE_PIPE, STATE_ANSWERS: file descriptors of the pipe to the thread, and of the pipe from it
# - STATE_ANSWER: ANSWER_WORDS words, for the thread's answers
# From STATE_ROWS on there are four arrays with a word for each expert: whether the expert is in memory; whether a pass
# uses it (USE_...); how many tokens have chosen it; whether the previous layer's mixture has guessed it.
(
    STATE_NOTE, STATE_NUMBER, STATE_FAILED, STATE_WRITE, STATE_READ, STATE_PIPE, STATE_ANSWERS, STATE_ANSWER,
) = range(8)  # fmt: skip
ANSWER_WORDS = 8
STATE_ROWS = STATE_ANSWER + ANSWER_WORDS
# USE_WANTED: a pass will use the expert, but until then its memory may be given to another expert. USE_HELD: the expert
# stays in memory until the pass has multiplied it.
USE_NONE, USE_WANTED, USE_HELD = range(3)
# A note is the number of the mixture times NOTE_KINDS, plus a kind. A negative note ends the thread.
# - NOTE_FEW: the experts of few tokens have been chosen; they are multiplied in the order in which they are read
# - NOTE_MANY: the experts of many tokens have been chosen; they are multiplied in ascending order
# - NOTE_GUESS: experts of the next mixture have been guessed; NOTE_WAITS: the kernel waits for an expert
NOTE_FEW, NOTE_MANY, NOTE_GUESS, NOTE_WAITS, NOTE_KINDS = range(5)


def expert_scratch(n_tokens: int, n_experts: int, n_used: int, width: int, inner: int, *, waits: bool = False) -> int:
    """Return the number of floats of scratch memory that `run_experts` needs; an int64 counts as two floats.

    With `waits`, experts may be read while the mixture runs. With `waits` and at most PROGRAM_TOKENS tokens, the
    results of all (row, expert) pairs are kept until the end.
    """
    results = width * n_used if waits and n_tokens <= PROGRAM_TOKENS else width
    per_token = (width, width, inner, results, n_experts, n_used, 2 * n_used, 2 * n_used)
    fixed = (LANES, n_experts, 2 * n_experts + 2)
    return sum(whole_vectors(n) + LANES for n in (*(n_tokens * size for size in per_token), *fixed))


# ---- a program: the steps of a model's layers ----

# Words of a program: the addresses of the entries and tasks that its steps call. The address is 0 if no step calls the
# function. The steps begin at STEPS, with STEP_WIDTH words each.
(
    ENTRY_PROJECT, ENTRY_ATTEND, TASK_ATTEND_DECODE, TASK_ATTEND_PREFILL, ENTRY_HEADS, ENTRY_PUT, TASK_PUT_SPAN,
    ENTRY_NORM_ADD, ENTRY_EXPERTS, ENTRY_GATE, TASK_GATE, ENTRY_CONVOLVE, ENTRY_DELTA, ENTRY_SPACE, STEPS,
) = range(15)  # fmt: skip
# Operations of a step (OP).
PROJECT, HEADS, KV_APPEND, ATTENTION, COPY, GATE, CONVOLVE, DELTA, EXPERTS, MULTIPLY, SCALE, NORM_ADD = range(12)
# Operations that Python runs between two calls: sum the values of all ranks, or concatenate their columns.
ALL_SUM, ALL_COLUMNS = 12, 13
# - SPACE: the state space of Mamba2
# - HEAD_LINEAR: multiplies each head with its own matrix. STEP_BLOCK (below) is the address of an array with the
#   addresses of N_HEADS blocks, each with N_KV_HEADS inputs and ROW_WIDTH outputs
# - JOIN: for each head, concatenates ROW_WIDTH elements of A and N_KV_HEADS elements of B
SPACE, HEAD_LINEAR, JOIN = 14, 15, 16
# Words of a step. A, B, C and D are its inputs; OUT and OUT_2 its outputs.
# - ..._AT, OUT, OUT_2: positions in the array of all values, in floats per token: the value at position p begins T * p
#   floats after the start of the array. An input whose AT is -1 is absent
# - ..._COLUMN: the first column of an input that is a part of a wider value, else 0; ..._ROW: floats from row to row
# - WANTED: whether only the wanted rows (those whose logits are needed) are processed; FROM_ALL: whether COPY has to
#   choose the wanted rows from all rows
# - STEP_BLOCK: address of the block or of other words of the operation, or for GATE the activation function (0:
#   sigmoid)
# - LAYER: the layer whose keys or states are used
# - COS, SIN: addresses of the rotary tables; N_HEADS, N_KV_HEADS: numbers of heads
# - ROW_WIDTH: the head dim, or for operations without heads the width of the rows
# - STEP_SCALE: factor of attention scores, or of SCALE; STEP_SOFTCAP: soft cap of attention scores, or 0. Both are bits
#   of float64
# - STEP_SINKS: address of attention sinks (H,), or 0
(
    OP, WANTED, A_AT, A_COLUMN, A_ROW, B_AT, B_COLUMN, B_ROW, OUT, OUT_2, STEP_BLOCK, LAYER, COS, SIN, N_HEADS,
    N_KV_HEADS, ROW_WIDTH, FROM_ALL, STEP_SCALE, STEP_SOFTCAP, STEP_SINKS, C_AT, C_COLUMN, C_ROW, D_AT, D_COLUMN,
    D_ROW, STEP_WIDTH,
) = range(28)  # fmt: skip
# Words of a forward pass: the number of tokens T, of wanted rows R and of sequences; tokens per page; the addresses of
# the tokens' positions (T,) and of the indices of the wanted rows (R,), both int64; the address of the runs (below),
# and their number.
(
    PASS_TOKENS, PASS_ROWS, PASS_SEQUENCES, PASS_PAGE, PASS_POSITIONS, PASS_WANTED, PASS_RUNS, PASS_N_RUNS, PASS_WIDTH,
) = range(9)  # fmt: skip
# Words of a layer's keys, values and states (a layer of Falcon-H1 has all three):
# - KV_STORE: address of the store; KV_SLOTS: the store's slots per head; KV_TYPE: type of the store
# - KV_WINDOW: the layer's window, 0 for none, or -C for chunks of C tokens (`attend`)
# - KV_GROUP: address of the words of its group, the layers that share page tables. GROUP_SEQUENCES: address of the
#   sequences' words; GROUP_SLOTS: address of the new tokens' slots (T,)
# - KV_ARRAYS: 2, or 1 if the keys are also the values
# - STATE_STORE: address of the states of a convolution; STATE_STORE_2: address of the states of the delta rule or state
#   space
KV_STORE, KV_SLOTS, KV_WINDOW, KV_GROUP, KV_TYPE, STATE_STORE, STATE_STORE_2, KV_ARRAYS, KV_WIDTH = range(9)
GROUP_SEQUENCES, GROUP_SLOTS, GROUP_WIDTH = range(3)

# ---- states ----

# Words of a convolution: the task, the address of its weights (taps, C), the number of taps, the number C of channels,
# whether SiLU is applied to its output, and the address of its bias (C,), or 0.
CONV_TASK, CONV_WEIGHT, CONV_TAPS, CONV_CHANNELS, CONV_SILU, CONV_BIAS, CONV_WIDTH = range(7)
# Words of a delta rule: the task, the addresses of the rates (H,) and of the biases (H,) of the time step, the number
# and width of key heads, the number H and width of value heads, DELTA_SHARED, and the norm of the output. Value head h
# uses key head h // DELTA_SHARED, modulo the number of key heads.
(
    DELTA_TASK, DELTA_RATE, DELTA_BIAS, DELTA_KEYS, DELTA_KEY_DIM, DELTA_VALUES, DELTA_VALUE_DIM, DELTA_SHARED,
    DELTA_NORM, DELTA_EPS, DELTA_WIDTH,
) = range(11)  # fmt: skip
# Words of a state space: the task, the task of the output's norm, the addresses of rates, of biases of the time step
# and of skip weights (one per head each), the number and width of heads, the number and width of groups of B and C, and
# for the norm: the address of its weight or 0, its epsilon (a float64), and its number of groups.
(
    SPACE_TASK, SPACE_NORM_TASK, SPACE_RATE, SPACE_BIAS, SPACE_SKIP, SPACE_HEADS, SPACE_HEAD_DIM, SPACE_GROUPS,
    SPACE_STATE_DIM, SPACE_NORM, SPACE_EPS, SPACE_NORM_GROUPS, SPACE_WIDTH,
) = range(13)  # fmt: skip
# A run is consecutive rows of one sequence. Words of a run: its first row, its number of rows, and the slots of the
# states before and after these rows.
RUN_FIRST, RUN_ROWS, RUN_SOURCE, RUN_TARGET, RUN_WIDTH = range(5)

# ---- attention ----

# Types of a KV store, in which a row has the E elements of one head of one token.
KV_F32, KV_F16, KV_BF16, KV_Q8_0 = range(4)
KV_TYPES = {"f32": KV_F32, "f16": KV_F16, "bf16": KV_BF16, "q8_0": KV_Q8_0}
# Attention sums over blocks of this number of keys, counted from position 0. This is part of the order of summation:
# changing the number changes bits.
BLOCK = 128
# Words of a sequence:
# - SEQ_PAGES: address of its page table, which has the slot of each page's first token
# - SEQ_LENGTH: number of its tokens, including those of the pass
# - SEQ_NEW: number of its tokens in the pass; SEQ_WANTED: number of its last tokens whose output is wanted
# The job of attention sets the other words:
# - SEQ_ROW, SEQ_CHUNK: its first row among the queries, and its first chunk
# - SEQ_BEGIN, SEQ_BLOCKS: the first block with a visible key, and the number of blocks from this one on
# - SEQ_PART: in decode, the first row of its blocks' results in the array `parts` (an argument of `attend`)
(
    SEQ_PAGES, SEQ_LENGTH, SEQ_NEW, SEQ_WANTED, SEQ_ROW, SEQ_CHUNK, SEQ_BEGIN, SEQ_PART, SEQ_BLOCKS, SEQ_WIDTH,
) = range(10)  # fmt: skip
# The most queries of a prefill chunk (tokens times query heads per KV head). These queries and their sums take only a
# part of a core's L2 cache.
QUERIES = 192
# Distance in floats between the scores of one query and those of the next query.
SCORES = BLOCK + LANES


def attention_span(group: int) -> int:
    """Return the number of tokens of a prefill chunk, for `group` query heads per KV head.

    The number is a multiple of LANES if `group` is at most QUERIES / LANES.
    """
    tokens = QUERIES // group
    return tokens // LANES * LANES if tokens >= LANES else max(1, tokens)


def attention_scratch(group: int, width: int, type_: int = KV_F32) -> int:
    """Return the bytes of scratch memory that a chunk needs, with `group` query heads of width `width` per KV head."""
    prefill, decode = attention_span(group) * group * (2 * width + LANES), SMALL_BATCH * group * width
    expanded = 0 if type_ == KV_F32 else 2 * BLOCK * width
    return 4 * (max(prefill, decode) + LANES * (SCORES + width + LANES) + expanded + LANES)
