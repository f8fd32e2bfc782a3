// A float32 matrix times vectors, in the order of summation of the kernels for quantised weights.
// N rows, K columns, R rows per lane, M vectors per SIMD-group, NSG SIMD-groups in a threadgroup.
  const int lane = int(thread_index_in_simdgroup);
  const int tiles = (x_shape[0] + M - 1) / M;
  const int group = int(threadgroup_position_in_grid.x) / tiles * NSG + int(simdgroup_index_in_threadgroup);
  const int vector0 = int(threadgroup_position_in_grid.x) % tiles * M;
  const int row0 = group * 4 * R + lane / 8;

  float sums[M * R], squares[1];
  const FloatRows rows = {w, N, row0};
  multiply_rows<K, R, M, 1, false>(sums, squares, rows, vectors_of(x, x_shape[0], vector0), 0, lane);

  if (lane % 8 == 0) {
    UNROLL for (int i = 0; i < M * R; i++) {
      const int row = row0 + i % R * 4;
      const int vector = vector0 + i / R;
      if (row < N && vector < x_shape[0]) y[size_t(vector) * N + row] = sums[i];
    }
  }
