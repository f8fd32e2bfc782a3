// Orders of threads and threadgroups, by the seed: 0 ascending, 1 descending, others shuffled.
#include "runtime.h"

static unsigned chosen;
static uint64_t random_state;

void orders_begin(unsigned seed) {
  chosen = seed;
  random_state = 0x9E3779B97F4A7C15ull * (seed + 1);
}

static unsigned draw(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (unsigned)((random_state >> 32) % below);
}

void order_of(unsigned* order, unsigned count) {
  for (unsigned i = 0; i < count; i++) order[i] = chosen == 1 ? count - 1 - i : i;
  for (unsigned i = count; chosen > 1 && i > 1; i--) {
    unsigned other = draw(i), last = order[i - 1];
    order[i - 1] = order[other];
    order[other] = last;
  }
}

// ---- threadgroups: a shuffled grid is visited with a stride that reaches each threadgroup once ----

static unsigned long common_divisor(unsigned long a, unsigned long b) { return b ? common_divisor(b, a % b) : a; }

unsigned long order_first(unsigned long count) {
  if (chosen > 1 && count > 1) return draw((unsigned)count);
  return chosen == 1 ? count - 1 : 0;
}

unsigned long order_stride(unsigned long count) {
  if (chosen == 1) return count - 1;
  if (!chosen || count == 1) return 1;
  unsigned long stride = 1 + draw((unsigned)count);
  while (common_divisor(stride, count) != 1) stride++;
  return stride;
}
