// Multiply rows by a norm weight, and compute each row's factor of its RMSNorm; WHOLE: multiply rows by their factors,
// too. K columns, eight lanes per row, NSG SIMD-groups in a threadgroup. Squares are summed in the same order as in
// norm_project.
  const int lane = int(thread_index_in_simdgroup);
  const int row = (int(threadgroup_position_in_grid.x) * NSG + int(simdgroup_index_in_threadgroup)) * 4 + lane / 8;
  const size_t start = size_t(min(row, x_shape[0] - 1)) * K;

  float squares = 0.0f;
  for (int s = 0; s < Order<K>::SEGMENTS; s++) {
    float stream = 0.0f;
    const int end = min((s + 1) * Order<K>::COLUMNS, K);
    for (int k = s * Order<K>::COLUMNS + lane % 8 * 16; k < end; k += 128) {
      const Sixteen v = load16(x + start + k);
      stream = stream + dot16(v, v);
    }
    squares = squares + add_streams(stream);
  }
  const float factor = rms_factor(squares, K, eps[0]);

  if (row < x_shape[0]) {
    for (int k = lane % 8 * 16; k < K; k += 128) {
      store16(rows + start + k, times16(load16(x + start + k), load16(norm_weight + k)), WHOLE ? factor : 1.0f);
    }
    if (lane % 8 == 0) factors[row] = factor;
  }
