// <metal_tensor>: arrays of one or more axes in memory. Elements along the first axis are adjacent.
#pragma once
#include <msl/all.h>
#define MSL_TENSORS

namespace metal {

inline constexpr size_t dynamic_extent = size_t(-1);

// ---- extents: the number of elements of each axis; some extents may be part of the type ----

template <class I, size_t... E>
struct extents {
  typedef I index_type;
  typedef size_t size_type;
  typedef size_t rank_type;
  static constexpr size_t msl_static[sizeof...(E) + 1] = {E..., 0};
  I counts[sizeof...(E) + 1] = {(E == dynamic_extent ? I(0) : I(E))..., I(0)};

  static constexpr size_t rank() { return sizeof...(E); }
  static constexpr size_t rank_dynamic() { return (size_t(0) + ... + size_t(E == dynamic_extent)); }
  static constexpr size_t static_extent(size_t axis) { return msl_static[axis]; }
  constexpr I extent(size_t axis) const { return counts[axis]; }

  constexpr extents() = default;
  // All extents, or only the dynamic ones.
  template <class... A>
    requires(sizeof...(A) != 0 && (sizeof...(A) == sizeof...(E) || sizeof...(A) == rank_dynamic()) &&
             (... && is_convertible_v<A, I>))
  constexpr extents(A... a) {
    const I given[] = {I(a)...};
    size_t next = 0;
    for (size_t axis = 0; axis < rank(); axis++) {
      if (sizeof...(A) == rank()) counts[axis] = given[axis];
      else if (msl_static[axis] == dynamic_extent) counts[axis] = given[next++];
    }
  }
  template <class J, size_t... F>
    requires(sizeof...(F) == sizeof...(E))
  constexpr extents(const extents<J, F...>& other) {
    for (size_t axis = 0; axis < rank(); axis++) counts[axis] = I(other.extent(axis));
  }
};

template <class I, size_t Rank, size_t... E>
struct msl_dynamic {
  typedef typename msl_dynamic<I, Rank - 1, E..., dynamic_extent>::type type;
};
template <class I, size_t... E>
struct msl_dynamic<I, 0, E...> {
  typedef extents<I, E...> type;
};
template <class I, size_t Rank>
using dextents = typename msl_dynamic<I, Rank>::type;

// ---- element types smaller than a byte, or without arithmetic ----

struct int4b_format {
  uchar bits;
};
struct uint4b_format {
  uchar bits;
};
struct int2b_format {
  uchar bits;
};
struct uint2b_format {
  uchar bits;
};
struct metal_fp4_e2m1_format {
  uchar bits;
};
struct metal_fp8_e4m3_format {
  uchar bits;
};
struct metal_fp8_e5m2_format {
  uchar bits;
};

// The bits of an element, and the type of its value.
template <class T>
struct msl_format {
  static constexpr unsigned bits = 8 * sizeof(T);
  static constexpr bool is_packed = false;
  typedef T number;
};
template <class N, unsigned B>
struct msl_packed {
  static constexpr unsigned bits = B;
  static constexpr bool is_packed = true;
  typedef N number;
};
MSL_FUNC constexpr float msl_small_float(unsigned bits, unsigned exponent, unsigned mantissa) {
  unsigned sign = bits >> (exponent + mantissa) & 1, e = bits >> mantissa & ((1u << exponent) - 1);
  float fraction = float(bits & ((1u << mantissa) - 1)) / float(1u << mantissa) + (e ? 1.0f : 0.0f);
  float value = fraction;
  for (int i = int(e ? e : 1) - int((1u << (exponent - 1)) - 1); i; i += i < 0 ? 1 : -1) value *= i < 0 ? 0.5f : 2.0f;
  return sign ? -value : value;
}
template <>
struct msl_format<int4b_format> : msl_packed<int, 4> {
  MSL_FUNC static int of(unsigned x) { return int(x << 28) >> 28; }
};
template <>
struct msl_format<uint4b_format> : msl_packed<int, 4> {
  MSL_FUNC static int of(unsigned x) { return int(x); }
};
template <>
struct msl_format<int2b_format> : msl_packed<int, 2> {
  MSL_FUNC static int of(unsigned x) { return int(x << 30) >> 30; }
};
template <>
struct msl_format<uint2b_format> : msl_packed<int, 2> {
  MSL_FUNC static int of(unsigned x) { return int(x); }
};
template <>
struct msl_format<metal_fp4_e2m1_format> : msl_packed<float, 4> {
  MSL_FUNC static float of(unsigned x) { return msl_small_float(x, 2, 1); }
};
template <>
struct msl_format<metal_fp8_e4m3_format> : msl_packed<float, 8> {
  MSL_FUNC static float of(unsigned x) { return (x & 0x7F) == 0x7F ? __builtin_nanf("") : msl_small_float(x, 4, 3); }
};
template <>
struct msl_format<metal_fp8_e5m2_format> : msl_packed<float, 8> {
  MSL_FUNC static float of(unsigned x) {
    if ((x & 0x7C) != 0x7C) return msl_small_float(x, 5, 2);
    return x & 3 ? __builtin_nanf("") : x & 0x80 ? -__builtin_inff() : __builtin_inff();
  }
};

// The type without its address space.
template <class T>
struct msl_spaceless {
  typedef __remove_cv(T) type;
};
#ifndef MSL_FLAT
template <class T>
struct msl_spaceless<device T> : msl_spaceless<T> {};
template <class T>
struct msl_spaceless<threadgroup T> : msl_spaceless<T> {};
template <class T>
struct msl_spaceless<constant T> : msl_spaceless<T> {};
#endif

// ---- tensors ----

struct tensor_inline {};
struct tensor_handle {};
struct tensor_offset {};

template <class E, class X, class D = tensor_handle, class... Tags>
struct tensor {
  static_assert(is_same_v<D, tensor_handle> || is_same_v<D, tensor_inline>,
                "the third argument of a tensor is tensor_handle or tensor_inline");
  typedef E element_type;
  typedef typename msl_spaceless<E>::type value_type;
  typedef X extents_type;
  typedef typename X::index_type index_type;
  typedef D descriptor_type;
  typedef E* data_handle_type;
  typedef msl_format<value_type> format;
  static constexpr size_t msl_rank = X::rank();

