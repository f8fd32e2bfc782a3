// Conversions by value, as in Metal, to types that may be vectors. `metal_text.py` inserts calls of these functions
// into the text of .metal files.
#pragma once

namespace metal {

template <class T>
inline constexpr bool msl_is_vector = false;
template <class T, int N>
inline constexpr bool msl_is_vector<T __attribute__((ext_vector_type(N)))> = true;

template <class T, class... A>
MSL_FUNC constexpr T msl_construct(A... a) {
  if constexpr (msl_is_vector<T>) return msl_make<T>(a...);
  else if constexpr (sizeof...(A) == 1 && (is_floating_point_v<T> && ... && is_floating_point_v<A>))
    return msl_static_cast<T>(a...);
  else if constexpr (sizeof...(A) == 1) return ((T)a, ...);
  else return T(a...);
}

template <class T>
struct msl_to {
  template <class A>
  MSL_FUNC constexpr T operator->*(A a) const {
    return msl_construct<T>(a);
  }
};

// A list of three elements in braces as an argument, which converts itself to a vector or a structure. (clang finds no
// function for a list if the parameter is a vector.) The elements are not constants here, so C++'s check of narrowing
// would refuse `{1, 2, 3}` as three floats; it is switched off.
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wc++11-narrowing"
template <class A, class B, class C>
struct msl_three {
  A a;
  B b;
  C c;
  template <class T, class = enable_if_t<!is_arithmetic_v<T>>>
  MSL_FUNC constexpr operator T() const {
    if constexpr (msl_is_vector<T>) return msl_make<T>(a, b, c);
    else return T{a, b, c};
  }
};
template <class A, class B, class C>
MSL_FUNC constexpr msl_three<A, B, C> msl_list(A a, B b, C c) {
  return {a, b, c};
}
#pragma clang diagnostic pop

}  // namespace metal
