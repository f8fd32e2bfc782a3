// Conversions whose target may be a vector: by value, as in Metal. `vector_text.py` writes them into whole kernels.
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

}  // namespace metal
