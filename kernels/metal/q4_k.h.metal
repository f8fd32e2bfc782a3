// Q4_K: a weight is (d * scale) * q - dmin * minimum, with quants q of four bits. 32 weights share a scale and a
// minimum of six bits. An entry of `ws` is four words for 256 weights: d and dmin as two half, then the file's 12 bytes
// with eight scales and eight minima.

template <int GROUP>
struct Stored<TYPE_Q4_K, GROUP> {
  static METAL_FUNC Weights load(const device uint* wq, const device uint* ws, size_t at) {
    const uint4 entry = ((const device uint4*)ws)[at / GROUP];
    // Scales and minima 0 to 3 are the low six bits of bytes 0 to 7. Scale 4 + j and minimum 4 + j have their low four
    // bits in byte 8 + j, and their high two bits in the high bits of bytes j and 4 + j.
    const uint i = uint(at / 32 % 8), shift = i % 4 * 8;
    const uint s = entry.y >> shift & 255u, m = entry.z >> shift & 255u, low = entry.w >> shift & 255u;
    const uint scale = i < 4 ? s & 63u : (low & 15u) | s >> 6 << 4;
    const uint minimum = i < 4 ? m & 63u : low >> 4 | m >> 6 << 4;
    const float d = float(as_type<half>(ushort(entry.x & 0xffffu)));
    const float dmin = float(as_type<half>(ushort(entry.x >> 16)));
    return shifted16(load_nibbles16(wq, at), d * float(scale), -(dmin * float(minimum)));
  }
};
