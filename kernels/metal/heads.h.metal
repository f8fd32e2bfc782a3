// Four elements, of either type, in float32.
METAL_FUNC float4 load4(const device float* p) { return *(const device float4*)p; }

METAL_FUNC float4 load4(const device half* p) { return float4(*(const device half4*)p); }

// An eighth of a head of E elements, held by one of eight neighbouring lanes: interleaved float4 or single elements.
template <int E, typename T>
METAL_FUNC void load_head(thread float* to, const device T* from, int lane) {
  if (E % 32 == 0) {
    UNROLL for (int i = 0; i < E / 32; i++) {
      const float4 v = load4(from + (i * 8 + lane) * 4);
      to[i * 4] = v.x;
      to[i * 4 + 1] = v.y;
      to[i * 4 + 2] = v.z;
      to[i * 4 + 3] = v.w;
    }
  } else {
    UNROLL for (int i = 0; i < E / 8; i++) to[i] = float(from[i * 8 + lane]);
  }
}

template <int E>
METAL_FUNC void put_head(threadgroup float* to, const thread float* from, int lane) {
  UNROLL for (int i = 0; i < E / 8; i++) {
    to[E % 32 == 0 ? i / 4 * 32 + lane * 4 + i % 4 : i * 8 + lane] = from[i];
  }
}
