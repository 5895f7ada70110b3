// How fast plain TCP sockets on this machine move bytes in the pattern of an exchange: every worker
// process sends its gradient to one server process, whose threads send a chunk back to all workers
// once they have it from all. Nothing is summed: what comes back is rank 0's gradient. This is the
// limit of any server over loopback TCP; one line of JSON.
//
//   sockets_floor BYTES WORKERS THREADS ROUNDS [WRITE_BYTES [BUFFER_BYTES]]
//
// A worker has one connection to every thread of the server and uses all of them in both directions
// at once. A system call writes up to WRITE_BYTES (default 1 MiB: as much as the socket takes), the
// sockets' buffers are of BUFFER_BYTES (default 256 KiB; 0: as the kernel sees fit).
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "bench/peers.h"
#include "bench/zerocompute/checker.h"
#include "bench/zerocompute/gradients.h"
#include "bench/zerocompute/measures.h"
#include "bench/zerocompute/shared.h"
#include "transport/error.h"
#include "worker/examples/processes.h"

namespace phub {
namespace {

constexpr size_t kChunkBytes = 32768;
constexpr size_t kReadBytes = 256 * 1024;
constexpr uint64_t kWarmup = 3;

struct Options {
  uint64_t bytes = 0, workers = 0, threads = 0, rounds = 0;
  uint64_t write_bytes = 1 << 20, buffer_bytes = 256 * 1024;
};

[[noreturn]] void give_up(const char* what) {
  std::fprintf(stderr, "sockets_floor: %s: %s\n", what, std::strerror(errno));
  _exit(1);
}

// Whole elements, in equal shares.
std::pair<size_t, size_t> share_of(const Options& o, uint64_t thread) {
  const uint64_t elements = o.bytes / sizeof(float);
  return {elements * thread / o.threads * sizeof(float),
          elements * (thread + 1) / o.threads * sizeof(float)};
}

int new_socket(const Options& o) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) give_up("socket");
  const int one = 1, bytes = static_cast<int>(o.buffer_bytes);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  // BBR, the default of some kernels, paces packets even on loopback.
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
  if (bytes > 0) {
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  }
  return fd;
}

// Listens on a port of the kernel's choice, which goes into `where`.
int listen_on_loopback(const Options& o, sockaddr_in& where) {
  const int fd = new_socket(o);
  where = {};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof where;
  if (bind(fd, reinterpret_cast<sockaddr*>(&where), length) != 0 || listen(fd, 512) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&where), &length) != 0) {
    give_up("listening on 127.0.0.1");
  }
  return fd;
}

// A connection, and the positions of its streams in both directions, over all rounds.
struct Stream {
  int fd = -1;
  bool readable = false, writable = false;  // as last reported by epoll (edge-triggered)
  uint64_t received = 0, sent = 0;
};

// Sends [stream.sent, limit) of `memory`, which repeats, and receives up to `receive_limit`, with
// one system call each. False: there was nothing to do, or the calls would have blocked.
bool send_some(const Options& o, Stream& stream, std::span<const std::byte> memory,
               uint64_t limit) {
  if (!stream.writable || stream.sent == limit) return false;
  const size_t at = stream.sent % memory.size();
  const size_t n = std::min({limit - stream.sent, memory.size() - at, o.write_bytes});
  const ssize_t done = send(stream.fd, memory.data() + at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (done < 0 && errno != EAGAIN) give_up("send");
  stream.writable = done == static_cast<ssize_t>(n);
  stream.sent += static_cast<uint64_t>(std::max<ssize_t>(done, 0));
  return done > 0;
}

bool receive_some(Stream& stream, std::span<std::byte> memory, uint64_t limit) {
  if (!stream.readable || stream.received == limit) return false;
  const size_t at = stream.received % memory.size();
  const size_t n = std::min({limit - stream.received, memory.size() - at, kReadBytes});
  const ssize_t done = recv(stream.fd, memory.data() + at, n, MSG_DONTWAIT);
  if (done == 0) return false;  // the other side has closed
  if (done < 0 && errno != EAGAIN) give_up("recv");
  stream.readable = done == static_cast<ssize_t>(n);
  stream.received += static_cast<uint64_t>(std::max<ssize_t>(done, 0));
  return done > 0;
}

class Poller {
 public:
  void add(Stream& stream) {
    epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                      .data = {.ptr = &stream}};
    if (epoll_ctl(fd_, EPOLL_CTL_ADD, stream.fd, &event) != 0) give_up("epoll_ctl");
  }
  // Sleeps until something changes. False when a connection was closed.
  bool wait() {
    epoll_event events[64];
    const int n = epoll_wait(fd_, events, 64, -1);
    for (int i = 0; i < n; ++i) {
      Stream& stream = *static_cast<Stream*>(events[i].data.ptr);
      stream.readable |= (events[i].events & EPOLLIN) != 0;
      stream.writable |= (events[i].events & EPOLLOUT) != 0;
      if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) return false;
    }
    return true;
  }

 private:
  int fd_ = epoll_create1(EPOLL_CLOEXEC);
};

