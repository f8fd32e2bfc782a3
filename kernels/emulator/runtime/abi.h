// The interface between compiled kernels, the emulator's C runtime and runtime.py. It includes no other header.
#pragma once

#define MSL_SIMD_WIDTH 32
#define MSL_SLOT_BYTES 64  // the widest value that a SIMD-group operation moves
#define MSL_RESULT_BYTES 512  // two 8 x 8 matrices of floats
#define MSL_MAX_THREADS 1024
#define MSL_MAX_THREADGROUP_BYTES 32768
#define MSL_MAX_THREADGROUP_ARRAYS 64
#define MSL_MAX_FINDINGS 16  // mistakes of one dispatch, and as many notes
#define MSL_DETAIL_BYTES 320
#define MSL_PRINTED_BYTES 65536

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// One threadgroup. At the edge of the grid, its `size` may be smaller than the `dispatched` size.
typedef struct {
  unsigned threads_per_grid[3];
  unsigned threadgroups_per_grid[3];
  unsigned dispatched[3];
  unsigned position[3];
  unsigned size[3];
  unsigned threads;
} msl_group;

// One thread. `index` is its flat index in the threadgroup, x fastest; each 32 consecutive threads are a SIMD-group.
typedef struct {
  const msl_group* group;
  unsigned index;
  unsigned position[3];
} msl_thread;

typedef void (*msl_entry)(void* const* buffers, const msl_thread* thread);

// What a lane receives from a SIMD-group operation after all lanes that take part have passed their values.
typedef struct {
  const unsigned char* slots;  // the values of 32 lanes, MSL_SLOT_BYTES apart
  unsigned lanes;              // a bit for each lane that passed a value
  unsigned lane;               // the calling lane
  void* result;                // memory for a result that is the same for all lanes
  unsigned first;              // whether the calling lane must compute the result
} msl_exchanged;

// Values of `argument` below: the operation has no argument; the operation needs all lanes.
enum { MSL_NO_ARGUMENT = -1, MSL_ALL_LANES = -2 };

// `argument` must be the same for all lanes that take part. An example is the delta of simd_shuffle_down.
void msl_exchange(const void* value, unsigned bytes, int argument, const char* what, const char* file, unsigned line,
                  msl_exchanged* found);
void msl_inactive(unsigned lane);   // end the threadgroup, because the last operation reads an inactive lane
void msl_undefined(unsigned lane);  // only add a note, for an operation where reading an inactive lane may be harmless
// The memory that a barrier or a fence orders; the values are those of Metal's mem_flags.
enum { MSL_DEVICE_MEMORY = 1, MSL_THREADGROUP_MEMORY = 2, MSL_MEMORIES = 2 };
void msl_barrier(unsigned memory, const char* file, unsigned line);
void msl_simdgroup_fence(unsigned memory);  // called by each lane, when all have reached the barrier
void msl_thread_fence(unsigned memory);     // atomic_thread_fence
void msl_print(const char* format, ...) __attribute__((format(printf, 1, 2)));  // print a line from `print_from`
const char* msl_printed(void);                                                  // the lines of the last dispatch
void* msl_threadgroup_array(unsigned ordinal, unsigned bytes, const char* name, unsigned line);

