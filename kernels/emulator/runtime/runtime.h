// Declarations that the files of the runtime share. The state is global, because only one dispatch runs at a time:
// runtime.py holds a lock.
#pragma once
#include <stdint.h>

#include "abi.h"

typedef enum { READY, AT_SIMD, AT_BARRIER, DONE } state;

// The saved state of a fibre or of the scheduler.
#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(MSL_UCONTEXT)
typedef struct { void* stack; } context;
#else
#include <ucontext.h>
typedef ucontext_t context;
#endif

typedef struct {
  context at;
  msl_thread thread;
  state state;
  const char* what;  // the operation at which the thread waits
  const char* file;
  unsigned line;
  const void* value;  // the value that the thread passes to a SIMD-group operation
  unsigned bytes;
  int argument;
  unsigned memory;  // the memory that is ordered by the barrier at which the thread waits
} fibre;

// The values of a SIMD-group operation. They are valid after its lanes continue, until the lanes wait again.
typedef struct {
  _Alignas(64) unsigned char slots[MSL_SIMD_WIDTH * MSL_SLOT_BYTES];
  _Alignas(64) unsigned char result[MSL_RESULT_BYTES];
  unsigned lanes, unfilled;
  unsigned unfenced;              // whether no lane has passed the current simdgroup_barrier yet
  unsigned fences[MSL_MEMORIES];  // number of passed simdgroup_barriers: for device memory, for threadgroup memory
} simdgroup;

// fibres.c
void fibres_prepare(unsigned count);
void fibre_begin(unsigned index, fibre* fibre, void (*main)(void));
void fibre_switch(fibre* from, fibre* to);  // NULL is the scheduler
void fibre_abandon(void);                   // switch to the scheduler and never return
uintptr_t fibre_stack_top(unsigned index);
int fibres_guard(uintptr_t address);
int fibres_hold(uintptr_t address);  // whether the address is in a stack

// denormals.c
unsigned long denormals_flush(void);  // returns the value for denormals_restore
void denormals_restore(unsigned long before);

// print.c
void print_begin(void);

// orders.c
void orders_begin(unsigned seed);
void order_of(unsigned* order, unsigned count);    // fills `order` with a permutation of 0 to count - 1
unsigned long order_first(unsigned long count);   // the first threadgroup
unsigned long order_stride(unsigned long count);  // the distance to the next threadgroup

// scheduler.c
extern fibre* volatile running;  // NULL while the scheduler runs
extern volatile int interrupted;
extern msl_statistics counted;
extern msl_options options;
unsigned running_index(void);
unsigned running_threads(void);  // the number of threads of the running threadgroup
void meet_group(const char* what, const char* file, unsigned line);  // a barrier that orders no memory
const unsigned* simdgroup_fences(void);  // the fences of the running thread's SIMD-group
void place_of(unsigned long group, unsigned thread, unsigned* position_of_group, unsigned* position_of_thread);
unsigned long running_group(void);  // the flat index of the running threadgroup in the grid, x fastest
_Noreturn void fail(int kind, msl_site site, unsigned count);
void end_thread(void);  // do not continue the running thread
void end_grid(void);    // run no further threads
void note(int kind, msl_site site);

// findings.c
extern msl_report failure;  // the report that is being written
void findings_begin(msl_report* room);
int findings_add(msl_report* one);  // adds and clears a report; returns 0 if there is no space
unsigned findings_end(void);
unsigned findings_count(void);  // the number of mistakes

// bounds.c
void bounds_forget(void);
void bounds_check(uintptr_t address, uintptr_t bytes, int writes, const void* code);  // ends a thread out of bounds

// races.c
void races_prepare(void);
void races_watch(uintptr_t start, uintptr_t bytes, int of_group, int blank);
void races_next_group(void);
void races_next_phase(unsigned memory);
void races_settle(void);          // report pending writes; called before another thread runs
void races_trace(uintptr_t address);  // add a note with the last thread that wrote this byte
void races_note_unwritten(void);      // add a note for each output with unwritten bytes
void races_forget_pending(void);  // report the pending write of a thread that has ended before its store, as a race

// tensors.c
void tensors_begin(void);
void tensors_next_group(void);

// threadgroup.c
void threadgroup_prepare(int at_end, int races);
void threadgroup_poison(void);
const char* threadgroup_damaged(void);

// signals.c
void signals_install(unsigned patience);
void signals_restore(void);
void signals_locate(msl_report* report);
