// Q6_K: a weight is (d * scale) * (q - 32), with quants q of six bits; 16 weights share a scale, a signed byte. Three
// words of `wq` hold 16 quants: the low four bits in two words, the high two bits in the third. An entry of `ws` is
// nine half for 256 weights: d, and eight half whose bits are 16 scales.

METAL_FUNC float4 with_high4(float4 low, uint high) {
  return float4(float(high & 3u), float(high >> 2 & 3u), float(high >> 4 & 3u), float(high >> 6 & 3u)) * 16.0f + low;
}

template <int GROUP>
struct Stored<TYPE_Q6_K, GROUP> {
  static METAL_FUNC Weights load(const device uint* wq, const device half* ws, size_t at) {
    const device uint* words = wq + at / 16 * 3;
    const device half* entry = ws + at / GROUP * 9;
    Weights w;
    uint2 low;
    low.x = words[0];
    low.y = words[1];
    w.q = nibbles16(low);
    w.q.a = with_high4(w.q.a, words[2]);
    w.q.b = with_high4(w.q.b, words[2] >> 8);
    w.q.c = with_high4(w.q.c, words[2] >> 16);
    w.q.d = with_high4(w.q.d, words[2] >> 24);
    w.q = plus16(w.q, -32.0f);
    w.d = float(entry[0]) * float(((const device char*)(entry + 1))[at / 16 % 16]);
    return w;
  }
};
