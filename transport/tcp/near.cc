#include "transport/tcp/near.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "transport/error.h"
#include "transport/greeting.h"

namespace phub {
namespace {

constexpr int kNearBacklog = 4096;

struct NearAddress {
  sockaddr_un storage = {};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// False: no name of a socket is so long.
bool set_near_address(const std::string& name, NearAddress& address) {
  address.storage.sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof(address.storage.sun_path)) return false;
  std::memcpy(address.storage.sun_path + 1, name.data(), name.size());  // behind a zero
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return true;
}

Fd new_near_socket() { return Fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

}  // namespace

TcpNearMemory::TcpNearMemory(std::span<const Fd> descriptors, uint64_t gradients_bytes,
                             uint64_t results_bytes) {
  if (descriptors.size() != kDescriptors) {
    fail(ErrorCode::kInvalid, "hello: {} descriptors of memory, {} expected", descriptors.size(),
         kDescriptors);
  }
  gradients_ = SealedMemory::adopt("a worker's gradients", descriptors[0], gradients_bytes,
                                   MemoryAccess::kRead);
  results_ = SealedMemory::adopt("a worker's results", descriptors[1], results_bytes,
                                 MemoryAccess::kReadWrite);
  memory_ = {gradients_.bytes(), results_.bytes(), {}};
}

std::string new_near_name() { return fmt::format("phub-{}", make_ticket()); }

Fd listen_near(const std::string& name) {
  NearAddress address;
  PHUB_CHECK(set_near_address(name, address));
  Fd listener = new_near_socket();
  if (!listener || bind(listener.get(), address.get(), address.size) != 0 ||
      listen(listener.get(), kNearBacklog) != 0) {
    fail_system("listening for workers on this host", errno);
  }
  return listener;
}

Fd connect_near(const std::string& name) {
  NearAddress address;
  if (!set_near_address(name, address)) return {};
  Fd socket = new_near_socket();
  if (!socket || connect(socket.get(), address.get(), address.size) != 0) return {};
  return socket;
}

bool is_near(int socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  return getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         address.ss_family == AF_UNIX;
}

}  // namespace phub
