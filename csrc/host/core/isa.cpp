#include "core/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace kunlun {
namespace {

constexpr std::array<const char*, 4> kNames = {"generic", "avx2", "avx512", "amx"};
constexpr int kArchReqXcompPerm = 0x1023;
constexpr int kXfeatureTileData = 18;

bool has_amx_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool tile = (d & (1u << 24)) != 0;
  const bool bf16 = (d & (1u << 22)) != 0;
  return tile && bf16;
}

// Linux grants the tile state per process, on request.
bool request_amx_permission() { return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0; }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

Isa& limit() {
  static Isa value = Isa::kAmx;
  return value;
}

}  // namespace

Isa detect_isa() {
  static const Isa detected = [] {
    if (!has_avx2()) return Isa::kGeneric;
    if (!has_avx512()) return Isa::kAvx2;
    return has_amx_bf16() && request_amx_permission() ? Isa::kAmx : Isa::kAvx512;
  }();
  return detected;
}

Isa active_isa() { return std::min(detect_isa(), limit()); }

void limit_isa(const std::string& name) {
  const auto it = std::find(kNames.begin(), kNames.end(), name);
  if (it == kNames.end()) throw std::invalid_argument("unknown instruction set '" + name + "'");
  limit() = static_cast<Isa>(it - kNames.begin());
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

}  // namespace kunlun
