#include "transport/verbs/resources.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "transport/verbs/library.h"

namespace phub {
namespace {

constexpr double kMiB = 1 << 20;

// Root, or whoever may lock without limit.
bool may_lock_all() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, 2> data = {};
  if (syscall(SYS_capget, &header, data.data()) != 0) return false;
  return (data[CAP_IPC_LOCK / 32].effective >> (CAP_IPC_LOCK % 32)) & 1;
}

std::string locked_memory_limit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return fmt::format("{:.1f} MiB", static_cast<double>(limit.rlim_cur) / kMiB);
}

std::string registration_error(ibv_pd* pd, const char* call, uint64_t bytes, int error) {
  return fmt::format(
      "{} of {:.1f} MiB on {}: {}; the limit of locked memory is {}: raise it with ulimit -l or "
      "LimitMEMLOCK=infinity",
      call, static_cast<double>(bytes) / kMiB, device_name(pd->context), std::strerror(error),
      locked_memory_limit());
}

// Empty: that is not why.
std::string_view why_no_dma_buf(int error) {
  if (error == ENOSYS) return "libibverbs here has no ibv_reg_dmabuf_mr: install rdma-core 34";
  if (error != EOPNOTSUPP && error != EPROTONOSUPPORT) return "";
  return "the NIC's driver takes no DMA buffers: ConnectX-5 and later (mlx5) and EFA do, from "
         "Linux "
         "5.12 and rdma-core 34 on; soft-RoCE does not";
}

}  // namespace

void fail_verbs(ibv_context* context, const std::string& call, int error) {
  fail(ErrorCode::kFull, "{} on {}: {}", call, device_name(context), std::strerror(error));
}

VerbsMr register_memory(ibv_pd* pd, std::span<const std::byte> memory, int access) {
  VerbsMr mr(ibv_reg_mr(pd, const_cast<std::byte*>(memory.data()), memory.size(), access));
  if (mr == nullptr) {
    throw Error(ErrorCode::kFull, registration_error(pd, "ibv_reg_mr", memory.size(), errno));
  }
  return mr;
}

VerbsMr register_dma_buf(ibv_pd* pd, const DmaBuf& buffer, std::span<const std::byte> memory,
                         int access) {
  VerbsMr mr(ibv_reg_dmabuf_mr(pd, buffer.offset, memory.size(),
                               reinterpret_cast<uint64_t>(memory.data()), buffer.fd.get(), access));
  if (mr != nullptr) return mr;
  const int error = errno;
  const std::string_view why = why_no_dma_buf(error);
  fail(ErrorCode::kInvalid,
       "ibv_reg_dmabuf_mr of {:.1f} MiB on {}: {}; {}. Without memory_device, gradients and "
       "parameters lie in memory of the host",
       static_cast<double>(memory.size()) / kMiB, device_name(pd->context), std::strerror(error),
       why.empty() ? "this NIC does not reach the GPU's memory: see dmesg, and whether both are "
                     "below one PCIe root (nvidia-smi topo -m)"
                   : why);
}

// Drivers that can look at the descriptor.
std::string dma_buf_problem(ibv_context* context) {
  const VerbsPd pd(ibv_alloc_pd(context));
  if (pd == nullptr) return fmt::format("ibv_alloc_pd: {}", std::strerror(errno));
  const VerbsMr none(ibv_reg_dmabuf_mr(pd.get(), 0, 4096, 0, -1, 0));
  return std::string(none == nullptr ? why_no_dma_buf(errno) : "");
}

void check_locked_memory(uint64_t bytes, const std::string& what) {
  rlimit limit = {};
  if (may_lock_all() || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return;
  }
  uint64_t pinned_kib = 0;  // what the NICs hold already
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmPin:")) pinned_kib = std::strtoull(line.c_str() + 6, nullptr, 10);
  }
  const uint64_t pinned = pinned_kib * 1024;
  if (pinned + bytes <= limit.rlim_cur) return;
  fail(ErrorCode::kFull,
       "{} needs {:.1f} MiB of locked memory, {:.1f} MiB are locked and the limit is {}: raise it "
       "with ulimit -l, LimitMEMLOCK=infinity in the unit, or /etc/security/limits.conf",
       what, static_cast<double>(bytes) / kMiB, static_cast<double>(pinned) / kMiB,
       locked_memory_limit());
}

// Too late for fork() if the application has registered memory through libibverbs before.
void prepare_verbs() {
  const std::string& problem = verbs_library_problem();
  if (!problem.empty()) fail(ErrorCode::kUnavailable, "no RDMA in this process: {}", problem);
  static_cast<void>(fork_problem());
}

std::string fork_problem() {
  static const int error = ibv_fork_init();
  if (error == 0) return "";
  return fmt::format("; fork() is not safe in this process: ibv_fork_init: {}",
                     std::strerror(error));
}

void make_nonblocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    fail(ErrorCode::kInternal, "fcntl(O_NONBLOCK): {}", std::strerror(errno));
  }
}

}  // namespace phub
