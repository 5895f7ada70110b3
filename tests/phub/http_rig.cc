#include "tests/phub/http_rig.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "transport/control/message_fields.h"  // the words of a BranchAction

namespace phub {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

void FakeHandler::record(std::string_view name, const Credential& who) {
  calls.push_back(
      fmt::format("{} {}/{}/{}/{}", name, who.job, who.rank, who.incarnation, who.ticket));
}

void FakeHandler::join(JoinRequest request, Reply<JoinReply> reply) {
  calls.push_back(fmt::format("join {} {}", request.spec.name, request.rank));
  joined_as = request.caller;
  if (request.spec.name == "throws") fail(ErrorCode::kFull, "job 'throws' needs 5 GiB");
  JoinReply answer;
  answer.rank = 3;
  answer.incarnation = 7;
  answer.first_round = 12;
  answer.offer = {"shm", "/tmp/socket", "0123456789abcdef0123456789abcdef"};
  answer.layout.key_offset = {0, 64};
  answer.layout.queue_chunks = {{0, 2}, {1}};
  answer.layout.total_elements = 128;
  answer.spec = std::move(request.spec);
  if (change_join) change_join(answer);
  reply(std::move(answer));
}

void FakeHandler::heartbeat(const Credential& who, Reply<Pulse> reply) {
  record("heartbeat", who);
  Pulse pulse;
  pulse.completed_round = 41;
  pulse.missing = {2};
  reply(pulse);
}

void FakeHandler::leave(const Credential& who, Reply<Done> reply) {
  record("leave", who);
  if (leave_code != ErrorCode::kInternal) return reply({leave_code, "as the test says"});
  reply(Done{});
}

void FakeHandler::barrier(const Credential& who, Reply<Done> reply) {
  record("barrier", who);
  waiting.push_back(std::move(reply));
}

void FakeHandler::leave_barrier(const Credential& who) { record("leave_barrier", who); }

void FakeHandler::release_barrier() {
  for (auto& reply : std::exchange(waiting, {})) reply(Done{});
}

void FakeHandler::set_hyper(const Credential& who, const HyperRequest& request,
                            Reply<HyperReply> reply) {
  const auto& [name, value] = *request.values.begin();
  if (who.is_admin) {
    calls.push_back(fmt::format("hyper {} by an admin of life {}", who.job, who.epoch));
  } else {
    record(fmt::format("hyper({}={}@{})", name, value, request.round), who);
  }
  reply(HyperReply{request.round + 1});
}

void FakeHandler::change_branches(const Credential& who, const BranchRequest& request,
                                  Reply<BranchReply> reply) {
  const std::string_view action = word_of(request.action);
  if (who.is_admin) {
    calls.push_back(
        fmt::format("{} branches of {} by an admin of life {}", action, who.job, who.epoch));
    return reply(BranchReply{.runs = {{1, 0}}});
  }
  record(fmt::format("{} branch {} at {}, {} turns", action, request.branch, request.round,
                     request.turns.size()),
         who);
  reply(BranchReply{.round = request.round + 1, .branch = 7, .runs = {{1, 0}}});
}

void FakeHandler::report_loss(const Credential& who, const LossRequest& report, Reply<Done> reply) {
  record(fmt::format("loss {} of {} {}", report.nonfinite ? "nan" : fmt::format("{}", report.loss),
                     report.round, report.name),
         who);
  reply(Done{});
}

void FakeHandler::remark(const Credential& who, const RemarkRequest& request, Reply<Done> reply) {
  record(fmt::format("remark on {}: {}", request.remark.subject, request.remark.text), who);
  reply(Done{});
}

void FakeHandler::losses(const std::string& job, uint64_t from, Reply<LossPage> reply) {
  calls.push_back(fmt::format("losses {} {}", job, from));
  reply(LossPage{.latest = from + 2, .losses = {{.round = from + 1, .branch = 3, .ranks = 2}}});
}

void FakeHandler::reconnect(const Credential& who, Reply<Offer> reply) {
  record("reconnect", who);
  reply(Offer{"tcp", "10.0.0.1:99", "fresh"});
}

void FakeHandler::check_part(const Credential& who, const PartPiece& place, uint64_t bytes) {
  record(fmt::format("check_part of {} {}+{}/{}", place.whose, place.offset, bytes, place.all),
         who);
  if (check) check();
  if (bytes == 0) fail(ErrorCode::kInvalid, "a part has bytes");
}

void FakeHandler::take_part(const Credential& who, const PartPiece& place, std::string piece,
                            std::shared_ptr<void> /*charge*/, Reply<Done> reply) {
  record(
      fmt::format("take_part of {} {}+{}/{}", place.whose, place.offset, piece.size(), place.all),
      who);
  parts[place.round] += piece;
  reply(Done{});
}

void FakeHandler::restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                                Reply<PartBytes> reply) {
  record(fmt::format("restored_part of {} {}", whose, offset), who);
  reply(PartBytes{parts.at(parts.rbegin()->first).substr(offset)});
}

void FakeHandler::begin_state(const Credential& who, const StateRequest& request,
                              Reply<StateReply> reply) {
  record("begin_state", who);
  reply(StateReply{.round = 7, .bytes = 8 * request.keys.size(), .steps = request.steps});
}

void FakeHandler::read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) {
  record("read_state", who);
  reply(PartBytes{parts.at(offset)});
}

