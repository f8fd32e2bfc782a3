// Further functions of Metal's library: arguments of two types, comparisons of vectors, three arguments, packing.
#pragma once

namespace metal {

// Replaces static_cast, because clang refuses it between half and bfloat.
template <class T, class U>
MSL_FUNC constexpr T msl_static_cast(const U& value) {
  if constexpr ((is_same_v<T, half> && is_same_v<U, bfloat>) || (is_same_v<T, bfloat> && is_same_v<U, half>))
    return static_cast<T>(static_cast<float>(value));
  else return static_cast<T>(value);
}

// ---- arguments of two types ----

// The type that Metal's overloads for float and half choose: half for a half and an integer, otherwise float.
template <class A, class B>
using msl_common_t = conditional_t<(is_same_v<A, half> && !is_same_v<B, float> && !is_same_v<B, bfloat>) ||
                                       (is_same_v<B, half> && !is_same_v<A, float> && !is_same_v<A, bfloat>),
                                   half, float>;
template <class A, class B>
using msl_if_mixed = enable_if_t<__is_arithmetic(A) && __is_arithmetic(B) &&
                                 (!is_same_v<A, B> || __is_integral(A))>;
#define MSL_MIXED(NAME)                                                          \
  template <class A, class B, class = msl_if_mixed<A, B>>                        \
  MSL_FUNC msl_common_t<A, B> NAME(A a, B b) {                                   \
    typedef msl_common_t<A, B> C;                                                \
    return NAME<C>(C(a), C(b));                                                  \
  }
#define MSL_MIXED_FUNCTIONS \
  MSL_MIXED(pow) MSL_MIXED(powr) MSL_MIXED(fmax) MSL_MIXED(fmin) MSL_MIXED(fmod) MSL_MIXED(atan2) MSL_MIXED(copysign)
MSL_MIXED_FUNCTIONS
namespace precise {
MSL_MIXED_FUNCTIONS
}
namespace fast {
MSL_MIXED_FUNCTIONS
}
#undef MSL_MIXED_FUNCTIONS
#undef MSL_MIXED

// ---- three arguments, and other floating-point functions ----

template <class T>
MSL_FUNC T fmax3(T a, T b, T c) {
  return fmax(a, fmax(b, c));
}
template <class T>
MSL_FUNC T fmin3(T a, T b, T c) {
  return fmin(a, fmin(b, c));
}
template <class T>
MSL_FUNC T median3(T a, T b, T c) {
  return max(min(a, b), min(max(a, b), c));
}
template <class T>
MSL_FUNC T fmedian3(T a, T b, T c) {
  return fmax(fmin(a, b), fmin(fmax(a, b), c));
}
template <class T>
MSL_FUNC T divide(T a, T b) {
  return a / b;
}
template <class T>
MSL_FUNC T mad(T a, T b, T c) {
  return a * b + c;
}
// The number of type T that is next to x in the direction of y. U is the unsigned integer with as many bits as T.
template <class U, class T>
MSL_FUNC T msl_nextafter(T x, T y) {
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  constexpr U sign = U(U(1) << (8 * sizeof(U) - 1));
  U bits = __builtin_bit_cast(U, x);
  if (x == T(0)) bits = U((y < T(0) ? sign : U(0)) | U(1));
  else bits = (x < y) == (x > T(0)) ? U(bits + 1) : U(bits - 1);
  return __builtin_bit_cast(T, bits);
}
MSL_FUNC float nextafter(float x, float y) { return msl_nextafter<uint>(x, y); }
MSL_FUNC half nextafter(half x, half y) { return msl_nextafter<ushort>(x, y); }
MSL_FUNC half ldexp(half x, int exponent) { return half(__builtin_ldexpf(float(x), exponent)); }
MSL_FUNC half frexp(half x, thread int& exponent) { return half(__builtin_frexpf(float(x), &exponent)); }
MSL_FUNC half modf(half x, thread half& whole) {
  whole = half(__builtin_truncf(float(x)));
  return x - whole;
}
MSL_FUNC half sincos(half x, thread half& cosine) {
  cosine = half(msl_cosf(float(x)));
  return half(msl_sinf(float(x)));
}
template <class T, int N>
MSL_FUNC vec<T, N> sincos(vec<T, N> x, thread vec<T, N>& cosine) {
  cosine = cos(x);
  return sin(x);
}
template <class T, int N>
MSL_FUNC vec<T, N> ldexp(vec<T, N> x, vec<int, N> exponent) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = ldexp(x[i], exponent[i]);
  return result;
}
template <class T, class = msl_if_floating<T>>
MSL_FUNC vec<int, msl_size<T>> ilogb(T x) {
  vec<int, msl_size<T>> result;
  for (int i = 0; i < msl_size<T>; i++) result[i] = __builtin_ilogbf(float(x[i]));
  return result;
}
MSL_FUNC int ilogb(float x) { return __builtin_ilogbf(x); }

// ---- comparisons, element by element ----

#define MSL_COMPARISON(NAME)                           \
  template <class T, int N>                            \
  MSL_FUNC vec<bool, N> NAME(vec<T, N> x) {            \
    vec<bool, N> result;                               \
    for (int i = 0; i < N; i++) result[i] = NAME(x[i]); \
    return result;                                     \
  }
