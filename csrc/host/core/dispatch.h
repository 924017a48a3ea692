// Choice of element type and of instruction set at run time.
#pragma once

#include "core/isa.h"

namespace kunlun {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

}  // namespace kunlun

// Declares `name`, a const table of function pointers of type `Type` that each instruction set's translation unit
// defines, and `name##_for(isa)`, which returns the table to use at that level.
#define KUNLUN_DECLARE_TABLE(Type, name)                   \
  namespace generic {                                      \
  extern const Type name;                                  \
  }                                                        \
  namespace avx2 {                                         \
  extern const Type name;                                  \
  }                                                        \
  namespace avx512 {                                       \
  extern const Type name;                                  \
  }                                                        \
  inline const Type& name##_for(Isa isa) {                 \
    if (isa >= Isa::kAvx512) return avx512::name;          \
    return isa == Isa::kAvx2 ? avx2::name : generic::name; \
  }

// Runs the statements with T the C++ type of `dtype`. For use where core/vec.h is included.
#define KUNLUN_DISPATCH_DTYPE(dtype, T, ...) \
  do {                                       \
    switch (dtype) {                         \
      case DType::kFloat32: {                \
        using T = float;                     \
        __VA_ARGS__;                         \
        break;                               \
      }                                      \
      case DType::kBFloat16: {               \
        using T = bf16;                      \
        __VA_ARGS__;                         \
        break;                               \
      }                                      \
      case DType::kFloat16: {                \
        using T = fp16;                      \
        __VA_ARGS__;                         \
        break;                               \
      }                                      \
    }                                        \
  } while (false)
