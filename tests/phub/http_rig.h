// A control port on loopback with a handler that records what reaches it, and a raw client.
#pragma once

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "phub/control/handler.h"
#include "phub/control/port.h"
#include "transport/text.h"

namespace phub {

// Answers at once, except for barrier, which waits until it is released.
class FakeHandler : public ControlHandler {
 public:
  void join(JoinRequest request, Reply<JoinReply> reply) override;
  void heartbeat(const Credential& who, Reply<Pulse> reply) override;
  void leave(const Credential& who, Reply<Done> reply) override;
  void barrier(const Credential& who, Reply<Done> reply) override;
  void leave_barrier(const Credential& who) override;
  void set_hyper(const Credential& who, const HyperRequest& request,
                 Reply<HyperReply> reply) override;
  void change_branches(const Credential& who, const BranchRequest& request,
                       Reply<BranchReply> reply) override;
  void report_loss(const Credential& who, const LossRequest& report, Reply<Done> reply) override;
  void remark(const Credential& who, const RemarkRequest& request, Reply<Done> reply) override;
  void losses(const std::string& job, uint64_t from, Reply<LossPage> reply) override;
  const JobOwner* owner(const std::string& job) const override {
    const auto at = owners.find(job);
    return at == owners.end() ? nullptr : &at->second;
  }
  void reconnect(const Credential& who, Reply<Offer> reply) override;
  void check_part(const Credential& who, const PartPiece& place, uint64_t bytes) override;
  void take_part(const Credential& who, const PartPiece& place, std::string piece,
                 std::shared_ptr<void> charge, Reply<Done> reply) override;
  void restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                     Reply<PartBytes> reply) override;
  void begin_state(const Credential& who, const StateRequest& request,
                   Reply<StateReply> reply) override;
  void read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) override;
  void check_state_piece(const Credential& who, uint64_t offset, uint64_t bytes) override;
  void write_state(const Credential& who, uint64_t offset, std::string piece,
                   std::shared_ptr<void> charge, Reply<Done> reply) override;
  void apply_state(const Credential& who, Reply<HyperReply> reply) override;
  void end_state(const Credential& who, Reply<Done> reply) override;
  void checkpoint(const Credential& who, const CheckpointRequest& request,
                  Reply<CheckpointReply> reply) override;
  void log(const std::string& job, uint64_t from, Reply<LogPage> reply) override;
  void remove(const std::string& job, Reply<Done> reply) override;
  void connection_ended(const Credential& /*who*/) override { ++ended; }
  ServerStatus status() override;
  JobStatus job_status(const std::string& job) override;

  void release_barrier();

  std::vector<std::string> calls;  // "leave job/rank/incarnation/ticket"
  std::vector<Reply<Done>> waiting;
  std::string topology = "fake";  // of the status
  int status_calls = 0;
  int ended = 0;  // connections with heartbeats
  std::map<std::string, JobOwner> owners;
  Caller joined_as;
  std::function<void(JoinReply&)> change_join;  // what a join is answered with
  ErrorCode leave_code = ErrorCode::kInternal;  // leave fails with this unless kInternal
  std::map<uint64_t, std::string> parts;        // by round
  std::function<void()> check;                  // of a part

 private:
  void record(std::string_view name, const Credential& who);
};

// The control thread. Calls into handler and server go through on_control().
class HttpRig {
 public:
  explicit HttpRig(HttpOptions options = {}, size_t addresses = 1);
  ~HttpRig();

  template <typename F>
  auto on_control(F f) {
    std::packaged_task<decltype(f())()> task(std::move(f));
    auto result = task.get_future();
    boost::asio::post(io_, [&task] { task(); });
    return result.get();
  }
  // False if it did not come true within some seconds.
  bool eventually(const std::function<bool()>& condition);

  std::string address(size_t i = 0) { return addresses_[i]; }
  size_t connections() {
    return on_control([this] { return server_->connections(); });
  }
  bool has_connections(size_t count) {  // sooner or later
    return eventually([this, count] { return server_->connections() == count; });
  }
  void destroy_server() {
    on_control([this] { server_.reset(); });
  }

  FakeHandler handler;

 private:
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::unique_ptr<HttpServer> server_;
  std::vector<std::string> addresses_;
  std::thread thread_;
};

// A socket without manners.
class RawClient {
 public:
  explicit RawClient(const std::string& address);
  ~RawClient();
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  void send(std::string_view text);
  void close();
  void shut();  // says that nothing more comes
  // What has come when `count` answers have ("HTTP/1.1 …", counted), the server has closed, or some
  // seconds have passed.
  std::string answers(size_t count);
  // Until the server closes; "still open" in the end if it does not within limit_ms.
  std::string rest(int limit_ms = 30000);

 private:
  int fd_ = -1;
};

// So many connections, on each of which this is sent.
std::vector<std::unique_ptr<RawClient>> raw_clients(const std::string& address, size_t count,
                                                    std::string_view text = "");

}  // namespace phub
