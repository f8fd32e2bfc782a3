// The loop of a matrix times vectors, which most kernels share, and its order of summation over the K columns.
//
// The order depends only on K. It does not depend on the number of rows, vectors or SIMD-groups, on the tile of a
// SIMD-group, or on a norm before the product. So the bits of a result do not depend on any of these, either.
// The columns are cut into SEGMENTS segments, and a segment into groups of 16 columns. A segment has eight streams:
// stream s sums the dot products of groups s, s + 8, s + 16, ... sequentially. The streams are added as a tree,
// adjacent streams first, and then the segments in their order. Each stream belongs to one lane, so a SIMD-group
// processes four rows at a time.

template <int K>
struct Order {
  enum {
    SEGMENTS = K >= 4096 ? 4 : K >= 2048 ? 2 : 1,
    // Columns of each segment except the last.
    COLUMNS = (K + 128 * SEGMENTS - 1) / (128 * SEGMENTS) * 128
  };
};

// Add the values of eight adjacent lanes as a tree. All eight lanes get the sum.
METAL_FUNC float add_streams(float v) {
  v = v + simd_shuffle_xor(v, ushort(1));
  v = v + simd_shuffle_xor(v, ushort(2));
  return v + simd_shuffle_xor(v, ushort(4));
}

// The rows of a lane: its row r is row `first + 4 r` of the N rows of a matrix. Beyond the last row, the last row is
// read again, and the caller must not store the sum. W: the type of the matrix, see sixteen.h.metal.
template <int W, typename S>
struct Rows {
  const device uint* wq;
  const device S* ws;
  int N, first;
};

template <int W, typename S>
METAL_FUNC Rows<W, S> rows_of(const device uint* wq, const device S* ws, int N, int first) {
  const Rows<W, S> rows = {wq, ws, N, first};
  return rows;
}

// Rows of the gate and up matrices, interleaved: row 2 r is row r of gate, and row 2 r + 1 is row r of up.
template <typename Gate, typename Up>
struct GatedRows {
  Gate gate;
  Up up;
};

template <typename Gate, typename Up>
METAL_FUNC GatedRows<Gate, Up> gated_rows(Gate gate, Up up) {
  const GatedRows<Gate, Up> rows = {gate, up};
  return rows;
}

// Rows of one of two matrices. All lanes of a SIMD-group have the same `is_second`.
template <typename First, typename Second>
struct EitherRows {
  First first;
  Second second;
  bool is_second;
};

template <typename First, typename Second>
METAL_FUNC EitherRows<First, Second> either_rows(First first, Second second, bool is_second) {
  const EitherRows<First, Second> rows = {first, second, is_second};
  return rows;
}

// For two matrices of the same type no struct is needed: they differ only in their addresses.
template <typename Same>
METAL_FUNC Same either_rows(Same first, Same second, bool is_second) {
  return is_second ? second : first;
}

struct FloatRows {
  const device float* w;
  int N, first;
};

// Load sixteen columns from column k on; columns after K - 1 are zero.
template <int K>
METAL_FUNC Sixteen load_columns(const device float* row, int k) {
  if (K % 16 == 0) return load16(row + k);
  float v[16];
  UNROLL for (int i = 0; i < 16; i++) v[i] = k + i < K ? row[k + i] : 0.0f;
  Sixteen x;
  x.a = float4(v[0], v[1], v[2], v[3]);
  x.b = float4(v[4], v[5], v[6], v[7]);
  x.c = float4(v[8], v[9], v[10], v[11]);
  x.d = float4(v[12], v[13], v[14], v[15]);
  return x;
}

template <int K, typename T>
METAL_FUNC Sixteen load_columns(const device T* row, int k) {
  return load16(row + k);
}

template <int K, int W, typename S>
METAL_FUNC Weights load_weights(Rows<W, S> rows, int r, int k) {
  return load_stored<W>(rows.wq, rows.ws, size_t(min(rows.first + 4 * r, rows.N - 1)) * K + k);
}

template <int K, typename Gate, typename Up>
METAL_FUNC Weights load_weights(GatedRows<Gate, Up> rows, int r, int k) {
  return r % 2 ? load_weights<K>(rows.up, r / 2, k) : load_weights<K>(rows.gate, r / 2, k);
}

template <int K, typename First, typename Second>
METAL_FUNC Weights load_weights(EitherRows<First, Second> rows, int r, int k) {
  return rows.is_second ? load_weights<K>(rows.second, r, k) : load_weights<K>(rows.first, r, k);
}

template <int K>
METAL_FUNC Weights load_weights(FloatRows rows, int r, int k) {
  Weights w;
  w.q = load_columns<K>(rows.w + size_t(min(rows.first + 4 * r, rows.N - 1)) * K, k);
  w.d = 1.0f;
  return w;
}

