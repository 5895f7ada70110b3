#include "transport/ofi/sockets_below.h"

#include <dirent.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

namespace phub {
namespace {

constexpr int kReadsAtMost = 10'000;  // much more than what a socket's buffers hold

// Whether the socket's name, as `call` tells it, is that of the endpoint.
bool has_name(int fd, int (*call)(int, sockaddr*, socklen_t*), const OfiTarget& endpoint) {
  sockaddr_storage name = {};
  socklen_t size = sizeof(name);
  return call(fd, reinterpret_cast<sockaddr*>(&name), &size) == 0 && size == endpoint.name_bytes &&
         std::memcmp(&name, endpoint.name.data(), size) == 0;
}

// Connections of this process to or from the endpoint `here`, and from it to `there`.
std::vector<int> connections_between(const OfiTarget& here, const OfiTarget& there) {
  std::vector<int> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> all(opendir("/proc/self/fd"), closedir);
  if (all == nullptr) return found;
  while (const dirent* entry = readdir(all.get())) {
    const int fd = std::atoi(entry->d_name);
    sockaddr_storage peer = {};
    socklen_t size = sizeof(peer);
    if (entry->d_name[0] == '.' ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) {
      continue;  // no socket, or not connected
    }
    if (has_name(fd, getsockname, here) || has_name(fd, getpeername, there)) found.push_back(fd);
  }
  return found;
}

bool has_ended(int fd) {
  char byte = 0;
  const ssize_t bytes = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace

void end_sockets_below(const OfiDomain& domain, fid_cq& completions, const OfiTarget& here,
                       const OfiTarget& there) noexcept try {
  if (std::string_view(domain.provider()) != "tcp;ofi_rxm") return;
  std::array<fi_cq_data_entry, 16> entries;
  const auto read = [&] {
    if (fi_cq_read(&completions, entries.data(), entries.size()) != -FI_EAVAIL) return;
    fi_cq_err_entry error = {};
    fi_cq_readerr(&completions, &error, 0);
  };
  for (const int fd : connections_between(here, there)) {
    shutdown(fd, SHUT_RDWR);
    for (int reads = 0; reads < kReadsAtMost && !has_ended(fd); ++reads) read();
    read();  // now the provider has seen the end
    read();
  }
} catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is closed all the same
}

}  // namespace phub
