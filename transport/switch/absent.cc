// What is built in place of the switch's program where there is no libbpf or no compiler for it.
#include "transport/error.h"
#include "transport/switch/library.h"
#include "transport/switch/program.h"

namespace phub {
namespace {

[[noreturn]] void absent() { throw Error(ErrorCode::kUnavailable, bpf_library_problem()); }

}  // namespace

struct SwitchProgram::Parts {};

const std::string& bpf_library_problem() {
  static const std::string problem =
      "this build has no program for a switch: install libbpf-dev and clang-14 (which compiles it) "
      "and build again";
  return problem;
}

SwitchProgram::SwitchProgram(uint32_t) { absent(); }
SwitchProgram::~SwitchProgram() = default;
void SwitchProgram::set_ports(std::span<const uint32_t>) { absent(); }
void SwitchProgram::attach(std::span<const std::string>) { absent(); }
std::array<uint64_t, kSwitchCounters> SwitchProgram::counters() const { absent(); }
void SwitchProgram::forget() { absent(); }
uint32_t SwitchProgram::run(std::span<std::byte>) { absent(); }

}  // namespace phub