// A thread of the server: its share of every worker's gradient, until a worker leaves.
void serve(const Options& o, int listener, size_t share_bytes) {
  std::vector<Stream> streams(o.workers);
  std::vector<std::vector<std::byte>> slots(o.workers, std::vector<std::byte>(share_bytes));
  Poller poller;
  for (uint64_t i = 0; i < o.workers; ++i) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    uint32_t rank = 0;
    if (fd < 0 || recv(fd, &rank, sizeof rank, MSG_WAITALL) != sizeof rank) give_up("accept");
    streams[rank].fd = fd;
    poller.add(streams[rank]);
  }
  while (poller.wait()) {
    for (bool progress = true; progress;) {
      progress = false;
      uint64_t least = UINT64_MAX;
      for (uint64_t w = 0; w < o.workers; ++w) {
        progress |= receive_some(streams[w], slots[w], UINT64_MAX);
        least = std::min(least, streams[w].received);
      }
      const uint64_t of_round = least % share_bytes;
      const uint64_t complete = least - of_round % kChunkBytes;
      for (Stream& stream : streams) {
        while (send_some(o, stream, slots[0], complete)) progress = true;
      }
    }
  }
}

int run_server(const Options& o, const std::vector<int>& listeners) {
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < o.threads; ++t) {
    const auto [begin, end] = share_of(o, t);
    threads.emplace_back(serve, o, listeners[t], end - begin);
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

// A round of a worker: sends its gradient, and receives as much.
void exchange(const Options& o, Poller& poller, std::vector<Stream>& streams,
              std::span<std::byte> gradient, std::span<std::byte> result, uint64_t round) {
  for (bool done = false; !done;) {
    done = true;
    bool progress = false;
    for (uint64_t t = 0; t < o.threads; ++t) {
      const auto [begin, end] = share_of(o, t);
      const uint64_t limit = (end - begin) * round;
      progress |= send_some(o, streams[t], gradient.subspan(begin, end - begin), limit);
      progress |= receive_some(streams[t], result.subspan(begin, end - begin), limit);
      done &= streams[t].received == limit;
    }
    if (!done && !progress && !poller.wait()) give_up("the server has closed a connection");
  }
}

int run_worker(const Options& o, SharedCase& shared, const std::vector<sockaddr_in>& server,
               uint32_t rank) {
  Poller poller;
  std::vector<Stream> streams(o.threads);
  for (uint64_t t = 0; t < o.threads; ++t) {
    streams[t].fd = new_socket(o);
    if (connect(streams[t].fd, reinterpret_cast<const sockaddr*>(&server[t]), sizeof server[t]) !=
            0 ||
        send(streams[t].fd, &rank, sizeof rank, MSG_NOSIGNAL) != sizeof rank) {
      give_up("connect");
    }
    poller.add(streams[t]);
  }
  std::vector<std::byte> gradient(o.bytes), result(o.bytes);
  WorkerSlot& slot = shared.slots()[rank];
  SharedHead& head = shared.head();
  const Checker checker({.ranks = 1, .elements = o.bytes / sizeof(float)}, {});
  for (uint64_t round = 1; round <= kWarmup + o.rounds; ++round) {
    fill_gradients(rank, round, 0, o.bytes / sizeof(float), kernels::DType::kF32, gradient.data());
    head.workers.wait();
    slot.start_ns = monotonic_ns();
    exchange(o, poller, streams, gradient, result, round);
    slot.end_ns = monotonic_ns();
    head.workers.wait();
    if (rank == 0 && round > kWarmup) {
      int64_t start = INT64_MAX, end = INT64_MIN;
      for (const WorkerSlot& each : shared.slots()) {
        start = std::min(start, each.start_ns);
        end = std::max(end, each.end_ns);
      }
      shared.round_us()[head.recorded++] = static_cast<double>(end - start) / 1e3;
    }
    slot.wrong += checker.check(round, 0, o.bytes / sizeof(float), result.data()).count;
  }
  head.workers.wait();
  return 0;
}

int measure(const Options& o) {
  std::vector<int> listeners;
  std::vector<sockaddr_in> addresses(o.threads);
  for (sockaddr_in& address : addresses) listeners.push_back(listen_on_loopback(o, address));
  SharedCase shared(static_cast<uint32_t>(o.workers), 0, 0);
  Child server([&] { return run_server(o, listeners); }, SIGKILL);
  std::vector<Child> workers;
  workers.reserve(o.workers);
  for (uint32_t rank = 0; rank < o.workers; ++rank) {
    workers.emplace_back([&, rank] { return run_worker(o, shared, addresses, rank); }, SIGKILL);
  }
  for (Child& worker : workers) {
    worker.wait(-1);
    if (!worker.ended()->empty()) fail(ErrorCode::kInternal, "a worker: {}", *worker.ended());
  }
  uint64_t wrong = 0;
  for (const WorkerSlot& slot : shared.slots()) wrong += slot.wrong;
  print_line({{"workers", o.workers},
              {"bytes", o.bytes},
              {"rounds", o.rounds},
              {"threads", o.threads},
              {"wrong", wrong},
              {"write_bytes", o.write_bytes}},
             shared.round_us().first(shared.head().recorded));
  return wrong == 0 ? 0 : 1;
}

int main_of(int argc, char** argv) {
  Options o;
  if (argc < 5 || argc > 7 || !parse(argv[1], 4096, 1ull << 36, o.bytes) || o.bytes % 4 != 0 ||
      !parse(argv[2], 1, 512, o.workers) || !parse(argv[3], 1, 64, o.threads) ||
      !parse(argv[4], 1, kMaxRounds, o.rounds) ||
      (argc > 5 && !parse(argv[5], 1, 1ull << 30, o.write_bytes)) ||
      (argc > 6 && !parse(argv[6], 0, 1ull << 30, o.buffer_bytes))) {
    std::fprintf(stderr,
                 "usage: sockets_floor BYTES WORKERS THREADS ROUNDS [WRITE_BYTES "
                 "[BUFFER_BYTES]]\n");
    return 2;
  }
  try {
    return measure(o);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sockets_floor: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) { return phub::main_of(argc, argv); }
