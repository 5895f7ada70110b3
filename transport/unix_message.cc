#include "transport/unix_message.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "transport/error.h"

namespace phub {

int send_message(int socket, std::span<const std::byte> message, std::span<const int> fds) {
  iovec part = {const_cast<std::byte*>(message.data()), message.size()};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(kMostMessageFds * sizeof(int))] = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    PHUB_CHECK(fds.size() <= kMostMessageFds);
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  }
  for (;;) {
    if (sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return 0;
    if (errno != EINTR) return errno;
  }
}

UnixMessage receive_message(int socket, size_t max_bytes, size_t max_fds) {
  PHUB_CHECK(max_fds <= kMostMessageFds);
  UnixMessage received;
  received.bytes.resize(max_bytes);
  iovec part = {received.bytes.data(), max_bytes};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(kMostMessageFds * sizeof(int))];
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = CMSG_SPACE(max_fds * sizeof(int));
  ssize_t bytes = -1;
  do {
    bytes = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) received.error = errno;
  received.bytes.resize(bytes < 0 ? 0 : static_cast<size_t>(bytes));
  if (bytes < 0) return received;

  // Every descriptor that came is owned from here on, wanted or not.
  for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
      received.fds.emplace_back(fd);
    }
  }
  // The kernel drops descriptors that it has no room for in this process.
  if ((header.msg_flags & MSG_CTRUNC) != 0) received.error = EMFILE;
  if ((header.msg_flags & MSG_TRUNC) != 0) received.error = EMSGSIZE;
  return received;
}

}  // namespace phub
