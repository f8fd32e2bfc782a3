"""Kernels of our own for test_whole.py."""

SOURCE = """
#include <metal_stdlib>
namespace metal {
inline float tripled(float x) { return 3 * x; }
}
using namespace metal;
#define NAMED(type) template [[host_name("scale_" #type)]] [[kernel]] decltype(scale<type>) scale<type>;

struct Arguments {
  int n;
  float scale;
  int64_t offsets[2];
};
struct Pair {
  float low, high;
  float middle() const thread { return (low + high) / 2; }
  float middle() const device { return (low + high) / 2; }
};
constant bool twice [[function_constant(3)]];
constant int given [[function_constant(4)]];
constant int chosen = is_function_constant_defined(given) ? given : 7;
constant float primes[3] = {2, 3, 5};

template <typename T>
kernel void scale(device const T* x [[buffer(0)]], constant Arguments& args [[buffer(1)]], device T* y [[buffer(2)]],
                  threadgroup T* held [[threadgroup(0)]], uint i [[thread_position_in_grid]],
                  ushort2 t [[thread_position_in_threadgroup]]) {
  threadgroup T more[32];
  const bool inside = i < uint(args.n);
  more[t.x] = inside ? x[i] : T(0);
  held[t.x] = more[t.x];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (inside) {
    y[i] = (held[t.x] * T(args.scale) + T(args.offsets[1])) * T(twice ? 2 : 1);
  }
}
NAMED(float)
NAMED(half)

kernel void optional(device int* y) { y[0] = chosen; }

kernel void places(device int4* y, uint i [[thread_position_in_grid]], ushort3 t [[thread_position_in_threadgroup]],
                   ushort group [[simdgroup_index_in_threadgroup]], uint3 at [[threadgroup_position_in_grid]],
                   ushort lane [[thread_index_in_simdgroup]]) {
  y[i] = int4(i, t.x, at.x + group, lane);
}

kernel void middles(device const Pair* x, device Pair* swapped, device float* y, uint i [[thread_position_in_grid]]) {
  Pair one = x[i];
  y[i] = one.middle() == x[i].middle() ? one.middle() : -1;
  swapped[i] = Pair{one.high, one.low};
}

static float sum_of(constant const int64_t counts[3]) {
  float sum = 0;
  for (int i = 0; i < 3; i++) sum += counts[i] * primes[i];
  return sum;
}
kernel void weighted(constant const int64_t counts[3], device float* y) { y[0] = sum_of(counts); }

[[host_name("renamed")]] kernel void original(device float* y, constant float& x) { y[0] = metal::tripled(x); }

kernel void initialised(device float* y, uint i [[thread_index_in_threadgroup]]) {
  threadgroup float zeros[32] = {0};
  if (i == 0) zeros[0] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = zeros[i];
}

template <typename V>
V doubled(half4 h) {
  return (V)h + V(1, 1, 1, 1);
}
kernel void vectors(device const packed_float3* x, device float* y) {
  int2 at(1, 2);
  float3 second = x[at.x];
  y[0] = second.x; y[1] = second.y; y[2] = second.z;
  float4 sums = doubled<float4>(half4(1, 2, 3, 4));
  float4x4 m(float4(1, 0, 0, 0), float4(0, 2, 0, 0), float4(0, 0, 3, 0), float4(0, 0, 0, 6));
  y[3] = sums.x;
  y[4] = (float4(int4(7)) * 1.0).x;
  y[5] = (m * sums).w;
  y[6] = float4x4(1.0f)[2][2];
  y[7] = transpose(m)[1][1] + (half2x4(half4(1), half4(2)))[1][3];
}

// What published kernels write and C++ takes in another way.
template <typename T>
using eight = vec<T, 8>;
template <typename T>
struct Stage {
  typedef half2 type;
};
struct Byte {
  uchar bits;
  operator float() thread { return bits; }
};
static half2 last(thread const half2 (&pairs)[2]) { return pairs[1]; }
static int sum(uint3 at, int more) { return at.x + 10 * at.y + 100 * at.z + 1000 * more; }
static int sum(int at, int more) { return at + more; }
struct Two {
  int x, y;
};
struct Three {
  float x;
  short y, z;
};
static int of_two(Two at, int more) { return at.x + 10 * at.y + 100 * more; }
static float of_three(Three at, int more) { return at.x + 10 * at.y + 100 * at.z + 1000 * more; }
// A vector of another type, and an array of vectors, by a pointer: the first is converted, the second is none.
template <typename T>
static T widened(device const int4* p) {
  thread T (*last)[1] = nullptr;
  return last ? (*last)[0] : T(*p);
}
kernel void converted(device const int4* x, device float* y) {
  y[0] = float4(*x).x + widened<float4>(x).y + vec<float, 4>(*x).z;
  y[1] = float4(*x)[3];
  y[2] = of_two({max(x->x, x->y), 5}, 6);
  y[3] = of_three({1, 2, 3}, 4);
}
template <typename T, typename U = T>
kernel void unusual(device const T* x, const device uint8_t*, device U* y, constant int&) {
  threadgroup typename Stage<T>::type held[2];
  metal::vec<T, 2> pair(x[0], x[1]);
  eight<T> all = eight<T>(*(device const vec<T, 4>*)x, *(device const vec<T, 4>*)(x + 4));
  half2 pairs[2] = {half2(pair), half2(2, 3)};
  held[1] = last(pairs);
  half4 short_ = half4(bfloat4(1, 2, 3, 4));
  Byte byte = {7};
  y[0] = pair.x + 10 * pair.y;
  y[1] = all[7];
  y[2] = held[1].y + short_.w;
  y[3] = T(byte) + sum({uint(x[0]), 2, 3}, 4);
}
template [[host_name("unusual_float")]] kernel decltype(unusual<float>) unusual<float>;

kernel void functions(device float* y) {
  y[0] = pow(2, 3);
  y[1] = fmax(3, 2.5f);
  y[2] = fmod(7, 2);
  y[3] = atan2(1, 1);
  y[4] = unpack_unorm4x8_to_float(pack_float_to_unorm4x8(float4(1, 0, 0, 0))).x;
  y[5] = unpack_snorm2x16_to_float(0x7fff8001u).y;
  y[6] = median3(1.0, 2.0, 3.0);
  y[7] = nextafter(1.0f, 2.0f);
}

kernel void same(device const float* a, device const float* b, device int* y) { y[0] = a == b; }

kernel void racing(device int* y, uint i [[thread_position_in_grid]]) { y[0] = int(i); }
"""