void FakeHandler::check_state_piece(const Credential& who, uint64_t /*offset*/, uint64_t bytes) {
  record("check_state_piece", who);
  if (bytes == 0) fail(ErrorCode::kInvalid, "a piece has bytes");
}

void FakeHandler::write_state(const Credential& who, uint64_t offset, std::string piece,
                              std::shared_ptr<void> /*charge*/, Reply<Done> reply) {
  record("write_state", who);
  parts[offset] = std::move(piece);
  reply(Done{});
}

void FakeHandler::apply_state(const Credential& who, Reply<HyperReply> reply) {
  record("apply_state", who);
  reply(HyperReply{9});
}

void FakeHandler::end_state(const Credential& who, Reply<Done> reply) {
  record("end_state", who);
  reply(Done{});
}

void FakeHandler::checkpoint(const Credential& who, const CheckpointRequest& request,
                             Reply<CheckpointReply> reply) {
  record("checkpoint", who);
  reply(CheckpointReply{.round = request.round + 5, .durable = request.round > 0});
}

void FakeHandler::log(const std::string& job, uint64_t from, Reply<LogPage> reply) {
  calls.push_back(fmt::format("log {} {}", job, from));
  if (job == "unknown") return reply({ErrorCode::kNotFound, "no job 'unknown'"});
  LogRecord record;
  record.kind = LogRecord::Kind::kLost;
  record.rank = 1;
  record.reason = "lease";
  record.last_rounds = {{0, 4, 9}};
  reply(LogPage{.first = from, .more = from < 2, .records = {record}});  // three pages
}

void FakeHandler::remove(const std::string& job, Reply<Done> reply) {
  calls.push_back("remove " + job);
  reply(Done{});
}

JobStatus FakeHandler::job_status(const std::string& job) {
  if (job != "mnist") fail(ErrorCode::kNotFound, "there is no job '{}'", job);
  calls.push_back("status " + job);
  return {.name = job, .state = "running"};
}

ServerStatus FakeHandler::status() {
  ++status_calls;
  ServerStatus status;
  status.topology = topology;
  status.cores = 2;
  return status;
}

HttpRig::HttpRig(HttpOptions options, size_t addresses) : work_(io_.get_executor()) {
  options.listen.assign(addresses, "127.0.0.1:0");
  server_ = std::make_unique<HttpServer>(io_, handler, std::move(options));
  addresses_ = server_->addresses();
  thread_ = std::thread([this] { io_.run(); });
}

HttpRig::~HttpRig() {
  destroy_server();
  work_.reset();
  thread_.join();  // nothing of the server may keep the loop alive
}

bool HttpRig::eventually(const std::function<bool()>& condition) {
  const auto deadline = steady_clock::now() + milliseconds(60'000);
  while (!on_control(condition)) {
    if (steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

RawClient::RawClient(const std::string& address) {
  const HostPort to = parse_host_port(address);
  fd_ = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(to.port);
  inet_pton(AF_INET, to.host.c_str(), &peer.sin_addr);
  const auto* name = reinterpret_cast<const sockaddr*>(&peer);
  EXPECT_EQ(connect(fd_, name, sizeof peer), 0) << address;
}

RawClient::~RawClient() { close(); }

void RawClient::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void RawClient::shut() { shutdown(fd_, SHUT_WR); }

void RawClient::send(std::string_view text) {
  while (!text.empty()) {
    const ssize_t sent = ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;  // the server has had enough
    text.remove_prefix(static_cast<size_t>(sent));
  }
}

namespace {

size_t count_answers(const std::string& text) {
  size_t count = 0;
  for (size_t at = text.find("HTTP/1.1 "); at != text.npos; at = text.find("HTTP/1.1 ", at + 1)) {
    const size_t body = text.find("\r\n\r\n", at);
    const size_t length = text.find("Content-Length: ", at);
    if (body == text.npos) break;
    const size_t bytes = length < body ? std::stoul(text.substr(length + 16)) : 0;
    if (text.size() < body + 4 + bytes) break;
    ++count;
  }
  return count;
}

// Reads until `enough` or the end. Appends "still open" when the time is over.
std::string read_until(int fd, int limit_ms,
                       const std::function<bool(const std::string&)>& enough) {
  const auto deadline = steady_clock::now() + milliseconds(limit_ms);
  std::string text;
  while (!enough(text)) {
    const auto left =
        std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now()).count();
    pollfd wait{fd, POLLIN, 0};
    if (left <= 0 || poll(&wait, 1, static_cast<int>(left)) <= 0) return text + "still open";
    char buffer[16384];
    const ssize_t got = recv(fd, buffer, sizeof buffer, 0);
    if (got <= 0) break;
    text.append(buffer, static_cast<size_t>(got));
  }
  return text;
}

}  // namespace

std::string RawClient::answers(size_t count) {
  return read_until(fd_, 30000,
                    [&](const std::string& text) { return count_answers(text) >= count; });
}

std::string RawClient::rest(int limit_ms) {
  return read_until(fd_, limit_ms, [](const std::string&) { return false; });
}

std::vector<std::unique_ptr<RawClient>> raw_clients(const std::string& address, size_t count,
                                                    std::string_view text) {
  std::vector<std::unique_ptr<RawClient>> clients;
  for (size_t i = 0; i < count; ++i) {
    clients.push_back(std::make_unique<RawClient>(address));
    clients.back()->send(text);
  }
  return clients;
}

}  // namespace phub
