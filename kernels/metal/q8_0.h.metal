// Q8_0 by sixteens: what one 16-byte load brings is half a block. Shared by all kernels of this folder.
//
// Multiplications that are added to something are written fma(): where the compiler may choose, two instantiations
// could choose differently, and the same row would have other bits in another batch.

#ifndef UNROLL
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

// Sixteen numbers in registers.
struct Sixteen {
  float4 a, b, c, d;
};

METAL_FUNC Sixteen load16(const device float* p) {
  const device float4* v = (const device float4*)p;
  Sixteen x;
  x.a = v[0];
  x.b = v[1];
  x.c = v[2];
  x.d = v[3];
  return x;
}

METAL_FUNC Sixteen load16(const device half* p) {
  const device half4* v = (const device half4*)p;
  Sixteen x;
  x.a = float4(v[0]);
  x.b = float4(v[1]);
  x.c = float4(v[2]);
  x.d = float4(v[3]);
  return x;
}

// Four codes as they are stored, each a byte with its sign bit flipped.
METAL_FUNC float4 codes4(uint q) {
  return float4(as_type<char4>(q ^ 0x80808080u));
}

METAL_FUNC Sixteen codes16(uint4 q) {
  Sixteen w;
  w.a = codes4(q.x);
  w.b = codes4(q.y);
  w.c = codes4(q.z);
  w.d = codes4(q.w);
  return w;
}

METAL_FUNC Sixteen times16(Sixteen x, Sixteen y) {
  Sixteen z;
  z.a = x.a * y.a;
  z.b = x.b * y.b;
  z.c = x.c * y.c;
  z.d = x.d * y.d;
  return z;
}

METAL_FUNC float dot16(Sixteen x, Sixteen y) {
  float4 s = x.a * y.a;
  s = fma(x.b, y.b, s);
  s = fma(x.c, y.c, s);
  s = fma(x.d, y.d, s);
  return (s.x + s.y) + (s.z + s.w);
}

// Sixteen columns from column k on, of R rows and M vectors: sums[m * R + r] += d * (row row0 + r . xs[m]).
// Rows behind the last of the N are read as if they were the last; nobody may store what comes of them.
template <int K, int R, int M>
METAL_FUNC void add_products(
    thread float* sums, const thread Sixteen* xs, const device uint* wq, const device half* ws, int N, int row0, int k) {
  UNROLL for (int r = 0; r < R; r++) {
    const size_t at = size_t(min(row0 + r, N - 1)) * K + k;
    const Sixteen w = codes16(((const device uint4*)wq)[at / 16]);
    const float d = float(ws[at / 32]);
    UNROLL for (int m = 0; m < M; m++) sums[m * R + r] = fma(d, dot16(w, xs[m]), sums[m * R + r]);
  }
}

METAL_FUNC void store4(device float* p, float4 x) {
  *(device float4*)p = x;
}

METAL_FUNC void store4(device half* p, float4 x) {
  *(device half4*)p = half4(x);
}

// Sixteen weights d * q. Only half rounds them: 11 bits of d and 8 of q fit into a float.
template <typename T>
METAL_FUNC void store16(device T* p, Sixteen q, float d) {
  store4(p, q.a * d);
  store4(p + 4, q.b * d);
  store4(p + 8, q.c * d);
  store4(p + 12, q.d * d);
}

// The same in memory of the threadgroup, where nothing promises more alignment than a number has.
template <typename T>
METAL_FUNC void put4(threadgroup T* p, float4 x) {
  p[0] = T(x.x);
  p[1] = T(x.y);
  p[2] = T(x.z);
  p[3] = T(x.w);
}

template <typename T>
METAL_FUNC void put16(threadgroup T* p, Sixteen q, float d) {
  put4(p, q.a * d);
  put4(p + 4, q.b * d);
  put4(p + 8, q.c * d);
  put4(p + 12, q.d * d);
}

// Sixteen columns of M vectors, each times the norm's gain; their squares are added to what was before.
template <int K, int V, int M, typename X, typename G>
METAL_FUNC void load_normed(
    thread Sixteen* xs, thread float* squares, const device X* x, const device G* gain, int vector0, int k) {
  const Sixteen g = load16(gain + k);
  UNROLL for (int m = 0; m < M; m++) {
    const Sixteen v = load16(x + size_t(min(vector0 + m, V - 1)) * K + k);
    squares[m] += dot16(v, v);
    xs[m] = times16(v, g);
  }
}

// Add up what the lanes of a SIMD-group have, then what KS neighbouring SIMD-groups have, always in the same order.
// Only the first of the neighbours gets the result. `parts` has room for all SIMD-groups' sums.
template <int COUNT, int KS>
METAL_FUNC void join_sums(thread float* sums, threadgroup float* parts, int simdgroup, int lane) {
  UNROLL for (int i = 0; i < COUNT; i++) sums[i] = simd_sum(sums[i]);
  if (KS > 1) {
    if (lane == 0) {
      UNROLL for (int i = 0; i < COUNT; i++) parts[simdgroup * COUNT + i] = sums[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup % KS == 0) {
      UNROLL for (int i = 0; i < COUNT; i++) {
        for (int s = 1; s < KS; s++) sums[i] += parts[(simdgroup + s) * COUNT + i];
      }
    }
  }
}

// What x is multiplied with by an RMSNorm.
METAL_FUNC float rms_factor(float squares, int count, float eps) {
  return metal::precise::rsqrt(squares / float(count) + eps);
}

// a * sigmoid(z): SiLU where z is a. exp() may overflow, and the result is then 0, as it should be.
METAL_FUNC float sigmoid_gate(float a, float z) {
  return a / (1.0f + metal::precise::exp(-z));
}

// The argument with which that is GELU's tanh form: 2 sqrt(2 / pi) (a + 0.044715 a^3).
METAL_FUNC float gelu_argument(float a) {
  return 1.5957691216f * fma(0.044715f * a * a, a, a);
}
