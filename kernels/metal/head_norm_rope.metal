// Apply RMSNorm and RoPE to the heads of queries and keys; write queries in the layout of attention, and keys and
// values in the layout of the KV store. A SIMD-group processes one head of one token; a threadgroup has NSG of them.
// H query heads and G KV heads of E elements of type X; a lane has PAIRS rotated pairs; NORM: whether there are norms.
  const int lane = int(thread_index_in_simdgroup);
  const int unit = int(threadgroup_position_in_grid.x) * NSG + int(simdgroup_index_in_threadgroup);
  const int tokens = q_shape[0];
  const int token = min(unit / (H + 2 * G), tokens - 1);
  const int head = unit % (H + 2 * G);
  const bool is_q = head < H;
  const bool is_k = !is_q && head < H + G;
  const int own = is_q ? head : is_k ? head - H : head - H - G;

  const device X* from = (is_q ? q : is_k ? k : v) + (size_t(token) * (is_q ? H : G) + own) * E;
  float a[PAIRS], b[PAIRS], squares = 0.0f;
  UNROLL for (int i = 0; i < PAIRS; i++) {
    const int j = min(i * 32 + lane, E / 2 - 1);
    a[i] = float(from[j]);
    b[i] = float(from[j + E / 2]);
    if (i * 32 + lane < E / 2) squares = fma(a[i], a[i], fma(b[i], b[i], squares));
  }
  const float factor = rms_factor(simd_sum(squares), E, is_q ? eps[0] : eps[1]);
  const device float* norm_weight = is_q ? q_weight : k_weight;

  // Values follow keys: heads H to H + 2 G - 1 are the rows of (2, G, tokens, E).
  device float* to = is_q ? rotated + (size_t(own) * tokens + token) * E
                          : kv + (size_t(head - H) * tokens + token) * E;
  UNROLL for (int i = 0; i < PAIRS; i++) {
    const int j = i * 32 + lane;
    if (j < E / 2 && unit < tokens * (H + 2 * G)) {
      if (is_q || is_k) {
        if (NORM) {
          a[i] = a[i] * factor * norm_weight[j];
          b[i] = b[i] * factor * norm_weight[j + E / 2];
        }
        const float c = cos_sin[size_t(token) * E + 2 * j];
        const float s = cos_sin[size_t(token) * E + 2 * j + 1];
        const float turned = fma(a[i], c, -(b[i] * s));
        b[i] = fma(b[i], c, a[i] * s);
        a[i] = turned;
      }
      to[j] = a[i];
      to[j + E / 2] = b[i];
    }
  }
