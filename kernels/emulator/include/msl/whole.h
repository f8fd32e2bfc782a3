// The arguments of whole kernels: what a kernel's own parameter asks for is what an argument becomes.
#pragma once

struct msl_pointer {
  void* address;
  template <class T>
  MSL_FUNC operator T*() const {
    return (T*)address;
  }
};
struct msl_reference {
  void* address;
  template <class T>
  MSL_FUNC operator T&() const {
    return *(T*)address;
  }
};
// An attribute of a thread: a number, or three, of which a kernel may take fewer.
template <class V>
struct msl_given {
  V value;
  template <class T>
  MSL_FUNC operator T() const {
    if constexpr (metal::msl_size<T> == 1 && metal::msl_size<V> == 1) {
      return T(value);
    } else if constexpr (metal::msl_size<T> == 1) {
      return T(value[0]);
    } else {
      T result;
      for (int i = 0; i < metal::msl_size<T>; i++) result[i] = metal::msl_element<T>(value[i]);
      return result;
    }
  }
};
template <class V>
MSL_FUNC msl_given<V> msl_give(V value) {
  return {value};
}

#define is_function_constant_defined(NAME) msl_defined_##NAME
#define coherent(SCOPE)
