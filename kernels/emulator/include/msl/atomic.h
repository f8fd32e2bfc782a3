// Atomics. The emulator runs one thread at a time, so atomic operations are plain loads and stores.
#pragma once

namespace metal {

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

template <class T>
struct msl_same {
  typedef T type;
};
template <class T>
using msl_value = typename msl_same<T>::type;  // T, but C++ does not deduce T from an argument of this type

// Accesses during the lifetime of this object are atomic, so they are not checked for races.
struct msl_alone {
#ifdef MSL_RACES
  msl_alone() { msl_atomically(1); }
  ~msl_alone() { msl_atomically(0); }
#endif
};

#define MSL_FETCH(SPACE, NAME, RESULT)                                                                          \
  template <class T>                                                                                            \
  MSL_FUNC T atomic_fetch_##NAME##_explicit(volatile SPACE atomic<T>* at, msl_value<T> b, memory_order) {       \
    msl_alone alone;                                                                                            \
    T a = at->value;                                                                                            \
    at->value = T(RESULT);                                                                                      \
    return a;                                                                                                   \
  }
#define MSL_ATOMICS(SPACE)                                                                                      \
  template <class T>                                                                                            \
  MSL_FUNC T atomic_load_explicit(const volatile SPACE atomic<T>* at, memory_order) {                           \
    msl_alone alone;                                                                                            \
    return at->value;                                                                                           \
  }                                                                                                             \
  template <class T>                                                                                            \
  MSL_FUNC void atomic_store_explicit(volatile SPACE atomic<T>* at, msl_value<T> b, memory_order) {             \
    msl_alone alone;                                                                                            \
    at->value = b;                                                                                              \
  }                                                                                                             \
  MSL_FETCH(SPACE, add, a + b)                                                                                  \
  MSL_FETCH(SPACE, sub, a - b)                                                                                  \
  MSL_FETCH(SPACE, min, min(a, b))                                                                              \
  MSL_FETCH(SPACE, max, max(a, b))                                                                              \
  MSL_FETCH(SPACE, and, a & b)                                                                                  \
  MSL_FETCH(SPACE, or, a | b)                                                                                   \
  MSL_FETCH(SPACE, xor, a ^ b)                                                                                  \
  template <class T>                                                                                            \
  MSL_FUNC T atomic_exchange_explicit(volatile SPACE atomic<T>* at, msl_value<T> b, memory_order) {             \
    msl_alone alone;                                                                                            \
    T a = at->value;                                                                                            \
    at->value = b;                                                                                              \
    return a;                                                                                                   \
  }                                                                                                             \
  template <class T>                                                                                            \
  MSL_FUNC bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* at, thread T* expected,         \
                                                      msl_value<T> b, memory_order, memory_order) {             \
    msl_alone alone;                                                                                            \
    T a = at->value;                                                                                            \
    bool same = __builtin_memcmp(&a, expected, sizeof(T)) == 0;                                                 \
    if (same) at->value = b;                                                                                    \
    else *expected = a;                                                                                         \
    return same;                                                                                                \
  }
MSL_ATOMICS(device)
#ifndef MSL_FLAT
MSL_ATOMICS(threadgroup)
#endif
#undef MSL_ATOMICS
#undef MSL_FETCH

MSL_FUNC void atomic_thread_fence(mem_flags flags, memory_order order, thread_scope scope = thread_scope_device) {
  if (order == memory_order_relaxed || scope < thread_scope_threadgroup) return;
  msl_thread_fence(unsigned(flags));
}

}  // namespace metal
