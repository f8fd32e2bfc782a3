// The build "races": clang calls us at every access to memory, as it would call ThreadSanitizer.
//
// Two accesses to one byte race if one of them writes, different threads make them, and nothing orders them: a
// threadgroup barrier between threads of one threadgroup, any SIMD-group operation between lanes of one SIMD-group.
// Threadgroups are never ordered. Only outputs and threadgroup memory are watched; all else nobody else can write.
#include "runtime.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MAX_REGIONS 128

typedef struct {
  const void* code;  // NULL: nobody yet
  unsigned group, phase, thread, operations;
  enum { BY_ONE, BY_LANES, BY_SIMDGROUPS } readers;
} access;

typedef struct {
  access write, read;
} history;  // of one byte

typedef struct {
  uintptr_t start, bytes;
  int of_group;  // each threadgroup has its own, at the same place
  history* bytes_of;
} region;

static region regions[MAX_REGIONS];
static unsigned region_count, groups, phases;
static int atomically;

static void forget(region* old) {
  if (old->bytes_of) munmap(old->bytes_of, old->bytes * sizeof(history));
  old->bytes_of = NULL;
}

void races_prepare(void) {
  while (region_count) forget(&regions[--region_count]);
  groups = phases = 0;
  atomically = 0;
}

void races_watch(uintptr_t start, uintptr_t bytes, int of_group) {
  if (region_count == MAX_REGIONS || !bytes) return;
  void* memory =
      mmap(NULL, bytes * sizeof(history), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  regions[region_count++] = (region){start, bytes, of_group, memory};
}

void msl_watch(unsigned long start, unsigned long bytes) { races_watch(start, bytes, 0); }
void msl_atomically(int begins) { atomically = begins; }

void races_next_group(void) { groups++; }
void races_next_phase(void) { phases++; }

static region* region_of(uintptr_t address) {
  for (unsigned i = 0; i < region_count; i++)
    if (address - regions[i].start < regions[i].bytes) return &regions[i];
  return NULL;
}

static int same_simdgroup(const access* one, const access* other) {
  return one->group == other->group && one->thread / MSL_SIMD_WIDTH == other->thread / MSL_SIMD_WIDTH;
}

static int ordered(const access* before, const access* now, int of_group) {
  if (!before->code) return 1;
  if (before->group != now->group) return of_group;
  if (before->phase != now->phase) return 1;
  return before->readers != BY_SIMDGROUPS && same_simdgroup(before, now) && before->operations != now->operations;
}

static void race(uintptr_t address, const access* before, const access* now, const char* what) {
  failure.address = address;
  failure.other_code = (unsigned long)before->code;
  failure.code = (unsigned long)now->code;
  failure.other_lane = before->thread;
  fail(MSL_RACE, (msl_site){what, NULL, 0, 0}, before->group != now->group);
}

static int by_another(const access* before, const access* now) {
  return before->readers != BY_ONE || before->thread != now->thread || before->group != now->group;
}

static void touch(uintptr_t address, unsigned bytes, int writes, const void* code) {
  if (!running || atomically) return;
  region* where = region_of(address);
  if (!where) return;
  access now = {code, groups, phases, running->thread.index, simdgroup_operations(), BY_ONE};
  for (unsigned i = 0; i < bytes && address + i - where->start < where->bytes; i++) {
    history* past = &where->bytes_of[address + i - where->start];
    if (by_another(&past->write, &now) && !ordered(&past->write, &now, where->of_group))
      race(address + i, &past->write, &now, writes ? "wrote, wrote" : "wrote, read");
    if (writes && by_another(&past->read, &now) && !ordered(&past->read, &now, where->of_group))
      race(address + i, &past->read, &now, "read, wrote");
    if (writes) past->write = now;
    else if (!past->read.code || ordered(&past->read, &now, where->of_group)) past->read = now;
    else if (!same_simdgroup(&past->read, &now)) past->read.readers = BY_SIMDGROUPS;
    else if (past->read.readers == BY_ONE && past->read.thread != now.thread) past->read.readers = BY_LANES;
  }
}

#define EXPORTED __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)
#define ACCESS(NAME, BYTES)                                                                        \
  EXPORTED void __tsan_##NAME##read##BYTES(void* at) { touch((uintptr_t)at, BYTES, 0, CALLER); }   \
  EXPORTED void __tsan_##NAME##write##BYTES(void* at) { touch((uintptr_t)at, BYTES, 1, CALLER); }

ACCESS(, 1)
ACCESS(, 2)
ACCESS(, 4)
ACCESS(, 8)
ACCESS(, 16)
ACCESS(unaligned_, 2)
ACCESS(unaligned_, 4)
ACCESS(unaligned_, 8)
ACCESS(unaligned_, 16)

// Loops that copy or fill are turned into calls.
EXPORTED void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  touch((uintptr_t)from, (unsigned)bytes, 0, CALLER);
  touch((uintptr_t)to, (unsigned)bytes, 1, CALLER);
  return memcpy(to, from, bytes);
}
EXPORTED void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  touch((uintptr_t)from, (unsigned)bytes, 0, CALLER);
  touch((uintptr_t)to, (unsigned)bytes, 1, CALLER);
  return memmove(to, from, bytes);
}
EXPORTED void* __tsan_memset(void* to, int byte, size_t bytes) {
  touch((uintptr_t)to, (unsigned)bytes, 1, CALLER);
  return memset(to, byte, bytes);
}

EXPORTED void __tsan_init(void) {}
