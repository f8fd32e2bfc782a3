// Embedding lookup: rows of a table by id, sixteen weights per thread. N rows, K columns, of type W.
  const int column = int(thread_position_in_grid.x) * 16;
  const int token = int(threadgroup_position_in_grid.y);
  if (column < K) {
    const int id = ids[token];
    const bool known = id >= 0 && id < N;
    const size_t at = size_t(known ? id : 0) * K + column;
    // Rows of invalid ids are NaN, because the host cannot check the ids.
    const Weights w = load_stored<W>(wq, ws, at);
    store16(y + size_t(token) * K + column, w.q, known ? w.d : as_type<float>(0x7fc00000u));
  }
