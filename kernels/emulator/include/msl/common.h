// Minimum, maximum and similar functions, comparisons, and geometric functions. As in Metal, all arguments of a call
// have the same type.
#pragma once

namespace metal {

// Whether x is the NaN that fills unwritten memory, or was computed from this NaN: its highest bits are set.
template <class T>
MSL_FUNC bool msl_unwritten(T x) {
  if constexpr (is_floating_point_v<T>) return x != x && __builtin_bit_cast(uint, float(x)) >= 0xFFFF0000u;
  else return false;
}
template <class T>
MSL_FUNC T msl_keep_unwritten(T x, T y, T result) {
  return msl_unwritten(x) ? x : msl_unwritten(y) ? y : result;
}

// If one argument is NaN, the result is the other argument, as in Metal. But if one is the NaN of unwritten memory, the
// result is this NaN, so that the read is found.
template <class T>
MSL_FUNC T max(T a, T b) {
  return msl_each<T>(
      [](auto x, auto y) MSL_LAMBDA { return msl_keep_unwritten(x, y, decltype(x)(x < y || x != x ? y : x)); }, a, b);
}
template <class T>
MSL_FUNC T min(T a, T b) {
  return msl_each<T>(
      [](auto x, auto y) MSL_LAMBDA { return msl_keep_unwritten(x, y, decltype(x)(y < x || x != x ? y : x)); }, a, b);
}
template <class T>
MSL_FUNC T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <class T>
MSL_FUNC T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <class T>
MSL_FUNC T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T, int N>
MSL_FUNC vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, vec<T, N>(low)), vec<T, N>(high));
}
template <class T>
MSL_FUNC T saturate(T x) {
  return clamp(x, T(0), T(1));
}
template <class T>
MSL_FUNC T abs(T x) {
  return msl_each<T>([](auto e) MSL_LAMBDA { return e < decltype(e)(0) ? decltype(e)(-e) : e; }, x);
}
template <class T>
MSL_FUNC T sign(T x) {
  return msl_each<T>([](auto e) MSL_LAMBDA { return decltype(e)((e > 0) - (e < 0)); }, x);
}
template <class T>
MSL_FUNC T mix(T x, T y, T a) {
  return x + (y - x) * a;
}
template <class T>
MSL_FUNC T step(T edge, T x) {
  return msl_each<T>([](auto e, auto v) MSL_LAMBDA { return decltype(e)(v < e ? 0 : 1); }, edge, x);
}
template <class T>
MSL_FUNC T smoothstep(T edge0, T edge1, T x) {
  T t = saturate((x - edge0) / (edge1 - edge0));
  return t * t * (T(3) - T(2) * t);
}

// ---- comparisons ----

template <class T>
MSL_FUNC bool isnan(T x) {
  return x != x;
}
template <class T>
MSL_FUNC bool isinf(T x) {
  return __builtin_fabsf(float(x)) == __builtin_inff();
}
template <class T>
MSL_FUNC bool isfinite(T x) {
  return __builtin_fabsf(float(x)) < __builtin_inff();
}
template <class T>
MSL_FUNC bool signbit(T x) {
  return __builtin_signbitf(float(x));
}
template <class T>
MSL_FUNC bool any(T x) {
  bool found = false;
  for (int i = 0; i < msl_size<T>; i++) found = found || x[i];
  return found;
}
template <class T>
MSL_FUNC bool all(T x) {
  bool found = true;
  for (int i = 0; i < msl_size<T>; i++) found = found && x[i];
  return found;
}
// Return b if the condition is true, and a if it is false.
template <class T>
MSL_FUNC T select(T a, T b, bool condition) {
  return condition ? b : a;
}
template <class T, class C, int N>
MSL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> condition) {
  vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = condition[i] ? b[i] : a[i];
  return result;
}

// ---- geometric functions ----

template <class T, int N>
MSL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
MSL_FUNC T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <class T, int N>
MSL_FUNC T length(vec<T, N> a) {
  return T(__builtin_sqrtf(float(dot(a, a))));
}
template <class T, int N>
MSL_FUNC T distance(vec<T, N> a, vec<T, N> b) {
  return length(a - b);
}
template <class T, int N>
MSL_FUNC vec<T, N> normalize(vec<T, N> a) {
  return a / length(a);
}
template <class T>
MSL_FUNC vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}

}  // namespace metal
