// Integer functions.
#pragma once

namespace metal {

template <class T>
using msl_if_integer = enable_if_t<__is_integral(msl_element<T>)>;

template <class T>
struct msl_unsigned {
  typedef __make_unsigned(T) type;
};

// Bit counts of an element, in the width of its type.
template <class T, class = msl_if_integer<T>>
MSL_FUNC T popcount(T x) {
  return msl_each<T>(
      [](auto e) MSL_LAMBDA { return __builtin_popcountl(typename msl_unsigned<decltype(e)>::type(e)); }, x);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T clz(T x) {
  return msl_each<T>(
      [](auto e) MSL_LAMBDA {
        unsigned long bits = typename msl_unsigned<decltype(e)>::type(e);
        return bits ? __builtin_clzl(bits) - int(64 - 8 * sizeof(e)) : int(8 * sizeof(e));
      },
      x);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T ctz(T x) {
  return msl_each<T>([](auto e) MSL_LAMBDA { return e ? __builtin_ctzl((unsigned long)e) : int(8 * sizeof(e)); }, x);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T reverse_bits(T x) {
  return msl_each<T>(
      [](auto e) MSL_LAMBDA { return __builtin_bitreverse64((unsigned long)e) >> (64 - 8 * sizeof(e)); }, x);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T rotate(T x, T by) {
  return msl_each<T>(
      [](auto e, auto n) MSL_LAMBDA {
        typedef typename msl_unsigned<decltype(e)>::type U;
        unsigned width = 8 * sizeof(e), left = unsigned(n) % width;
        return left ? U(U(U(e) << left) | U(U(e) >> (width - left))) : U(e);
      },
      x, by);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T extract_bits(T x, uint offset, uint bits) {
  uint width = 8 * sizeof(T);
  if (bits == 0) return T(0);
  typedef typename msl_unsigned<T>::type U;
  return T(T(U(x) << (width - offset - bits)) >> (width - bits));
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T insert_bits(T base, T insert, uint offset, uint bits) {
  if (bits == 0) return base;
  typedef typename msl_unsigned<T>::type U;
  U mask = U(U(~U(0)) >> (8 * sizeof(T) - bits)) << offset;
  return T((U(base) & ~mask) | ((U(insert) << offset) & mask));
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T absdiff(T a, T b) {
  return msl_each<T>([](auto x, auto y) MSL_LAMBDA { return x < y ? y - x : x - y; }, a, b);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T addsat(T a, T b) {
  return msl_each<T>(
      [](auto x, auto y) MSL_LAMBDA {
        decltype(x) sum;
        bool over = __builtin_add_overflow(x, y, &sum);
        return !over ? sum : y < 0 ? numeric_limits<decltype(x)>::min() : numeric_limits<decltype(x)>::max();
      },
      a, b);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T subsat(T a, T b) {
  return msl_each<T>(
      [](auto x, auto y) MSL_LAMBDA {
        decltype(x) sum;
        bool over = __builtin_sub_overflow(x, y, &sum);
        return !over ? sum : x < y ? numeric_limits<decltype(x)>::min() : numeric_limits<decltype(x)>::max();
      },
      a, b);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T mulhi(T a, T b) {
  return msl_each<T>(
      [](auto x, auto y) MSL_LAMBDA { return (decltype(x))(((__int128)x * (__int128)y) >> (8 * sizeof(x))); }, a, b);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T hadd(T a, T b) {
  return msl_each<T>([](auto x, auto y) MSL_LAMBDA { return ((__int128)x + (__int128)y) >> 1; }, a, b);
}
template <class T, class = msl_if_integer<T>>
MSL_FUNC T rhadd(T a, T b) {
  return msl_each<T>([](auto x, auto y) MSL_LAMBDA { return ((__int128)x + (__int128)y + 1) >> 1; }, a, b);
}
MSL_FUNC int mul24(int a, int b) { return a * b; }
MSL_FUNC uint mul24(uint a, uint b) { return a * b; }
MSL_FUNC int mad24(int a, int b, int c) { return a * b + c; }
MSL_FUNC uint mad24(uint a, uint b, uint c) { return a * b + c; }

}  // namespace metal