// The vectors of a lane: its vector m is vector `first + m` of V. Beyond the last vector, the last one is read again.
template <typename X>
struct Vectors {
  const device X* x;
  int V, first;
};

template <typename X>
METAL_FUNC Vectors<X> vectors_of(const device X* x, int V, int first) {
  const Vectors<X> vectors = {x, V, first};
  return vectors;
}

// Vectors times a norm weight. READY: x comes from norm_rows, already multiplied by the norm weight.
template <bool READY, typename X, typename G>
struct NormedVectors {
  const device X* x;
  const device G* norm_weight;
  int V, first;
};

template <bool READY, typename X, typename G>
METAL_FUNC NormedVectors<READY, X, G> normed_vectors(const device X* x, const device G* norm_weight, int V, int first) {
  const NormedVectors<READY, X, G> vectors = {x, norm_weight, V, first};
  return vectors;
}

template <int K, typename X>
METAL_FUNC Sixteen load_vector(Vectors<X> vectors, int m, int k, thread float* squares) {
  return load_columns<K>(vectors.x + size_t(min(vectors.first + m, vectors.V - 1)) * K, k);
}

// Sum the squares of the norm here, in the loop that reads x for the product, so that x is read once.
template <int K, bool READY, typename X, typename G>
METAL_FUNC Sixteen load_vector(NormedVectors<READY, X, G> vectors, int m, int k, thread float* squares) {
  const Sixteen v = load16(vectors.x + size_t(min(vectors.first + m, vectors.V - 1)) * K + k);
  if (READY) return v;
  squares[m] = squares[m] + dot16(v, v);
  return times16(v, load16(vectors.norm_weight + k));
}

// Multiply a lane's R rows with its M vectors: sums[m * R + r] is the sum over segments `segment`, `segment + KS`, ...;
// with NORM, squares[m] is the sum of the squares of vector m.
template <int K, int R, int M, int KS, bool NORM, typename Rows, typename Input>
METAL_FUNC void multiply_rows(
    thread float* sums, thread float* squares, Rows rows, Input vectors, int segment, int lane) {
  // If a lane has few sums, there are registers to load the weights of several steps at once.
  const int STEPS = R * M <= 4 ? 4 : 1;
  const bool WHOLE = K % (128 * Order<K>::SEGMENTS * STEPS) == 0;
  for (int s = segment; s < Order<K>::SEGMENTS; s += KS) {
    float streams[M * R], own[M];
    UNROLL for (int i = 0; i < M * R; i++) streams[i] = 0.0f;
    UNROLL for (int m = 0; m < M; m++) own[m] = 0.0f;
    const int end = min((s + 1) * Order<K>::COLUMNS, K);
    for (int start = s * Order<K>::COLUMNS + lane % 8 * 16; start < end; start += 128 * STEPS) {
      UNROLL for (int step = 0; step < STEPS; step++) {
        const int k = start + 128 * step;
        if (WHOLE || k < end) {
          Weights w[R];
          UNROLL for (int r = 0; r < R; r++) w[r] = load_weights<K>(rows, r, k);
          UNROLL for (int m = 0; m < M; m++) {
            const Sixteen v = load_vector<K>(vectors, m, k, own);
            UNROLL for (int r = 0; r < R; r++) {
              streams[m * R + r] = fma(w[r].d, dot16(w[r].q, v), streams[m * R + r]);
            }
          }
        }
      }
    }
    UNROLL for (int i = 0; i < M * R; i++) {
      const float sum = add_streams(streams[i]);
      sums[i] = s == segment ? sum : sums[i] + sum;
    }
    if (NORM) {
      UNROLL for (int m = 0; m < M; m++) {
        const float sum = add_streams(own[m]);
        squares[m] = s == segment ? sum : squares[m] + sum;
      }
    }
  }
}

// Add the sums of KS adjacent SIMD-groups, each of which has one segment, in the order of segments. Only the first
// SIMD-group gets the result. `parts` has space for COUNT sums per eight lanes, 4 * COUNT per SIMD-group.
template <int COUNT, int KS>
METAL_FUNC void add_segments(thread float* sums, threadgroup float* parts, int simdgroup, int lane) {
  if (KS > 1) {
    if (lane % 8 == 0) {
      UNROLL for (int i = 0; i < COUNT; i++) parts[(simdgroup * 4 + lane / 8) * COUNT + i] = sums[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup % KS == 0) {
      UNROLL for (int i = 0; i < COUNT; i++) {
        for (int s = 1; s < KS; s++) sums[i] = sums[i] + parts[((simdgroup + s) * 4 + lane / 8) * COUNT + i];
      }
    }
  }
}
