// Address spaces. Clang knows spaces by number, checks them like Metal does, and puts all of them into one memory.
#pragma once
#include "../../runtime/abi.h"

#ifndef __clang__
#error "kernels are compiled by clang: no other compiler has address spaces"
#endif

#define __METAL_VERSION__ 320
#define METAL_FUNC inline __attribute__((always_inline))

// A function of ours: what goes wrong inside is reported at the line that calls it.
#define MSL_FUNC inline __attribute__((always_inline, nodebug))
#define MSL_LAMBDA __attribute__((always_inline, nodebug))
#define MSL_LARGE_FUNC inline __attribute__((nodebug))

// Where a call stands; the last parameters of every function that waits for other threads.
#define MSL_HERE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()

#ifdef MSL_FLAT  // UBSan checks alignment in the default space only
#define device
#define constant const
#define threadgroup
#else
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2))) const
#define threadgroup __attribute__((address_space(3)))
#endif
#define thread
