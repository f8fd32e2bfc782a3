// Q4_K: weights (d * scale) * q - dmin * minimum, with quants of four bits and scales and minima of six bits. An entry of
// `ws` is four words: d and dmin, two half, then the 12 bytes with eight scales and eight minima as a file has them.

// Byte i of the 12.
METAL_FUNC uint scale_byte(const device uint* entry, uint i) {
  return entry[1 + i / 4] >> i % 4 * 8 & 255u;
}

template <int GROUP>
struct Stored<TYPE_Q4_K, GROUP> {
  static METAL_FUNC Weights load(const device uint* wq, const device uint* ws, size_t at) {
    const device uint* entry = ws + at / GROUP * 4;
    // Scales and minima 4 to 7 have their low bits together, and their high bits above scales and minima 0 to 3.
    const uint i = uint(at / 32 % 8);
    const uint s = scale_byte(entry, i % 4), m = scale_byte(entry, 4 + i % 4), low = scale_byte(entry, 8 + i % 4);
    const uint scale = i < 4 ? s & 63u : (low & 15u) | s >> 6 << 4;
    const uint minimum = i < 4 ? m & 63u : low >> 4 | m >> 6 << 4;
    const float d = float(as_type<half>(ushort(entry[0] & 0xffffu)));
    const float dmin = float(as_type<half>(ushort(entry[0] >> 16)));
    const Sixteen q = nibbles16(wq[at / 8], wq[at / 8 + 1]);
    return shifted16(q, d * float(scale), -(dmin * float(minimum)));
  }
};
