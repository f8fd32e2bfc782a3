"""What Python writes and machine code reads: the words of blocks and jobs, and the sizes that both must agree on.

Nothing here needs a compiler: this is all that a process knows of the kernels when it runs the machine code of an
earlier one.
"""

from __future__ import annotations

# Floats of a vector.
LANES = 16


def whole_vectors(n: int) -> int:
    """Return n rounded up to a multiple of LANES."""
    return -(-n // LANES) * LANES


# Bytes that memory is asked for at a time.
LINE_BYTES = 64

# Formats of a matrix.
F32, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K = range(6)

# What becomes of a product, or of a gate before it is multiplied with what it gates; 0 is nothing.
SILU, GELU = 1, 2

# ---- a pool's control block ----

# Words of the control block; those that threads write lie on cache lines of their own. SCRATCH is the address of the
# threads' scratch memory; from JOB on lies the job. From LEFT on there is one cache line per thread, which begins with
# how many chunks of its stretch are left. While ON is 1 more jobs are about to come: nobody goes to sleep.
DONE, STOP, ON = 0, 16, 17
TASK, CHUNKS, THREADS, SCRATCH, JOB, LEFT = 32, 33, 34, 35, 40, 256
LINE = 16
# Bytes of scratch memory that each thread has; behind the last thread's lie as many for who brings the job.
SCRATCH_BYTES = 4 << 20

# ---- a block of linear layers with one input ----

# Words of a block: the tasks for one vector or a few, for several, and to prepare several; a norm of the input, or a
# GAIN of 0: with a SHIFT, which is where a bias lies, it is a layer norm, without an RMS norm; (N, K) of all matrices
# together; what becomes of a product, or of a gate, or 0; rows of a chunk; whether products with few vectors are worth
# more than one thread; how many matrices there are; a norm of the output, like that of the input; whether the rows can
# be multiplied with one vector as they are stored. From TABLE on come the matrices: KIND and WEIGHTS say how and where
# one is stored, ROWS how many rows it has, BIAS where its bias lies or 0, COLUMN where its products begin in a row of
# the output, and CHUNK which chunk of a job is its first.
(
    TASK_GEMV, TASK_GEMM, TASK_PREPARE, GAIN, EPS, SHIFT, N, K, ACTIVATION, CHUNK_GEMV, CHUNK_GEMM, HAND_OUT, MATRICES,
    POST_GAIN, POST_EPS, POST_SHIFT, HAS_GEMV,
) = range(17)  # fmt: skip
# Words that each job sets itself.
OWN, TABLE = 17, 32
KIND, WEIGHTS, ROWS, BIAS, COLUMN, CHUNK, WIDTH = range(7)
MOST_MATRICES = 8

# Columns whose products are summed before their total is added to those before: part of what a product is, to the last
# bit (`tile.py`). A smaller number costs time for totals, a larger one precision, and expanded rows more memory.
STRETCH = 1024
# Rows of a register tile.
TILE_ROWS = 4

# Up to so many tokens go through all layers in one call; more are worth a call per step, behind which Ctrl-C is heard.
PROGRAM_TOKENS = 32
# At most so many vectors are multiplied with rows as they are stored; scratch memory has room for them, normed.
PANEL_TOKENS = 18
# Up to so many tokens are prepared by one thread, and attend to blocks of keys side by side.
FEW = 8
# A core reads faster from four places of memory in turns than from one in order: benchmarks/ways.py. So with one vector
# a chunk has rows of so many stretches of its matrix.
MAX_WAYS = 4
# Bytes of stored rows in a chunk for one vector, and what one thread does alone: measured by benchmarks/chunks.py.
# Smaller chunks cost more to hand out than they even out.
CHUNK_BYTES = 64 * 1024
# The same where a job is long: a sixteenth of its bytes, up to so many. Decode of a 0.6B model takes 3 to 5 % less
# time; of a small model it would take more, for want of chunks.
MOST_CHUNK_BYTES, LONG_JOB = 128 * 1024, 16
# Rows and vectors of a chunk for several vectors. What is expanded of 64 rows stays in a core's second-level cache;
# more rows read the vectors less often, more vectors expand the rows less often. A job with fewer than GEMM_CHUNKS for
# each thread has chunks of fewer rows: at its end threads wait for whoever has the last one.
GEMM_ROWS, GEMM_TOKENS, GEMM_CHUNKS = 64, 128, 8
# Up to so many vectors rows are expanded four by four, and stay in the nearest cache while the vectors come from the
# second-level one.
GEMM_NEAR = 48

# ---- a block of query and key heads ----

# Words: the task, how many heads there are, how wide one is, and the norms of both; a gain of 0 is none.
HEADS_TASK, Q_HEADS, K_HEADS, HEAD_DIM, Q_GAIN, Q_EPS, K_GAIN, K_EPS = range(8)

# ---- a program: the steps of a model's layers ----

# Words of a program: entries and tasks that its steps call. From STEPS on come the steps, STEP_WIDTH words each.
ENTRY_PROJECT, ENTRY_ATTEND, TASK_ATTEND_FEW, TASK_ATTEND_MANY, TASK_PUT_SPAN, STEPS = range(6)
# What a step does.
PROJECT, HEADS, KV_APPEND, ATTENTION, COPY = range(5)
# Words of a step. Values lie in one piece of memory: T times `at` floats behind its beginning, or for a part of
# something wider, `column` floats further on; rows of inputs begin `row` floats apart. An input at -1 is none. A step
# with WANTED has the wanted rows alone; FROM_ALL says that its input has all rows. ROW_WIDTH is the width of a head, or
# of what is copied.
(
    OP, WANTED, A_AT, A_COLUMN, A_ROW, B_AT, B_COLUMN, B_ROW, OUT, OUT_2, STEP_BLOCK, LAYER, COS, SIN, N_HEADS,
    N_KV_HEADS, ROW_WIDTH, FROM_ALL, STEP_SCALE, STEP_WIDTH,
) = range(20)  # fmt: skip
# Words of a forward pass: tokens, rows that are wanted, sequences, tokens of a page; where the positions (T,) of the
# tokens and the numbers (R,) of the wanted rows lie, 64-bit integers both.
PASS_TOKENS, PASS_ROWS, PASS_SEQUENCES, PASS_PAGE, PASS_POSITIONS, PASS_WANTED, PASS_WIDTH = range(7)
# Words of a layer's keys and values: where its store lies, how many slots that has, the layer's window or 0, and where
# the words of its group lie: those of the sequences, and the slots (T,) of the new tokens, 64-bit integers.
KV_STORE, KV_SLOTS, KV_WINDOW, KV_GROUP, KV_WIDTH = range(5)
GROUP_SEQUENCES, GROUP_SLOTS, GROUP_WIDTH = range(3)

# ---- attention ----

# Keys that are summed together, counted from position 0: part of what attention is, to the last bit (`attention.py`).
BLOCK = 128
# Words of a sequence: where its page table lies, the slot of each page's first token; how many tokens there are, those
# of the pass included; how many of the last ones are new, and how many of those are wanted. A job sets the others:
# which row is its first, which chunk, which block of keys and which place for what blocks find; how many blocks it has.
(
    SEQ_PAGES, SEQ_LENGTH, SEQ_NEW, SEQ_WANTED, SEQ_ROW, SEQ_CHUNK, SEQ_BEGIN, SEQ_PART, SEQ_BLOCKS, SEQ_WIDTH,
) = range(10)  # fmt: skip
# Queries of a chunk for many tokens, those of all heads that share keys: they and their sums fill a part of a
# second-level cache.
QUERIES = 192
# Floats from one query's scores to the next one's.
SCORES = BLOCK + LANES


def attention_scratch(group: int, width: int) -> int:
    """Bytes of scratch memory that a chunk takes, with `group` query heads of `width` for each key/value head."""
    queries = max(QUERIES, FEW * group, LANES * group)
    return 4 * (queries * (2 * width + 2 * LANES) + LANES * (SCORES + width))
