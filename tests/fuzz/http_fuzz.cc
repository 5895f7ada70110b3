// The control port's connections: the input is what a client sends before it closes its side.
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "phub/control/session.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

constexpr size_t kMaxInputBytes = 64u << 10;  // fits into the socket's buffer

// Some answers come at once, some later, some after the client has gone.
class Handler : public ControlHandler {
 public:
  void check_part(const Credential& /*who*/, const PartPiece& /*place*/,
                  uint64_t /*bytes*/) override {}
  void take_part(const Credential& /*who*/, const PartPiece& /*place*/, std::string /*piece*/,
                 std::shared_ptr<void> /*charge*/, Reply<Done> reply) override {
    reply(Done{});
  }
  void restored_part(const Credential& /*who*/, uint32_t /*whose*/, uint64_t /*offset*/,
                     Reply<PartBytes> reply) override {
    reply(PartBytes{"part"});
  }
  void begin_state(const Credential& /*who*/, const StateRequest& /*request*/,
                   Reply<StateReply> reply) override {
    reply(StateReply{});
  }
  void read_state(const Credential& /*who*/, uint64_t /*offset*/, Reply<PartBytes> reply) override {
    reply(PartBytes{"piece"});
  }
  void check_state_piece(const Credential& /*who*/, uint64_t /*offset*/,
                         uint64_t /*bytes*/) override {}
  void write_state(const Credential& /*who*/, uint64_t /*offset*/, std::string /*piece*/,
                   std::shared_ptr<void> /*charge*/, Reply<Done> reply) override {
    reply(Done{});
  }
  void apply_state(const Credential& /*who*/, Reply<HyperReply> reply) override {
    reply(HyperReply{});
  }
  void end_state(const Credential& /*who*/, Reply<Done> reply) override { reply(Done{}); }
  void checkpoint(const Credential& /*who*/, const CheckpointRequest& request,
                  Reply<CheckpointReply> reply) override {
    reply(CheckpointReply{.round = request.round});
  }
  explicit Handler(boost::asio::io_context& io) : io_(io) {}

  void join(JoinRequest request, Reply<JoinReply> reply) override {
    JoinReply answer;
    answer.offer.ticket = "t";
    answer.spec = std::move(request.spec);
    boost::asio::post(io_, [reply = std::move(reply), answer] { reply(answer); });
  }
  void heartbeat(const Credential& who, Reply<Pulse> reply) override {
    PHUB_CHECK(!who.job.empty() && !who.ticket.empty() && who.rank < kMaxRanks);
    reply(Pulse{});
  }
  void leave(const Credential& who, Reply<Done>) override {
    fail(ErrorCode::kFenced, "rank {} was replaced", who.rank);
  }
  void barrier(const Credential&, Reply<Done> reply) override { kept_.push_back(std::move(reply)); }
  void set_hyper(const Credential&, const HyperRequest& request, Reply<HyperReply> reply) override {
    PHUB_CHECK(!request.values.empty());
    reply(HyperReply{request.round});
  }
  void change_branches(const Credential&, const BranchRequest& request,
                       Reply<BranchReply> reply) override {
    PHUB_CHECK(request.turns.size() <= kMostBranchTurns);
    reply(BranchReply{.round = request.round});
  }
  void report_loss(const Credential& who, const LossRequest& report, Reply<Done> reply) override {
    PHUB_CHECK(who.rank == report.rank && std::isfinite(report.loss));
    reply(Done{});
  }
  void remark(const Credential&, const RemarkRequest& request, Reply<Done> reply) override {
    PHUB_CHECK(!request.remark.subject.empty());
    reply(Done{});
  }
  void losses(const std::string& job, uint64_t from, Reply<LossPage> reply) override {
    check_job_name(job);
    reply(LossPage{.latest = from});
  }
  void reconnect(const Credential&, Reply<Offer> reply) override {
    reply({ErrorCode::kFenced, "no"});
  }
  void log(const std::string& job, uint64_t from, Reply<LogPage> reply) override {
    check_job_name(job);
    reply(LogPage{.first = from, .more = false, .records = {}});
  }
  void remove(const std::string& job, Reply<Done> reply) override {
    check_job_name(job);
    boost::asio::post(io_, [reply = std::move(reply)] { reply(Done{}); });
  }
  ServerStatus status() override { return {}; }
  JobStatus job_status(const std::string& job) override { return {.name = job}; }

  bool answer_kept() {
    const auto kept = std::exchange(kept_, {});
    for (const auto& reply : kept) reply(Done{});
    return !kept.empty();
  }

 private:
  boost::asio::io_context& io_;
  std::vector<Reply<Done>> kept_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > kMaxInputBytes) return 0;
  int ends[2];
  PHUB_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  PHUB_CHECK(send(ends[0], data, size, 0) == static_cast<ssize_t>(size));
  shutdown(ends[0], SHUT_WR);

  boost::asio::io_context io;
  Handler handler(io);
  const auto shared = std::make_shared<HttpShared>();
  shared->handler = &handler;
  boost::asio::ip::tcp::socket socket(io);
  socket.assign(boost::asio::ip::tcp::v4(), ends[1]);
  std::make_shared<HttpSession>(std::move(socket), HttpPeer{}, shared)->start();
  do {  // everything has been sent: it ends with the connection, or waits for an answer
    io.restart();
    io.run();
  } while (handler.answer_kept());
  PHUB_CHECK(shared->sessions.empty());
  PHUB_CHECK(shared->long_body_bytes == 0);
  close(ends[0]);
  return 0;
}
