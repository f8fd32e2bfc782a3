// Runs a grid: one threadgroup at a time, in it one SIMD-group as far as it can go, in it one lane after the other.
//
// That is as uneven as a GPU may be, so what needs a barrier and has none comes out wrong, and differently for
// different orders.
#include "runtime.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SIMDGROUPS (MSL_MAX_THREADS / MSL_SIMD_WIDTH)

fibre* volatile running;
msl_statistics counted;
msl_report failure;
volatile int interrupted;

static fibre fibres[MSL_MAX_THREADS];
static simdgroup simdgroups[MAX_SIMDGROUPS];
static msl_group group;
static msl_entry kernel;
static void* const* kernel_buffers;
static msl_options options;
static uint64_t random_state;

static unsigned smaller(unsigned a, unsigned b) { return a < b ? a : b; }
static unsigned groups_of(unsigned size, unsigned n) { return n / size + (n % size != 0); }

// ---- orders ----

static unsigned draw(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (unsigned)((random_state >> 32) % below);
}

static void arrange(unsigned* order, unsigned count) {
  for (unsigned i = 0; i < count; i++) order[i] = options.seed == 1 ? count - 1 - i : i;
  for (unsigned i = count; options.seed > 1 && i > 1; i--) {
    unsigned other = draw(i), last = order[i - 1];
    order[i - 1] = order[other];
    order[other] = last;
  }
}

// ---- the SIMD-group that runs ----

static struct {
  unsigned first, lanes;
  unsigned order[MSL_SIMD_WIDTH];
  unsigned next;  // how many of them have had their turn
} current;

static fibre* next_ready(void) {
  while (current.next < current.lanes) {
    fibre* next = &fibres[current.first + current.order[current.next++]];
    if (next->state == READY) return next;
  }
  return NULL;
}

// ---- what a thread calls ----

unsigned running_index(void) { return running->thread.index; }

unsigned simdgroup_operations(void) { return simdgroups[running->thread.index / MSL_SIMD_WIDTH].operations; }

// The next lane of the SIMD-group takes over; after the last one, the scheduler.
static void hand_over(fibre* self) {
  counted.switches++;
  running = next_ready();
  fibre_switch(self, running);
}

static void wait_as(state state, const char* what, const char* file, unsigned line) {
  fibre* self = running;
  self->state = state;
  self->what = what;
  self->file = file;
  self->line = line;
  hand_over(self);
}

void msl_barrier(const char* file, unsigned line) {
  counted.barriers++;
  wait_as(AT_BARRIER, "threadgroup_barrier", file, line);
}

static void copy(void* to, const void* from, unsigned bytes) {
  switch (bytes) {
    case 4: memcpy(to, from, 4); break;
    case 16: memcpy(to, from, 16); break;
    default: memcpy(to, from, bytes);
  }
}

void msl_exchange(const void* value, unsigned bytes, int argument, const char* what, const char* file, unsigned line,
                  msl_exchanged* found) {
  unsigned index = running->thread.index;
  simdgroup* self = &simdgroups[index / MSL_SIMD_WIDTH];
  counted.simd_operations++;
  if (bytes > MSL_SLOT_BYTES) fail(MSL_VALUE_BYTES, (msl_site){what, file, line, 0}, bytes);
  running->value = value;
  running->bytes = bytes;
  running->argument = argument;
  wait_as(AT_SIMD, what, file, line);
  found->slots = self->slots;
  found->lanes = self->lanes;
  found->lane = index % MSL_SIMD_WIDTH;
  found->result = self->result;
  found->first = self->unfilled;
  self->unfilled = 0;
}

static void thread_main(void) {
  kernel(kernel_buffers, &running->thread);
  running->state = DONE;
  hand_over(running);
  abort();
}

// ---- failing ----

static void report_thread(const fibre* at) {
  for (int i = 0; i < 3; i++) {
    failure.group[i] = group.position[i];
    failure.thread[i] = at->thread.position[i];
  }
  failure.lane = at->thread.index % MSL_SIMD_WIDTH;
}

// Ends the dispatch from within a thread.
_Noreturn void fail(int kind, msl_site site, unsigned count) {
  report_thread(running);
  failure.kind = kind;
  failure.site = site;
  failure.count = count;
  fibre_abandon();
  abort();
}

static msl_site site_of(const fibre* at) { return (msl_site){at->what, at->file, at->line, 0}; }

void msl_undefined(unsigned lane) {
  if (failure.site.what) return;
  report_thread(running);
  failure.site = site_of(running);
  failure.other_lane = lane;
}

