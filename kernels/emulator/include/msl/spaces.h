// Address spaces. They are defined as OpenCL's, which clang checks by the same rules as Metal's. In machine code all of
// them are the CPU's default address space, because clang's sanitizers check accesses only there.
#pragma once
#include "../../runtime/abi.h"

#ifndef __clang__
#error "kernels are compiled by clang: no other compiler has address spaces"
#endif

#define __METAL_VERSION__ 400
#ifdef __OPTIMIZE__
#define METAL_FUNC inline __attribute__((always_inline))
#else  // not inlined: without optimisation, copies in every kernel of a unit would take most of the compile time
#define METAL_FUNC inline
#endif

// A function of these headers. A mistake inside of it is reported at the line of the kernel that calls it.
#define MSL_FUNC inline __attribute__((always_inline, nodebug))
#define MSL_LAMBDA __attribute__((always_inline, nodebug))
#define MSL_LARGE_FUNC inline __attribute__((nodebug))

// The file and the line of a call: the last parameters of every function that waits for other threads.
#define MSL_HERE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()

#ifdef MSL_FLAT  // for .metal files: C++ has no member functions for objects in other address spaces
#define device
#define constant const
#define threadgroup
#else
#define device __attribute__((opencl_global))
#define constant __attribute__((opencl_constant)) const
#define threadgroup __attribute__((opencl_local))
#endif
#define thread
