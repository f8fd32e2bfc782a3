// Constructors and conversions of vectors. As in Metal, they convert values, but clang's own casts would keep the bits.
#pragma once

namespace metal {

// Make a V from one scalar, from a vector of the same size, or from parts with as many elements in all.
template <class V, class A>
MSL_FUNC V msl_make(A a) {
  if constexpr (msl_size<A> == 1) {
    return V(msl_element<V>(a));
  } else {
    static_assert(msl_size<A> == msl_size<V>, "expected as many components as the vector has");
    typedef msl_element<A> from;
    typedef msl_element<V> to;
    // Clang cannot convert between half and bfloat directly.
    if constexpr ((is_same_v<from, half> && is_same_v<to, bfloat>) || (is_same_v<from, bfloat> && is_same_v<to, half>))
      return __builtin_convertvector(__builtin_convertvector(a, vec<float, msl_size<A>>), V);
    else return __builtin_convertvector(a, V);
  }
}

template <class V>
struct msl_filling {
  V vector;
  int filled = 0;
  template <class A>
  MSL_FUNC void take(A a) {
    if constexpr (msl_size<A> == 1) vector[filled++] = msl_element<V>(a);
    else
      for (int i = 0; i < msl_size<A>; i++) vector[filled++] = msl_element<V>(a[i]);
  }
};

template <class V, class A, class B, class... Rest>
MSL_FUNC V msl_make(A a, B b, Rest... rest) {
  static_assert(msl_size<A> + msl_size<B> + (0 + ... + msl_size<Rest>) == msl_size<V>,
                "expected as many components as the vector has");
  msl_filling<V> made;
  made.take(a);
  made.take(b);
  (made.take(rest), ...);
  return made.vector;
}

template <class V>
MSL_FUNC V msl_make() {
  return V(0);
}

// Reinterpret the bits as another type of the same size.
template <class T, class U>
MSL_FUNC T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type: expected two types of one size");
  return __builtin_bit_cast(T, value);
}

}  // namespace metal
using metal::as_type;
