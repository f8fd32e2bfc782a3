// Weights as numbers of type T, sixteen per thread. COUNT sixteens in all.
  const int i = int(thread_position_in_grid.x);
  if (i < COUNT) {
    const Sixteen w = codes16(((const device uint4*)wq)[i]);
    store16(y + size_t(i) * 16, w, float(ws[i / 2]));
  }
