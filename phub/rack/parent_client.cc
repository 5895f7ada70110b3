#include "phub/rack/parent_client.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

#include "phub/background.h"
#include "transport/beside/transport.h"
#include "transport/control/control_client.h"
#include "transport/control/server_address.h"
#include "transport/error.h"
#include "transport/fd.h"
#include "transport/network/connect.h"
#include "transport/paced/transport.h"
#include "transport/tcp/transport.h"

namespace phub {
namespace {

constexpr uint32_t kConnectMs = 10000;
constexpr uint32_t kJoinMs = 60000;  // it plans, and makes memory

// For a token that may see its own job only.
std::string transport_of_job(ControlClient& client, const std::string& job) {
  try {
    return client.job_status(job, kConnectMs).transport;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    return "tcp";  // it does not exist yet
  }
}

// As workers choose (worker/link/connect.h), but for shared memory, which is for workers alone.
std::string choose_for_auto(ControlClient& client, const std::string& job) {
  ServerStatus status;
  try {
    status = client.status(kConnectMs);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnauthorized) throw;
    return transport_of_job(client, job);
  }
  const auto at = std::ranges::find(status.jobs, job, &JobStatus::name);
  if (at != status.jobs.end()) return at->transport;
  return choose_network(status.transports);
}

// Another rack may have created the job meanwhile: then it is joined over what that has chosen.
JoinReply join_by_auto(ControlClient& client, JoinRequest request, uint32_t timeout_ms) {
  request.transport = choose_for_auto(client, request.spec.name);
  for (;;) {
    try {
      return client.join(request, timeout_ms);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kMismatch) throw;
      const std::string now = choose_for_auto(client, request.spec.name);
      if (now == request.transport) throw;
      request.transport = now;
    }
  }
}

}  // namespace

// A connection to the parent, and the thread that asks over it, one call after another.
class ParentClient::Lane {
 public:
  explicit Lane(const Options& options)
      : client_(options.server, options.token, options.tls),
        thread_([this](const std::stop_token& stop) {
          pthread_setname_np(pthread_self(), "phub-parent");
          work(stop);
        }) {}
  ~Lane() { stop(); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void run(std::function<void(ControlClient&)> call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    changed_.notify_all();
  }
  void stop() {
    thread_.request_stop();
    client_.cancel();
  }
  bool has_ended() const { return ended_; }

 private:
  void work(const std::stop_token& stop) {
    for (;;) {
      std::function<void(ControlClient&)> call;
      {
        std::unique_lock lock(mutex_);
        if (!changed_.wait(lock, stop, [this] { return !calls_.empty(); })) break;
        call = std::move(calls_.front());
        calls_.pop_front();
      }
      call(client_);
    }
    ended_ = true;
  }

  ControlClient client_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable_any changed_;
  std::deque<std::function<void(ControlClient&)>> calls_;
  std::atomic<bool> ended_ = false;
  std::jthread thread_;  // last
};

ParentClient::ParentClient(Options options)
    : options_(std::move(options)), event_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (event_fd_ < 0) fail_system("eventfd", errno);
  if (options_.nic_bytes_per_s > 0) {
    shares_.emplace(NicBudget{.bytes_per_s = options_.nic_bytes_per_s});
  }
  static_cast<void>(ControlClient(options_.server, options_.token, options_.tls));  // is it one?
}

ParentClient::~ParentClient() {
  for (auto& [name, lane] : lanes_) lane->stop();
  lanes_.clear();
  over_.clear();
  close(event_fd_);
}

ParentClient::Lane& ParentClient::lane(const std::string& name) {
  std::unique_ptr<Lane>& lane = lanes_[name];
  if (!lane) lane = std::make_unique<Lane>(options_);
  return *lane;
}

void ParentClient::answer(Call reply) {
  {
    const std::lock_guard lock(mutex_);
    answers_.push_back(std::move(reply));
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(event_fd_, &one, sizeof one);
}

void ParentClient::poll() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = read(event_fd_, &count, sizeof count);
  std::vector<Call> answers;
  {
    const std::lock_guard lock(mutex_);
    answers.swap(answers_);
  }
  for (const Call& call : answers) call();
  std::erase_if(over_, [](const std::unique_ptr<Lane>& lane) { return lane->has_ended(); });
}

template <typename T, typename Ask>
void ParentClient::call(const std::string& lane_name, Ask ask, Reply<T> reply) {
  lane(lane_name).run(
      [this, ask = std::move(ask), reply = std::move(reply)](ControlClient& client) {
        Result<T> result(ErrorCode::kInternal, "");
        const std::optional<Error> failed = error_of([&] { result = Result<T>(ask(client)); });
        if (failed) result = Result<T>(failed->code(), failed->what());
        answer([reply, result = std::move(result)]() mutable { reply(std::move(result)); });
      });
}

