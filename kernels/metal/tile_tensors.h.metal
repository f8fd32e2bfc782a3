// Multiply tiles with `matmul2d` of Metal 4, for GPUs with neural accelerators; for the kernel prompt_product_tensors.
// The four SIMD-groups of a threadgroup compute one product of 64 vectors by 64 rows; the compiler decides which thread
// has which sums.

#if __METAL_VERSION__ >= 400
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#endif

enum { TILE_STRIDE = 32, TILE_HELD = 1 };

// The weights are transposed: a row of the tile is a column of the product.
METAL_FUNC auto tile_operation() {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      64, 64, 32, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  return mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroups<4>>();
}

// A tile as a tensor; its first axis counts columns.
template <typename TILE>
METAL_FUNC auto tile_tensor(threadgroup TILE* tile) {
  typedef metal::dextents<int, 2> Extents;
  return metal::tensor<threadgroup TILE, Extents, metal::tensor_inline>(tile, Extents(32, 64));
}

template <typename TILE>
METAL_FUNC auto tile_sums() {
  typedef metal::tensor<threadgroup TILE, metal::dextents<int, 2>, metal::tensor_inline> Tile;
  auto operation = tile_operation();
  return operation.template get_destination_cooperative_tensor<Tile, Tile, float>();
}

template <typename Sums>
METAL_FUNC void clear_sums(thread Sums& sums) {
  for (ushort i = 0; i < sums.get_capacity(); i++) sums[i] = 0.0f;
}

template <typename Sums, typename TILE>
METAL_FUNC void add_tiles(thread Sums& sums, threadgroup TILE* vectors, threadgroup TILE* weights, int simdgroup) {
  auto operation = tile_operation();
  auto left = tile_tensor(vectors);
  auto right = tile_tensor(weights);
  operation.run(left, right, sums);
}

// Write to y the sums whose row and vector exist.
template <typename T, typename Sums>
METAL_FUNC void store_sums(
    thread Sums& sums, device T* y, threadgroup float* held, int row0, int vector0, int N, int count, int simdgroup,
    int lane) {
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      const auto at = sums.get_multidimensional_index(i);
      const int row = row0 + int(at[0]);
      const int vector = vector0 + int(at[1]);
      if (row < N && vector < count) y[size_t(vector) * N + row] = T(sums[i]);
    }
  }
}
