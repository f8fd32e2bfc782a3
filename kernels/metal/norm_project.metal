// RMSNorm and one matrix. The norm's factor is one number per vector: it multiplies the finished sums, and the squares
// it is made of are added up in the loop that reads x anyway.
// N rows, K columns, V vectors in TILES tiles of M, R rows per SIMD-group, NSG SIMD-groups in a threadgroup.
  const int lane = int(thread_index_in_simdgroup);
  const int unit = int(threadgroup_position_in_grid.x) * NSG + int(simdgroup_index_in_threadgroup);
  const int row0 = unit / TILES * R;
  const int vector0 = unit % TILES * M;

  float sums[M * R], squares[M];
  UNROLL for (int i = 0; i < M * R; i++) sums[i] = 0.0f;
  UNROLL for (int m = 0; m < M; m++) squares[m] = 0.0f;
  for (int k = lane * 16; k < K; k += 512) {
    Sixteen xs[M];
    load_normed<K, V, M>(xs, squares, x, gain, vector0, k);
    add_products<K, R, M>(sums, xs, wq, ws, N, row0, k);
  }

  UNROLL for (int m = 0; m < M; m++) {
    const float factor = rms_factor(simd_sum(squares[m]), K, eps[0]);
    UNROLL for (int r = 0; r < R; r++) {
      const float product = simd_sum(sums[m * R + r]) * factor;
      if (lane == 0 && row0 + r < N && vector0 + m < V) y[size_t(vector0 + m) * N + row0 + r] = product;
    }
  }