  E* data;
  X counts;
  long strides[msl_rank];
  long origin[msl_rank];  // the position of a slice in the whole tensor
  long edge[msl_rank];    // the extents of the whole tensor

  static constexpr size_t get_rank() { return msl_rank; }
  static constexpr size_t rank() { return msl_rank; }
  MSL_FUNC constexpr const X& extents() const { return counts; }
  MSL_FUNC constexpr index_type get_extent(size_t axis) const { return counts.extent(axis); }
  static constexpr size_t get_static_extent(size_t axis) { return X::static_extent(axis); }
  MSL_FUNC constexpr index_type get_stride(size_t axis) const { return index_type(strides[axis]); }

  MSL_FUNC tensor() = default;
  template <class P>
  MSL_FUNC tensor(P* memory, const X& given) : data((E*)memory), counts(given) {
    long stride = 1;
    for (size_t axis = 0; axis < msl_rank; axis++) {
      strides[axis] = stride;
      stride *= counts.extent(axis);
    }
    whole();
  }
  template <class P, class I>
  MSL_FUNC tensor(P* memory, const X& given, const array<I, msl_rank>& steps) : data((E*)memory), counts(given) {
    for (size_t axis = 0; axis < msl_rank; axis++) strides[axis] = steps[axis];
    whole();
  }
  MSL_FUNC void whole() {
    for (size_t axis = 0; axis < msl_rank; axis++) {
      origin[axis] = 0;
      edge[axis] = counts.extent(axis);
    }
  }

  // The slice that begins at these indices. Each axis extends to the tensor's end, or has a static extent.
  template <size_t... S, class... I>
    requires(sizeof...(I) == msl_rank && (sizeof...(S) == msl_rank || sizeof...(S) == 0))
  MSL_FUNC auto slice(I... at) const {
    if constexpr (sizeof...(S) == 0) return part<dextents<index_type, msl_rank>>({long(at)...});
    else return part<metal::extents<index_type, S...>>({long(at)...});
  }
  template <class Y>
  using msl_part = conditional_t<is_same_v<D, tensor_handle>, tensor<E, Y, D, tensor_offset>, tensor<E, Y, D>>;
  template <class Y>
  MSL_FUNC msl_part<Y> part(const long (&at)[msl_rank]) const {
    msl_part<Y> result;
    result.data = data;
    for (size_t axis = 0; axis < msl_rank; axis++) {
      long left = counts.extent(axis) - at[axis];
      result.strides[axis] = strides[axis];
      result.origin[axis] = origin[axis] + at[axis];
      result.edge[axis] = edge[axis];
      if (Y::static_extent(axis) == dynamic_extent) result.counts.counts[axis] = index_type(left < 0 ? 0 : left);
    }
    return result;
  }

