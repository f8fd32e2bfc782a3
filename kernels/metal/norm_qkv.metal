// RMSNorm and three matrices: queries, keys and values of one launch. Which matrix a SIMD-group multiplies follows from
// its number; its rows never belong to two.
// NQ, NK, NV rows, K columns, V vectors in TILES tiles of M, R rows per SIMD-group, NSG SIMD-groups in a threadgroup.
  const int lane = int(thread_index_in_simdgroup);
  const int unit = int(threadgroup_position_in_grid.x) * NSG + int(simdgroup_index_in_threadgroup);
  const int group = unit / TILES;
  const int vector0 = unit % TILES * M;

  const int k_first = (NQ + R - 1) / R;
  const int v_first = k_first + (NK + R - 1) / R;
  const bool is_q = group < k_first;
  const bool is_k = !is_q && group < v_first;
  const int N = is_q ? NQ : is_k ? NK : NV;
  const int row0 = (is_q ? group : is_k ? group - k_first : group - v_first) * R;
  const device uint* wq = is_q ? q_wq : is_k ? k_wq : v_wq;
  const device half* ws = is_q ? q_ws : is_k ? k_ws : v_ws;
  device float* y = is_q ? q : is_k ? k : v;

  float sums[M * R], squares[M];
  UNROLL for (int i = 0; i < M * R; i++) sums[i] = 0.0f;
  UNROLL for (int m = 0; m < M; m++) squares[m] = 0.0f;
  for (int column = lane * 16; column < K; column += 512) {
    Sixteen xs[M];
    load_normed<K, V, M>(xs, squares, x, gain, vector0, column);
    add_products<K, R, M>(sums, xs, wq, ws, N, row0, column);
  }

  UNROLL for (int m = 0; m < M; m++) {
    const float factor = rms_factor(simd_sum(squares[m]), K, eps[0]);
    UNROLL for (int r = 0; r < R; r++) {
      const float product = simd_sum(sums[m * R + r]) * factor;
      if (lane == 0 && row0 + r < N && vector0 + m < V) y[size_t(vector0 + m) * N + row0 + r] = product;
    }
  }
