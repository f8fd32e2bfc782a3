// A matrix of N rows and K columns of type W times vectors; sums are rounded to type Y. A SIMD-group has four groups of
// eight lanes. Each lane has R rows and M vectors, and loads 16 weights at a time. A threadgroup has NSG SIMD-groups
// and one tile of M vectors; KS SIMD-groups share the columns of a row.
  threadgroup float parts[KS > 1 ? NSG * 4 * M * R : 1];
  const int lane = int(thread_index_in_simdgroup);
  const int mine = int(simdgroup_index_in_threadgroup);
  // Adjacent threadgroups multiply the same rows, so that weights are read from memory only once.
  const int tiles = (x_shape[0] + M - 1) / M;
  const int group = (int(threadgroup_position_in_grid.x) / tiles * NSG + mine) / KS;
  const int row0 = group * 4 * R + lane / 8;
  const int vector0 = int(threadgroup_position_in_grid.x) % tiles * M;

  float sums[M * R], squares[1];
  const auto rows = rows_of<W>(wq, ws, N, row0);
  multiply_rows<K, R, M, KS, false>(sums, squares, rows, vectors_of(x, x_shape[0], vector0), mine % KS, lane);
  add_segments<M * R, KS>(sums, parts, mine, lane);

  if (lane % 8 == 0 && mine % KS == 0) {
    UNROLL for (int i = 0; i < M * R; i++) {
      const int row = row0 + i % R * 4;
      const int vector = vector0 + i / R;
      if (row < N && vector < x_shape[0]) y[size_t(vector) * N + row] = Y(sums[i]);
    }
  }