// Kinds of findings. A mistake ends its threadgroup, unless it is a race; a note does not.
enum {
  MSL_FINE,
  MSL_FAULT,               // an access to unmapped memory, or a write to read-only memory
  MSL_DIVERGENT_SIMD,      // lanes of a SIMD-group are at different operations
  MSL_RETURNED_SIMD,       // a SIMD-group operation, but lanes have returned
  MSL_DIVERGENT_BARRIER,   // threads wait at different barriers
  MSL_RETURNED_BARRIER,    // a barrier, but threads have returned
  MSL_BARRIER_AND_SIMD,    // some lanes wait at a barrier, others at a SIMD-group operation
  MSL_UNDEFINED,           // undefined behaviour, found by UBSan
  MSL_ARITHMETIC,          // the processor trapped a division
  MSL_IMPOSSIBLE,          // reached code that the compiler treated as unreachable
  MSL_THREADGROUP_BYTES,   // threadgroup memory beyond its limit
  MSL_THREADGROUP_CANARY,  // written past the end of a threadgroup array
  MSL_VALUE_BYTES,         // a SIMD-group operation on a type that is too wide
  MSL_INTERRUPTED,         // Ctrl-C
  MSL_RACE,                // a data race, see races.c
  MSL_INACTIVE_LANE,       // a SIMD-group operation reads an inactive lane
  MSL_UNEVEN_ARGUMENT,     // an argument that must be the same for all lanes differs
  MSL_UNORDERED_SIMD,      // lanes are at operations whose order the emulator cannot determine
  MSL_SPINNING,            // a threadgroup that does not end
  MSL_BOUNDS,              // an access to the pages of a buffer but outside of its bytes, see bounds.c
  MSL_TENSOR,              // a tensor is used in a way that the specification leaves undefined, see tensors.c
  MSL_FIRST_NOTE,
  MSL_SAME_VALUE = MSL_FIRST_NOTE,  // a race of two threads that write the same value
  MSL_TRUNCATED,                    // an implicit conversion changed an integer
  MSL_UNWRITTEN,                    // a read of memory that no thread has written
  MSL_SHIFTED,                      // a shift operation reads an inactive lane
  MSL_WRITER,                       // the last thread that wrote a byte, for `trace`
  MSL_NOT_WRITTEN,                  // bytes of an output that no thread has written
};

typedef struct {
  const char* what;
  const char* file;
  unsigned line;
  unsigned column;
} msl_site;

typedef struct {
  int kind;
  msl_site site, other;
  unsigned group[3], thread[3], lane, other_lane;
  unsigned other_group[3], other_thread[3];  // for a race: the thread of the earlier access
  unsigned count;             // lanes, threads or bytes; for a race: whether it is between threadgroups
  unsigned times;             // how often the same mistake was found
  unsigned is_write, is_known;  // for a fault: whether it was a write; whether `is_write` is known
  unsigned long address;      // the accessed address
  unsigned long code;         // the instruction of the access, as an offset into `object`
  unsigned long other_code;   // for a race: the instruction of the earlier access
  const char* object;         // the shared object with the instruction
  char detail[MSL_DETAIL_BYTES];
} msl_report;

typedef struct {
  const char* name;
  unsigned long start, bytes;
} msl_array;

typedef struct {
  unsigned seed;       // order of threads. 0: ascending; 1: descending; others: shuffled
  unsigned all_lanes;  // whether every SIMD-group operation needs all lanes
  unsigned races;      // whether the kernel calls the runtime at each access
  unsigned at_end;     // 1: threadgroup arrays end at an unmapped page; 0: they begin at one
  unsigned poison;     // the initial bytes of threadgroup memory
  unsigned patience;   // milliseconds of CPU time that a threadgroup may take
  unsigned m5;         // whether cooperative tensors have the layout of an M5; else `seed` decides
  unsigned print_from[3];  // the position in the grid of the thread that may print
  unsigned long trace;  // the address of a watched byte whose last writer is reported, or 0
} msl_options;

typedef struct {
  unsigned long threads, threadgroups, simd_operations, barriers, switches, threadgroup_bytes, tensor_operations;
} msl_statistics;

// Run a grid; return the number of reports. `reports` has space for 2 * MSL_MAX_FINDINGS.
unsigned msl_dispatch(msl_entry entry, void* const* buffers, const unsigned* grid, const unsigned* threadgroup,
                      const msl_options* options, msl_statistics* statistics, msl_report* reports);
// Declare a buffer and the mapped pages around it, for exact bounds. Called before a dispatch; valid until its end.
void msl_bound(unsigned long pages, unsigned long page_bytes, unsigned long start, unsigned long bytes);
// Check memory for races until the end of the next dispatch; `blank` if the memory has no values yet.
void msl_watch(unsigned long start, unsigned long bytes, unsigned blank);
void msl_atomically(int begins);  // accesses between msl_atomically(1) and msl_atomically(0) do not race
unsigned msl_threadgroup_arrays(msl_array* arrays);  // the arrays of the last dispatch; returns their number

