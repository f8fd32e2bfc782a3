// Expand weights of type W to floats, sixteen per thread. COUNT threads have work.
  const int i = int(thread_position_in_grid.x);
  if (i < COUNT) {
    const Weights w = load_stored<W>(wq, ws, size_t(i) * 16);
    store16(y + size_t(i) * 16, w.q, w.d);
  }
