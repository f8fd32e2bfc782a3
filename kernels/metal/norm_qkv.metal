// RMSNorm and three matrices: queries, keys and values in one launch. The number of a SIMD-group determines its matrix;
// all rows of a SIMD-group are in the same matrix.
// NQ, NK, NV rows, K columns, R rows per lane, M vectors per SIMD-group, NSG SIMD-groups in a threadgroup. READY:
// the kernel norm_rows has already multiplied x by the norm weight and computed the factors of the norm.
// Q_W, K_W, V_W: the types of the matrices, which may differ.
  const int lane = int(thread_index_in_simdgroup);
  const int tiles = (x_shape[0] + M - 1) / M;
  const int group = int(threadgroup_position_in_grid.x) / tiles * NSG + int(simdgroup_index_in_threadgroup);
  const int vector0 = int(threadgroup_position_in_grid.x) % tiles * M;

  const int k_first = (NQ + 4 * R - 1) / (4 * R);
  const int v_first = k_first + (NK + 4 * R - 1) / (4 * R);
  const bool is_q = group < k_first;
  const bool is_k = !is_q && group < v_first;
  const int N = is_q ? NQ : is_k ? NK : NV;
  const int row0 = (is_q ? group : is_k ? group - k_first : group - v_first) * 4 * R + lane / 8;
  device float* y = is_q ? q : is_k ? k : v;

  float sums[M * R], squares[M];
  const auto q_or_k = either_rows(rows_of<Q_W>(q_wq, q_ws, N, row0), rows_of<K_W>(k_wq, k_ws, N, row0), is_k);
  const auto rows = either_rows(q_or_k, rows_of<V_W>(v_wq, v_ws, N, row0), !is_q && !is_k);
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
