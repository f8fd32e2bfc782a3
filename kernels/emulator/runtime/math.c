// exp, log, sin and other functions of float32. The functions of C libraries differ in the last bit between systems,
// versions and sometimes processors. These functions give the same bits everywhere: they use only operations that IEEE
// 754 rounds exactly (+ - * / sqrt in double, integers), in a fixed order, never fused (the flag -ffp-contract=off).
// Relative errors in double stay below 2^-40. So a result is the nearest float32, except for about one argument in ten
// thousand, where it is an adjacent float32.
#include <stdint.h>
#include <string.h>

#include "abi.h"

#define COUNT(TABLE) (int)(sizeof(TABLE) / sizeof *(TABLE))

static const double LN2 = 0x1.62e42fefa39efp-1, LOG2_E = 0x1.71547652b82fep0, LOG2_10 = 0x1.a934f0979a371p1;
static const double LOG10_2 = 0x1.34413509f79ffp-2, LOG10_E = 0x1.bcb7b1526e50ep-2, PI = 0x1.921fb54442d18p1;

static uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static double double_of(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static int is_negative(double x) { return (int)(bits_of(x) >> 63); }
static double infinite(void) { return __builtin_inf(); }

// ---- exponentials ----

// 1/2!, 1/3!, ... 1/14!
static const double FACTORIALS[] = {
    1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,        1.0 / 720,         1.0 / 5040,        1.0 / 40320,
    1.0 / 362880,  1.0 / 3628800,  1.0 / 39916800,  1.0 / 479001600,  1.0 / 6227020800,  1.0 / 87178291200};

// e^x - 1 for |x| <= ln 2 / 2.
static double small_expm1(double x) {
  double sum = FACTORIALS[COUNT(FACTORIALS) - 1];
  for (int i = COUNT(FACTORIALS) - 2; i >= 0; i--) sum = FACTORIALS[i] + sum * x;
  return x + x * x * sum;
}

// 2^x. Arguments are clamped to +-1000: beyond them, the result as a float is infinite or 0 anyway.
static double power_of_two(double x) {
  if (x != x) return x;
  x = x > 1000 ? 1000 : x < -1000 ? -1000 : x;
  double whole = __builtin_floor(x + 0.5);
  double scale = double_of((uint64_t)(int64_t)(whole + 1023) << 52);
  return scale + scale * small_expm1((x - whole) * LN2);
}

static double exponential(double x) { return power_of_two(x * LOG2_E); }

static double expm1_of(double x) {
  return x > -0.34 && x < 0.34 ? small_expm1(x) : exponential(x) - 1;
}

// ---- logarithms ----

// 2 artanh s = log((1 + s) / (1 - s)) for |s| <= 0.18.
static double log_ratio(double s) {
  double square = s * s, sum = 1.0 / 23;
  for (int i = 21; i >= 3; i -= 2) sum = 1.0 / i + sum * square;
  return 2 * (s + s * square * sum);
}

typedef struct {
  double exponent, log;
} parts;

// log2 x as a whole number, and the remainder as a natural logarithm. x is a normal float64.
static parts logarithm(double x) {
  uint64_t bits = bits_of(x) - bits_of(0x1.6a09e667f3bcdp-1);  // sqrt(1/2), so that the remaining factor is near 1
  int64_t exponent = (int64_t)bits >> 52;
  double rest = double_of(bits_of(x) - ((uint64_t)exponent << 52));
  return (parts){(double)exponent, log_ratio((rest - 1) / (rest + 1))};
}

// The logarithm of x in the base for which `of_two` is the logarithm of 2 and `of_e` that of e; or the special value
// for 0, infinity, NaN and negative numbers.
static double log_in(double x, double of_two, double of_e) {
  if (x != x || x == infinite()) return x;
  if (x <= 0) return x == 0 ? -infinite() : __builtin_nan("");
  parts of = logarithm(x);
  return of.exponent * of_two + of.log * of_e;
}

static double log1p_of(double x) {
  return x > -0.3 && x < 0.42 ? log_ratio(x / (2 + x)) : log_in(1 + x, LN2, 1);
}

static double power(double x, double y) {
  if (x == 1 || y == 0) return 1;
  if (x != x || y != y) return x + y;
  double half = y / 2, magnitude = __builtin_fabs(x);
  int is_whole = __builtin_floor(y) == y, is_odd = is_whole && __builtin_floor(half) != half;
  double sign = is_negative(x) && is_odd ? -1 : 1;
  if (y == infinite() || y == -infinite()) return magnitude == 1 ? 1 : (magnitude > 1) == (y > 0) ? infinite() : 0;
  if (magnitude == 0 || magnitude == infinite()) return sign * ((magnitude == 0) == (y > 0) ? 0 : infinite());
  if (x < 0 && !is_whole) return __builtin_nan("");
  parts of = logarithm(magnitude);
  return sign * power_of_two(y * (of.exponent + of.log * LOG2_E));
}

// ---- circular functions ----

// The fraction bits of 2 / pi, after a word of zeros.
static const uint32_t TWO_OVER_PI[] = {0,          0xa2f9836e, 0x4e441529, 0xfc2757d1,
                                       0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab};

typedef struct {
  unsigned quadrant;
  double rest;  // in -pi/4 .. pi/4
} angle;

// The nearest multiple of pi / 2, and the remainder. Only the bits of 2/pi that change the result are multiplied.
static angle reduced(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  double magnitude = __builtin_fabs((double)x);
  if (magnitude <= PI / 4) return (angle){0, x};
  int first = (int)(bits >> 23 & 255) - 120;  // earlier bits contribute multiples of four quarters
  unsigned __int128 window = 0;
  for (int i = 0; i < 4; i++) window = window << 32 | TWO_OVER_PI[first / 32 + i];
  window = window << first % 32 >> 32;  // 96 bits
  unsigned __int128 product = (window * ((bits & 0x7FFFFF) | 0x800000)) << 32;
  uint64_t quarters = (uint64_t)(product >> 64);  // 2 bits of quadrant, 62 bits of fraction
  unsigned quadrant = (unsigned)((quarters + (1ull << 61)) >> 62);
  double rest = (double)(int64_t)(quarters - ((uint64_t)quadrant << 62)) * 0x1p-62 * (PI / 2);
  return bits >> 31 ? (angle){-quadrant & 3, -rest} : (angle){quadrant & 3, rest};
}

static double small_sine(double x) {
  double square = x * x, sum = -1.0 / 1307674368000;
  for (int i = 11; i >= 1; i -= 2) sum = ((i + 1) % 4 == 0 ? 1 : -1) * FACTORIALS[i] + sum * square;
  return x + x * square * sum;
}

static double small_cosine(double x) {
  double square = x * x, sum = 1.0 / 20922789888000;
  for (int i = 12; i >= 0; i -= 2) sum = (i % 4 == 2 ? 1 : -1) * FACTORIALS[i] + sum * square;
  return 1 + square * sum;
}

static double sine(float x, unsigned quarters) {
  if (!(__builtin_fabsf(x) < __builtin_inff())) return x - x;
  angle at = reduced(x);
  double value = (at.quadrant + quarters) % 2 ? small_cosine(at.rest) : small_sine(at.rest);
  return (at.quadrant + quarters) % 4 >= 2 ? -value : value;
}

// ---- inverse circular functions ----

static double half_angle(double tangent) { return tangent / (1 + __builtin_sqrt(1 + tangent * tangent)); }

static double arctangent(double x) {
  if (x < 0) return -arctangent(-x);
  if (x > 1) return PI / 2 - arctangent(1 / x);
  double t = half_angle(half_angle(x)), square = t * t, sum = -1.0 / 27;  // t <= 0.2
  for (int i = 25; i >= 3; i -= 2) sum = ((i % 4 == 1) ? 1.0 : -1.0) / i + sum * square;
  return 4 * (t + t * square * sum);
}

static double direction(double y, double x) {
  if (x != x || y != y) return x + y;
  double up = __builtin_fabs(y), right = __builtin_fabs(x);
  double value = up == 0 ? 0 : up == right ? PI / 4 : arctangent(up / right);
  if (is_negative(x)) value = PI - value;
  return is_negative(y) ? -value : value;
}

// ---- hyperbolic functions and their inverses ----

static double hyperbolic_sine(double x) {
  double e = expm1_of(__builtin_fabs(x));
  return __builtin_copysign((e + e / (e + 1)) / 2, x);
}

static double hyperbolic_tangent(double x) {
  double e = expm1_of(2 * __builtin_fabs(x));
  return __builtin_copysign(e / (e + 2), x);
}

static double inverse_hyperbolic_sine(double x) {
  double a = __builtin_fabs(x);
  if (!(a < infinite())) return x;
  return __builtin_copysign(log1p_of(a + a * a / (1 + __builtin_sqrt(1 + a * a))), x);
}

static double inverse_hyperbolic_tangent(double x) {
  double a = __builtin_fabs(x);
  return a > 1 ? __builtin_nan("") : __builtin_copysign(0.5 * log1p_of(2 * a / (1 - a)), x);
}

// ---- the functions that kernels call ----

// Odd functions return zero, and values that are flushed to zero (denormals.c), with the sign of the argument.
#define FUNCTION(NAME, RESULT) \
  float msl_##NAME##f(float x) { return (float)(RESULT); }
#define ODD_FUNCTION(NAME, RESULT) \
  float msl_##NAME##f(float x) { return x == 0 ? __builtin_copysignf(0, x) : (float)(RESULT); }

FUNCTION(exp, exponential(x))
FUNCTION(exp2, power_of_two(x))
FUNCTION(exp10, power_of_two((double)x * LOG2_10))
FUNCTION(log, log_in(x, LN2, 1))
FUNCTION(log2, log_in(x, 1, LOG2_E))
FUNCTION(log10, log_in(x, LOG10_2, LOG10_E))
FUNCTION(cos, sine(x, 1))
FUNCTION(acos, 2 * arctangent(__builtin_sqrt((1 - (double)x) / (1 + (double)x))))
FUNCTION(cosh, (exponential(x) + exponential(-(double)x)) / 2)
FUNCTION(acosh, log1p_of((double)x - 1 + __builtin_sqrt((double)x - 1) * __builtin_sqrt((double)x + 1)))
ODD_FUNCTION(sin, sine(x, 0))
ODD_FUNCTION(tan, sine(x, 0) / sine(x, 1))
ODD_FUNCTION(asin, arctangent(x / __builtin_sqrt((1 - (double)x) * (1 + (double)x))))
ODD_FUNCTION(atan, arctangent(x))
ODD_FUNCTION(sinh, hyperbolic_sine(x))
ODD_FUNCTION(tanh, hyperbolic_tangent(x))
ODD_FUNCTION(asinh, inverse_hyperbolic_sine(x))
ODD_FUNCTION(atanh, inverse_hyperbolic_tangent(x))
ODD_FUNCTION(log1p, log1p_of(x))

float msl_powf(float x, float y) { return (float)power(x, y); }
float msl_atan2f(float y, float x) { return (float)direction(y, x); }
