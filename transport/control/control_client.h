// The control port's calls, typed. One thread at a time; cancel() from any thread. An answer that
// is an error is thrown as Error with the server's code and message; further errors as in
// HttpClient.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/control/calls.h"
#include "transport/control/http_client.h"
#include "transport/control/shard_messages.h"

namespace phub {

class ControlClient {
 public:
  // `token` is for a server that asks for one. Calls with a credential show its ticket instead.
  explicit ControlClient(const std::string& server, std::string token = {},
                         ClientTls tls = client_tls_from_environment())
      : http_(server, token, std::move(tls)), token_(std::move(token)) {}

  // The calls of calls.def, by their names. `who` replaces the sender that the request names.
#define PHUB_CALL(name, Answer, ...) \
  Answer name(const Credential& who, uint32_t timeout_ms = calls::name.timeout_ms);
#define PHUB_REQUEST(name, Request, Answer, ...) \
  Answer name(const Credential& who, Request request, uint32_t timeout_ms = calls::name.timeout_ms);
#include "transport/control/calls.def"

  // Waits for other ranks: the limit should be above the job's. 0: no limit.
  JoinReply join(const JoinRequest& request, uint32_t timeout_ms);
  LossPage losses(const std::string& job, uint64_t from, uint32_t timeout_ms = kCallMs);
  // A piece of the rank's part of a checkpoint, 1 to kPartPieceBytes; pieces go in their order.
  // Returns when it is in its file. kNotFound: no checkpoint of that round is being taken; kTaken:
  // it was sent already.
  void send_part(const Credential& who, const PartPiece& place, std::string_view piece,
                 uint32_t timeout_ms = kLongCallMs);
  // A piece of the rank's part of the checkpoint that it goes on from; for a rack, of the part of
  // one of its ranks. kNotFound: there is none.
  std::string restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                            uint32_t timeout_ms = kLongCallMs);
  // The bytes of a state that was begun, a piece at a time: those from `offset` on.
  std::string read_state(const Credential& who, uint64_t offset, uint32_t timeout_ms = kLongCallMs);
  void write_state(const Credential& who, uint64_t offset, std::string_view piece,
                   uint32_t timeout_ms = kLongCallMs);
  // All pages. Throws Error(kFull) when the server has dropped the first ones.
  std::vector<LogRecord> log(const std::string& job, uint32_t timeout_ms = kCallMs);
  LogPage log_page(const std::string& job, uint64_t from, uint32_t timeout_ms = kCallMs);
  void remove(const std::string& job, uint32_t timeout_ms = kCallMs);
  ServerStatus status(uint32_t timeout_ms = kCallMs);
  void ping(uint32_t timeout_ms);  // returns when the server answers
  JobStatus job_status(const std::string& job, uint32_t timeout_ms = kCallMs);

  // Of a box that serves under the server.
  ShardWelcome join_shard(const ShardHello& hello, uint32_t timeout_ms = kCallMs);
  ShardOrders mail(uint64_t shard, const ShardMail& mail, uint32_t timeout_ms = kCallMs);
  // A piece of what the shard has of a checkpoint, or of the state of keys: up to kCopyPieceBytes.
  std::string read_copy(uint64_t shard, const CopyPlace& place, uint32_t timeout_ms = kCallMs);
  void write_copy(uint64_t shard, const CopyPlace& place, std::string_view piece,
                  uint32_t timeout_ms = kCallMs);

  void cancel() { http_.cancel(); }
  std::string reached() const { return http_.reached(); }  // as HttpClient has it

 private:
  template <typename Answer, typename Request>
  Answer ask(const CallInfo& call, const Credential& who, const Request& request,
             uint32_t timeout_ms);
  std::string call(std::string_view method, const std::string& job, std::string_view action,
                   std::string_view bearer, std::string_view body, uint32_t timeout_ms,
                   std::string_view content_type = kJsonType);

  HttpClient http_;
  const std::string token_;
};

}  // namespace phub
