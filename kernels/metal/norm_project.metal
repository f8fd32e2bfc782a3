// RMSNorm and one matrix. The factor of the norm is one number per vector, which multiplies the finished sums.
// N rows, K columns, of type W; R rows per lane, M vectors per SIMD-group, NSG SIMD-groups in a threadgroup. READY: the
// kernel norm_rows has already multiplied x by the norm weight and computed the factors of the norm.
  const int lane = int(thread_index_in_simdgroup);
  const int tiles = (x_shape[0] + M - 1) / M;
  const int group = int(threadgroup_position_in_grid.x) / tiles * NSG + int(simdgroup_index_in_threadgroup);
  const int vector0 = int(threadgroup_position_in_grid.x) % tiles * M;
  const int row0 = group * 4 * R + lane / 8;

  float sums[M * R], squares[M];
  const auto rows = rows_of<W>(wq, ws, N, row0);
  multiply_rows<K, R, M, 1, !READY>(
      sums, squares, rows, normed_vectors<READY>(x, norm_weight, x_shape[0], vector0), 0, lane);

  UNROLL for (int m = 0; m < M; m++) {
    const int vector = vector0 + m;
    const float factor = READY ? factors[min(vector, x_shape[0] - 1)] : rms_factor(squares[m], K, eps[0]);
    UNROLL for (int r = 0; r < R; r++) {
      const int row = row0 + 4 * r;
      if (lane % 8 == 0 && row < N && vector < x_shape[0]) y[size_t(vector) * N + row] = sums[m * R + r] * factor;
    }
  }
