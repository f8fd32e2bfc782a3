// Tensors: layouts of cooperative tensors, synchronisation of the threads of an operation, and matrix products.
//
// The specification defines neither which thread has which element of a cooperative tensor (its layout), nor the order
// of summation. So the layout and the order depend on the seed. With seed 0, or with the option `m5`, the layout is the
// one of an M5; with seed 1 it is the one of simdgroup_matrix, as on older GPUs. Other seeds scatter the elements, and
// some of them add invalid elements.
#include "runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LAYOUTS 64

static msl_layout layouts[MAX_LAYOUTS];
static unsigned layout_count, layouts_asked[MAX_LAYOUTS];
static const void* brought[MSL_MAX_THREADS];
// The number of operations that each thread has reached, and the number of operations that were computed.
static unsigned meetings[MSL_MAX_THREADS], acted;

void tensors_begin(void) {
  while (layout_count) free((void*)layouts[--layout_count].at);
}

void tensors_next_group(void) {
  acted = 0;
  memset(meetings, 0, sizeof meetings);
}

void msl_tensor_wrong(const char* file, unsigned line, const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(failure.detail, sizeof failure.detail, format, values);
  va_end(values);
  if (!file) failure.code = (unsigned long)__builtin_return_address(0);
  fail(MSL_TENSOR, (msl_site){"tensor", file, line, 0}, 0);
}

static _Noreturn void wrong_at(const void* code, const char* text) {
  snprintf(failure.detail, sizeof failure.detail, "%s", text);
  failure.code = (unsigned long)code;
  fail(MSL_TENSOR, (msl_site){"tensor", NULL, 0, 0}, 0);
}

#define CALLER __builtin_return_address(0)

void msl_outside(long index, int axis, long origin, long extent, long edge) {
  char text[MSL_DETAIL_BYTES];
  const char* past = index >= 0 && index < extent ? "its slice extends past the edge of the tensor" : "outside";
  snprintf(text, sizeof text,
           "index %ld along axis %d of a tensor with %ld elements there: %s\n"
           "expected an index from 0 to %ld; check the index, or guard it",
           index, axis, extent, past, (extent < edge - origin ? extent : edge - origin) - 1);
  wrong_at(CALLER, text);
}

void msl_beyond_capacity(long index, unsigned capacity) {
  char text[MSL_DETAIL_BYTES];
  snprintf(text, sizeof text,
           "element %ld of a cooperative tensor, but this thread has %u elements\n"
           "expected an element below get_capacity(), which differs from GPU to GPU",
           index, capacity);
  wrong_at(CALLER, text);
}

void msl_not_mapped(void) {
  wrong_at(CALLER,
           "map_iterator: in this layout, the thread does not have the corresponding element\n"
           "check is_iterator_compatible first, and copy through threadgroup memory if it returns false");
}

void msl_tensor_unplaced(const char* file, unsigned line, const char* operand) {
  if (options.m5) return;
  msl_tensor_wrong(file, line,
                   "%s has elements that were set without querying their index: that relies on one GPU's layout\n"
                   "load it from a tensor, or use get_multidimensional_index; layout='m5' checks only for an M5",
                   operand);
}

// ---- layouts ----

static unsigned up(unsigned n, unsigned to) { return (n + to - 1) / to * to; }
static unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }
static unsigned chosen(void) { return options.m5 ? 0 : options.seed; }
static unsigned threads_of(unsigned simdgroups) { return simdgroups ? simdgroups * MSL_SIMD_WIDTH : 1; }

// A layout of squares of `side` x `side` elements, distributed cyclically to SIMD-groups. `of` returns the position of
// a lane's element i in a square.
static void in_squares(msl_layout* layout, msl_at* at, unsigned side, msl_at (*of)(unsigned lane, unsigned i)) {
  unsigned rows = layout->tile.rows, columns = layout->tile.columns, across = up(columns, side) / side;
  unsigned squares = up(rows, side) / side * across, each = side * side / MSL_SIMD_WIDTH;
  for (unsigned square = 0; square < squares; square++) {
    unsigned simdgroup = square % layout->tile.simdgroups, turn = square / layout->tile.simdgroups;
    for (unsigned lane = 0; lane < MSL_SIMD_WIDTH; lane++)
      for (unsigned i = 0; i < each; i++) {
        msl_at one = of(lane, i);
        unsigned row = one.row + square / across * side, column = one.column + square % across * side;
        if (row >= rows || column >= columns) continue;
        at[(simdgroup * MSL_SIMD_WIDTH + lane) * layout->capacity + turn * each + i] = (msl_at){(short)row, (short)column};
      }
  }
}

