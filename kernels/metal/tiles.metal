// Products with many vectors: a threadgroup of four SIMD-groups computes a tile of 64 rows by BM vectors, 32 columns at
// a time. The weights of these columns are expanded into threadgroup memory once, and the matrix units multiply them
// with all BM vectors: each SIMD-group multiplies 32 of the 64 rows with half of the vectors. The matrix has N rows and
// K columns of type W; TILE is the element type in threadgroup memory; sums are float32. The `metal` backend does not
// use this kernel, because its sums may differ from those of `matvec` (tiles.py).
  threadgroup TILE weights[64 * 36];
  threadgroup TILE vectors[BM * 36];
  threadgroup float edge[4 * 64];
  const int thread_index = int(thread_index_in_threadgroup);
  const int simdgroup = int(simdgroup_index_in_threadgroup);
  const int row0 = int(threadgroup_position_in_grid.x) * 64;
  const int vector0 = int(threadgroup_position_in_grid.y) * BM;
  const int count = x_shape[0];
  const int own_row = simdgroup % 2 * 32;
  const int own_vector = simdgroup / 2 * (BM / 2);

  simdgroup_matrix<float, 8, 8> sums[BM / 16][4];
  UNROLL for (int i = 0; i < BM / 16; i++) {
    UNROLL for (int j = 0; j < 4; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int k = 0; k < K; k += 32) {
    // Two threads per row: sixteen weights each.
    const int r = thread_index / 2;
    const int column = thread_index % 2 * 16;
    const size_t from = size_t(min(row0 + r, N - 1)) * K + k + column;
    const Weights w = load_stored<W>(wq, ws, from);
    put16(weights + r * 36 + column, w.q, w.d);
    if (r < BM) {
      const size_t at = size_t(min(vector0 + r, count - 1)) * K + k + column;
      put16(vectors + r * 36 + column, load16(x + at), 1.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // The products of 32 columns are first summed into `parts`, and then added to `sums`: one long sum would lose
    // precision.
    simdgroup_matrix<float, 8, 8> parts[BM / 16][4];
    UNROLL for (int i = 0; i < BM / 16; i++) {
      UNROLL for (int j = 0; j < 4; j++) parts[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    UNROLL for (int i = 0; i < 32; i += 8) {
      simdgroup_matrix<TILE, 8, 8> rows[4];
      UNROLL for (int j = 0; j < 4; j++) {
        simdgroup_load(rows[j], weights + (own_row + j * 8) * 36 + i, 36, ulong2(0, 0), true);
      }
      UNROLL for (int m = 0; m < BM / 16; m++) {
        simdgroup_matrix<TILE, 8, 8> v;
        simdgroup_load(v, vectors + (own_vector + m * 8) * 36 + i, 36);
        UNROLL for (int j = 0; j < 4; j++) simdgroup_multiply_accumulate(parts[m][j], v, rows[j], parts[m][j]);
      }
    }
    UNROLL for (int m = 0; m < BM / 16; m++) {
      UNROLL for (int j = 0; j < 4; j++) {
        sums[m][j].thread_elements()[0] += parts[m][j].thread_elements()[0];
        sums[m][j].thread_elements()[1] += parts[m][j].thread_elements()[1];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const bool whole = row0 + 64 <= N && vector0 + BM <= count;
  UNROLL for (int m = 0; m < BM / 16; m++) {
    UNROLL for (int j = 0; j < 4; j++) {
      const int row = row0 + own_row + j * 8;
      const int vector = vector0 + own_vector + m * 8;
      if (whole) {
        simdgroup_store(sums[m][j], y + size_t(vector) * N + row, N);
      } else {
        // Elements outside y must not be written, so a partial tile is copied through threadgroup memory.
        simdgroup_store(sums[m][j], edge + simdgroup * 64, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = thread_index % 32; i < 64; i += 32) {
          if (row + i % 8 < N && vector + i / 8 < count) {
            y[size_t(vector + i / 8) * N + row + i % 8] = edge[simdgroup * 64 + i];
          }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
  }
