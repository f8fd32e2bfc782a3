// Softmax attention over pages of keys and values. A threadgroup processes one row (a query token) and HEADS query
// heads that share a KV head.
// Template arguments: H query heads and G KV heads of E elements; a head takes ROW elements of the store; PAGE
// positions per page. WINDOW: a row attends to this number of latest positions, 0 for all. CHUNKED: a row attends to
// the positions of its own chunk of WINDOW positions. SOFTCAP: scores are scale[0] tanh(scale[1] score). SINKS: each
// query head has one more score, without a value. If store_shape[0] is 1, the keys are also the values.
// attention.py defines the order of summation; each SIMD-group sums one chain of blocks of 32 keys.
  threadgroup float totals[CHAINS * HEADS * E];
  threadgroup float weights[CHAINS * HEADS * 2];
  const int lane = int(thread_index_in_simdgroup);
  const int chain = int(simdgroup_index_in_threadgroup);
  // PARTS lanes (8 or 16) share a key, and a SIMD-group processes 32 / PARTS keys at a time.
  const int part = lane % PARTS;
  const int stream = lane / PARTS;
  const int head0 = int(threadgroup_position_in_grid.x) % (H / HEADS) * HEADS;
  const int row = int(threadgroup_position_in_grid.x) / (H / HEADS);
  const int kv = head0 / (H / G);
  const int last = position[row];
  const int chunk = WINDOW > 0 ? WINDOW : 1;
  const int first = CHUNKED ? last - last % chunk : WINDOW > 0 ? max(0, last + 1 - WINDOW) : 0;
  const int table = owner[row] * pages_shape[1];
  const size_t slots = size_t(store_shape[2]);
  // `load_head` converts every type of store to float.
  const auto keys = store + size_t(kv) * slots * ROW;
  const auto values = keys + size_t(store_shape[0] - 1) * G * slots * ROW;

  float queries[HEADS * E / PARTS], sums[HEADS * E / PARTS], largest[HEADS], weight[HEADS];
  UNROLL for (int h = 0; h < HEADS; h++) {
    load_head<E, PARTS>(queries + h * E / PARTS, q + (size_t(row) * H + head0 + h) * E, part);
    UNROLL for (int i = 0; i < E / PARTS; i++) sums[h * E / PARTS + i] = 0.0f;
    largest[h] = -3.0e38f;
    weight[h] = 0.0f;
  }

  // The first visible block of this chain.
  for (int block = first / 32 + (chain + CHAINS - first / 32 % CHAINS) % CHAINS; block * 32 <= last; block += CHAINS) {
    int slot[PARTS];
    float scores[HEADS * PARTS];
    UNROLL for (int j = 0; j < PARTS; j++) {
      // Positions are clamped to the visible ones, because the slots of masked keys may be unwritten.
      const int p = min(max(block * 32 + j * (32 / PARTS) + stream, first), last);
      slot[j] = pages[table + p / PAGE] + p % PAGE;
    }
    UNROLL for (int j = 0; j < PARTS; j++) {
      const int p = block * 32 + j * (32 / PARTS) + stream;
      float key[E / PARTS];
      load_head<E, PARTS>(key, keys + size_t(slot[j]) * ROW, part);
      UNROLL for (int h = 0; h < HEADS; h++) {
        float score = 0.0f;
        UNROLL for (int i = 0; i < E / PARTS; i++) score = fma(queries[h * E / PARTS + i], key[i], score);
        score = add_streams(score);
        if (PARTS == 16) score = score + simd_shuffle_xor(score, ushort(8));
        if (SOFTCAP) score = metal::precise::tanh(score * scale[1]);
        score = score * scale[0];
        // A masked key's score is so low that its weight is 0. It is not -infinity, because infinity minus infinity is
        // NaN.
        scores[h * PARTS + j] = p >= first && p <= last ? score : -3.0e38f;
      }
    }
    UNROLL for (int h = 0; h < HEADS; h++) {
      float found = scores[h * PARTS];
      UNROLL for (int j = 1; j < PARTS; j++) found = max(found, scores[h * PARTS + j]);
      const float now = max(largest[h], simd_max(found));
      const float before = metal::precise::exp2(largest[h] - now);
      largest[h] = now;
      float more = 0.0f;
      UNROLL for (int i = 0; i < E / PARTS; i++) sums[h * E / PARTS + i] = sums[h * E / PARTS + i] * before;
      UNROLL for (int j = 0; j < PARTS; j++) {
        scores[h * PARTS + j] = metal::precise::exp2(scores[h * PARTS + j] - now);
        more = more + scores[h * PARTS + j];
      }
      weight[h] = fma(weight[h], before, more);
    }
    UNROLL for (int j = 0; j < PARTS; j++) {
      float value[E / PARTS];
      load_head<E, PARTS>(value, values + size_t(slot[j]) * ROW, part);
      UNROLL for (int h = 0; h < HEADS; h++) {
        UNROLL for (int i = 0; i < E / PARTS; i++) {
          sums[h * E / PARTS + i] = fma(scores[h * PARTS + j], value[i], sums[h * E / PARTS + i]);
        }
      }
    }
  }

  // Add the streams of a chain (SIMD-group).
  UNROLL for (int h = 0; h < HEADS; h++) {
    if (PARTS == 8) weight[h] = weight[h] + simd_shuffle_xor(weight[h], ushort(8));
    weight[h] = weight[h] + simd_shuffle_xor(weight[h], ushort(16));
    UNROLL for (int i = 0; i < E / PARTS; i++) {
      float sum = sums[h * E / PARTS + i];
      if (PARTS == 8) sum = sum + simd_shuffle_xor(sum, ushort(8));
      sums[h * E / PARTS + i] = sum + simd_shuffle_xor(sum, ushort(16));
    }
    if (stream == 0) put_head<E, PARTS>(totals + (chain * HEADS + h) * E, sums + h * E / PARTS, part);
    if (lane == 0) {
      weights[(chain * HEADS + h) * 2] = largest[h];
      weights[(chain * HEADS + h) * 2 + 1] = weight[h];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Add the chains, each scaled from its own largest score to the largest of all.
  for (int i = int(thread_index_in_threadgroup); i < HEADS * E; i += CHAINS * 32) {
    const int h = i / E;
    float most = weights[h * 2];
    for (int c = 1; c < CHAINS; c++) most = max(most, weights[(c * HEADS + h) * 2]);
    const float sink = SINKS ? sinks[head0 + h] * 1.44269504f : 0.0f;
    if (SINKS) most = max(most, sink);
    float sum = 0.0f, divisor = 0.0f;
    for (int c = 0; c < CHAINS; c++) {
      const float share = metal::precise::exp2(weights[(c * HEADS + h) * 2] - most);
      sum = fma(totals[c * HEADS * E + i], share, sum);
      divisor = fma(weights[(c * HEADS + h) * 2 + 1], share, divisor);
    }
    if (SINKS) divisor = divisor + metal::precise::exp2(sink - most);
    y[(size_t(row) * H + head0) * E + i] = sum / divisor;
  }
