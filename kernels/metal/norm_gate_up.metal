// RMSNorm, gate and up projections, and activation: y = activation(gate) * up. A SIMD-group has the same rows of both
// matrices. N rows of each, K columns, R rows of each per lane, M vectors per SIMD-group, NSG SIMD-groups in a
// threadgroup. GELU: the tanh form of GELU instead of SiLU. READY: the kernel norm_rows has already multiplied x by the
// norm weight and computed the factors of the norm. GATE_W, UP_W: the types of the matrices, which may differ.
  const int lane = int(thread_index_in_simdgroup);
  const int tiles = (x_shape[0] + M - 1) / M;
  const int group = int(threadgroup_position_in_grid.x) / tiles * NSG + int(simdgroup_index_in_threadgroup);
  const int vector0 = int(threadgroup_position_in_grid.x) % tiles * M;
  const int row0 = group * 4 * R + lane / 8;

  float sums[M * 2 * R], squares[M];
  const auto rows = gated_rows(rows_of<GATE_W>(gate_wq, gate_ws, N, row0), rows_of<UP_W>(up_wq, up_ws, N, row0));
  multiply_rows<K, 2 * R, M, 1, !READY>(
      sums, squares, rows, normed_vectors<READY>(x, norm_weight, x_shape[0], vector0), 0, lane);

  UNROLL for (int m = 0; m < M; m++) {
    const int vector = vector0 + m;
    const float factor = READY ? factors[min(vector, x_shape[0] - 1)] : rms_factor(squares[m], K, eps[0]);
    UNROLL for (int r = 0; r < R; r++) {
      const float gate = sums[(m * R + r) * 2] * factor;
      const float up = sums[(m * R + r) * 2 + 1] * factor;
      const int row = row0 + 4 * r;
      if (lane % 8 == 0 && row < N && vector < x_shape[0]) {
        y[size_t(vector) * N + row] = sigmoid_gate(gate, GELU ? gelu_argument(gate) : gate) * up;
      }
    }
  }
