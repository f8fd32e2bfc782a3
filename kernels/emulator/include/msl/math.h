// Floating-point functions: worked out in float32, rounded once to the type of the argument.
//
// A GPU's `fast` functions are less exact than its `precise` ones, and how much is not written down; here all are exact
// to about the last bit.
#pragma once

namespace metal {

template <class T>
using msl_if_floating = enable_if_t<is_floating_point_v<msl_element<T>>>;

#define MSL_FUNCTION_1(NAME, RESULT)                       \
  template <class T, class = msl_if_floating<T>>           \
  MSL_FUNC T NAME(T value) {                               \
    return msl_each<T>(                                    \
        [](auto e) MSL_LAMBDA {                            \
          float x = float(e);                              \
          return RESULT;                                   \
        },                                                 \
        value);                                            \
  }
#define MSL_FUNCTION_2(NAME, RESULT)                       \
  template <class T, class = msl_if_floating<T>>           \
  MSL_FUNC T NAME(T first, T second) {                     \
    return msl_each<T>(                                    \
        [](auto e, auto f) MSL_LAMBDA {                    \
          float x = float(e), y = float(f);                \
          return RESULT;                                   \
        },                                                 \
        first, second);                                    \
  }

#define MSL_FUNCTIONS                                                     \
  MSL_FUNCTION_1(exp, __builtin_expf(x))                                  \
  MSL_FUNCTION_1(exp2, __builtin_exp2f(x))                                \
  MSL_FUNCTION_1(exp10, __builtin_powf(10.0f, x))                         \
  MSL_FUNCTION_1(log, __builtin_logf(x))                                  \
  MSL_FUNCTION_1(log2, __builtin_log2f(x))                                \
  MSL_FUNCTION_1(log10, __builtin_log10f(x))                              \
  MSL_FUNCTION_1(sqrt, __builtin_sqrtf(x))                                \
  MSL_FUNCTION_1(rsqrt, 1.0f / __builtin_sqrtf(x))                        \
  MSL_FUNCTION_1(sin, __builtin_sinf(x))                                  \
  MSL_FUNCTION_1(cos, __builtin_cosf(x))                                  \
  MSL_FUNCTION_1(tan, __builtin_tanf(x))                                  \
  MSL_FUNCTION_1(sinpi, __builtin_sinf(x * M_PI_F))                       \
  MSL_FUNCTION_1(cospi, __builtin_cosf(x * M_PI_F))                       \
  MSL_FUNCTION_1(tanpi, __builtin_tanf(x * M_PI_F))                       \
  MSL_FUNCTION_1(asin, __builtin_asinf(x))                                \
  MSL_FUNCTION_1(acos, __builtin_acosf(x))                                \
  MSL_FUNCTION_1(atan, __builtin_atanf(x))                                \
  MSL_FUNCTION_1(sinh, __builtin_sinhf(x))                                \
  MSL_FUNCTION_1(cosh, __builtin_coshf(x))                                \
  MSL_FUNCTION_1(tanh, __builtin_tanhf(x))                                \
  MSL_FUNCTION_1(asinh, __builtin_asinhf(x))                              \
  MSL_FUNCTION_1(acosh, __builtin_acoshf(x))                              \
  MSL_FUNCTION_1(atanh, __builtin_atanhf(x))                              \
  MSL_FUNCTION_1(floor, __builtin_floorf(x))                              \
  MSL_FUNCTION_1(ceil, __builtin_ceilf(x))                                \
  MSL_FUNCTION_1(trunc, __builtin_truncf(x))                              \
  MSL_FUNCTION_1(rint, __builtin_rintf(x))                                \
  MSL_FUNCTION_1(round, __builtin_roundf(x))                              \
  MSL_FUNCTION_1(fract, x - __builtin_floorf(x))                          \
  MSL_FUNCTION_1(fabs, __builtin_fabsf(x))                                \
  MSL_FUNCTION_2(pow, __builtin_powf(x, y))                               \
  MSL_FUNCTION_2(powr, __builtin_powf(x, y))                              \
  MSL_FUNCTION_2(atan2, __builtin_atan2f(x, y))                           \
  MSL_FUNCTION_2(fmod, __builtin_fmodf(x, y))                             \
  MSL_FUNCTION_2(fmax, x < y || x != x ? y : x)                           \
  MSL_FUNCTION_2(fmin, y < x || x != x ? y : x)                           \
  MSL_FUNCTION_2(fdim, x > y ? x - y : 0.0f)                              \
  MSL_FUNCTION_2(copysign, __builtin_copysignf(x, y))

MSL_FUNCTIONS
namespace precise {
MSL_FUNCTIONS
}
namespace fast {
MSL_FUNCTIONS
}
#undef MSL_FUNCTION_1
#undef MSL_FUNCTION_2
#undef MSL_FUNCTIONS

// One rounding.
MSL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSL_FUNC half fma(half a, half b, half c) { return half(__builtin_fmaf(float(a), float(b), float(c))); }
MSL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(__builtin_fmaf(float(a), float(b), float(c))); }
template <class T, int N>
MSL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = fma(a[i], b[i], c[i]);
  return result;
}

MSL_FUNC float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
MSL_FUNC float frexp(float x, thread int& exponent) { return __builtin_frexpf(x, &exponent); }
MSL_FUNC float modf(float x, thread float& whole) {
  whole = __builtin_truncf(x);
  return x - whole;
}
MSL_FUNC float sincos(float x, thread float& cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}

}  // namespace metal
