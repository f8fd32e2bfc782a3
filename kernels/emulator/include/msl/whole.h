// The arguments that an entry function passes to a kernel of a .metal file. An argument converts itself to the type of
// the kernel's parameter.
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
#ifdef MSL_TENSORS
// An array that is passed as a tensor, with the array's extents.
struct msl_bound_tensor {
  void* address;
  const long* counts;
  template <class E, class X, class D, class... Tags>
  MSL_FUNC operator metal::tensor<E, X, D, Tags...>() const {
    if (counts[0] != long(X::rank()))
      msl_tensor_wrong("entry", 0, "an array of %ld axes for a tensor of %ld\npass an array with as many axes", counts[0],
                       long(X::rank()));
    X extents;
    for (size_t axis = 0; axis < X::rank(); axis++) extents.counts[axis] = typename X::index_type(counts[1 + axis]);
    return {(E*)address, extents};
  }
};
#endif

// An attribute of a thread: one number, or three numbers, of which a kernel may declare only the first one or two.
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
