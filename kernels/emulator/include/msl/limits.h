// numeric_limits.
#pragma once

namespace metal {

template <class T>
struct numeric_limits;

#define MSL_INTEGER_LIMITS(T, LOWEST, HIGHEST)             \
  template <>                                              \
  struct numeric_limits<T> {                               \
    static constexpr T min() { return LOWEST; }            \
    static constexpr T lowest() { return LOWEST; }         \
    static constexpr T max() { return HIGHEST; }           \
    static constexpr bool is_integer = true;               \
    static constexpr int digits = sizeof(T) * 8 - (LOWEST < 0); \
  };
MSL_INTEGER_LIMITS(bool, false, true)
MSL_INTEGER_LIMITS(signed char, -__SCHAR_MAX__ - 1, __SCHAR_MAX__)
MSL_INTEGER_LIMITS(uchar, 0, 0xFF)
MSL_INTEGER_LIMITS(short, -__SHRT_MAX__ - 1, __SHRT_MAX__)
MSL_INTEGER_LIMITS(ushort, 0, 0xFFFF)
MSL_INTEGER_LIMITS(int, -__INT_MAX__ - 1, __INT_MAX__)
MSL_INTEGER_LIMITS(uint, 0, ~0u)
MSL_INTEGER_LIMITS(long, -__LONG_MAX__ - 1, __LONG_MAX__)
MSL_INTEGER_LIMITS(ulong, 0, ~0ul)
#undef MSL_INTEGER_LIMITS

#define MSL_FLOAT_LIMITS(T, SMALLEST, LARGEST, EPSILON)                \
  template <>                                                          \
  struct numeric_limits<T> {                                           \
    static constexpr T min() { return T(SMALLEST); }                   \
    static constexpr T lowest() { return T(-LARGEST); }                \
    static constexpr T max() { return T(LARGEST); }                    \
    static constexpr T epsilon() { return T(EPSILON); }                \
    static constexpr T infinity() { return T(__builtin_inff()); }      \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }   \
    static constexpr bool is_integer = false;                          \
  };
MSL_FLOAT_LIMITS(float, 0x1p-126f, 0x1.fffffep127f, 0x1p-23f)
MSL_FLOAT_LIMITS(half, 0x1p-14f, 65504.0f, 0x1p-10f)
MSL_FLOAT_LIMITS(bfloat, 0x1p-126f, 0x1.fep127f, 0x1p-7f)
#undef MSL_FLOAT_LIMITS

}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define HALF_MAX 65504.0h
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX 0xFFFFFFFFu
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define MAXFLOAT FLT_MAX
#define MAXHALF HALF_MAX
#define HALF_MIN 0x1p-14h
#define HALF_EPSILON 0x1p-10h
#define HUGE_VALH half(__builtin_inff())
#define CHAR_MAX 127
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define LONG_MAX __LONG_MAX__
#define LONG_MIN (-__LONG_MAX__ - 1)
#define ULONG_MAX (~0ul)
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define M_PI_H 3.14159265358979323846h
#define M_E_H 2.71828182845904523536h
#define M_SQRT2_H 1.41421356237309504880h
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_1_PI_H 0.31830988618379067154h
