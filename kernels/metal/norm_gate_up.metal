// RMSNorm, gate and up, and what gates: y = activation(gate) * up. A SIMD-group multiplies the same rows of both.
// N rows of each, K columns, V vectors in TILES tiles of M, R rows per SIMD-group, NSG SIMD-groups in a threadgroup;
// GELU: the tanh form of GELU instead of SiLU.
  const int lane = int(thread_index_in_simdgroup);
  const int unit = int(threadgroup_position_in_grid.x) * NSG + int(simdgroup_index_in_threadgroup);
  const int row0 = unit / TILES * R;
  const int vector0 = unit % TILES * M;

  float gates[M * R], ups[M * R], squares[M];
  UNROLL for (int i = 0; i < M * R; i++) gates[i] = ups[i] = 0.0f;
  UNROLL for (int m = 0; m < M; m++) squares[m] = 0.0f;
  for (int k = lane * 16; k < K; k += 512) {
    Sixteen xs[M];
    load_normed<K, V, M>(xs, squares, x, gain, vector0, k);
    add_products<K, R, M>(gates, xs, gate_wq, gate_ws, N, row0, k);
    add_products<K, R, M>(ups, xs, up_wq, up_ws, N, row0, k);
  }

  UNROLL for (int m = 0; m < M; m++) {
    const float factor = rms_factor(simd_sum(squares[m]), K, eps[0]);
    UNROLL for (int r = 0; r < R; r++) {
      const float gate = simd_sum(gates[m * R + r]) * factor;
      const float up = simd_sum(ups[m * R + r]) * factor;
      if (lane == 0 && row0 + r < N && vector0 + m < V) {
        y[size_t(vector0 + m) * N + row0 + r] = sigmoid_gate(gate, GELU ? gelu_argument(gate) : gate) * up;
      }
    }
  }
