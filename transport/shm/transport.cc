// The listening side: a Unix socket of this user.
#include "transport/shm/transport.h"

#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "transport/sealed_memory.h"
#include "transport/shm/box.h"
#include "transport/shm/format.h"
#include "transport/shm/socket.h"
#include "transport/socket_transport.h"
#include "transport/text.h"

namespace phub {
namespace {

std::string new_socket_path(const std::string& dir) {
  uint64_t random = 0;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
    fail_system("getrandom of a socket name", errno);
  }
  return fmt::format("{}/phub-{}-{:016x}.sock", dir, getpid(), random);
}

// "huge pages", or why not.
std::string describe_pages() {
  constexpr const char* kSetting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
  const std::string line = first_line(kSetting);
  for (const char* word : {"[always]", "[within_size]", "[advise]", "[force]"}) {
    if (line.find(word) != std::string::npos) return "huge pages";
  }
  return fmt::format("{}-byte pages (huge ones: echo advise > {})", page_bytes(), kSetting);
}

class ShmTransport final : public SocketTransport {
 public:
  explicit ShmTransport(const ShmOptions& options);
  ~ShmTransport() override { unlink(address_.c_str()); }

  std::string_view name() const override { return "shm"; }
  std::string describe() const override {
    return fmt::format("shm: {}, {}", address_, describe_pages());
  }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override {
    return std::make_unique<ShmBoxLink>(admissions_, address_, layout);
  }
  bool shares_memory() const override { return true; }

 private:
  void check_peer(int socket) const override;
  std::string describe_peer(int socket) const override {
    return fmt::format("of process {}", peer_of(socket).pid);
  }
  // A message comes as a whole. One byte more than a hello shows one that is too long.
  size_t missing(std::span<const std::byte> so_far) const override {
    return so_far.empty() ? sizeof(ShmHello) + 1 : 0;
  }
  void welcome(std::span<const std::byte> hello, Fd& socket) override;
  void send_refusal(int socket, ErrorCode code, const std::string& reason) const override {
    send_message(socket, make_shm_refusal(code, reason));
  }

  std::string address_;
};

ShmTransport::ShmTransport(const ShmOptions& options)
    : SocketTransport(options.half_open_ms, options.max_half_open) {
  const std::string dir = options.socket_dir.empty() ? default_socket_dir() : options.socket_dir;
  prepare_socket_dir(dir);
  remove_stale_sockets(dir);
  const std::string path = new_socket_path(dir);
  Fd listener = listen_at(path);
  address_ = path;
  listen(std::move(listener));
}

void ShmTransport::check_peer(int socket) const {
  const uid_t uid = peer_of(socket).uid;
  if (uid == geteuid() || uid == 0) return;
  fail(ErrorCode::kUnauthorized, "user {} may not use the server of user {}", uid, geteuid());
}

void ShmTransport::welcome(std::span<const std::byte> message, Fd& socket) {
  const ShmHello hello = parse_shm_hello(message);
  Incarnation& incarnation = admissions_.find_ticket({hello.ticket.data(), hello.ticket.size()});
  static_cast<ShmBoxLink&>(*incarnation.link)
      .welcome(static_cast<ShmIncarnation&>(incarnation), socket);
}

}  // namespace

std::string default_socket_dir() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && runtime[0] == '/') return std::string(runtime) + "/phub";
  return fmt::format("/tmp/phub-{}", geteuid());
}

std::unique_ptr<Transport> make_shm_transport(const ShmOptions& options) {
  return std::make_unique<ShmTransport>(options);
}

}  // namespace phub
