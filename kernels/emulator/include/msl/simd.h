// SIMD-group operations. They are over the lanes that reach them; see `lanes` in kernel.py.
#pragma once

namespace metal {

#define MSL_REDUCTION(NAME, RESULT)                                                                       \
  template <class T>                                                                                      \
  MSL_FUNC T NAME(T value, MSL_HERE) {                                                                    \
    msl_lanes<T> all(value, #NAME, file, line);                                                           \
    T* result = (T*)all.found.result;                                                                     \
    if (all.found.first)                                                                                  \
      *result = msl_combine(all, 0, MSL_SIMD_WIDTH, [](T a, T b) MSL_LAMBDA { return T(RESULT); }); \
    return *result;                                                                                       \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a * b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_and, a & b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)
#undef MSL_REDUCTION

// ---- votes ----

struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  explicit constexpr simd_vote(vote_t given = 0) : votes(given) {}
  explicit operator vote_t() const { return votes; }
  bool all() const { return votes == 0xFFFFFFFFul; }
  bool any() const { return votes != 0; }
};

MSL_FUNC simd_vote msl_vote(bool value, const char* what, const char* file, unsigned line) {
  msl_lanes<uint> all(value, what, file, line);
  ulong votes = 0;
  for (unsigned i = 0; i < MSL_SIMD_WIDTH; i++)
    if (all.has(i) && all.of(i)) votes |= 1ul << i;
  return simd_vote(votes);
}
MSL_FUNC simd_vote simd_ballot(bool value, MSL_HERE) { return msl_vote(value, "simd_ballot", file, line); }
MSL_FUNC simd_vote simd_active_threads_mask(MSL_HERE) { return msl_vote(true, "simd_active_threads_mask", file, line); }
MSL_FUNC bool simd_any(bool value, MSL_HERE) { return msl_vote(value, "simd_any", file, line).any(); }
MSL_FUNC bool simd_all(bool value, MSL_HERE) { return !msl_vote(!value, "simd_all", file, line).any(); }
MSL_FUNC bool simd_is_first(MSL_HERE) {
  msl_lanes<char> all(0, "simd_is_first", file, line);
  return all.found.lane == unsigned(__builtin_ctz(all.found.lanes));
}

// ---- values of other lanes; the values of inactive lanes and of lanes beyond 31 are undefined ----

#define MSL_SHUFFLE(NAME, PARAMETER, ARGUMENT, RESULT)         \
  template <class T>                                           \
  MSL_FUNC T NAME(T value, ushort PARAMETER, MSL_HERE) {       \
    msl_lanes<T> all(value, #NAME, file, line, ARGUMENT);      \
    unsigned lane = all.found.lane;                            \
    (void)lane;                                                \
    return RESULT;                                             \
  }
MSL_SHUFFLE(simd_broadcast, from, from, all.at(from))
MSL_SHUFFLE(simd_shuffle, from, MSL_NO_ARGUMENT, all.at(from))
MSL_SHUFFLE(simd_shuffle_xor, mask, mask, all.at(lane ^ mask))
// The first or last `delta` lanes keep their own values.
MSL_SHUFFLE(simd_shuffle_up, delta, delta, all.shifted(lane < delta ? lane : lane - delta))
MSL_SHUFFLE(simd_shuffle_down, delta, delta, all.shifted(lane + delta < MSL_SIMD_WIDTH ? lane + delta : lane))
MSL_SHUFFLE(simd_shuffle_rotate_up, delta, delta, all.shifted((lane - delta) % MSL_SIMD_WIDTH))
MSL_SHUFFLE(simd_shuffle_rotate_down, delta, delta, all.shifted((lane + delta) % MSL_SIMD_WIDTH))
#undef MSL_SHUFFLE

template <class T>
MSL_FUNC T simd_broadcast_first(T value, MSL_HERE) {
  msl_lanes<T> all(value, "simd_broadcast_first", file, line);
  return all.of(__builtin_ctz(all.found.lanes));
}

// Lanes without a source lane get the argument `fill` of the lanes at the other end.
template <class T>
struct msl_filled {
  T value, fill;
};
template <class T>
MSL_FUNC T simd_shuffle_and_fill_up(T value, T fill, ushort delta, MSL_HERE) {
  msl_lanes<msl_filled<T>> all({value, fill}, "simd_shuffle_and_fill_up", file, line, delta);
  unsigned lane = all.found.lane;
  return lane >= delta ? all.shifted(lane - delta).value : all.shifted(MSL_SIMD_WIDTH + lane - delta).fill;
}
template <class T>
MSL_FUNC T simd_shuffle_and_fill_down(T value, T fill, ushort delta, MSL_HERE) {
  msl_lanes<msl_filled<T>> all({value, fill}, "simd_shuffle_and_fill_down", file, line, delta);
  unsigned lane = all.found.lane + delta;
  return lane < MSL_SIMD_WIDTH ? all.shifted(lane).value : all.shifted(lane - MSL_SIMD_WIDTH).fill;
}

// ---- running sums and products ----

#define MSL_PREFIX(NAME, START, END, RESULT)                                      \
  template <class T>                                                              \
  MSL_FUNC T NAME(T value, MSL_HERE) {                                            \
    msl_lanes<T> all(value, #NAME, file, line);                                   \
    T a = T(START);                                                               \
    for (unsigned i = 0; i < all.found.lane + END; i++)                           \
      if (all.has(i)) {                                                           \
        T b = all.of(i);                                                          \
        a = T(RESULT);                                                            \
      }                                                                           \
    return a;                                                                     \
  }
MSL_PREFIX(simd_prefix_inclusive_sum, 0, 1, a + b)
MSL_PREFIX(simd_prefix_exclusive_sum, 0, 0, a + b)
MSL_PREFIX(simd_prefix_inclusive_product, 1, 1, a * b)
MSL_PREFIX(simd_prefix_exclusive_product, 1, 0, a * b)
#undef MSL_PREFIX

}  // namespace metal
