// Weights of type W as floats, sixteen per thread, in COUNT threads.
  const int i = int(thread_position_in_grid.x);
  if (i < COUNT) {
    const Weights w = load_stored<W>(wq, ws, size_t(i) * 16);
    store16(y + size_t(i) * 16, w.q, w.d);
  }
