// Type traits.
#pragma once

namespace metal {

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  typedef T value_type;
  constexpr operator T() const { return V; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;

template <bool V>
using bool_constant = integral_constant<bool, V>;
template <class... C>
struct _conjunction : bool_constant<(true && ... && C::value)> {};
template <class... C>
struct _disjunction : bool_constant<(false || ... || C::value)> {};
template <class C>
struct _negation : bool_constant<!C::value> {};

template <bool C, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool C, class T = void>
using enable_if_t = typename enable_if<C, T>::type;

template <bool C, class A, class B>
struct conditional {
  typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool C, class A, class B>
using conditional_t = typename conditional<C, A, B>::type;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
inline constexpr bool is_same_v = is_same<A, B>::value;

template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

// These traits need not distinguish address spaces: in text that uses them, all address spaces are one.
template <class T>
using remove_addrspace_t = T;
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <class T>
using remove_const_t = __remove_const(T);
template <class T>
struct remove_const {
  typedef __remove_const(T) type;
};
template <class T>
using remove_pointer_t = __remove_pointer(T);
template <class T>
struct remove_pointer {
  typedef __remove_pointer(T) type;
};
template <class T>
using decay_t = __decay(T);
template <class T>
using make_unsigned_t = __make_unsigned(T);
template <class T>
using make_signed_t = __make_signed(T);
template <class T>
inline constexpr bool is_pointer_v = __is_pointer(T);
template <class T>
struct is_pointer : bool_constant<__is_pointer(T)> {};
template <class T>
inline constexpr bool is_const_v = __is_const(T);
template <class T>
T&& declval();

template <class T>
inline constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T>
struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};
template <class T>
inline constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_integral : integral_constant<bool, __is_integral(T)> {};
template <class T>
inline constexpr bool is_signed_v = __is_signed(T) || is_floating_point_v<T>;
template <class T>
inline constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T>
struct is_signed : bool_constant<is_signed_v<T>> {};
template <class T>
struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <class T>
inline constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class A, class B>
inline constexpr bool is_convertible_v = __is_convertible_to(A, B);
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};

// The number and type of a vector's elements; a scalar has one.
template <class T>
struct msl_vector {
  static constexpr int size = 1;
  typedef T element;
};
template <class T, int N>
struct msl_vector<T __attribute__((ext_vector_type(N)))> {
  static constexpr int size = N;
  typedef T element;
};
template <class T>
inline constexpr int msl_size = msl_vector<T>::size;
template <class T>
using msl_element = typename msl_vector<T>::element;
template <class T>
using vec_element_t = msl_element<T>;

// Apply f to each element of one, two or three vectors, or to scalars; convert the results to T's elements.
template <class T, class F>
MSL_FUNC T msl_each(F f, T a) {
  if constexpr (msl_size<T> == 1) {
    return T(f(a));
  } else {
    T result;
    for (int i = 0; i < msl_size<T>; i++) result[i] = msl_element<T>(f(a[i]));
    return result;
  }
}
template <class T, class F>
MSL_FUNC T msl_each(F f, T a, T b) {
  if constexpr (msl_size<T> == 1) {
    return T(f(a, b));
  } else {
    T result;
    for (int i = 0; i < msl_size<T>; i++) result[i] = msl_element<T>(f(a[i], b[i]));
    return result;
  }
}
template <class T, class F>
MSL_FUNC T msl_each(F f, T a, T b, T c) {
  if constexpr (msl_size<T> == 1) {
    return T(f(a, b, c));
  } else {
    T result;
    for (int i = 0; i < msl_size<T>; i++) result[i] = msl_element<T>(f(a[i], b[i], c[i]));
    return result;
  }
}

}  // namespace metal
