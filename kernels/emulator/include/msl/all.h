// The part of the Metal Shading Language that compute kernels use, implemented in C++ for clang on a CPU.
//
// Each file is one chapter of Apple's specification, with the same names and semantics. If the specification leaves a
// value undefined and a check is cheap, the value is NaN here, or reading it is an error.
#pragma once
#include <msl/spaces.h>
#include <msl/types.h>
#include <msl/traits.h>
#include <msl/limits.h>
#include <msl/vectors.h>
#include <msl/common.h>
#include <msl/math.h>
#include <msl/integer.h>
#include <msl/sync.h>
#include <msl/simd.h>
#include <msl/quad.h>
#include <msl/matrix.h>
#include <msl/atomic.h>
#include <msl/logging.h>
#include <msl/extended.h>
#include <msl/matrices.h>
#include <msl/conversions.h>
#include <msl/builtins.h>
// Included last, because it defines the names of vector types as macros.
#include <msl/constructors.h>
