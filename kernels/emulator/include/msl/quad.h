// SIMD-group operations (simd.h) for a quad-group: four adjacent lanes.
#pragma once

namespace metal {

#define MSL_REDUCTION(NAME, RESULT)                                                                       \
  template <class T>                                                                                      \
  MSL_FUNC T NAME(T value, MSL_HERE) {                                                                    \
    msl_lanes<T> all(value, #NAME, file, line);                                                           \
    return msl_combine(all, all.found.lane & ~3u, 4, [](T a, T b) MSL_LAMBDA { return T(RESULT); }); \
  }
MSL_REDUCTION(quad_sum, a + b)
MSL_REDUCTION(quad_product, a * b)
MSL_REDUCTION(quad_max, max(a, b))
MSL_REDUCTION(quad_min, min(a, b))
MSL_REDUCTION(quad_and, a & b)
MSL_REDUCTION(quad_or, a | b)
MSL_REDUCTION(quad_xor, a ^ b)
#undef MSL_REDUCTION

MSL_FUNC bool quad_any(bool value, MSL_HERE) { return quad_or(uint(value), file, line); }
MSL_FUNC bool quad_all(bool value, MSL_HERE) { return quad_and(uint(value), file, line); }

#define MSL_SHUFFLE(NAME, PARAMETER, READ, PLACE)                  \
  template <class T>                                               \
  MSL_FUNC T NAME(T value, ushort PARAMETER, MSL_HERE) {           \
    msl_lanes<T> all(value, #NAME, file, line);                    \
    unsigned first = all.found.lane & ~3u, place = all.found.lane & 3u, from = PLACE; \
    (void)place;                                                   \
    return all.READ(from < 4 ? first + from : MSL_SIMD_WIDTH);     \
  }
MSL_SHUFFLE(quad_broadcast, source, at, source)
MSL_SHUFFLE(quad_shuffle, source, at, source)
MSL_SHUFFLE(quad_shuffle_xor, mask, at, place ^ mask)
// The first or last `delta` lanes keep their own values.
MSL_SHUFFLE(quad_shuffle_up, delta, shifted, place < delta ? place : place - delta)
MSL_SHUFFLE(quad_shuffle_down, delta, shifted, place + delta < 4 ? place + delta : place)
MSL_SHUFFLE(quad_shuffle_rotate_up, delta, shifted, (place - delta) & 3u)
MSL_SHUFFLE(quad_shuffle_rotate_down, delta, shifted, (place + delta) & 3u)
#undef MSL_SHUFFLE

template <class T>
MSL_FUNC T quad_broadcast_first(T value, MSL_HERE) {
  msl_lanes<T> all(value, "quad_broadcast_first", file, line);
  unsigned first = all.found.lane & ~3u;
  return all.of(first + unsigned(__builtin_ctz(all.found.lanes >> first)));
}

}  // namespace metal
