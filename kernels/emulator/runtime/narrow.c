// Conversions between float and half or bfloat, which compilers call by name if the processor has no instruction for
// them. They are defined here, because kernels are linked without libraries.
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((weak, visibility("default")))

typedef _Float16 half;
typedef __bf16 bfloat;

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Round to nearest, ties to even: round up if the dropped bits are more than half, or half and the number is odd.
EXPORTED bfloat __truncsfbf2(float x) {
  uint32_t bits = bits_of(x);
  uint16_t top = (x != x) ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  bfloat result;
  memcpy(&result, &top, sizeof result);
  return result;
}

EXPORTED half __truncsfhf2(float x) {
  uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000), code;
  if (magnitude > 0x7F800000) code = 0x7E00;
  else if (magnitude >= 0x477FF000) code = 0x7C00;  // 65520 and more round to infinity
  else if (magnitude < 0x38800000) {                // below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits
    code = (uint16_t)(bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
  } else code = (uint16_t)((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
  code |= sign;
  half result;
  memcpy(&result, &code, sizeof result);
  return result;
}

EXPORTED float __extendhfsf2(half x) {
  uint16_t code;
  memcpy(&code, &x, sizeof code);
  uint32_t sign = (uint32_t)(code & 0x8000) << 16, exponent = code >> 10 & 31, fraction = code & 0x3FF;
  if (exponent == 31) return float_of(sign | 0x7F800000 | fraction << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  float small = (float)fraction * 0x1p-24f;
  return sign ? -small : small;
}

// Literals such as 0.5h are long doubles, which unoptimised code converts at run time. The first conversion sets the
// last bit if it drops any bits ("round to odd"), so that the second conversion rounds correctly.
#if __LDBL_MANT_DIG__ == 64
EXPORTED half __truncxfhf2(long double x) {
  float nearest = (float)x;
  if (nearest == x || x != x) return __truncsfhf2(nearest);
  uint32_t bits = bits_of(nearest);
  if (nearest > 0 ? nearest > x : nearest < x) bits--;
  return __truncsfhf2(float_of(bits | 1));
}
#elif __LDBL_MANT_DIG__ == 113
static double odd_double(long double x) {
  uint64_t word[2], bits;
  memcpy(word, &x, sizeof word);
  uint64_t sign = word[1] & 1ul << 63, fraction = (word[1] & 0xFFFFFFFFFFFFul) << 4 | word[0] >> 60;
  int exponent = (int)(word[1] >> 48 & 0x7FFF);
  uint64_t rest = (word[0] << 4) != 0;
  if (exponent == 0x7FFF) bits = 0x7FFul << 52 | (fraction | rest ? 1ul << 51 : 0);
  else if (exponent > 16383 + 1023) bits = 0x7FFul << 52;
  else if (exponent < 16383 - 1022) bits = (exponent || fraction || rest);
  else bits = (uint64_t)(exponent - 16383 + 1023) << 52 | fraction | rest;
  bits |= sign;
  double result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

EXPORTED half __trunctfhf2(long double x) { return (half)odd_double(x); }

EXPORTED float __trunctfsf2(long double x) { return (float)odd_double(x); }
#endif
