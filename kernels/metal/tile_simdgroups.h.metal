// Multiply tiles with `simdgroup_matrix`, 8 x 8 elements at a time, on any GPU; for the kernel prompt_product. A
// threadgroup computes the sums of 64 vectors by 64 rows; each of its four SIMD-groups computes 32 by 32 of these sums.

// TILE_STRIDE is the distance in elements between the rows of a tile: 32 columns and 4 of padding, so that rows begin
// in different memory banks. TILE_HELD is the number of floats of threadgroup memory that store_sums needs.
enum { TILE_STRIDE = 36, TILE_HELD = 4 * 64 };

// Sums in matrices of 8 vectors by 8 rows: matrix i, j begins at vector 8 i and row 8 j.
struct TileSums {
  simdgroup_matrix<float, 8, 8> of[4][4];
};

template <typename TILE>
METAL_FUNC TileSums tile_sums() {
  TileSums sums;
  return sums;
}

METAL_FUNC void clear_sums(thread TileSums& sums) {
  UNROLL for (int i = 0; i < 4; i++) {
    UNROLL for (int j = 0; j < 4; j++) sums.of[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}

template <typename TILE>
METAL_FUNC void add_tiles(
    thread TileSums& sums, const threadgroup TILE* vectors, const threadgroup TILE* weights, int simdgroup) {
  vectors = vectors + simdgroup / 2 * 32 * TILE_STRIDE;
  weights = weights + simdgroup % 2 * 32 * TILE_STRIDE;
  for (int k = 0; k < 32; k += 8) {
    simdgroup_matrix<TILE, 8, 8> rows[4];
    UNROLL for (int j = 0; j < 4; j++) {
      simdgroup_load(rows[j], weights + j * 8 * TILE_STRIDE + k, TILE_STRIDE, ulong2(0, 0), true);
    }
    UNROLL for (int i = 0; i < 4; i++) {
      simdgroup_matrix<TILE, 8, 8> v;
      simdgroup_load(v, vectors + i * 8 * TILE_STRIDE + k, TILE_STRIDE);
      UNROLL for (int j = 0; j < 4; j++) simdgroup_multiply_accumulate(sums.of[i][j], v, rows[j], sums.of[i][j]);
    }
  }
}

// Write to y the sums whose row and vector exist. The sums pass through threadgroup memory, 64 at a time, because y has
// another type than the sums.
template <typename T>
METAL_FUNC void store_sums(
    thread TileSums& sums, device T* y, threadgroup float* held, int row0, int vector0, int N, int count,
    int simdgroup, int lane) {
  held = held + simdgroup * 64;
  UNROLL for (int i = 0; i < 4; i++) {
    UNROLL for (int j = 0; j < 4; j++) {
      simdgroup_store(sums.of[i][j], held, 8);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int at = lane; at < 64; at += 32) {
        const int row = row0 + simdgroup % 2 * 32 + j * 8 + at % 8;
        const int vector = vector0 + simdgroup / 2 * 32 + i * 8 + at / 8;
        if (row < N && vector < count) y[size_t(vector) * N + row] = T(held[at]);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}
