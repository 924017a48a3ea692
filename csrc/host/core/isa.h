// Instruction sets the kernels are built for, and the one chosen at run time.
#pragma once

#include <string>

namespace kunlun {

// Ordered: a higher level may use everything a lower one may.
enum class Isa : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// Highest level that this CPU and operating system support. kAvx512 needs AVX-512 F, BW, DQ, VL, VNNI and BF16.
Isa detect_isa();

// Level in force: detect_isa(), capped by limit_isa().
Isa active_isa();

// Caps the level. Throws std::invalid_argument on an unknown name.
void limit_isa(const std::string& name);

const char* isa_name(Isa isa);

}  // namespace kunlun
