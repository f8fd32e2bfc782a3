// MLX's affine types: a weight is scale * q + bias, with quants q of four or eight bits. An entry of `ws` is the scale
// and the bias of GROUP weights: two float or half numbers, or the bits of two bfloat16 in one uint, the scale in the
// low half.

METAL_FUNC float4 bytes4(uint q) {
  return float4(float(q & 255u), float(q >> 8 & 255u), float(q >> 16 & 255u), float(q >> 24));
}

METAL_FUNC Sixteen bytes16(uint4 q) {
  Sixteen w;
  w.a = bytes4(q.x);
  w.b = bytes4(q.y);
  w.c = bytes4(q.z);
  w.d = bytes4(q.w);
  return w;
}

METAL_FUNC Weights affine16(Sixteen q, const device half* ws, size_t group) {
  return shifted16(q, float(ws[2 * group]), float(ws[2 * group + 1]));
}

METAL_FUNC Weights affine16(Sixteen q, const device uint* ws, size_t group) {
  return shifted16(q, as_type<float>(ws[group] << 16), as_type<float>(ws[group] & 0xffff0000u));
}

// With float scales, MLX rounds the product before it adds the bias, so these weights are computed without fma.
METAL_FUNC Weights affine16(Sixteen q, const device float* ws, size_t group) {
  const float scale = ws[2 * group];
  Weights w;
  w.q.a = q.a * scale;
  w.q.b = q.b * scale;
  w.q.c = q.c * scale;
  w.q.d = q.d * scale;
  // The bias is added in a separate statement: within one expression a compiler may contract product and sum to an fma.
  w.q = plus16(w.q, ws[2 * group + 1]);
  w.d = 1.0f;
  return w;
}

template <int GROUP>
struct Stored<TYPE_AFFINE4, GROUP> {
  template <typename S>
  static METAL_FUNC Weights load(const device uint* wq, const device S* ws, size_t at) {
    return affine16(load_nibbles16(wq, at), ws, at / GROUP);
  }
};

template <int GROUP>
struct Stored<TYPE_AFFINE8, GROUP> {
  template <typename S>
  static METAL_FUNC Weights load(const device uint* wq, const device S* ws, size_t at) {
    return affine16(bytes16(((const device uint4*)wq)[at / 16]), ws, at / GROUP);
  }
};