  // ---- elements ----

  // The first axis whose index is outside of the tensor, or -1.
  MSL_FUNC int outside(const long (&at)[msl_rank]) const {
    for (size_t axis = 0; axis < msl_rank; axis++)
      if (at[axis] < 0 || at[axis] >= counts.extent(axis) || origin[axis] + at[axis] < 0 ||
          origin[axis] + at[axis] >= edge[axis])
        return int(axis);
    return -1;
  }
  MSL_FUNC long offset(const long (&at)[msl_rank]) const {
    long sum = 0;
    for (size_t axis = 0; axis < msl_rank; axis++) sum += (origin[axis] + at[axis]) * strides[axis];
    return sum;
  }
  MSL_FUNC decltype(auto) element(const long (&at)[msl_rank]) const {
    if constexpr (format::is_packed) {
      constexpr long each = 8 / format::bits;
      long place = offset(at);
      return format::of(data[place / each].bits >> (place % each * format::bits) & ((1u << format::bits) - 1));
    } else {
      return (data[offset(at)]);
    }
  }
  MSL_FUNC decltype(auto) checked(const long (&at)[msl_rank]) const {
    int axis = outside(at);
    if (axis >= 0) msl_outside(at[axis], axis, origin[axis], counts.extent(axis), edge[axis]);
    return element(at);
  }
  template <class... I>
    requires(sizeof...(I) == msl_rank && (... && is_convertible_v<I, index_type>))
  MSL_FUNC decltype(auto) operator[](I... at) const {
    return checked({long(at)...});
  }
  template <class I>
  MSL_FUNC decltype(auto) operator[](const array<I, msl_rank>& at) const {
    long indices[msl_rank];
    for (size_t axis = 0; axis < msl_rank; axis++) indices[axis] = at[axis];
    return checked(indices);
  }
  template <class... I>
  MSL_FUNC auto get(I... at) const {
    return checked({long(at)...});
  }
  template <class... I>
  MSL_FUNC void set(const value_type& value, I... at) const {
    checked({long(at)...}) = value;
  }
  MSL_FUNC E* data_handle() const {
    const long first[msl_rank] = {};
    return data + offset(first) / long(format::is_packed ? 8 / format::bits : 1);
  }
};
template <class P, class X>
tensor(P*, X) -> tensor<P, X, tensor_inline>;
template <class P, class X, class I, size_t N>
tensor(P*, X, array<I, N>) -> tensor<P, X, tensor_inline>;

template <class T>
struct msl_tensor_traits {
  static constexpr bool is_any = false, is_handle = false, is_offset = false;
};
template <class E, class X, class D, class... Tags>
struct msl_tensor_traits<tensor<E, X, D, Tags...>> {
  static constexpr bool is_any = true, is_handle = is_same_v<D, tensor_handle>,
                        is_offset = (false || ... || is_same_v<Tags, tensor_offset>);
};
template <class T>
inline constexpr bool is_tensor_v = msl_tensor_traits<__remove_cv(T)>::is_any;
template <class T>
inline constexpr bool is_tensor_handle_v = msl_tensor_traits<__remove_cv(T)>::is_handle;
template <class T>
inline constexpr bool is_tensor_inline_v = is_tensor_v<T> && !is_tensor_handle_v<T>;
template <class T>
inline constexpr bool has_tensor_offset_v = msl_tensor_traits<__remove_cv(T)>::is_offset;

// ---- scopes: the threads that compute an operation together ----

template <size_t N>
struct execution_simdgroups {
  static_assert(N > 0, "expected one SIMD-group at least");
  static constexpr unsigned msl_simdgroups = N;
  static constexpr unsigned size() { return N; }
};
template <size_t N>
struct execution_threads {
  static_assert(N == 1, "an operation is made by one thread, or by SIMD-groups");
  static constexpr unsigned msl_simdgroups = 0;
  static constexpr unsigned size() { return N; }
};
typedef execution_simdgroups<1> execution_simdgroup;
typedef execution_threads<1> execution_thread;

}  // namespace metal

#define __remove_addrspace_t metal::remove_addrspace_t
#include <msl/cooperative.h>
#include <msl/matmul2d.h>
