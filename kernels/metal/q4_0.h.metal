// Q4_0: a weight is d * (q - 8), with quants q of four bits; 32 weights share d.

template <int GROUP>
struct Stored<TYPE_Q4_0, GROUP> {
  static METAL_FUNC Weights load(const device uint* wq, const device half* ws, size_t at) {
    Weights w;
    w.q = plus16(load_nibbles16(wq, at), -8.0f);
    w.d = float(ws[at / GROUP]);
    return w;
  }
};
