// Load four adjacent elements, of any type, as float32.
METAL_FUNC float4 load4(const device float* p) { return *(const device float4*)p; }

METAL_FUNC float4 load4(const device half* p) { return float4(*(const device half4*)p); }

// Convert to float. A ushort has the bits of a bfloat16, which are the upper half of a float.
METAL_FUNC float widened(const device ushort* p) { return as_type<float>(uint(*p) << 16); }

template <typename T>
METAL_FUNC float widened(const device T* p) {
  return float(*p);
}

METAL_FUNC float4 load4(const device ushort* p) {
  return float4(widened(p), widened(p + 1), widened(p + 2), widened(p + 3));
}

// Load one lane's part of a head of E elements, which PARTS adjacent lanes share. Lane i of PARTS has every PARTS-th
// float4 from float4 i on, or, if E is not a multiple of 4 PARTS, every PARTS-th element from element i on.
template <int E, int PARTS, typename T>
METAL_FUNC void load_head(thread float* to, const device T* from, int lane) {
  if (E % (4 * PARTS) == 0) {
    UNROLL for (int i = 0; i < E / (4 * PARTS); i++) {
      const float4 v = load4(from + (i * PARTS + lane) * 4);
      to[i * 4] = v.x;
      to[i * 4 + 1] = v.y;
      to[i * 4 + 2] = v.z;
      to[i * 4 + 3] = v.w;
    }
  } else {
    UNROLL for (int i = 0; i < E / PARTS; i++) to[i] = widened(from + i * PARTS + lane);
  }
}

// Load the same part of a head in Q8_0: 34 bytes for 32 elements, a float16 scale and 32 signed bytes.
template <int E, int PARTS>
METAL_FUNC void load_head(thread float* to, const device uint8_t* from, int lane) {
  UNROLL for (int i = 0; i < E / (4 * PARTS); i++) {
    const device uint8_t* block = from + (i * (PARTS / 8) + lane / 8) * 34;
    const float scale = float(*(const device half*)block);
    const device int8_t* quants = (const device int8_t*)(block + 2) + lane % 8 * 4;
    UNROLL for (int j = 0; j < 4; j++) to[i * 4 + j] = scale * float(quants[j]);
  }
}

template <int E, int PARTS>
METAL_FUNC void put_head(threadgroup float* to, const thread float* from, int lane) {
  UNROLL for (int i = 0; i < E / PARTS; i++) {
    to[E % (4 * PARTS) == 0 ? i / 4 * 4 * PARTS + lane * 4 + i % 4 : i * PARTS + lane] = from[i];
  }
}
