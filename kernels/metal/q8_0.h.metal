// Q8_0 in units of 16 quants: one 16-byte load reads half a block. All kernels of this folder share this and the other
// headers.
//
// Multiply-adds are written fma(). If the compiler could choose, two instantiations might differ, and the same row
// would have other bits in another batch.

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

// Four stored quants, each a byte with its sign bit flipped.
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

METAL_FUNC float dot4(float4 x, float4 y, float s) {
  return fma(x.w, y.w, fma(x.z, y.z, fma(x.y, y.y, fma(x.x, y.x, s))));
}

// Sixteen products, added sequentially in the order of their columns, not as a tree: the chain continues the sum of a
// row without another addition, and other chains hide its latency.
METAL_FUNC float dot16(Sixteen x, Sixteen y) {
  return dot4(x.d, y.d, dot4(x.c, y.c, dot4(x.b, y.b, dot4(x.a, y.a, 0.0f))));
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

// The same in threadgroup memory, where only the alignment of one element is guaranteed.
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

// The factor by which an RMSNorm multiplies x.
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
