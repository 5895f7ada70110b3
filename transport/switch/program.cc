#include "transport/switch/program.h"

#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "transport/error.h"
#include "transport/switch/library.h"
#include "transport/text.h"

// What clang has made of program.bpf.c.
asm(".section .rodata\n"
    ".balign 8\n"
    "kPhubSwitchProgram:\n"
    ".incbin \"" PHUB_SWITCH_PROGRAM
    "\"\n"
    "kPhubSwitchProgramEnd:\n"
    ".previous\n");
extern "C" {
extern const char kPhubSwitchProgram[];
extern const char kPhubSwitchProgramEnd[];
}

namespace phub {
namespace {

constexpr const char* kRights = "it needs root, or CAP_BPF and CAP_NET_ADMIN";

// What libbpf says, the first of it; nothing goes to stderr.
thread_local std::string said;
int keep(libbpf_print_level level, const char* format, va_list values) {
  if (level == LIBBPF_DEBUG || said.size() > 500) return 0;
  char line[512];
  const int length = std::vsnprintf(line, sizeof line, format, values);
  if (length > 0) said += line;
  return length;
}

[[noreturn]] void refused(const std::string& what, int error) {
  std::string words = said.substr(0, said.find('\n'));
  fail(ErrorCode::kUnavailable, "{}: {}{}{}{}", what, std::strerror(error),
       error == EPERM ? std::string("; ") + kRights : "",
       words.empty() ? "" : "; libbpf: ", escaped(words));
}

}  // namespace

struct SwitchProgram::Parts {
  ~Parts() {
    for (bpf_link* link : links) bpf_link__destroy(link);
    if (object != nullptr) bpf_object__close(object);
  }
  int map(const char* name) const {
    return bpf_map__fd(bpf_object__find_map_by_name(object, name));
  }

  uint32_t slots = 0;
  bpf_object* object = nullptr;
  bpf_program* program = nullptr;
  std::vector<bpf_link*> links;
};

SwitchProgram::SwitchProgram(uint32_t slots) : parts_(std::make_unique<Parts>()) {
  if (slots < 1 || slots > kMostSwitchSlots) {
    fail(ErrorCode::kInvalid, "slots: must be from 1 to {}, got {}", uint32_t{kMostSwitchSlots},
         slots);
  }
  if (!bpf_library_problem().empty()) fail(ErrorCode::kUnavailable, "{}", bpf_library_problem());
  said.clear();
  libbpf_set_print(keep);
  parts_->slots = slots;
  parts_->object = bpf_object__open_mem(
      kPhubSwitchProgram, static_cast<size_t>(kPhubSwitchProgramEnd - kPhubSwitchProgram), nullptr);
  if (parts_->object == nullptr) refused("the switch's program cannot be opened", errno);
  bpf_map* map = bpf_object__find_map_by_name(parts_->object, "slots");
  if (bpf_map__set_max_entries(map, 2 * slots) != 0) refused("the switch's slots", errno);
  if (const int error = bpf_object__load(parts_->object); error != 0) {
    refused("the kernel does not take the switch's program", -error);
  }
  parts_->program = bpf_object__find_program_by_name(parts_->object, "phub_switch");
}

SwitchProgram::~SwitchProgram() = default;

void SwitchProgram::set_ports(std::span<const uint32_t> ports) {
  PHUB_CHECK(ports.size() <= kSwitchWorkers);
  for (uint32_t worker = 0; worker < kSwitchWorkers; ++worker) {
    const uint32_t port = worker < ports.size() ? ports[worker] : 0;
    if (bpf_map_update_elem(parts_->map("ports"), &worker, &port, BPF_ANY) != 0) {
      refused("the switch's ports", errno);
    }
  }
}

void SwitchProgram::attach(std::span<const std::string> interfaces) {
  if (interfaces.empty() || interfaces.size() > kSwitchWorkers) {
    fail(ErrorCode::kInvalid, "interfaces: a switch has 1 to {} workers, got {}",
         uint32_t{kSwitchWorkers}, interfaces.size());
  }
  std::vector<uint32_t> ports;
  for (const std::string& name : interfaces) {
    const uint32_t index = if_nametoindex(name.c_str());
    if (index == 0) {
      fail(ErrorCode::kNotFound, "interface '{}': there is none of this name here", escaped(name));
    }
    if (std::ranges::find(ports, index) != ports.end()) {
      fail(ErrorCode::kInvalid, "interface '{}' is there twice", escaped(name));
    }
    ports.push_back(index);
  }
  set_ports(ports);
  for (size_t i = 0; i < ports.size(); ++i) {
    said.clear();
    bpf_link* link = bpf_program__attach_xdp(parts_->program, static_cast<int>(ports[i]));
    if (link == nullptr) refused(fmt::format("interface '{}'", escaped(interfaces[i])), errno);
    parts_->links.push_back(link);
  }
}

std::array<uint64_t, kSwitchCounters> SwitchProgram::counters() const {
  std::array<uint64_t, kSwitchCounters> sums{};
  std::vector<uint64_t> of_cpus(static_cast<size_t>(std::max(libbpf_num_possible_cpus(), 1)));
  for (uint32_t i = 0; i < kSwitchCounters; ++i) {
    if (bpf_map_lookup_elem(parts_->map("counters"), &i, of_cpus.data()) != 0) continue;
    for (const uint64_t each : of_cpus) sums[i] += each;
  }
  return sums;
}

void SwitchProgram::forget() {
  const std::vector<std::byte> zeros(sizeof(SwitchSlot) + 8);  // the lock, and what aligns it
  for (uint32_t i = 0; i < 2 * parts_->slots; ++i) {
    if (bpf_map_update_elem(parts_->map("slots"), &i, zeros.data(), BPF_ANY) != 0) {
      refused("the switch's slots", errno);
    }
  }
}

uint32_t SwitchProgram::run(std::span<std::byte> frame) {
  std::vector<std::byte> out(frame.size());
  bpf_test_run_opts options{};
  options.sz = sizeof options;
  options.data_in = frame.data();
  options.data_size_in = static_cast<__u32>(frame.size());
  options.data_out = out.data();
  options.data_size_out = static_cast<__u32>(out.size());
  options.repeat = 1;
  const int error = bpf_prog_test_run_opts(bpf_program__fd(parts_->program), &options);
  if (error != 0 || options.data_size_out != frame.size()) {
    fail(ErrorCode::kInternal, "BPF_PROG_TEST_RUN: {}", std::strerror(-error));
  }
  std::ranges::copy(out, frame.begin());
  return options.retval;
}

}  // namespace phub
