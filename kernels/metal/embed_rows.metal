// Embedding lookup: expand the table rows that `ids` names, sixteen weights per thread. The table has N rows and K
// columns of type W.
  const int column = int(thread_position_in_grid.x) * 16;
  const int token = int(threadgroup_position_in_grid.y);
  if (column < K) {
    const int id = ids[token];
    const bool known = id >= 0 && id < N;
    const size_t at = size_t(known ? id : 0) * K + column;
    // The row of an invalid id is NaN, because the host cannot check ids that are in GPU memory.
    const Weights w = load_stored<W>(wq, ws, at);
    store16(y + size_t(token) * K + column, w.q, known ? w.d : as_type<float>(0x7fc00000u));
  }
