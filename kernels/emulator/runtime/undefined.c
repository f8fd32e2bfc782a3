// The functions that clang's checks of undefined behaviour (UBSan) call in the build "undefined". They get the place in
// the text, report the mistake and end the threadgroup. An implicit conversion is only a note.
#include "runtime.h"

#include <stdio.h>

// The data of every check begins with its place in the text.
typedef struct {
  const char* file;
  uint32_t line, column;
} source_location;

static void report(const char* what, const source_location* at) {
  msl_site site = {what, at->file, at->line, at->column};
  fail(MSL_UNDEFINED, site, 0);
}

#define EXPORTED __attribute__((visibility("default")))

#define HANDLER(NAME, WHAT) \
  EXPORTED void __ubsan_handle_##NAME##_abort(void* data) { report(WHAT, data); }

HANDLER(add_overflow, "signed overflow of +")
HANDLER(sub_overflow, "signed overflow of -")
HANDLER(mul_overflow, "signed overflow of *")
HANDLER(negate_overflow, "signed overflow of a negation")
HANDLER(divrem_overflow, "integer division by zero, or of the lowest integer by -1")
HANDLER(shift_out_of_bounds, "shift by a negative amount or by all bits, or of a negative value")
HANDLER(out_of_bounds, "index beyond an array's bounds")
HANDLER(float_cast_overflow, "cast of a floating value that the integer type cannot hold")

// The data of a type mismatch.
typedef struct {
  source_location at;
  const void* type;
  unsigned char log_alignment, kind;
} type_mismatch;

// The data of an implicit conversion.
typedef struct {
  uint16_t kind, info;  // of an integer: its signedness, and the logarithm of its bits
  char name[];
} type;

typedef struct {
  source_location at;
  const type *from, *to;
  unsigned char kind;
} conversion;

static long long value_of(const type* of, uintptr_t given) {
  unsigned bits = 1u << (of->info >> 1), unused = 64 - bits;
  if (bits >= 64) return (long long)given;
  uint64_t top = (uint64_t)given << unused;
  return of->info & 1 ? (long long)top >> unused : (long long)(top >> unused);
}

EXPORTED void __ubsan_handle_implicit_conversion(const conversion* data, uintptr_t from, uintptr_t to) {
  snprintf(failure.detail, sizeof failure.detail, "from %s to %s: %lld becomes %lld", data->from->name, data->to->name,
           value_of(data->from, from), value_of(data->to, to));
  note(MSL_TRUNCATED, (msl_site){"conversion", data->at.file, data->at.line, data->at.column});
}

EXPORTED void __ubsan_handle_type_mismatch_v1_abort(const type_mismatch* data, uintptr_t address) {
  failure.address = address;
  msl_site site = {address ? "misaligned access" : "access through a null pointer", data->at.file, data->at.line,
                   data->at.column};
  fail(MSL_UNDEFINED, site, 1u << data->log_alignment);
}
