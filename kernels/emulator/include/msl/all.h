// The Metal Shading Language, as far as kernels use it, for clang on a CPU.
//
// One file per chapter. Names and meanings are those of Apple's specification; what a GPU leaves undefined becomes NaN
// or an error here, where that is cheap.
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
// Last: from here on the names of vector types are macros too.
#include <msl/constructors.h>
