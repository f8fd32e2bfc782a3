// y = x * weights^T for prompts, with sums in float32. A threadgroup of four SIMD-groups computes a tile of 64 vectors
// by 64 rows, 32 columns at a time: it expands weights of type W into one tile of threadgroup memory, copies vectors
// into a second tile, and calls `add_tiles` of tile_simdgroups.h.metal or tile_tensors.h.metal, which multiplies both
// tiles. TILE: the element type of tiles. T: the type of x and y. The sizes N and K are not template arguments, so that
// matrices of all sizes share one compiled kernel.
  threadgroup TILE vectors[64 * TILE_STRIDE];
  threadgroup TILE weights[64 * TILE_STRIDE];
  threadgroup float held[TILE_HELD];
  const int thread_index = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int simdgroup = int(simdgroup_index_in_threadgroup);
  const int count = x_shape[0];
  const int K = x_shape[1];
  const int N = wq_shape[0];
  const int row0 = int(threadgroup_position_in_grid.x) * 64;
  const int vector0 = int(threadgroup_position_in_grid.y) * 64;
  // Two threads per row of a tile, with sixteen columns each. Beyond the last row or vector, the last one is read
  // again.
  const int r = thread_index / 2;
  const int column = thread_index % 2 * 16;
  const size_t of_row = size_t(min(row0 + r, N - 1)) * K + column;
  const size_t of_vector = size_t(min(vector0 + r, count - 1)) * K + column;

  auto sums = tile_sums<TILE>();
  clear_sums(sums);
  for (int k = 0; k < K; k += 32) {
    const Weights w = load_prompt_weights<W>(wq, ws, biases, of_row + k);
    put16(weights + r * TILE_STRIDE + column, w.q, w.d);
    put16(vectors + r * TILE_STRIDE + column, load16(x + of_vector + k), 1.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_tiles(sums, vectors, weights, simdgroup);
    // All sums must be added before the next columns replace the tiles.
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_sums<T>(sums, y, held, row0, vector0, N, count, simdgroup, lane);
