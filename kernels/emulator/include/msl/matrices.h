// Matrices of floats, stored by columns: float4x4, half2x4 (two columns of four rows) and so on.
#pragma once

namespace metal {

template <class T, int Columns, int Rows>
struct matrix {
  vec<T, Rows> columns[Columns];

  matrix() = default;
  explicit MSL_FUNC matrix(T diagonal) {
    for (int c = 0; c < Columns; c++)
      for (int r = 0; r < Rows; r++) columns[c][r] = c == r ? diagonal : T(0);
  }
  template <class... Rest, class = enable_if_t<(sizeof...(Rest) + 2 == Columns)>>
  MSL_FUNC matrix(vec<T, Rows> first, vec<T, Rows> second, Rest... rest) : columns{first, second, rest...} {}
  template <class... Rest, class = enable_if_t<(sizeof...(Rest) + 2 == Columns * Rows)>, class = void>
  MSL_FUNC matrix(T first, T second, Rest... rest) {
    T given[] = {first, second, T(rest)...};
    for (int i = 0; i < Columns * Rows; i++) columns[i / Rows][i % Rows] = given[i];
  }
  template <class U>
  explicit MSL_FUNC matrix(const matrix<U, Columns, Rows>& other) {
    for (int c = 0; c < Columns; c++)
      for (int r = 0; r < Rows; r++) columns[c][r] = T(other.columns[c][r]);
  }
  MSL_FUNC vec<T, Rows>& operator[](int column) { return columns[column]; }
  MSL_FUNC const vec<T, Rows>& operator[](int column) const { return columns[column]; }
};

template <class T, int C, int R>
MSL_FUNC matrix<T, C, R> operator+(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; c++) a[c] += b[c];
  return a;
}
template <class T, int C, int R>
MSL_FUNC matrix<T, C, R> operator-(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; c++) a[c] -= b[c];
  return a;
}
template <class T, int C, int R>
MSL_FUNC matrix<T, C, R> operator*(matrix<T, C, R> a, msl_value<T> b) {
  for (int c = 0; c < C; c++) a[c] *= b;
  return a;
}
template <class T, int C, int R>
MSL_FUNC matrix<T, C, R> operator*(msl_value<T> b, matrix<T, C, R> a) {
  return a * b;
}
template <class T, int C, int R>
MSL_FUNC matrix<T, C, R>& operator+=(matrix<T, C, R>& a, matrix<T, C, R> b) {
  return a = a + b;
}
template <class T, int C, int R>
MSL_FUNC matrix<T, C, R>& operator*=(matrix<T, C, R>& a, msl_value<T> b) {
  return a = a * b;
}
template <class T, int C, int R>
MSL_FUNC vec<T, R> operator*(matrix<T, C, R> a, vec<T, C> x) {
  vec<T, R> sum = a[0] * x[0];
  for (int c = 1; c < C; c++) sum += a[c] * x[c];
  return sum;
}
template <class T, int C, int R>
MSL_FUNC vec<T, C> operator*(vec<T, R> x, matrix<T, C, R> a) {
  vec<T, C> result;
  for (int c = 0; c < C; c++) result[c] = dot(x, a[c]);
  return result;
}
template <class T, int K, int R, int C>
MSL_FUNC matrix<T, C, R> operator*(matrix<T, K, R> a, matrix<T, C, K> b) {
  matrix<T, C, R> result;
  for (int c = 0; c < C; c++) result[c] = a * b[c];
  return result;
}
template <class T, int C, int R>
MSL_FUNC bool operator==(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++)
      if (a[c][r] != b[c][r]) return false;
  return true;
}
template <class T, int C, int R>
MSL_FUNC matrix<T, R, C> transpose(matrix<T, C, R> a) {
  matrix<T, R, C> result;
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) result[r][c] = a[c][r];
  return result;
}
template <class T>
MSL_FUNC T determinant(matrix<T, 2, 2> a) {
  return a[0][0] * a[1][1] - a[1][0] * a[0][1];
}
template <class T>
MSL_FUNC T determinant(matrix<T, 3, 3> a) {
  return dot(a[0], cross(a[1], a[2]));
}
template <class T>
MSL_FUNC T determinant(matrix<T, 4, 4> a) {
  T sum = 0;
  for (int c = 0; c < 4; c++) {
    matrix<T, 3, 3> minor;
    for (int k = 0; k < 3; k++) minor[k] = a[k + (k >= c)].yzw;
    sum += (c % 2 ? -a[c][0] : a[c][0]) * determinant(minor);
  }
  return sum;
}

// Packed vectors of three elements: float3 is padded to four, these types are not.
template <class T>
struct msl_packed3 {
  T x, y, z;
  msl_packed3() = default;
  MSL_FUNC msl_packed3(T a, T b, T c) : x(a), y(b), z(c) {}
  MSL_FUNC msl_packed3(T a) : x(a), y(a), z(a) {}
  MSL_FUNC msl_packed3(vec<T, 3> v) : x(v[0]), y(v[1]), z(v[2]) {}
  MSL_FUNC operator vec<T, 3>() const { return vec<T, 3>{x, y, z}; }
  MSL_FUNC T& operator[](int i) { return (&x)[i]; }
  MSL_FUNC const T& operator[](int i) const { return (&x)[i]; }
#define MSL_OPERATOR(SIGN)                                                                         \
  friend MSL_FUNC vec<T, 3> operator SIGN(msl_packed3 a, msl_packed3 b) {                          \
    return vec<T, 3>(a) SIGN vec<T, 3>(b);                                                         \
  }                                                                                                \
  MSL_FUNC msl_packed3& operator SIGN##=(msl_packed3 b) { return *this = *this SIGN b; }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
#undef MSL_OPERATOR
};
template <class T>
struct msl_vector<msl_packed3<T>> {
  static constexpr int size = 3;
  typedef T element;
};

}  // namespace metal

#define MSL_MATRICES(T)                                                                            \
  typedef metal::matrix<T, 2, 2> T##2x2; typedef metal::matrix<T, 2, 3> T##2x3;                    \
  typedef metal::matrix<T, 2, 4> T##2x4; typedef metal::matrix<T, 3, 2> T##3x2;                    \
  typedef metal::matrix<T, 3, 3> T##3x3; typedef metal::matrix<T, 3, 4> T##3x4;                    \
  typedef metal::matrix<T, 4, 2> T##4x2; typedef metal::matrix<T, 4, 3> T##4x3;                    \
  typedef metal::matrix<T, 4, 4> T##4x4;
MSL_MATRICES(float) MSL_MATRICES(half)
#undef MSL_MATRICES

#define MSL_PACKED3(T) typedef metal::msl_packed3<T> packed_##T##3;
typedef metal::msl_packed3<signed char> packed_char3;
MSL_PACKED3(uchar) MSL_PACKED3(short) MSL_PACKED3(ushort) MSL_PACKED3(int) MSL_PACKED3(uint) MSL_PACKED3(long)
MSL_PACKED3(ulong) MSL_PACKED3(half) MSL_PACKED3(bfloat) MSL_PACKED3(float)
#undef MSL_PACKED3
