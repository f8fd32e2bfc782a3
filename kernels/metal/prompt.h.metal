// Weights of every type, for the kernels `prompt_product` and `prompt_product_tensors`.

// The numbers of two more types, after those of sixteen.h.metal: MLX's own arrays, with scales and biases in separate
// arrays.
enum { TYPE_MLX4 = 6, TYPE_MLX8 };

template <int TYPE, int GROUP>
struct PromptWeights {
  template <typename S>
  static METAL_FUNC Weights load(const device uint* wq, const device S* ws, const device S* biases, size_t at) {
    return Stored<TYPE, GROUP>::load(wq, ws, at);
  }
};

template <int GROUP>
struct PromptWeights<TYPE_MLX4, GROUP> {
  template <typename S>
  static METAL_FUNC Weights load(const device uint* wq, const device S* ws, const device S* biases, size_t at) {
    return shifted16(load_nibbles16(wq, at), float(ws[at / GROUP]), float(biases[at / GROUP]));
  }
};

template <int GROUP>
struct PromptWeights<TYPE_MLX8, GROUP> {
  template <typename S>
  static METAL_FUNC Weights load(const device uint* wq, const device S* ws, const device S* biases, size_t at) {
    const Sixteen q = bytes16(((const device uint4*)wq)[at / 16]);
    return shifted16(q, float(ws[at / GROUP]), float(biases[at / GROUP]));
  }
};

// Load the sixteen weights from weight `at` on. W is 1000 TYPE + GROUP. Only MLX's own arrays read `biases`.
template <int W, typename S>
METAL_FUNC Weights load_prompt_weights(const device uint* wq, const device S* ws, const device S* biases, size_t at) {
  return PromptWeights<W / 1000, W % 1000>::load(wq, ws, biases, at);
}