template <class T>
MSL_FUNC bool isnormal(T x) {
  return isfinite(x) && __builtin_fabsf(float(x)) >= float(numeric_limits<T>::min());
}
MSL_COMPARISON(isnan) MSL_COMPARISON(isinf) MSL_COMPARISON(isfinite) MSL_COMPARISON(isnormal) MSL_COMPARISON(signbit)
#undef MSL_COMPARISON
template <class T>
MSL_FUNC bool isordered(T x, T y) {
  return x == x && y == y;
}
template <class T>
MSL_FUNC bool isunordered(T x, T y) {
  return !isordered(x, y);
}

// ---- geometric functions ----

template <class T, int N>
MSL_FUNC vec<T, N> reflect(vec<T, N> i, vec<T, N> n) {
  return i - T(2) * dot(n, i) * n;
}
template <class T, int N>
MSL_FUNC T distance_squared(vec<T, N> a, vec<T, N> b) {
  return dot(a - b, a - b);
}
template <class T, int N>
MSL_FUNC vec<T, N> faceforward(vec<T, N> n, vec<T, N> i, vec<T, N> reference) {
  return dot(reference, i) < T(0) ? n : -n;
}

// ---- normalised integers packed in 32 bits, the first in the lowest bits ----

#define MSL_PACKED_NORMS(COUNT, BITS, TYPE)                                                       \
  MSL_FUNC vec<TYPE, COUNT> unpack_unorm##COUNT##x##BITS##_to_##TYPE(uint bits) {                 \
    vec<TYPE, COUNT> result;                                                                      \
    for (int i = 0; i < COUNT; i++)                                                               \
      result[i] = TYPE(float(bits >> BITS * i & ((1u << BITS) - 1)) / float((1u << BITS) - 1));   \
    return result;                                                                                \
  }                                                                                               \
  MSL_FUNC vec<TYPE, COUNT> unpack_snorm##COUNT##x##BITS##_to_##TYPE(uint bits) {                 \
    vec<TYPE, COUNT> result;                                                                      \
    for (int i = 0; i < COUNT; i++)                                                               \
      result[i] = TYPE(max(float(int(bits << (32 - BITS - BITS * i)) >> (32 - BITS)) /            \
                               float((1u << (BITS - 1)) - 1),                                     \
                           -1.0f));                                                               \
    return result;                                                                                \
  }                                                                                               \
  MSL_FUNC uint pack_##TYPE##_to_unorm##COUNT##x##BITS(vec<TYPE, COUNT> from) {                   \
    uint bits = 0;                                                                                \
    for (int i = 0; i < COUNT; i++)                                                               \
      bits |= uint(__builtin_rintf(saturate(float(from[i])) * float((1u << BITS) - 1))) << BITS * i; \
    return bits;                                                                                  \
  }                                                                                               \
  MSL_FUNC uint pack_##TYPE##_to_snorm##COUNT##x##BITS(vec<TYPE, COUNT> from) {                   \
    uint bits = 0;                                                                                \
    for (int i = 0; i < COUNT; i++) {                                                             \
      float scaled = clamp(float(from[i]), -1.0f, 1.0f) * float((1u << (BITS - 1)) - 1);          \
      bits |= (uint(int(__builtin_rintf(scaled))) & ((1u << BITS) - 1)) << BITS * i;              \
    }                                                                                             \
    return bits;                                                                                  \
  }
MSL_PACKED_NORMS(4, 8, float)
MSL_PACKED_NORMS(2, 16, float)
MSL_PACKED_NORMS(4, 8, half)
MSL_PACKED_NORMS(2, 16, half)
#undef MSL_PACKED_NORMS

// ---- SIMD-group operations of groups smaller than 32 ----

template <class T>
MSL_FUNC T simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo, MSL_HERE) {
  msl_lanes<msl_filled<T>> all({value, fill}, "simd_shuffle_and_fill_up", file, line, delta);
  unsigned lane = all.found.lane, place = lane % modulo;
  return place >= delta ? all.shifted(lane - delta).value : all.shifted(lane + modulo - delta).fill;
}
template <class T>
MSL_FUNC T simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo, MSL_HERE) {
  msl_lanes<msl_filled<T>> all({value, fill}, "simd_shuffle_and_fill_down", file, line, delta);
  unsigned lane = all.found.lane, place = lane % modulo;
  return place + delta < modulo ? all.shifted(lane + delta).value : all.shifted(lane + delta - modulo).fill;
}

// metal::array: a fixed number of elements, which is copied as a value.
template <class T, size_t N>
struct array {
  T elements[N];
  constexpr thread T& operator[](size_t i) { return elements[i]; }
  constexpr const thread T& operator[](size_t i) const { return elements[i]; }
  static constexpr size_t size() { return N; }
};

// metal::uniform: a value that is equal in all threads of the grid. The emulator does not check that it is equal.
template <class T>
struct uniform {
  T value;
  constexpr uniform(T given) : value(given) {}
  constexpr operator T() const { return value; }
};
template <class T>
MSL_FUNC constexpr uniform<T> make_uniform(T value) {
  return value;
}

}  // namespace metal
