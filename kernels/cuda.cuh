// The Metal types and functions that the kernels use, defined for CUDA. kernels/launch.py puts this text before each
// translated kernel. Threadgroups are one-dimensional and consist of whole SIMD-groups (warps).

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef __half half;

#define METAL_FUNC __device__ __forceinline__
#define UNROLL _Pragma("unroll")

#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#define simdgroups_per_threadgroup (blockDim.x >> 5)
#define threads_per_simdgroup 32u
#define thread_index_in_threadgroup (threadIdx.x)
#define thread_position_in_threadgroup threadIdx
#define threads_per_threadgroup blockDim
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define thread_position_in_grid                                                          \
  (uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, \
         blockIdx.z * blockDim.z + threadIdx.z})

struct mem_flags {
  enum { mem_none, mem_device, mem_threadgroup };
};
#define threadgroup_barrier(flags) __syncthreads()
#define simdgroup_barrier(flags) __syncwarp()

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// CUDA's vectors have neither operators nor converting constructors.
struct __align__(8) half4 {
  half x, y, z, w;
};

METAL_FUNC float4 to_float4(float x, float y, float z, float w) { return make_float4(x, y, z, w); }
METAL_FUNC float4 to_float4(float x) { return make_float4(x, x, x, x); }
METAL_FUNC float4 to_float4(char4 v) { return make_float4(v.x, v.y, v.z, v.w); }
METAL_FUNC float4 to_float4(half4 v) { return make_float4(float(v.x), float(v.y), float(v.z), float(v.w)); }
METAL_FUNC half4 to_half4(float4 v) { return half4{half(v.x), half(v.y), half(v.z), half(v.w)}; }

METAL_FUNC float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
METAL_FUNC float4 operator*(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
METAL_FUNC float4 operator*(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }
METAL_FUNC float4 fma(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}

namespace metal {
namespace precise {
METAL_FUNC float exp(float x) { return expf(x); }
METAL_FUNC float exp2(float x) { return exp2f(x); }
METAL_FUNC float tanh(float x) { return tanhf(x); }
METAL_FUNC float rsqrt(float x) { return __frsqrt_rn(x); }
}  // namespace precise
}  // namespace metal

// SIMD-group operations. All 32 lanes must take part.
template <typename T>
METAL_FUNC T simd_sum(T v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

template <typename T>
METAL_FUNC T simd_max(T v) {
  for (int o = 16; o; o >>= 1) {
    const T other = __shfl_xor_sync(0xffffffffu, v, o);
    v = other > v ? other : v;
  }
  return v;
}

template <typename T>
METAL_FUNC T simd_broadcast(T v, ushort lane) { return __shfl_sync(0xffffffffu, v, lane); }

template <typename T>
METAL_FUNC T simd_shuffle_xor(T v, ushort mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

template <typename T>
METAL_FUNC T simd_shuffle_down(T v, ushort delta) { return __shfl_down_sync(0xffffffffu, v, delta); }

// An 8 x 8 matrix; each lane has two adjacent elements of one row. Tensor cores are not used, because they would round
// float32 factors.
template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  T elements[2];
  METAL_FUNC T* thread_elements() { return elements; }
};

template <typename T, int Rows, int Columns>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Rows, Columns>{{value, value}};
}

#define MATRIX_ROW (threadIdx.x % 32 / 4)
#define MATRIX_COLUMN (threadIdx.x % 4 * 2)

template <typename T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* p, size_t per_row,
                               ulonglong2 origin = make_ulonglong2(0, 0), bool transposed = false) {
  __syncwarp();
  for (int i = 0; i < 2; i++) {
    const size_t row = MATRIX_ROW, column = MATRIX_COLUMN + i;
    m.elements[i] = p[((transposed ? column : row) + origin.y) * per_row + (transposed ? row : column) + origin.x];
  }
}

template <typename T>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* p, size_t per_row) {
  for (int i = 0; i < 2; i++) p[MATRIX_ROW * per_row + MATRIX_COLUMN + i] = m.elements[i];
  __syncwarp();
}

template <typename A, typename B>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<float, 8, 8> c) {
  UNROLL for (int k = 0; k < 8; k++) {
    const float left = __shfl_sync(0xffffffffu, float(a.elements[k % 2]), MATRIX_ROW * 4 + k / 2);
    UNROLL for (int i = 0; i < 2; i++) {
      const float right = __shfl_sync(0xffffffffu, float(b.elements[i]), k * 4 + MATRIX_COLUMN / 2);
      c.elements[i] = fmaf(left, right, c.elements[i]);
    }
  }
  d = c;
}

// Constructor calls in kernels, such as float4(x), become calls of the functions above.
#define float4(...) to_float4(__VA_ARGS__)
#define half4(...) to_half4(__VA_ARGS__)
#define ulong2(x, y) make_ulonglong2(x, y)
