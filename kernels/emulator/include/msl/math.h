// Floating-point functions. The result is computed in float32 and rounded once to the type of the argument.
//
// A GPU's `fast` functions are less exact than its `precise` functions, by errors that Apple does not document. Here
// functions are exact to about the last bit, with the same bits on every processor (runtime/math.c). Exceptions are
// sinpi, cospi and tanpi, whose product with pi is rounded. Functions that are one builtin of clang, such as sqrt, are
// rounded correctly.
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
  MSL_FUNCTION_1(exp, msl_expf(x))                                        \
  MSL_FUNCTION_1(exp2, msl_exp2f(x))                                      \
  MSL_FUNCTION_1(exp10, msl_exp10f(x))                                    \
  MSL_FUNCTION_1(log, msl_logf(x))                                        \
  MSL_FUNCTION_1(log2, msl_log2f(x))                                      \
  MSL_FUNCTION_1(log10, msl_log10f(x))                                    \
  MSL_FUNCTION_1(sqrt, __builtin_sqrtf(x))                                \
  MSL_FUNCTION_1(rsqrt, 1.0f / __builtin_sqrtf(x))                        \
  MSL_FUNCTION_1(sin, msl_sinf(x))                                        \
  MSL_FUNCTION_1(cos, msl_cosf(x))                                        \
  MSL_FUNCTION_1(tan, msl_tanf(x))                                        \
  MSL_FUNCTION_1(sinpi, msl_sinf(x * M_PI_F))                             \
  MSL_FUNCTION_1(cospi, msl_cosf(x * M_PI_F))                             \
  MSL_FUNCTION_1(tanpi, msl_tanf(x * M_PI_F))                             \
  MSL_FUNCTION_1(asin, msl_asinf(x))                                      \
  MSL_FUNCTION_1(acos, msl_acosf(x))                                      \
  MSL_FUNCTION_1(atan, msl_atanf(x))                                      \
  MSL_FUNCTION_1(sinh, msl_sinhf(x))                                      \
  MSL_FUNCTION_1(cosh, msl_coshf(x))                                      \
  MSL_FUNCTION_1(tanh, msl_tanhf(x))                                      \
  MSL_FUNCTION_1(asinh, msl_asinhf(x))                                    \
  MSL_FUNCTION_1(acosh, msl_acoshf(x))                                    \
  MSL_FUNCTION_1(atanh, msl_atanhf(x))                                    \
  MSL_FUNCTION_1(floor, __builtin_floorf(x))                              \
  MSL_FUNCTION_1(ceil, __builtin_ceilf(x))                                \
  MSL_FUNCTION_1(trunc, __builtin_truncf(x))                              \
  MSL_FUNCTION_1(rint, __builtin_rintf(x))                                \
  MSL_FUNCTION_1(round, __builtin_roundf(x))                              \
  MSL_FUNCTION_1(fract, x - __builtin_floorf(x))                          \
  MSL_FUNCTION_1(fabs, __builtin_fabsf(x))                                \
  MSL_FUNCTION_2(pow, msl_powf(x, y))                                     \
  MSL_FUNCTION_2(powr, msl_powf(x, y))                                    \
  MSL_FUNCTION_2(atan2, msl_atan2f(x, y))                                 \
  MSL_FUNCTION_2(fmod, __builtin_fmodf(x, y))                             \
  MSL_FUNCTION_2(fmax, msl_keep_unwritten(x, y, x < y || x != x ? y : x)) \
  MSL_FUNCTION_2(fmin, msl_keep_unwritten(x, y, y < x || x != x ? y : x)) \
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

// Rounded once.
template <class T, class = msl_if_floating<T>>
MSL_FUNC T fma(T a, T b, T c) {
  return msl_each<T>(
      [](auto x, auto y, auto z) MSL_LAMBDA { return __builtin_fmaf(float(x), float(y), float(z)); }, a, b, c);
}

MSL_FUNC float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
MSL_FUNC float frexp(float x, thread int& exponent) { return __builtin_frexpf(x, &exponent); }
MSL_FUNC float modf(float x, thread float& whole) {
  whole = __builtin_truncf(x);
  return x - whole;
}
MSL_FUNC float sincos(float x, thread float& cosine) {
  cosine = msl_cosf(x);
  return msl_sinf(x);
}

}  // namespace metal
