// The part of the Metal Shading Language that kernels use, for clang on a CPU.
//
// One file per chapter. Names and semantics are those of Apple's specification. Where the check is cheap, values that
// the specification leaves undefined are NaN or an error here.
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
