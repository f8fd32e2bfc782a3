// Functions `__metal_...` of Apple's compiler, on which Metal's library is built. MLX's headers call them for bfloat.
#pragma once

#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0

#define MSL_BUILTIN_1(NAME)                                  \
  MSL_FUNC float __metal_##NAME(float x, bool = false) {     \
    return metal::NAME(x);                                   \
  }
#define MSL_BUILTIN_2(NAME)                                           \
  MSL_FUNC float __metal_##NAME(float x, float y, bool = false) {     \
    return metal::NAME(x, y);                                         \
  }
#define MSL_BUILTIN_3(NAME)                                                    \
  MSL_FUNC float __metal_##NAME(float x, float y, float z, bool = false) {     \
    return metal::NAME(x, y, z);                                               \
  }
MSL_BUILTIN_1(acos) MSL_BUILTIN_1(acosh) MSL_BUILTIN_1(asin) MSL_BUILTIN_1(asinh) MSL_BUILTIN_1(atan)
MSL_BUILTIN_1(atanh) MSL_BUILTIN_1(ceil) MSL_BUILTIN_1(cos) MSL_BUILTIN_1(cosh) MSL_BUILTIN_1(cospi)
MSL_BUILTIN_1(exp) MSL_BUILTIN_1(exp10) MSL_BUILTIN_1(exp2) MSL_BUILTIN_1(fabs) MSL_BUILTIN_1(floor)
MSL_BUILTIN_1(fract) MSL_BUILTIN_1(log) MSL_BUILTIN_1(log10) MSL_BUILTIN_1(log2) MSL_BUILTIN_1(rint)
MSL_BUILTIN_1(round) MSL_BUILTIN_1(rsqrt) MSL_BUILTIN_1(sin) MSL_BUILTIN_1(sinh) MSL_BUILTIN_1(sinpi)
MSL_BUILTIN_1(sqrt) MSL_BUILTIN_1(tan) MSL_BUILTIN_1(tanh) MSL_BUILTIN_1(tanpi) MSL_BUILTIN_1(trunc)
MSL_BUILTIN_2(atan2) MSL_BUILTIN_2(divide) MSL_BUILTIN_2(fdim) MSL_BUILTIN_2(fmax) MSL_BUILTIN_2(fmin)
MSL_BUILTIN_2(fmod) MSL_BUILTIN_2(nextafter) MSL_BUILTIN_2(pow) MSL_BUILTIN_2(powr)
MSL_BUILTIN_3(fma) MSL_BUILTIN_3(fmax3) MSL_BUILTIN_3(fmedian3) MSL_BUILTIN_3(fmin3)
#undef MSL_BUILTIN_1
#undef MSL_BUILTIN_2
#undef MSL_BUILTIN_3
MSL_FUNC float __metal_ldexp(float x, int exponent, bool = false) { return metal::ldexp(x, exponent); }
MSL_FUNC float __metal_frexp(float x, thread int* exponent, bool = false) { return metal::frexp(x, *exponent); }
MSL_FUNC float __metal_modf(float x, thread float* whole, bool = false) { return metal::modf(x, *whole); }

#define MSL_BUILTIN_OF_LANES(NAME)                                    \
  template <class T>                                                  \
  MSL_FUNC T __metal_##NAME(T value, MSL_HERE) {                      \
    return metal::NAME(value, file, line);                            \
  }
MSL_BUILTIN_OF_LANES(simd_sum) MSL_BUILTIN_OF_LANES(simd_product) MSL_BUILTIN_OF_LANES(simd_max)
MSL_BUILTIN_OF_LANES(simd_min)  
 MSL_BUILTIN_OF_LANES(simd_prefix_inclusive_sum)
MSL_BUILTIN_OF_LANES(simd_prefix_inclusive_product) MSL_BUILTIN_OF_LANES(simd_prefix_exclusive_sum)
MSL_BUILTIN_OF_LANES(simd_prefix_exclusive_product)
#undef MSL_BUILTIN_OF_LANES
template <class T>
MSL_FUNC T __metal_simd_xor(T value, MSL_HERE) {
  if constexpr (metal::is_floating_point_v<T>)
    return __builtin_bit_cast(T, metal::simd_xor(__builtin_bit_cast(uint, float(value)), file, line));
  else return metal::simd_xor(value, file, line);
}
#define MSL_BUILTIN_SHUFFLE(NAME)                                     \
  template <class T>                                                  \
  MSL_FUNC T __metal_##NAME(T value, ushort by, MSL_HERE) {           \
    return metal::NAME(value, by, file, line);                        \
  }
MSL_BUILTIN_SHUFFLE(simd_broadcast) MSL_BUILTIN_SHUFFLE(simd_shuffle) MSL_BUILTIN_SHUFFLE(simd_shuffle_xor)
MSL_BUILTIN_SHUFFLE(simd_shuffle_up) MSL_BUILTIN_SHUFFLE(simd_shuffle_down)
MSL_BUILTIN_SHUFFLE(simd_shuffle_rotate_up) MSL_BUILTIN_SHUFFLE(simd_shuffle_rotate_down)
#undef MSL_BUILTIN_SHUFFLE
MSL_FUNC ushort __metal_get_simdgroup_size(ushort) { return MSL_SIMD_WIDTH; }
MSL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort, MSL_HERE) {
  return metal::msl_lanes<char>(0, "thread_index_in_simdgroup", file, line).found.lane;
}
template <class T>
MSL_FUNC T __metal_simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo, MSL_HERE) {
  return metal::simd_shuffle_and_fill_up(value, fill, delta, modulo, file, line);
}
template <class T>
MSL_FUNC T __metal_simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo, MSL_HERE) {
  return metal::simd_shuffle_and_fill_down(value, fill, delta, modulo, file, line);
}
