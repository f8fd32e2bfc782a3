// Q8_0: a weight is d * q; 32 weights share d. One 16-byte load reads 16 quants; in memory, their sign bits are
// flipped.

METAL_FUNC float4 quants4(uint q) {
  return float4(as_type<char4>(q ^ 0x80808080u));
}

METAL_FUNC Sixteen quants16(uint4 q) {
  Sixteen w;
  w.a = quants4(q.x);
  w.b = quants4(q.y);
  w.c = quants4(q.z);
  w.d = quants4(q.w);
  return w;
}

template <int GROUP>
struct Stored<TYPE_Q8_0, GROUP> {
  static METAL_FUNC Weights load(const device uint* wq, const device half* ws, size_t at) {
    Weights w;
    w.q = quants16(((const device uint4*)wq)[at / 16]);
    w.d = float(ws[at / GROUP]);
    return w;
  }
};
