// The preamble that MLX puts before every kernel. Kernels may use its names without including anything.
#pragma once
#include <msl/all.h>

using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;

// A complex number, stored as two T: the real and the imaginary part.
template <class T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T re = T(0), T im = T(0)) : real(re), imag(im) {}
};
typedef complex_t<float> complex64_t;
template <class T>
METAL_FUNC constexpr complex_t<T> operator+(complex_t<T> a, complex_t<T> b) {
  return {a.real + b.real, a.imag + b.imag};
}
template <class T>
METAL_FUNC constexpr complex_t<T> operator-(complex_t<T> a, complex_t<T> b) {
  return {a.real - b.real, a.imag - b.imag};
}
template <class T>
METAL_FUNC constexpr complex_t<T> operator*(complex_t<T> a, complex_t<T> b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

// The smallest and largest value of a type, which are infinities if the type has them.
template <class U>
struct Limits {
  static constexpr U max = numeric_limits<U>::max(), min = numeric_limits<U>::lowest();
  static constexpr U finite_max = max, finite_min = min;
};
#define MSL_FLOAT_LIMITS(T)                                                                           \
  template <>                                                                                         \
  struct Limits<T> {                                                                                  \
    static constexpr T max = numeric_limits<T>::infinity(), min = -numeric_limits<T>::infinity();     \
    static constexpr T finite_max = numeric_limits<T>::max(), finite_min = numeric_limits<T>::lowest(); \
  };
MSL_FLOAT_LIMITS(float)
MSL_FLOAT_LIMITS(half)
MSL_FLOAT_LIMITS(bfloat)
#undef MSL_FLOAT_LIMITS

// ---- the offset of an element of a strided array; the last axis varies fastest ----

template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(IdxT elem, constant const int* shape, constant const int64_t* strides, int ndim) {
  IdxT location = 0;
  for (int axis = ndim; axis-- > 0 && elem > 0; elem /= shape[axis])
    location += (elem % shape[axis]) * IdxT(strides[axis]);
  return location;
}
// x and y are the indices along the axes -1 and -2; z is the flat index along all other axes.
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(uint3 elem, constant const int* shape, constant const int64_t* strides, int ndim) {
  IdxT location = elem.x * IdxT(strides[ndim - 1]) + elem.y * IdxT(strides[ndim - 2]);
  return location + elem_to_loc<IdxT>(IdxT(elem.z), shape, strides, ndim - 2);
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_1(uint elem, constant const int64_t& stride) {
  return elem * IdxT(stride);
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_2(uint2 elem, constant const int64_t* strides) {
  return elem.y * IdxT(strides[0]) + elem.x * IdxT(strides[1]);
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_3(uint3 elem, constant const int64_t* strides) {
  return elem.z * IdxT(strides[0]) + elem.y * IdxT(strides[1]) + elem.x * IdxT(strides[2]);
}

// ---- arithmetic ----

template <class T, class U>
METAL_FUNC T ceildiv(T n, U per) {
  return (n + per - 1) / per;
}

METAL_FUNC float log1p(float x) { return msl_log1pf(x); }
METAL_FUNC bfloat log1p(bfloat x) { return bfloat(msl_log1pf(float(x))); }