// A square of 16 x 16 on an M5: a lane has four columns of two rows, 8 apart.
static msl_at of_sixteen(unsigned lane, unsigned i) {
  unsigned quad = lane / 4;
  return (msl_at){(short)((quad & 4) + lane / 2 % 4 + i / 4 * 8), (short)(((quad & 2) + lane % 2) * 4 + i % 4)};
}

// A square of 8 x 8 as in a simdgroup_matrix: a lane has two columns of a row.
static msl_at of_eight(unsigned lane, unsigned i) {
  unsigned quad = lane / 4;
  return (msl_at){(short)((quad & 4) + lane / 2 % 4), (short)((quad & 2) * 2 + lane % 2 * 2 + i)};
}

// A layout that scatters the elements over the places of all threads; each place has at most one element.
static void scattered(msl_layout* layout, msl_at* at, unsigned variant) {
  unsigned long places = (unsigned long)layout->capacity * layout->threads, rows = layout->tile.rows;
  unsigned long count = rows * layout->tile.columns, step = 1 + 2654435761ul * variant % places;
  if (!layout->copies) step += 7 * layout->tile.operand;
  while (1) {
    unsigned long a = places, b = step;
    while (b) {
      unsigned long rest = a % b;
      a = b;
      b = rest;
    }
    if (a == 1) break;
    step++;
  }
  for (unsigned long i = 0; i < count; i++) {
    msl_at one = {(short)(i / layout->tile.columns), (short)(i % layout->tile.columns)};
    at[(i * step + variant) % places] = one;
  }
}

// A layout for the results of rows (or columns): a thread has the result of each row of which it has elements.
static void following(msl_layout* layout, msl_at* at) {
  const msl_layout* source =
      msl_layout_of(MSL_DESTINATION, layout->tile.rows, layout->tile.columns, layout->tile.simdgroups);
  layout->capacity = source->capacity;
  memcpy(at, source->at, sizeof(msl_at) * source->capacity * source->threads);
}

static void arrange(msl_layout* layout, unsigned variant) {
  msl_tile tile = layout->tile;
  unsigned sixteens = up(tile.rows, 16) / 16 * (up(tile.columns, 16) / 16);
  unsigned eights = up(tile.rows, 8) / 8 * (up(tile.columns, 8) / 8), shared = larger(tile.simdgroups, 1);
  int is_result = tile.operand >= MSL_ROW_RESULTS, elements = tile.rows * tile.columns;
  layout->threads = threads_of(tile.simdgroups);
  layout->follows = variant < 2 || variant % 2 == 0;
  layout->copies = variant < 2 || variant % 4 == 2;
  if (is_result && !layout->follows) elements = tile.operand == MSL_ROW_RESULTS ? tile.rows : tile.columns;
  layout->capacity = up(elements, layout->threads) / layout->threads + (variant % 4 == 3 ? 1 + variant / 4 % 3 : 0);
  if (!tile.simdgroups) layout->capacity = elements;
  else if (variant == 0) layout->capacity = up(sixteens, shared) / shared * 8;
  else if (variant == 1) layout->capacity = up(eights, shared) / shared * 2;
  unsigned long places = (unsigned long)larger(layout->capacity, elements) * layout->threads;
  msl_at* at = malloc(sizeof(msl_at) * places);
  if (!at) abort();
  memset(at, 0xFF, sizeof(msl_at) * places);
  layout->at = at;
  if (is_result && layout->follows) following(layout, at);
  else if (is_result) {
    msl_layout flat = *layout;
    flat.tile.rows = tile.operand == MSL_ROW_RESULTS ? tile.rows : 1;
    flat.tile.columns = tile.operand == MSL_ROW_RESULTS ? 1 : tile.columns;
    scattered(&flat, at, variant);
  } else if (!tile.simdgroups) {
    for (int i = 0; i < elements; i++) at[i] = (msl_at){(short)(i / tile.columns), (short)(i % tile.columns)};
  } else if (variant == 0) in_squares(layout, at, 16, of_sixteen);
  else if (variant == 1) in_squares(layout, at, 8, of_eight);
  else scattered(layout, at, variant);
}

