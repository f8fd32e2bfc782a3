// Find data races in the build "races": kernels call these functions at every access to memory. (clang inserts calls of
// ThreadSanitizer's functions; the functions here have the same names.)
//
// Two accesses to the same byte race if different threads make them, at least one of them writes, and nothing orders
// them. A threadgroup_barrier orders the accesses of a threadgroup's threads, and a simdgroup_barrier the accesses of a
// SIMD-group's lanes. Both order only the memory that the mem_flags name. Other SIMD-group operations order nothing.
// atomic_thread_fence orders the accesses of one thread before a fence and the accesses of another thread after a later
// fence. Only outputs and threadgroup memory are watched, because other memory is read-only or private to a thread.
#include "runtime.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MAX_REGIONS 128
#define WIDEST 16

typedef struct {
  const void* code;
  unsigned group, thread;
} accessor;

typedef struct {
  accessor by;               // .code is NULL: no access yet
  unsigned phase, fence, when;  // number of earlier threadgroup_barriers, simdgroup_barriers, and fences of all threads
  enum { BY_ONE, BY_LANES, BY_SIMDGROUPS } readers;
} access;

typedef struct {
  access write, read;
  accessor also;  // another thread that has read
  unsigned written_by;  // 0: never written, not even by an atomic; else 1, in threadgroup memory 1 + the writer's group
} history;  // of one byte

typedef struct {
  uintptr_t start, bytes;
  int of_group;  // whether this is threadgroup memory, which has the same addresses in each threadgroup
  int blank;
  history* bytes_of;
} region;

static region regions[MAX_REGIONS];
static unsigned region_count, this_group, phases[MSL_MEMORIES];
static int atomically;
static accessor traced_atomic;  // the last atomic write of the traced byte

// ---- fences of threads ----

#define MAX_FENCED_GROUPS (1u << 24)
static unsigned fences;                                       // the number of fences of all threads so far
static unsigned fenced_threads[MSL_MEMORIES][MSL_MAX_THREADS];  // the last fence of each thread of this threadgroup
static unsigned* fenced_groups;                               // the last fence of each threadgroup, for device memory

void msl_thread_fence(unsigned memory) {
  if (!options.races) return;
  fences++;
  for (unsigned i = 0; i < MSL_MEMORIES; i++)
    if (memory >> i & 1) fenced_threads[i][running->thread.index] = fences;
  if (!(memory & MSL_DEVICE_MEMORY) || this_group >= MAX_FENCED_GROUPS) return;
  if (!fenced_groups) {
    void* room = mmap(NULL, MAX_FENCED_GROUPS * sizeof(unsigned), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) abort();
    fenced_groups = room;
  }
  fenced_groups[this_group] = fences;
}

// Whether fences order the access `before` and the current access: the thread (or threadgroup) of `before` had a fence
// after `before`, and the running thread (or threadgroup) had a later fence.
static int fenced(const access* before, int of_group) {
  if (!fences) return 0;
  if (before->by.group == this_group) {
    const unsigned* times = fenced_threads[of_group];
    unsigned first = times[before->by.thread];
    return first > before->when && times[running->thread.index] > first;
  }
  if (!fenced_groups || before->by.group >= MAX_FENCED_GROUPS) return 0;
  unsigned first = fenced_groups[before->by.group];
  return first > before->when && fenced_threads[0][running->thread.index] > first;
}

// ---- watched memory ----

static void forget(region* old) {
  if (old->bytes_of) munmap(old->bytes_of, old->bytes * sizeof(history));
  old->bytes_of = NULL;
}

void races_prepare(void) {
  while (region_count) forget(&regions[--region_count]);
  if (fenced_groups) munmap(fenced_groups, MAX_FENCED_GROUPS * sizeof(unsigned));
  fenced_groups = NULL;
  memset(phases, 0, sizeof phases);
  fences = 0;
  atomically = 0;
  traced_atomic = (accessor){0};
}

