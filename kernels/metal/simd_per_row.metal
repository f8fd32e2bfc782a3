// One SIMD-group per output; its 32 lanes read 32 adjacent words of a row. N rows, K columns, NSG
// SIMD-groups in a threadgroup.
  const int lane = int(thread_index_in_simdgroup);
  const int row = int(threadgroup_position_in_grid.x) * NSG + int(simdgroup_index_in_threadgroup);
  const int vector = int(threadgroup_position_in_grid.y);
  const size_t start = size_t(min(row, N - 1)) * K;

  float sum = 0.0f;
  for (int k = lane * 4; k < K; k += 128) {
    const float4 w = quants4(wq[(start + k) / 4]);
    const size_t at = size_t(vector) * K + k;
    float products = w.x * float(x[at]);
    products = fma(w.y, float(x[at + 1]), products);
    products = fma(w.z, float(x[at + 2]), products);
    products = fma(w.w, float(x[at + 3]), products);
    sum = fma(float(ws[(start + k) / 32]), products, sum);
  }
  sum = simd_sum(sum);
  if (lane == 0 && row < N) {
    y[size_t(vector) * N + row] = sum;
  }