const msl_layout* msl_layout_of(int operand, int rows, int columns, unsigned simdgroups) {
  for (unsigned i = 0; i < layout_count; i++) {
    const msl_tile* one = &layouts[i].tile;
    if (one->operand == operand && one->rows == rows && one->columns == columns && one->simdgroups == simdgroups)
      return &layouts[i];
  }
  // `following` needs the destination's layout. Make it first, because both would otherwise take the same slot.
  if (operand >= MSL_ROW_RESULTS) msl_layout_of(MSL_DESTINATION, rows, columns, simdgroups);
  if (layout_count == MAX_LAYOUTS)
    msl_tensor_wrong(NULL, 0, "more than %d sizes of cooperative tensors in one kernel\ndivide the kernel", MAX_LAYOUTS);
  msl_layout* layout = &layouts[layout_count];
  *layout = (msl_layout){.tile = {operand, rows, columns, simdgroups}, .asked = &layouts_asked[layout_count]};
  layouts_asked[layout_count] = 0;
  arrange(layout, chosen());
  layout_count++;
  return layout;
}

// ---- scopes ----

unsigned msl_place_in_scope(unsigned simdgroups) {
  return simdgroups ? running_index() % threads_of(simdgroups) : 0;
}

void msl_meet(unsigned simdgroups, const void* mine, const char* what, const char* file, unsigned line, msl_met* met) {
  unsigned index = running_index(), first = simdgroups == 1 ? index / MSL_SIMD_WIDTH * MSL_SIMD_WIDTH : 0;
  unsigned threads = threads_of(simdgroups), is_first = 1;
  if (!simdgroups) first = index;
  if (simdgroups > 1 && running_threads() != threads)
    msl_tensor_wrong(file, line,
                     "%s is for %u SIMD-groups, and the threadgroup has %u threads\n"
                     "expected %u threads: launch as many, or write execution_simdgroups<%u>",
                     what, simdgroups, running_threads(), threads, running_threads() / MSL_SIMD_WIDTH);
  if (simdgroups == 1 && first + threads > running_threads())
    msl_tensor_wrong(file, line,
                     "%s needs a whole SIMD-group, and this one has %u threads\nlaunch a multiple of 32 threads", what,
                     running_threads() - first);
  brought[index] = mine;
  if (simdgroups == 1) {
    msl_exchanged found;
    char nothing = 0;
    msl_exchange(&nothing, 1, MSL_ALL_LANES, what, file, line, &found);
    is_first = found.first;
  } else if (simdgroups > 1) {
    unsigned meeting = meetings[index]++;
    meet_group(what, file, line);
    is_first = acted == meeting;
    acted += is_first;
  }
  *met = (msl_met){&brought[first], threads, is_first};
  counted.tensor_operations += is_first;
}

// ---- products ----

void* msl_room(unsigned which, unsigned long bytes) {
  static struct {
    void* memory;
    unsigned long bytes;
  } rooms[4];
  if (rooms[which].bytes < bytes) {
    free(rooms[which].memory);
    rooms[which].memory = malloc(rooms[which].bytes = 2 * bytes);
    if (!rooms[which].memory) abort();
  }
  return rooms[which].memory;
}

unsigned msl_rounds(void) { return options.seed % 2; }

// One row of c: the terms are added in ascending or descending order, or in sums of sixteen.
static void multiply_row(const float* a, const float* b, float* c, unsigned n, unsigned k) {
  unsigned order = options.seed % 3;
  for (unsigned at = 0; order < 2 && at < k; at++) {
    unsigned i = order ? k - 1 - at : at;
    for (unsigned j = 0; j < n; j++) c[j] += a[i] * b[(unsigned long)i * n + j];
  }
  float* sums = msl_room(3, n * sizeof(float));
  for (unsigned from = 0; order == 2 && from < k; from += 16) {
    memset(sums, 0, n * sizeof(float));
    for (unsigned i = from; i < k && i < from + 16; i++)
      for (unsigned j = 0; j < n; j++) sums[j] += a[i] * b[(unsigned long)i * n + j];
    for (unsigned j = 0; j < n; j++) c[j] += sums[j];
  }
}

void msl_multiply_floats(const float* a, const float* b, float* c, unsigned m, unsigned n, unsigned k) {
  for (unsigned i = 0; i < m; i++) multiply_row(a + (unsigned long)i * k, b, c + (unsigned long)i * n, n, k);
}

void msl_multiply_ints(const int* a, const int* b, int* c, unsigned m, unsigned n, unsigned k) {
  for (unsigned i = 0; i < m; i++)
    for (unsigned at = 0; at < k; at++)
      for (unsigned j = 0; j < n; j++) {
        unsigned product = (unsigned)a[(unsigned long)i * k + at] * (unsigned)b[(unsigned long)at * n + j];
        c[(unsigned long)i * n + j] = (int)((unsigned)c[(unsigned long)i * n + j] + product);
      }
}
