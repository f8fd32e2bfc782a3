// simdgroup_matrix: 8 x 8 values, two per lane, distributed as on Apple's GPUs.
#pragma once

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "a simdgroup_matrix has 8 rows and 8 columns");
  typedef vec<T, 2> storage;
  storage mine;
  simdgroup_matrix() = default;
  MSL_FUNC explicit simdgroup_matrix(T diagonal, MSL_HERE);
  MSL_FUNC thread storage& thread_elements() { return mine; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// A lane has columns `column` and `column + 1` of row `row`.
struct msl_place {
  unsigned row, column;
  MSL_FUNC explicit msl_place(unsigned lane)
      : row((lane / 4 & 4) + (lane / 2) % 4), column((lane / 4 & 2) * 2 + (lane % 2) * 2) {}
};

// Wait for all lanes. After that, a lane may access memory that other lanes wrote before.
MSL_FUNC msl_place msl_meet(const char* what, const char* file, unsigned line) {
  return msl_place(msl_meet_all(what, file, line));
}

template <class T, int Rows, int Columns>
MSL_FUNC simdgroup_matrix<T, Rows, Columns>::simdgroup_matrix(T diagonal, const char* file, unsigned line) {
  msl_place at = msl_meet("simdgroup_matrix", file, line);
  mine = storage{T(at.row == at.column ? diagonal : T(0)), T(at.row == at.column + 1 ? diagonal : T(0))};
}

template <class T, int Rows, int Columns = Rows>
MSL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> result;
  result.mine = vec<T, 2>{value, value};
  return result;
}

// The offset in memory of element `i` (0 or 1) of a lane. For a transposed matrix, rows and columns are exchanged.
MSL_FUNC ulong msl_offset(msl_place at, unsigned i, ulong per_row, ulong2 origin, bool transposed) {
  ulong row = transposed ? at.column + i : at.row, column = transposed ? at.row : at.column + i;
  return (row + origin.y) * per_row + column + origin.x;
}

#define MSL_TRANSFERS(SPACE)                                                                                  \
  template <class T>                                                                                          \
  MSL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& to, const SPACE T* from, ulong per_row = 8,  \
                               ulong2 origin = 0, bool transposed = false, MSL_HERE) {                        \
    msl_place at = msl_meet("simdgroup_load", file, line);                                                    \
    for (unsigned i = 0; i < 2; i++) to.mine[i] = from[msl_offset(at, i, per_row, origin, transposed)];       \
  }                                                                                                           \
  template <class T>                                                                                          \
  MSL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8> from, SPACE T* to, ulong per_row = 8,         \
                                ulong2 origin = 0, bool transposed = false, MSL_HERE) {                       \
    msl_place at = msl_meet("simdgroup_store", file, line);                                                   \
    for (unsigned i = 0; i < 2; i++) to[msl_offset(at, i, per_row, origin, transposed)] = from.mine[i];       \
  }
MSL_TRANSFERS(device)
#ifndef MSL_FLAT
MSL_TRANSFERS(threadgroup)
#endif
#undef MSL_TRANSFERS

// Both factors as floats, row by row, in memory that all lanes can read.
struct msl_operands {
  float a[8][8], b[8][8];
};
static_assert(sizeof(msl_operands) <= MSL_RESULT_BYTES);

MSL_LARGE_FUNC void msl_spread(const msl_lanes<float4>& all, msl_operands* operands) {
  for (unsigned lane = 0; lane < MSL_SIMD_WIDTH; lane++) {
    msl_place at(lane);
    float4 values = all.at(lane);
    for (unsigned i = 0; i < 2; i++) {
      operands->a[at.row][at.column + i] = values[i];
      operands->b[at.row][at.column + i] = values[2 + i];
    }
  }
}

// result = a * b + c. Sums are float32, and each is rounded once to the type of the result.
template <class R, class A, class B, class C>
MSL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<R, 8, 8>& result, simdgroup_matrix<A, 8, 8> a,
                                            simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, MSL_HERE) {
  float4 mine = {float(a.mine[0]), float(a.mine[1]), float(b.mine[0]), float(b.mine[1])};
  msl_lanes<float4> all(mine, "simdgroup_multiply_accumulate", file, line, MSL_ALL_LANES);
  msl_operands* operands = (msl_operands*)all.found.result;
  if (all.found.first) msl_spread(all, operands);
  msl_place at(all.found.lane);
  float2 sum = {float(c.mine[0]), float(c.mine[1])};
  for (unsigned k = 0; k < 8; k++)
    sum += operands->a[at.row][k] * float2{operands->b[k][at.column], operands->b[k][at.column + 1]};
  result.mine = vec<R, 2>{R(sum[0]), R(sum[1])};
}
template <class R, class A, class B>
MSL_FUNC void simdgroup_multiply(thread simdgroup_matrix<R, 8, 8>& result, simdgroup_matrix<A, 8, 8> a,
                                 simdgroup_matrix<B, 8, 8> b, MSL_HERE) {
  simdgroup_multiply_accumulate(result, a, b, make_filled_simdgroup_matrix<R, 8, 8>(R(0)), file, line);
}

#define MSL_OPERATION(SIGN, RESULT)                                                                    \
  template <class T>                                                                                   \
  MSL_FUNC simdgroup_matrix<T, 8, 8> operator SIGN(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) { \
    simdgroup_matrix<T, 8, 8> result;                                                                  \
    RESULT;                                                                                            \
    return result;                                                                                     \
  }
MSL_OPERATION(*, simdgroup_multiply(result, a, b))
MSL_OPERATION(+, result.mine = a.mine + b.mine)
MSL_OPERATION(-, result.mine = a.mine - b.mine)
#undef MSL_OPERATION

}  // namespace metal
