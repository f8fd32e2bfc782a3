// Operations on 16 columns at a time, which the kernels of this folder share. Each quantised type has a header of its
// own, such as q8_0.h.metal.
//
// Multiply-adds are explicit calls of fma(). From x * y + z the compiler could make an fma in one instantiation of a
// template and not in another, so that a row would have other bits in another batch.

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

// Convert four bfloat16, given as bits, to float: a bfloat16 is the upper half of a float. Not every GPU supports the
// type bfloat.
METAL_FUNC float4 upper_halves4(ushort4 v) {
  return float4(as_type<float>(uint(v.x) << 16), as_type<float>(uint(v.y) << 16), as_type<float>(uint(v.z) << 16),
                as_type<float>(uint(v.w) << 16));
}

template <typename T>
METAL_FUNC Sixteen load16(const device T* p) {
  const device ushort4* v = (const device ushort4*)p;
  Sixteen x;
  x.a = upper_halves4(v[0]);
  x.b = upper_halves4(v[1]);
  x.c = upper_halves4(v[2]);
  x.d = upper_halves4(v[3]);
  return x;
}

// Sixteen adjacent weights of a row: weight i is d times number i of q.
struct Weights {
  Sixteen q;
  float d;
};

// A quantised type. The header of a type specialises this struct with a static function `load(wq, ws, at)`, which
// returns the sixteen weights from weight `at` on, counted over all rows. GROUP: number of columns that share an entry
// of `ws`. kernels/metal/layout.py numbers the types in the same way.
enum { TYPE_Q8_0, TYPE_Q4_0, TYPE_Q4_K, TYPE_Q6_K, TYPE_AFFINE4, TYPE_AFFINE8 };
template <int TYPE, int GROUP>
struct Stored;

// Load sixteen weights of type W. W is 1000 TYPE + GROUP, so that a type is one template argument of a kernel.
template <int W, typename S>
METAL_FUNC Weights load_stored(const device uint* wq, const device S* ws, size_t at) {
  return Stored<W / 1000, W % 1000>::load(wq, ws, at);
}

METAL_FUNC Sixteen times16(Sixteen x, Sixteen y) {
  Sixteen z;
  z.a = x.a * y.a;
  z.b = x.b * y.b;
  z.c = x.c * y.c;
  z.d = x.d * y.d;
  return z;
}

// Four quants of four bits, the first in the lowest bits.
METAL_FUNC float4 nibbles4(uint q) {
  return float4(float(q & 15u), float(q >> 4 & 15u), float(q >> 8 & 15u), float(q >> 12 & 15u));
}

METAL_FUNC Sixteen nibbles16(uint2 q) {
  Sixteen w;
  w.a = nibbles4(q.x);
  w.b = nibbles4(q.x >> 16);
  w.c = nibbles4(q.y);
  w.d = nibbles4(q.y >> 16);
  return w;
}

// The sixteen quants of four bits from quant `at` on, with one load.
METAL_FUNC Sixteen load_nibbles16(const device uint* wq, size_t at) {
  return nibbles16(((const device uint2*)wq)[at / 16]);
}

METAL_FUNC Sixteen plus16(Sixteen x, float y) {
  x.a = x.a + float4(y);
  x.b = x.b + float4(y);
  x.c = x.c + float4(y);
  x.d = x.d + float4(y);
  return x;
}

// Return the weights d * q + m, each rounded once. Their common factor w.d is 1, because m cannot be factored out.
METAL_FUNC Weights shifted16(Sixteen q, float d, float m) {
  Weights w;
  w.q.a = fma(q.a, float4(d), float4(m));
  w.q.b = fma(q.b, float4(d), float4(m));
  w.q.c = fma(q.c, float4(d), float4(m));
  w.q.d = fma(q.d, float4(d), float4(m));
  w.d = 1.0f;
  return w;
}

METAL_FUNC float dot4(float4 x, float4 y, float s) {
  return fma(x.w, y.w, fma(x.z, y.z, fma(x.y, y.y, fma(x.x, y.x, s))));
}

// Return the sum of sixteen products, added sequentially in the order of their columns. A tree would have less latency
// but more instructions; the sums of a lane's other rows hide the latency.
METAL_FUNC float dot16(Sixteen x, Sixteen y) {
  return dot4(x.d, y.d, dot4(x.c, y.c, dot4(x.b, y.b, dot4(x.a, y.a, 0.0f))));
}

METAL_FUNC void store4(device float* p, float4 x) {
  *(device float4*)p = x;
}

METAL_FUNC void store4(device half* p, float4 x) {
  *(device half4*)p = half4(x);
}

// Store sixteen weights d * q. They are exact in float: the bits of d and q together fit into a float, or d is 1.
template <typename T>
METAL_FUNC void store16(device T* p, Sixteen q, float d) {
  store4(p, q.a * d);
  store4(p + 4, q.b * d);
  store4(p + 8, q.c * d);
  store4(p + 12, q.d * d);
}

// Store to threadgroup memory, where only the alignment of one element is guaranteed.
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

// The factor by which an RMSNorm multiplies x: 1 / sqrt(squares / count + eps).
METAL_FUNC float rms_factor(float squares, int count, float eps) {
  return metal::precise::rsqrt(squares / float(count) + eps);
}

// a * sigmoid(z), which is SiLU for z = a. If exp() overflows, the result is 0, which is correct.
METAL_FUNC float sigmoid_gate(float a, float z) {
  return a / (1.0f + metal::precise::exp(-z));
}

// The argument z with which sigmoid_gate is GELU's tanh form: 2 sqrt(2 / pi) (a + 0.044715 a^3).
METAL_FUNC float gelu_argument(float a) {
  return 1.5957691216f * fma(0.044715f * a * a, a, a);
}