// ---- tensors, see tensors.c ----

// The role of a cooperative tensor in a matrix product, or in a reduction of the destination's rows or columns.
enum { MSL_LEFT, MSL_RIGHT, MSL_DESTINATION, MSL_ROW_RESULTS, MSL_COLUMN_RESULTS };
typedef struct {
  int operand, rows, columns;
  unsigned simdgroups;  // the number of SIMD-groups that share the tensor; 0: it belongs to one thread
} msl_tile;
typedef struct {
  short row, column;  // -1: this element is not valid
} msl_at;
// The layout: the distribution of a cooperative tensor's elements over threads in this dispatch.
typedef struct {
  msl_tile tile;
  unsigned capacity, threads;
  unsigned follows;    // whether the result of a row or column is in the threads that have its elements
  unsigned copies;     // whether a destination has the layout of an operand of its size
  unsigned* asked;     // whether any thread has queried the index of an element
  const msl_at* at;    // the index of element i of thread t: at[t * capacity + i]
} msl_layout;
// The threads of an operation's scope, after all of them have reached the operation.
typedef struct {
  const void* const* brought;  // the argument of each thread, in order
  unsigned threads;
  unsigned first;  // whether the calling thread continues first; it computes the operation for all
} msl_met;

const msl_layout* msl_layout_of(int operand, int rows, int columns, unsigned simdgroups);
unsigned msl_place_in_scope(unsigned simdgroups);  // the index of the running thread in its scope
void msl_meet(unsigned simdgroups, const void* brought, const char* what, const char* file, unsigned line,
              msl_met* met);
void* msl_room(unsigned which, unsigned long bytes);  // scratch memory 0 to 3, valid until the next call for this one
unsigned msl_rounds(void);  // whether relaxed precision drops bits in this dispatch
// c = a * b + c; matrices are stored by rows. The order of summation depends on the seed.
void msl_multiply_floats(const float* a, const float* b, float* c, unsigned m, unsigned n, unsigned k);
void msl_multiply_ints(const int* a, const int* b, int* c, unsigned m, unsigned n, unsigned k);
// End the threadgroup. The format is the text of the mistake, a new line, and advice. If `file` is NULL, the line of
// the caller is reported.
void msl_tensor_wrong(const char* file, unsigned line, const char* format, ...)
    __attribute__((noreturn, format(printf, 3, 4)));

// Report a mistake at the line of the call. The compiler must not merge such calls.
#define MSL_NEVER_RETURNS __attribute__((noreturn, nomerge))
void msl_outside(long index, int axis, long origin, long extent, long edge) MSL_NEVER_RETURNS;
void msl_beyond_capacity(long index, unsigned capacity) MSL_NEVER_RETURNS;
void msl_not_mapped(void) MSL_NEVER_RETURNS;
void msl_tensor_unplaced(const char* file, unsigned line, const char* operand);  // does nothing if `m5` is set

// Elementary functions, see math.c.
#define MSL_MATH(NAME) float msl_##NAME##f(float x) __attribute__((const));
MSL_MATH(exp) MSL_MATH(exp2) MSL_MATH(exp10) MSL_MATH(log) MSL_MATH(log2) MSL_MATH(log10) MSL_MATH(log1p)
MSL_MATH(sin) MSL_MATH(cos) MSL_MATH(tan) MSL_MATH(asin) MSL_MATH(acos) MSL_MATH(atan)
MSL_MATH(sinh) MSL_MATH(cosh) MSL_MATH(tanh) MSL_MATH(asinh) MSL_MATH(acosh) MSL_MATH(atanh)
#undef MSL_MATH
float msl_powf(float x, float y) __attribute__((const));
float msl_atan2f(float y, float x) __attribute__((const));

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
