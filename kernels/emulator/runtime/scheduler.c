// Run a grid, one threadgroup at a time. Within a threadgroup, run each SIMD-group as far as possible before the next
// SIMD-group, and each lane before the next lane.
//
// This is the most uneven progress of threads that a GPU allows. So if a barrier is missing, results are wrong and
// differ between orders of threads.
#include "runtime.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SIMDGROUPS (MSL_MAX_THREADS / MSL_SIMD_WIDTH)
// A mistake other than a race ends its threadgroup, so that consequences of the mistake are not reported. Other
// threadgroups continue, until this number of threadgroups has failed.
#define MAX_FAILED_GROUPS 32

fibre* volatile running;
msl_statistics counted;
msl_options options;
volatile int interrupted;

static fibre fibres[MSL_MAX_THREADS];
static simdgroup simdgroups[MAX_SIMDGROUPS];
static msl_group group;
static msl_entry kernel;
static void* const* kernel_buffers;
static unsigned failed_groups;
static volatile int group_over, grid_over;

static unsigned smaller(unsigned a, unsigned b) { return a < b ? a : b; }
static unsigned groups_of(unsigned size, unsigned n) { return n / size + (n % size != 0); }

// ---- the running SIMD-group ----

static struct {
  unsigned first, lanes;
  unsigned order[MSL_SIMD_WIDTH];
  unsigned next;  // number of lanes that have run
} current;

static fibre* next_ready(void) {
  while (current.next < current.lanes) {
    fibre* next = &fibres[current.first + current.order[current.next++]];
    if (next->state == READY) return next;
  }
  return NULL;
}

// ---- functions that threads call ----

unsigned running_index(void) { return running->thread.index; }
unsigned running_threads(void) { return group.threads; }

static simdgroup* simdgroup_of(const fibre* at) { return &simdgroups[at->thread.index / MSL_SIMD_WIDTH]; }

const unsigned* simdgroup_fences(void) { return simdgroup_of(running)->fences; }

// Switch to the next lane of the SIMD-group, or after the last lane to the scheduler.
static void hand_over(fibre* self) {
  counted.switches++;
  running = next_ready();
  fibre_switch(self, running);
}

static void wait_as(state state, const char* what, const char* file, unsigned line) {
  fibre* self = running;
  if (options.races) races_settle();
  self->state = state;
  self->what = what;
  self->file = file;
  self->line = line;
  hand_over(self);
}

void msl_barrier(unsigned memory, const char* file, unsigned line) {
  counted.barriers++;
  running->memory = memory;
  wait_as(AT_BARRIER, "threadgroup_barrier", file, line);
}