void msl_inactive(unsigned lane) {
  failure.other_lane = lane;
  fail(MSL_INACTIVE_LANE, site_of(running), 0);
}

// Ends it from the scheduler, which has found two threads that do not go together.
static void disagree(int kind, const fibre* one, const fibre* other, unsigned count) {
  report_thread(one);
  failure.kind = kind;
  failure.site = site_of(one);
  failure.other = site_of(other);
  failure.other_lane = other->thread.index % MSL_SIMD_WIDTH;
  failure.count = count;
}

static int same_place(const fibre* a, const fibre* b) {
  return a->line == b->line && (a->what == b->what || !strcmp(a->what, b->what)) &&
         (a->file == b->file || !strcmp(a->file, b->file));
}

// ---- a SIMD-group ----

// Each lane that is ready runs to where it waits or ends; 0 when there is none.
static int resume_ready(void) {
  current.next = 0;
  running = next_ready();
  if (!running) return 0;
  counted.switches++;
  fibre_switch(NULL, running);
  running = NULL;
  return 1;
}

static fibre* lane_of(unsigned i) { return &fibres[current.first + i]; }

// The lane that waits at the operation that comes first in the text; NULL when none waits, or when lanes wait in
// different texts, of which the first to run is not known.
static fibre* earliest(void) {
  fibre* first = NULL;
  for (unsigned i = 0; i < current.lanes; i++) {
    fibre* at = lane_of(i);
    if (at->state != AT_SIMD) continue;
    if (first && strcmp(at->file, first->file)) return disagree(MSL_UNORDERED_SIMD, first, at, 0), NULL;
    if (!first || at->line < first->line) first = at;
  }
  return first;
}

// Whether all lanes are at the operation of `first`; if not, says why.
static int all_at(const fibre* first) {
  fibre *elsewhere = NULL, *at_barrier = NULL;
  unsigned returned = 0;
  for (unsigned i = 0; i < current.lanes; i++) {
    fibre* at = lane_of(i);
    if (at->state == DONE) returned++;
    else if (at->state == AT_BARRIER) at_barrier = at;
    else if (!same_place(first, at)) elsewhere = at;
  }
  if (elsewhere) return disagree(MSL_DIVERGENT_SIMD, first, elsewhere, 0), 0;
  if (at_barrier) return disagree(MSL_BARRIER_AND_SIMD, first, at_barrier, 0), 0;
  if (returned) return disagree(MSL_RETURNED_SIMD, first, first, returned), 0;
  return 1;
}

// Lets the lanes that wait at one operation go on; 0 when there are none, or when lanes do not go together. The others
// wait: a GPU, too, runs the ways of a branch one after the other, in the order of the text.
static int release(void) {
  fibre* first = earliest();
  if (!first) return 0;
  if ((options.all_lanes || first->argument == MSL_ALL_LANES) && !all_at(first)) return 0;
  simdgroup* shared = &simdgroups[current.first / MSL_SIMD_WIDTH];
  shared->lanes = 0;
  shared->unfilled = 1;
  shared->operations++;
  for (unsigned i = 0; i < current.lanes; i++) {
    fibre* at = lane_of(i);
    if (at->state != AT_SIMD || !same_place(first, at)) continue;
    if (at->argument != first->argument) return disagree(MSL_UNEVEN_ARGUMENT, first, at, 0), 0;
    copy(shared->slots + i * MSL_SLOT_BYTES, at->value, at->bytes);
    shared->lanes |= 1u << i;
    at->state = READY;
  }
  return 1;
}

// As far as it can go without the rest of the threadgroup.
static void run_simdgroup(unsigned index) {
  current.first = index * MSL_SIMD_WIDTH;
  current.lanes = smaller(group.threads - current.first, MSL_SIMD_WIDTH);
  arrange(current.order, current.lanes);
  while (resume_ready() && !failure.kind && release()) {
  }
}

// ---- a threadgroup ----

static void begin_threads(void) {
  for (unsigned index = 0; index < group.threads; index++) {
    fibre* next = &fibres[index];
    unsigned x = group.size[0], y = group.size[1];
    next->thread = (msl_thread){&group, index, {index % x, index / x % y, index / (x * y)}};
    next->state = READY;
    fibre_begin(index, next, thread_main);
  }
  for (unsigned i = 0; i < groups_of(MSL_SIMD_WIDTH, group.threads); i++) simdgroups[i].operations = 0;
}