void races_watch(uintptr_t start, uintptr_t bytes, int of_group, int blank) {
  if (region_count == MAX_REGIONS || !bytes) return;
  void* memory =
      mmap(NULL, bytes * sizeof(history), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  regions[region_count++] = (region){start, bytes, of_group, blank, memory};
}

void msl_watch(unsigned long start, unsigned long bytes, unsigned blank) { races_watch(start, bytes, 0, (int)blank); }
void msl_atomically(int begins) { atomically = begins; }

void races_next_group(void) {
  this_group = (unsigned)running_group();
  atomically = 0;  // a thread may have ended during an atomic access
  memset(fenced_threads, 0, sizeof fenced_threads);
}

void races_next_phase(unsigned memory) {
  for (unsigned i = 0; i < MSL_MEMORIES; i++) phases[i] += memory >> i & 1;
}

static region* region_of(uintptr_t address) {
  static unsigned last;
  if (last < region_count && address - regions[last].start < regions[last].bytes) return &regions[last];
  for (unsigned i = 0; i < region_count; i++)
    if (address - regions[i].start < regions[i].bytes) return &regions[last = i];
  return NULL;
}

// ---- order ----

static int same_simdgroup(const accessor* one, const accessor* other) {
  return one->group == other->group && one->thread / MSL_SIMD_WIDTH == other->thread / MSL_SIMD_WIDTH;
}

static int ordered(const access* before, const access* now, int of_group) {
  if (!before->by.code) return 1;
  if (before->by.group != now->by.group) return of_group || fenced(before, of_group);
  if (before->phase != now->phase) return 1;
  if (before->readers != BY_SIMDGROUPS && same_simdgroup(&before->by, &now->by) && before->fence != now->fence) return 1;
  return fenced(before, of_group);
}

static int same_thread(const accessor* one, const accessor* other) {
  return one->thread == other->thread && one->group == other->group;
}

static int by_another(const access* before, const access* now) {
  return before->readers != BY_ONE || !same_thread(&before->by, &now->by);
}

// ---- findings ----

// A racing write that is not yet reported. It is reported after the thread has stored the value: as a note if the store
// did not change the memory, and as a race if it did.
static struct {
  uintptr_t address;
  unsigned bytes;
  unsigned char before[WIDEST];
  msl_report report;
} pending;

void races_settle(void) {
  if (!pending.bytes) return;
  if (!memcmp((void*)pending.address, pending.before, pending.bytes)) pending.report.kind = MSL_SAME_VALUE;
  pending.bytes = 0;
  findings_add(&pending.report);
}

void races_forget_pending(void) {
  if (pending.bytes) findings_add(&pending.report);
  pending.bytes = 0;
}

static msl_report race(uintptr_t address, const accessor* before, const accessor* now, const char* what) {
  msl_report found = {.kind = MSL_RACE, .site = {what, NULL, 0, 0}, .address = address};
  found.other_code = (unsigned long)before->code;
  found.code = (unsigned long)now->code;
  found.count = before->group != now->group;
  place_of(now->group, now->thread, found.group, found.thread);
  place_of(before->group, before->thread, found.other_group, found.other_thread);
  found.lane = now->thread % MSL_SIMD_WIDTH;
  found.other_lane = before->thread % MSL_SIMD_WIDTH;
  return found;
}

static void read_unwritten(uintptr_t address, const accessor* now) {
  failure.address = address;
  failure.code = (unsigned long)now->code;
  note(MSL_UNWRITTEN, (msl_site){0});
}

// ---- accesses ----

static void remember_read(history* past, const access* now, int of_group) {
  if (!past->read.by.code || ordered(&past->read, now, of_group)) {
    past->read = *now;
    return;
  }
  if (!by_another(&past->read, now)) return;
  if (!same_thread(&past->read.by, &now->by)) past->also = now->by;
  if (!same_simdgroup(&past->read.by, &now->by)) past->read.readers = BY_SIMDGROUPS;
  else if (past->read.readers == BY_ONE) past->read.readers = BY_LANES;
}

static void touch_byte(uintptr_t address, history* past, const access* now, const region* where, int writes,
                       msl_report* found, uintptr_t* unwritten) {
  unsigned mark = where->of_group ? now->by.group + 1 : 1;
  int none = !found->kind, is_first = past->written_by != mark;
  if (writes) past->written_by = mark;
  else if (where->blank && is_first && !*unwritten) *unwritten = address;
  if (atomically) {
    if (writes && address == options.trace) traced_atomic = now->by;
    return;
  }
  if (none && by_another(&past->write, now) && !ordered(&past->write, now, where->of_group))
    *found = race(address, &past->write.by, &now->by, writes ? "write after write" : "read after write");
  else if (none && writes && by_another(&past->read, now) && !ordered(&past->read, now, where->of_group))
    *found = race(address, same_thread(&past->read.by, &now->by) ? &past->also : &past->read.by, &now->by,
                  where->blank && is_first ? "read after write, read first" : "write after read");
  if (writes) past->write = *now;
  else remember_read(past, now, where->of_group);
}

static void touch(uintptr_t address, unsigned bytes, int writes, const void* code) {
  if (!running) return;
  races_settle();
  if (fibres_hold(address)) return;  // private memory of a thread
  bounds_check(address, bytes, writes, code);
  region* where = region_of(address);
  if (!where) return;
  int kind = where->of_group;
  access now = {{code, this_group, running->thread.index}, phases[kind], simdgroup_fences()[kind], fences, BY_ONE};
  msl_report found = {.kind = MSL_FINE};
  uintptr_t offset = address - where->start, unwritten = 0;
  if (bytes > where->bytes - offset) bytes = (unsigned)(where->bytes - offset);  // the rest is not watched
  for (unsigned i = 0; i < bytes; i++)
    touch_byte(address + i, &where->bytes_of[offset + i], &now, where, writes, &found, &unwritten);
  if (unwritten) read_unwritten(unwritten, &now.by);
  if (!found.kind) return;
  if (!strcmp(found.site.what, "write after write") && bytes <= WIDEST) {
    pending.address = address;
    pending.bytes = bytes;
    memcpy(pending.before, (void*)address, bytes);
    pending.report = found;
  } else findings_add(&found);
}

enum { NOBODY, A_THREAD, A_NEIGHBOUR };

// The address of the written byte that is nearest to an unwritten byte.
static uintptr_t nearest_written(const region* where, uintptr_t at) {
  for (uintptr_t distance = 1; distance < where->bytes; distance++) {
    if (at >= distance && where->bytes_of[at - distance].write.by.code) return at - distance;
    if (at + distance < where->bytes && where->bytes_of[at + distance].write.by.code) return at + distance;
  }
  return at;
}

void races_trace(uintptr_t address) {
  region* where = region_of(address);
  if (!where) return;
  uintptr_t at = address - where->start;
  const accessor* by = where->bytes_of[at].write.by.code ? &where->bytes_of[at].write.by : &traced_atomic;
  msl_report found = {.kind = MSL_WRITER, .address = address, .count = A_THREAD};
  if (!by->code) {
    at = nearest_written(where, at);
    by = &where->bytes_of[at].write.by;
    found.count = by->code ? A_NEIGHBOUR : NOBODY;
    found.address = where->start + at;
  }
  if (by->code) {
    found.code = (unsigned long)by->code;
    found.lane = by->thread % MSL_SIMD_WIDTH;
    place_of(by->group, by->thread, found.group, found.thread);
  }
  findings_add(&found);
}

void races_note_unwritten(void) {
  for (unsigned i = 0; i < region_count; i++) {
    const region* where = &regions[i];
    if (where->of_group || !where->blank) continue;
    msl_report found = {.kind = MSL_NOT_WRITTEN, .other = {NULL, NULL, i, 0}};  // i: one report per output
    for (uintptr_t k = 0; k < where->bytes; k++) {
      if (where->bytes_of[k].written_by) continue;
      if (!found.count++) found.address = where->start + k;
    }
    if (found.count) findings_add(&found);
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

// Clang turns loops that copy or fill memory into calls of these functions.
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