void meet_group(const char* what, const char* file, unsigned line) {
  running->memory = 0;
  wait_as(AT_BARRIER, what, file, line);
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

// After a simdgroup_barrier, the first lane that continues counts the fence for all lanes.
void msl_simdgroup_fence(unsigned memory) {
  simdgroup* self = simdgroup_of(running);
  if (!self->unfenced) return;
  self->unfenced = 0;
  for (unsigned i = 0; i < MSL_MEMORIES; i++) self->fences[i] += memory >> i & 1;
}

static void thread_main(void) {
  kernel(kernel_buffers, &running->thread);
  if (options.races) races_settle();
  running->state = DONE;
  hand_over(running);
  abort();
}

// ---- mistakes ----

static void report_thread(const fibre* at) {
  for (int i = 0; i < 3; i++) {
    failure.group[i] = group.position[i];
    failure.thread[i] = at->thread.position[i];
  }
  failure.lane = at->thread.index % MSL_SIMD_WIDTH;
}

void end_grid(void) { grid_over = group_over = 1; }

void end_thread(void) {
  if (options.races) races_forget_pending();
  running->state = DONE;
  group_over = 1;
}

// End the threadgroup from within a thread.
_Noreturn void fail(int kind, msl_site site, unsigned count) {
  report_thread(running);
  failure.kind = kind;
  failure.site = site;
  failure.count = count;
  if (!findings_add(&failure)) end_grid();
  end_thread();
  fibre_abandon();
  abort();
}

static msl_site site_of(const fibre* at) { return (msl_site){at->what, at->file, at->line, 0}; }

void note(int kind, msl_site site) {
  report_thread(running);
  failure.kind = kind;
  failure.site = site;
  findings_add(&failure);
}

void msl_undefined(unsigned lane) {
  failure.other_lane = lane;
  note(MSL_SHIFTED, site_of(running));
}

void msl_inactive(unsigned lane) {
  failure.other_lane = lane;
  fail(MSL_INACTIVE_LANE, site_of(running), 0);
}

// End the threadgroup from the scheduler, because two threads wait at different operations.
static void disagree(int kind, const fibre* one, const fibre* other, unsigned count) {
  report_thread(one);
  failure.kind = kind;
  failure.site = site_of(one);
  failure.other = site_of(other);
  failure.other_lane = other->thread.index % MSL_SIMD_WIDTH;
  failure.count = count;
  if (!findings_add(&failure)) end_grid();
  group_over = 1;
}

static int same_place(const fibre* a, const fibre* b) {
  return a->line == b->line && (a->what == b->what || !strcmp(a->what, b->what)) &&
         (a->file == b->file || !strcmp(a->file, b->file));
}

// ---- a SIMD-group ----

// Run each ready lane until it waits or ends; return 0 if there is none. Lanes switch to each other directly; a lane
// that fails returns here.
static int resume_ready(void) {
  int any = 0;
  current.next = 0;
  while (!grid_over && (running = next_ready())) {
    any = 1;
    counted.switches++;
    fibre_switch(NULL, running);
    running = NULL;
  }
  return any;
}

static fibre* lane_of(unsigned i) { return &fibres[current.first + i]; }

// The lane that waits at the operation that is first in the text. NULL if no lane waits, or if lanes wait in different
// files, so that the order is unknown.
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

// Whether all lanes are at the operation of `first`; if not, report it.
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

// Continue the lanes that wait at the first operation; return 0 if there are none, or after a mistake. Other lanes
// wait, because a GPU also runs the branches of a condition sequentially, in the order of the text.
static int release(void) {
  fibre* first = earliest();
  if (!first) return 0;
  if ((options.all_lanes || first->argument == MSL_ALL_LANES) && !all_at(first)) return 0;
  simdgroup* shared = &simdgroups[current.first / MSL_SIMD_WIDTH];
  shared->lanes = 0;
  shared->unfilled = shared->unfenced = 1;
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

// Run a SIMD-group as far as possible without the rest of the threadgroup.
static void run_simdgroup(unsigned index) {
  current.first = index * MSL_SIMD_WIDTH;
  current.lanes = smaller(group.threads - current.first, MSL_SIMD_WIDTH);
  order_of(current.order, current.lanes);
  while (resume_ready() && !group_over && release()) {
  }
}

// ---- a threadgroup ----

static void begin_threads(void) {
  for (unsigned index = 0; index < group.threads; index++) {
    fibre* next = &fibres[index];
    unsigned x = group.size[0], y = group.size[1];
    next->thread = (msl_thread){&group, index, {index % x, index / x % y, index / (x * y)}};
    next->state = READY;
    next->what = next->file = NULL;
    fibre_begin(index, next, thread_main);
  }
  for (unsigned i = 0; i < groups_of(MSL_SIMD_WIDTH, group.threads); i++)
    memset(simdgroups[i].fences, 0, sizeof simdgroups[i].fences);
}

// If all threads wait at one barrier, continue them and return 1. Return 0 if all have returned, or after a mistake.
static int pass_barrier(void) {
  fibre* first = NULL;
  unsigned returned = 0, memory = ~0u;
  for (unsigned i = 0; i < group.threads; i++) {
    fibre* at = &fibres[i];
    if (at->state != DONE) memory &= at->memory;
    if (at->state == DONE) returned++;
    else if (!first) first = at;
    else if (!same_place(first, at)) return disagree(MSL_DIVERGENT_BARRIER, first, at, 0), 0;
  }
  if (!first) return 0;
  if (returned) return disagree(MSL_RETURNED_BARRIER, first, first, returned), 0;
  for (unsigned i = 0; i < group.threads; i++) fibres[i].state = READY;
  races_next_phase(memory);
  return 1;
}

static void check_canaries(void) {
  const char* damaged = threadgroup_damaged();
  if (group_over || !damaged) return;
  report_thread(&fibres[0]);
  failure.kind = MSL_THREADGROUP_CANARY;
  failure.site = (msl_site){damaged, NULL, 0, 0};
  findings_add(&failure);
  group_over = 1;
}

static void run_group(void) {
  unsigned order[MAX_SIMDGROUPS], count = groups_of(MSL_SIMD_WIDTH, group.threads);
  counted.threadgroups++;
  counted.threads += group.threads;
  races_next_group();
  tensors_next_group();
  threadgroup_poison();
  group_over = grid_over;
  begin_threads();
  do {
    order_of(order, count);
    for (unsigned i = 0; i < count && !grid_over; i++) run_simdgroup(order[i]);
  } while (!group_over && pass_barrier());
  check_canaries();
  if (group_over && ++failed_groups == MAX_FAILED_GROUPS) end_grid();
}

// ---- the grid ----

static unsigned size_along(int axis, unsigned position) {
  return smaller(group.dispatched[axis], group.threads_per_grid[axis] - position * group.dispatched[axis]);
}

static void place_group(unsigned long index) {
  for (int i = 0; i < 3; i++) {
    group.position[i] = (unsigned)(index % group.threadgroups_per_grid[i]);
    index /= group.threadgroups_per_grid[i];
    group.size[i] = size_along(i, group.position[i]);
  }
  group.threads = group.size[0] * group.size[1] * group.size[2];
}

unsigned long running_group(void) {
  const unsigned *at = group.position, *of = group.threadgroups_per_grid;
  return at[0] + of[0] * (at[1] + (unsigned long)of[1] * at[2]);
}

void place_of(unsigned long index, unsigned thread, unsigned* group_at, unsigned* thread_at) {
  for (int i = 0; i < 3; i++) {
    group_at[i] = (unsigned)(index % group.threadgroups_per_grid[i]);
    index /= group.threadgroups_per_grid[i];
    unsigned size = size_along(i, group_at[i]);
    thread_at[i] = thread % size;
    thread /= size;
  }
}

static void run_grid(void) {
  unsigned long count = 1;
  for (int i = 0; i < 3; i++) count *= group.threadgroups_per_grid[i];
  unsigned long index = order_first(count), stride = order_stride(count);
  for (unsigned long ran = 0; ran < count && !grid_over; ran++, index = (index + stride) % count) {
    place_group(index);
    if (!interrupted) run_group();
    else {
      failure.kind = MSL_INTERRUPTED;
      findings_add(&failure);
      end_grid();
    }
  }
}

unsigned msl_dispatch(msl_entry entry, void* const* buffers, const unsigned* grid, const unsigned* threadgroup,
                      const msl_options* given, msl_statistics* statistics, msl_report* reports) {
  kernel = entry;
  kernel_buffers = buffers;
  options = *given;
  orders_begin(options.seed);
  tensors_begin();
  memset(&counted, 0, sizeof counted);
  findings_begin(reports);
  print_begin();
  failed_groups = 0;
  interrupted = group_over = grid_over = 0;
  unsigned threads = 1;
  for (int i = 0; i < 3; i++) {
    group.threads_per_grid[i] = grid[i];
    group.dispatched[i] = smaller(threadgroup[i], grid[i]);
    group.threadgroups_per_grid[i] = groups_of(group.dispatched[i], grid[i]);
    threads *= group.dispatched[i];
  }
  fibres_prepare(threads);
  threadgroup_prepare((int)options.at_end, (int)options.races);
  signals_install(options.patience);
  unsigned long before = denormals_flush();
  run_grid();
  denormals_restore(before);
  signals_restore();
  running = NULL;
  if (options.races && options.trace) races_trace(options.trace);
  if (options.races && !options.trace && !findings_count()) races_note_unwritten();
  if (options.races) races_prepare();
  bounds_forget();
  *statistics = counted;
  return findings_end();
}