// 1 when all threads wait at one barrier, and go on; 0 when all have returned, or do not go together.
static int pass_barrier(void) {
  fibre* first = NULL;
  unsigned returned = 0;
  for (unsigned i = 0; i < group.threads; i++) {
    fibre* at = &fibres[i];
    if (at->state == DONE) returned++;
    else if (!first) first = at;
    else if (!same_place(first, at)) return disagree(MSL_DIVERGENT_BARRIER, first, at, 0), 0;
  }
  if (!first) return 0;
  if (returned) return disagree(MSL_RETURNED_BARRIER, first, first, returned), 0;
  for (unsigned i = 0; i < group.threads; i++) fibres[i].state = READY;
  races_next_phase();
  return 1;
}

static void check_canaries(void) {
  const char* damaged = threadgroup_damaged();
  if (failure.kind || !damaged) return;
  report_thread(&fibres[0]);
  failure.kind = MSL_THREADGROUP_CANARY;
  failure.site = (msl_site){damaged, NULL, 0, 0};
}

static void run_group(void) {
  unsigned order[MAX_SIMDGROUPS], count = groups_of(MSL_SIMD_WIDTH, group.threads);
  counted.threadgroups++;
  counted.threads += group.threads;
  races_next_group();
  threadgroup_poison();
  begin_threads();
  do {
    arrange(order, count);
    for (unsigned i = 0; i < count && !failure.kind; i++) run_simdgroup(order[i]);
  } while (!failure.kind && pass_barrier());
  check_canaries();
}

// ---- the grid ----

static void place_group(unsigned long index) {
  for (int i = 0; i < 3; i++) {
    group.position[i] = (unsigned)(index % group.threadgroups_per_grid[i]);
    index /= group.threadgroups_per_grid[i];
    group.size[i] = smaller(group.dispatched[i], group.threads_per_grid[i] - group.position[i] * group.dispatched[i]);
  }
  group.threads = group.size[0] * group.size[1] * group.size[2];
}

static unsigned long common_divisor(unsigned long a, unsigned long b) { return b ? common_divisor(b, a % b) : a; }

// Shuffled, a grid is walked with a stride that meets each threadgroup once.
static void run_grid(void) {
  unsigned long count = 1, stride = 1, index = 0;
  for (int i = 0; i < 3; i++) count *= group.threadgroups_per_grid[i];
  if (options.seed == 1) {
    index = count - 1;
    stride = count - 1;
  } else if (options.seed > 1 && count > 1) {
    index = draw((unsigned)count);
    for (stride = 1 + draw((unsigned)count); common_divisor(stride, count) != 1;) stride++;
  }
  for (unsigned long ran = 0; ran < count && !failure.kind; ran++, index = (index + stride) % count) {
    if (interrupted) failure.kind = MSL_INTERRUPTED;
    place_group(index);
    if (!failure.kind) run_group();
  }
}

// ---- denormals: a GPU takes float32 values below 2^-126 for 0 ----

#if defined(__x86_64__)
static unsigned flush(void) {
  unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  return before;
}
static void unflush(unsigned before) { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
static uint64_t flush(void) {
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | 1ul << 24));
  return before;
}
static void unflush(uint64_t before) { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#else
static unsigned flush(void) { return 0; }
static void unflush(unsigned before) { (void)before; }
#endif

int msl_dispatch(msl_entry entry, void* const* buffers, const unsigned* grid, const unsigned* threadgroup,
                 const msl_options* given, msl_statistics* statistics, msl_report* report) {
  kernel = entry;
  kernel_buffers = buffers;
  options = *given;
  random_state = 0x9E3779B97F4A7C15ull * (options.seed + 1);
  memset(&counted, 0, sizeof counted);
  memset(&failure, 0, sizeof failure);
  interrupted = 0;
  unsigned threads = 1;
  for (int i = 0; i < 3; i++) {
    group.threads_per_grid[i] = grid[i];
    group.dispatched[i] = smaller(threadgroup[i], grid[i]);
    group.threadgroups_per_grid[i] = groups_of(group.dispatched[i], grid[i]);
    threads *= group.dispatched[i];
  }
  fibres_prepare(threads);
  threadgroup_prepare((int)options.at_end, (int)options.races);
  signals_install();
  __auto_type before = flush();
  run_grid();
  unflush(before);
  signals_restore();
  running = NULL;
  if (options.races) races_prepare();
  if (failure.kind) signals_locate(&failure);
  *statistics = counted;
  *report = failure;
  return failure.kind;
}
