// Scalars, and vectors of 2, 3 and 4 of them.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;
typedef long intptr_t;

typedef _Float16 half;
typedef __bf16 bfloat;

constexpr half operator""h(long double value) { return half(value); }
constexpr half operator""H(long double value) { return half(value); }
constexpr bfloat operator""bf(long double value) { return bfloat(float(value)); }

// Packed vectors have the alignment of their elements. Those of 3 elements are in matrices.h, because clang's vectors of
// 3 elements take the space of 4.
#define MSL_VECTORS(ELEMENT, NAME)                                                           \
  typedef ELEMENT NAME##2 __attribute__((ext_vector_type(2)));                               \
  typedef ELEMENT NAME##3 __attribute__((ext_vector_type(3)));                               \
  typedef ELEMENT NAME##4 __attribute__((ext_vector_type(4)));                               \
  typedef ELEMENT packed_##NAME##2 __attribute__((ext_vector_type(2), aligned(sizeof(ELEMENT)))); \
  typedef ELEMENT packed_##NAME##4 __attribute__((ext_vector_type(4), aligned(sizeof(ELEMENT))));

MSL_VECTORS(signed char, char)
MSL_VECTORS(uchar, uchar)
MSL_VECTORS(short, short)
MSL_VECTORS(ushort, ushort)
MSL_VECTORS(int, int)
MSL_VECTORS(uint, uint)
MSL_VECTORS(long, long)
MSL_VECTORS(ulong, ulong)
MSL_VECTORS(half, half)
MSL_VECTORS(bfloat, bfloat)
MSL_VECTORS(float, float)
#undef MSL_VECTORS

typedef bool bool2 __attribute__((ext_vector_type(2)));
typedef bool bool3 __attribute__((ext_vector_type(3)));
typedef bool bool4 __attribute__((ext_vector_type(4)));

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}
