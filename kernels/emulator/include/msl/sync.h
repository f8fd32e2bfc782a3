// Barriers, and the common part of SIMD-group operations: each lane passes a value, then each lane can read all values.
#pragma once

namespace metal {

enum class mem_flags : unsigned {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
MSL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }

MSL_FUNC void threadgroup_barrier(mem_flags flags, MSL_HERE) { msl_barrier(unsigned(flags), file, line); }

// The values that the active lanes passed to an operation.
template <class T>
struct msl_lanes {
  msl_exchanged found;  // filled by msl_exchange
  MSL_FUNC msl_lanes(T value, const char* what, const char* file, unsigned line, int argument = MSL_NO_ARGUMENT) {
    static_assert(sizeof(T) <= MSL_SLOT_BYTES);
    msl_exchange(&value, sizeof(T), argument, what, file, line, &found);
  }
  MSL_FUNC bool has(unsigned lane) const { return lane < MSL_SIMD_WIDTH && (found.lanes >> lane & 1u); }
  MSL_FUNC T of(unsigned lane) const { return *(const T*)(found.slots + lane * MSL_SLOT_BYTES); }
  // The value of an inactive lane is undefined.
  MSL_FUNC T at(unsigned lane) const {
    if (!has(lane)) msl_inactive(lane);
    return of(lane);
  }
  // In shift operations, the value of an inactive lane is NaN and not an error: the last step of a sum in pairs reads
  // such lanes but does not use the result.
  MSL_FUNC T shifted(unsigned lane) const {
    if (has(lane)) return of(lane);
    msl_undefined(lane);
    T nothing;
    __builtin_memset((void*)&nothing, 0xFF, sizeof(T));
    return nothing;
  }
};

// Wait for all 32 lanes; return the number of the calling lane.
MSL_FUNC unsigned msl_meet_all(const char* what, const char* file, unsigned line) {
  return msl_lanes<char>(0, what, file, line, MSL_ALL_LANES).found.lane;
}

MSL_FUNC void simdgroup_barrier(mem_flags flags, MSL_HERE) {
  msl_meet_all("simdgroup_barrier", file, line);
  msl_simdgroup_fence(unsigned(flags));
}

// Combine the values of lanes `first` to `first + width - 1` as a tree, halves with halves, so that the order of
// threads changes no bit. If one of two lanes is inactive, the value of the other lane is kept.
template <class T, class F>
MSL_LARGE_FUNC T msl_combine(const msl_lanes<T>& all, unsigned first, unsigned width, F combine) {
  __attribute__((uninitialized)) T values[MSL_SIMD_WIDTH];
  for (unsigned i = 0; i < width; i++) values[i] = all.of(first + i);
  unsigned here = all.found.lanes >> first;
  for (unsigned half = width / 2; half; half /= 2) {
    unsigned both = (1u << half) - 1;
    if ((here & both) == both && (here >> half & both) == both) {
      for (unsigned i = 0; i < half; i++) values[i] = combine(values[i], values[i + half]);
      continue;
    }
    for (unsigned i = 0; i < half; i++)
      if (here >> i & here >> (i + half) & 1u) values[i] = combine(values[i], values[i + half]);
      else if (here >> (i + half) & 1u) values[i] = values[i + half];
    here = (here | here >> half) & both;
  }
  return values[0];
}

}  // namespace metal
