// Exact bounds in the build "races", which checks every access: it must be within one buffer or threadgroup array.
//
// An access to another byte of a buffer's mapped pages is a mistake. Memory next to these pages is unmapped, so an
// access there faults. Any other address is memory of the runtime or private memory of a thread, and is not checked.
#include "runtime.h"

#include <stdlib.h>

typedef struct {
  uintptr_t pages, page_bytes;  // the mapped pages
  uintptr_t start, bytes;       // the bytes that a kernel may access
} area;

static area* areas;
static unsigned area_count, area_room;

// A cache: for each instruction, the area of its last access, because most instructions access the same area again.
#define GUESSES 1024
static unsigned guesses[GUESSES];

void bounds_forget(void) { area_count = 0; }

void msl_bound(unsigned long pages, unsigned long page_bytes, unsigned long start, unsigned long bytes) {
  if (area_count == area_room) {
    areas = realloc(areas, (area_room = 2 * area_room + 64) * sizeof(area));
    if (!areas) abort();
  }
  areas[area_count++] = (area){pages, page_bytes, start, bytes};
}

static int inside(const area* of, uintptr_t address, uintptr_t bytes) {
  uintptr_t offset = address - of->start;
  return offset < of->bytes && bytes <= of->bytes - offset;
}

void bounds_check(uintptr_t address, uintptr_t bytes, int writes, const void* code) {
  unsigned* guess = &guesses[(uintptr_t)code / 4 % GUESSES];
  if (*guess < area_count && inside(&areas[*guess], address, bytes)) return;
  for (unsigned i = 0; i < area_count; i++) {
    if (address - areas[i].pages >= areas[i].page_bytes) continue;
    *guess = i;
    if (!bytes || inside(&areas[i], address, bytes)) return;
    failure.address = address;
    failure.code = (unsigned long)code;
    failure.is_write = (unsigned)writes;
    failure.is_known = 1;
    fail(MSL_BOUNDS, (msl_site){0}, (unsigned)bytes);
  }
}
