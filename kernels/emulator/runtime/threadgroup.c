// Threadgroup memory. Each array is between unmapped pages, and is filled with one byte when a threadgroup begins.
#include "runtime.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// Bytes of unmapped memory (guard) on each side of an array. It is far larger than all arrays together, so that a wrong
// index does not reach the next array. In a process with few addresses, the guard is 16 KiB.
#define LARGE_GUARD (16ul << 20)
#define SMALL_GUARD 16384ul
#define ALIGNMENT 16ul

static char* places;
static unsigned long guard_bytes, place_bytes;
static int ends_at_guard, watched;
static msl_array arrays[MSL_MAX_THREADGROUP_ARRAYS];
static unsigned used;

static void* reserved(unsigned long guard) {
  guard_bytes = guard;
  place_bytes = MSL_MAX_THREADGROUP_BYTES + 2 * guard;
  return mmap(NULL, place_bytes * MSL_MAX_THREADGROUP_ARRAYS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0);
}

void threadgroup_prepare(int at_end, int races) {
  watched = races;
  if (!places) {
    void* memory = reserved(LARGE_GUARD);
    if (memory == MAP_FAILED) memory = reserved(SMALL_GUARD);
    if (memory == MAP_FAILED) abort();
    places = memory;
    for (unsigned i = 0; i < MSL_MAX_THREADGROUP_ARRAYS; i++)
      mprotect(places + place_bytes * i + guard_bytes, MSL_MAX_THREADGROUP_BYTES, PROT_READ | PROT_WRITE);
  }
  memset(arrays, 0, sizeof arrays);
  used = 0;
  ends_at_guard = at_end;
}

static unsigned long slack(const msl_array* array) { return -array->bytes % ALIGNMENT; }

static void poison(const msl_array* array) { memset((void*)array->start, (int)options.poison, array->bytes + slack(array)); }

// Called by each thread that uses the array. The first call of a dispatch allocates it.
void* msl_threadgroup_array(unsigned ordinal, unsigned bytes, const char* name, unsigned line) {
  msl_array* array = &arrays[ordinal];
  if (!array->name) {
    counted.threadgroup_bytes += bytes;
    msl_site site = {name, NULL, line, 0};
    if (counted.threadgroup_bytes > MSL_MAX_THREADGROUP_BYTES)
      fail(MSL_THREADGROUP_BYTES, site, (unsigned)counted.threadgroup_bytes);
    char* first = places + place_bytes * ordinal + guard_bytes;
    array->name = name;
    array->bytes = bytes;
    array->start = (unsigned long)first;
    if (ends_at_guard) array->start += MSL_MAX_THREADGROUP_BYTES - bytes - slack(array);
    poison(array);
    if (watched) races_watch(array->start, bytes, 1, 1);
    if (watched) msl_bound((unsigned long)first, MSL_MAX_THREADGROUP_BYTES, array->start, bytes);
    if (ordinal >= used) used = ordinal + 1;
  }
  return (void*)array->start;
}

void threadgroup_poison(void) {
  for (unsigned i = 0; i < used; i++)
    if (arrays[i].name) poison(&arrays[i]);
}

// The name of an array whose padding (to a multiple of 16 bytes) was written; NULL if there is none.
const char* threadgroup_damaged(void) {
  for (unsigned i = 0; i < used; i++) {
    const unsigned char* end = (const unsigned char*)arrays[i].start + arrays[i].bytes;
    for (unsigned long k = 0; arrays[i].name && k < slack(&arrays[i]); k++)
      if (end[k] != options.poison) return arrays[i].name;
  }
  return NULL;
}

unsigned msl_threadgroup_arrays(msl_array* found) {
  unsigned count = 0;
  for (unsigned i = 0; i < used; i++)
    if (arrays[i].name) found[count++] = arrays[i];
  return count;
}
