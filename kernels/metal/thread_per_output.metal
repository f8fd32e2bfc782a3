// One thread per output; the thread reads the whole row of the matrix. N rows, K columns.
  const int row = int(thread_position_in_grid.x);
  const int vector = int(thread_position_in_grid.y);
  if (row < N) {
    float sum = 0.0f;
    for (int block = 0; block < K / 32; block++) {
      float products = 0.0f;
      for (int i = block * 32; i < block * 32 + 32; i++) {
        // A signed byte with its sign bit flipped is the quant plus 128.
        const int quant = int(((const device uchar*)wq)[size_t(row) * K + i]) - 128;
        products = fma(float(quant), float(x[size_t(vector) * K + i]), products);
      }
      sum = fma(float(ws[size_t(row) * (K / 32) + block]), products, sum);
    }
    y[size_t(vector) * N + row] = sum;
  }