// It has a thread of its own, as it knows no rank yet.
void ParentClient::join(JoinRequest request, Reply<JoinReply> reply) {
  const std::string name = fmt::format("join {}", joins_++);
  const uint32_t timeout_ms = kJoinMs + request.spec.join_limit_ms;
  call<JoinReply>(
      name,
      [request = std::move(request), timeout_ms](ControlClient& client) {
        return request.transport == "auto" ? join_by_auto(client, request, timeout_ms)
                                           : client.join(request, timeout_ms);
      },
      [this, name, reply = std::move(reply)](Result<JoinReply> result) {
        auto lane = lanes_.extract(name);
        lane.mapped()->stop();
        over_.push_back(std::move(lane.mapped()));
        reply(std::move(result));
      });
}

namespace {

std::string lane_of(const Credential& who, std::string_view what) {
  return fmt::format("{} {} of {}", what, who.incarnation, who.job);
}

}  // namespace

#define PHUB_CALL(name, Answer, ...)                                                         \
  void ParentClient::name(const Credential& who, Reply<Answer> reply, uint32_t timeout_ms) { \
    call<Answer>(                                                                            \
        lane_of(who, calls::name.lane),                                                      \
        [who, timeout_ms](ControlClient& client) { return client.name(who, timeout_ms); },   \
        std::move(reply));                                                                   \
  }
#define PHUB_REQUEST(name, Request, Answer, ...)                                              \
  void ParentClient::name(const Credential& who, const Request& request, Reply<Answer> reply, \
                          uint32_t timeout_ms) {                                              \
    call<Answer>(                                                                             \
        lane_of(who, calls::name.lane),                                                       \
        [who, request, timeout_ms](ControlClient& client) {                                   \
          return client.name(who, request, timeout_ms);                                       \
        },                                                                                    \
        std::move(reply));                                                                    \
  }
#include "transport/control/calls.def"

void ParentClient::send_part(const Credential& who, const PartPiece& place, std::string piece,
                             Reply<Done> reply) {
  call<Done>(
      lane_of(who, "parts"),
      [who, place, piece = std::move(piece)](ControlClient& client) {
        client.send_part(who, place, piece);
        return Done{};
      },
      std::move(reply));
}

void ParentClient::restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                                 Reply<PartBytes> reply) {
  call<PartBytes>(
      lane_of(who, "parts"),
      [who, whose, offset](ControlClient& client) {
        return PartBytes{client.restored_part(who, whose, offset)};
      },
      std::move(reply));
}

void ParentClient::read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) {
  call<PartBytes>(
      lane_of(who, "state"),
      [who, offset](ControlClient& client) { return PartBytes{client.read_state(who, offset)}; },
      std::move(reply));
}

void ParentClient::write_state(const Credential& who, uint64_t offset, std::string piece,
                               Reply<Done> reply) {
  call<Done>(
      lane_of(who, "state"),
      [who, offset, piece = std::move(piece)](ControlClient& client) {
        client.write_state(who, offset, piece);
        return Done{};
      },
      std::move(reply));
}

void ParentClient::forget(const Credential& who) {
  for (const char* what : {"lease", "barrier", "calls", "parts", "state"}) {
    auto lane = lanes_.extract(lane_of(who, what));
    if (lane.empty()) continue;
    lane.mapped()->stop();
    over_.push_back(std::move(lane.mapped()));
  }
}

std::unique_ptr<WorkerLink> ParentClient::connect(const Offer& offer, const LinkLayout& layout) {
  auto link = connect_unpaced(offer, layout);
  return shares_ ? make_paced(std::move(link), layout, *shares_) : std::move(link);
}

std::unique_ptr<WorkerLink> ParentClient::connect_unpaced(const Offer& offer,
                                                          const LinkLayout& layout) const {
  const bool may_be_near = options_.transport == "auto";
  const std::string& transport = may_be_near ? offer.transport : options_.transport;
  if (transport == "tcp") {
    return connect_tcp(offer, layout, kConnectMs,
                       {.host = parse_server_address(options_.server).host, .tls = options_.tls},
                       may_be_near);
  }
  const auto network = [&transport](const Offer& part, const LinkLayout& of,
                                    std::unique_ptr<LinkArrays> arrays) {
    return connect_network(transport, part, of, kConnectMs, std::move(arrays));
  };
  return may_be_near ? connect_beside(offer, layout, kConnectMs, network)
                     : network(offer, layout, nullptr);
}

}  // namespace phub
