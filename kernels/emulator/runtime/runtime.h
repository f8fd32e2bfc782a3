// What the files of the runtime share. One dispatch at a time: runtime.py holds a lock.
#pragma once
#include <stdint.h>

#include "abi.h"

typedef enum { READY, AT_SIMD, AT_BARRIER, DONE } state;

// Where a fibre, or the scheduler, goes on.
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
  const char* what;  // where it waits
  const char* file;
  unsigned line;
  const void* value;  // what it brings to a SIMD-group's operation
  unsigned bytes;
  int argument;
} fibre;

// The values of a SIMD-group's operation, from when its lanes go on until they wait again.
typedef struct {
  _Alignas(64) unsigned char slots[MSL_SIMD_WIDTH * MSL_SLOT_BYTES];
  _Alignas(64) unsigned char result[MSL_RESULT_BYTES];
  unsigned lanes, unfilled;
  unsigned operations;
} simdgroup;

// fibres.c
void fibres_prepare(unsigned count);
void fibre_begin(unsigned index, fibre* fibre, void (*main)(void));
void fibre_switch(fibre* from, fibre* to);  // NULL is the scheduler
void fibre_abandon(void);                   // to the scheduler, never to come back
uintptr_t fibre_stack_top(unsigned index);
int fibres_guard(uintptr_t address);

// scheduler.c
extern fibre* volatile running;  // NULL while the scheduler runs
extern volatile int interrupted;
extern msl_statistics counted;
extern msl_report failure;
unsigned running_index(void);
unsigned simdgroup_operations(void);  // that the running thread's SIMD-group has behind it
_Noreturn void fail(int kind, msl_site site, unsigned count);

// races.c
void races_prepare(void);
void races_watch(uintptr_t start, uintptr_t bytes, int of_group);
void races_next_group(void);
void races_next_phase(void);

// threadgroup.c
void threadgroup_prepare(int at_end, int races);
void threadgroup_poison(void);
const char* threadgroup_damaged(void);

// signals.c
void signals_install(void);
void signals_restore(void);
void signals_locate(msl_report* report);
