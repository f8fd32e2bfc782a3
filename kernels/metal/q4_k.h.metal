// Q4_K: weights (d * scale) * q - dmin * minimum, with quants of four bits and scales and minima of six bits. An entry
// of `ws` is four words: d and dmin as two half, then the file's 12 bytes with eight scales and eight minima.

template <int GROUP>
struct Stored<TYPE_Q4_K, GROUP> {
  static METAL_FUNC Weights load(const device uint* wq, const device uint* ws, size_t at) {
    const uint4 entry = ((const device uint4*)ws)[at / GROUP];
    // Scale and minimum 4 to 7 share a byte for their low bits; their high bits are above scales and minima 0 to 3.
    const uint i = uint(at / 32 % 8), shift = i % 4 * 8;
    const uint s = entry.y >> shift & 255u, m = entry.z >> shift & 255u, low = entry.w >> shift & 255u;
    const uint scale = i < 4 ? s & 63u : (low & 15u) | s >> 6 << 4;
    const uint minimum = i < 4 ? m & 63u : low >> 4 | m >> 6 << 4;
    const float d = float(as_type<half>(ushort(entry.x & 0xffffu)));
    const float dmin = float(as_type<half>(ushort(entry.x >> 16)));
    return shifted16(load_nibbles16(wq, at), d * float(scale), -(dmin * float(minimum)));
  }
};
