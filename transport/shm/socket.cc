#include "transport/shm/socket.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <thread>

#include "transport/error.h"
#include "transport/shm/format.h"

namespace phub {
namespace {

constexpr int kListenBacklog = 256;

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    fail(ErrorCode::kInvalid,
         "socket path '{}' has {} bytes, 1 to {} are possible; choose another socket directory",
         path, path.size(), sizeof(address.sun_path) - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Fd new_socket() {
  Fd socket_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_fd) fail_system("socket(AF_UNIX)", errno);
  return socket_fd;
}

int connect_once(int socket_fd, const sockaddr_un& address) {
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  return connect(socket_fd, generic, sizeof(address)) == 0 ? 0 : errno;
}

// "phub-<pid>-<random>.sock" → pid; 0 for another name.
pid_t pid_in_name(const std::string& name) {
  int pid = 0, end = 0;
  if (std::sscanf(name.c_str(), "phub-%d-%*[0-9a-f].sock%n", &pid, &end) != 1) return 0;
  return end == static_cast<int>(name.size()) ? pid : 0;
}

}  // namespace

void prepare_socket_dir(const std::string& dir) {
  if (mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) {
    fail(ErrorCode::kInvalid, "socket directory '{}': {}; make it, or choose another", dir,
         std::strerror(errno));
  }
  struct stat status = {};
  if (lstat(dir.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    fail(ErrorCode::kInvalid, "socket directory '{}' is not a directory", dir);
  }
  if (status.st_uid != geteuid()) {
    fail(ErrorCode::kInvalid,
         "socket directory '{}' belongs to user {}, this is user {}; choose "
         "another",
         dir, status.st_uid, geteuid());
  }
  if ((status.st_mode & 0077) != 0) {
    fail(ErrorCode::kInvalid,
         "socket directory '{}' has mode {:o}, others may enter it; chmod 700 "
         "it or choose another",
         dir, status.st_mode & 0777);
  }
}

void remove_stale_sockets(const std::string& dir) {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(opendir(dir.c_str()), closedir);
  if (!listing) return;
  while (const dirent* entry = readdir(listing.get())) {
    const pid_t pid = pid_in_name(entry->d_name);
    if (pid <= 0 || kill(pid, 0) == 0 || errno != ESRCH) continue;
    // The pid may be alive in another container that shares the directory: it would answer.
    const std::string path = dir + "/" + entry->d_name;
    if (connect_once(new_socket().get(), address_of(path)) == ECONNREFUSED) unlink(path.c_str());
  }
}

Fd listen_at(const std::string& path) {
  const sockaddr_un address = address_of(path);
  Fd socket_fd = new_socket();
  // On Linux the file gets the mode of the descriptor, less the umask: it is never too wide.
  fchmod(socket_fd.get(), 0600);
  if (bind(socket_fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(path.c_str(), 0600) != 0 || listen(socket_fd.get(), kListenBacklog) != 0) {
    fail(ErrorCode::kInvalid, "listening at '{}': {}", path, std::strerror(errno));
  }
  return socket_fd;
}

Fd connect_to(const std::string& path, uint32_t timeout_ms) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  const sockaddr_un address = address_of(path);
  Fd socket_fd = new_socket();
  for (;;) {
    const int error = connect_once(socket_fd.get(), address);
    if (error == 0) return socket_fd;
    if (error == ENOENT || error == ECONNREFUSED) {
      fail(ErrorCode::kUnavailable,
           "no server at '{}' ({}); is it running, and is its directory the same here (a container "
           "has a /tmp of its own)? If not, set PHUB_TRANSPORT=tcp for all ranks",
           path, std::strerror(error));
    }
    if (error == EACCES || error == EPERM) {
      fail(ErrorCode::kUnauthorized,
           "'{}': {}; run the worker as the server's user, or set PHUB_TRANSPORT=tcp for all ranks",
           path, std::strerror(error));
    }
    if (error != EAGAIN && error != EINTR) fail_system(fmt::format("connect to '{}'", path), error);
    if (Clock::now() >= deadline) {
      fail(ErrorCode::kTimeout, "'{}': the server has accepted no connection for {} ms", path,
           timeout_ms);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

ShmPeer peer_of(int socket) {
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return {};
  return {credentials.pid, credentials.uid};
}

Fd open_peer(int socket) {
  constexpr int kPeerPidfd = 77;  // SO_PEERPIDFD, since Linux 6.5: it cannot name another process
  int fd = -1;
  socklen_t size = sizeof(fd);
  if (getsockopt(socket, SOL_SOCKET, kPeerPidfd, &fd, &size) == 0) return Fd(fd);
  const ShmPeer peer = peer_of(socket);
  if (peer.pid <= 0) return {};
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

}  // namespace phub
