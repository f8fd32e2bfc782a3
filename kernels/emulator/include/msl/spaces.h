// Address spaces. Clang checks those of OpenCL as Metal checks its own, and puts all of them into the memory of a CPU, so
// that its sanitizers, which know that memory only, see every access.
#pragma once
#include "../../runtime/abi.h"

#ifndef __clang__
#error "kernels are compiled by clang: no other compiler has address spaces"
#endif

#define __METAL_VERSION__ 400
#ifdef __OPTIMIZE__
#define METAL_FUNC inline __attribute__((always_inline))
#else  // calls: without optimisation, copies in every kernel of a unit take most of the time to compile
#define METAL_FUNC inline
#endif

// A function of ours: what goes wrong inside is reported at the line that calls it.
#define MSL_FUNC inline __attribute__((always_inline, nodebug))
#define MSL_LAMBDA __attribute__((always_inline, nodebug))
#define MSL_LARGE_FUNC inline __attribute__((nodebug))

// Where a call stands; the last parameters of every function that waits for other threads.
#define MSL_HERE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()

#ifdef MSL_FLAT  // whole kernels: C++ has no member functions for objects in other address spaces
#define device
#define constant const
#define threadgroup
#else
#define device __attribute__((opencl_global))
#define constant __attribute__((opencl_constant)) const
#define threadgroup __attribute__((opencl_local))
#endif
#define thread
