// R rows times M vectors per SIMD-group, 16 weights per lane and load.
// N rows, K columns, V vectors in TILES tiles of M; NSG SIMD-groups in a threadgroup; KS of them share a row's columns.
  threadgroup float parts[KS > 1 ? NSG * M * R : 1];
  const int lane = int(thread_index_in_simdgroup);
  const int mine = int(simdgroup_index_in_threadgroup);
  const int unit = (int(threadgroup_position_in_grid.x) * NSG + mine) / KS;
  // Neighbours multiply the same rows with other vectors: what one has read from memory, the other finds in a cache.
  const int row0 = unit / TILES * R;
  const int vector0 = unit % TILES * M;

  float sums[M * R];
  UNROLL for (int i = 0; i < M * R; i++) sums[i] = 0.0f;
  for (int k = (mine % KS * 32 + lane) * 16; k < K; k += KS * 512) {
    Sixteen xs[M];
    UNROLL for (int m = 0; m < M; m++) xs[m] = load16(x + size_t(min(vector0 + m, V - 1)) * K + k);
    add_products<K, R, M>(sums, xs, wq, ws, N, row0, k);
  }
  join_sums<M * R, KS>(sums, parts, mine, lane);

  if (lane == 0 && mine % KS == 0) {
    UNROLL for (int i = 0; i < M * R; i++) {
      const int row = row0 + i % R;
      const int vector = vector0 + i / R;
      if (row < N && vector < V) y[size_t(vector) * N + row] = sums[i];
    }
  }
