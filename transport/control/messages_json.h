// The control messages as JSON text. Decoding throws Error(kInvalid) with the path of what is
// wrong: unknown, repeated and missing fields, wrong types, numbers out of range, lists that are
// too long. Encoding throws Error(kInvalid) on text that is not UTF-8 and on numbers that are not
// finite. Fields that have their default value are left out. Pure functions, any thread.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/control/branch_messages.h"
#include "transport/control/loss_messages.h"
#include "transport/control/messages.h"
#include "transport/control/state_messages.h"

namespace phub {

using HyperValues = std::map<std::string, double>;

std::string to_json(const JobSpec& spec);
JobSpec parse_job_spec(std::string_view text);

// Also throws if the spec does not pass validate(), or the rank is below -1.
std::string to_json(const JoinRequest& request);
JoinRequest parse_join_request(std::string_view text);

std::string to_json(const JoinReply& reply);
JoinReply parse_join_reply(std::string_view text);

std::string to_json(const Offer& offer);
Offer parse_offer(std::string_view text);

// Rank and incarnation only: the job is in the path, the ticket in the Authorization header.
std::string to_json(const Credential& who);
Credential parse_credential(std::string_view text);

std::string to_json(const RackNews& news);
RackNews parse_rack_news(std::string_view text);

// POST …/hyper: rank, incarnation, round (0: not given) and values.
std::string hyper_json(const Credential& who, const HyperChange& change);
std::pair<Credential, HyperChange> parse_hyper(std::string_view text);
std::string to_json(const HyperReply& reply);
HyperReply parse_hyper_reply(std::string_view text);

// POST …/branches, as hyper.
std::string branch_json(const Credential& who, const BranchChange& change);
std::pair<Credential, BranchChange> parse_branch_request(std::string_view text);
std::string to_json(const BranchReply& reply);
BranchReply parse_branch_reply(std::string_view text);

std::string to_json(const LossRequest& request);
LossRequest parse_loss_request(std::string_view text);
std::string to_json(const LossPage& page);
LossPage parse_loss_page(std::string_view text);

std::string to_json(const StateRequest& request);
StateRequest parse_state_request(std::string_view text);
std::string to_json(const StateReply& reply);
StateReply parse_state_reply(std::string_view text);
std::string to_json(const CheckpointRequest& request);
CheckpointRequest parse_checkpoint_request(std::string_view text);
std::string to_json(const CheckpointReply& reply);
CheckpointReply parse_checkpoint_reply(std::string_view text);

std::string to_json(const Pulse& pulse);
Pulse parse_pulse(std::string_view text);

std::string to_json(const LogPage& page);
LogPage parse_log_page(std::string_view text);
std::string to_json(const LogRecord& record);

std::string to_json(const ServerStatus& status);
ServerStatus parse_status(std::string_view text);

std::string to_json(const JobStatus& status);
JobStatus parse_job_status(std::string_view text);
std::string jobs_json(const ServerStatus& status);  // {"jobs": …}

std::string to_json(const Done& done);  // "{}"

// The status of an answer with this error.
unsigned http_status(ErrorCode code);
// A problem of RFC 9457. Bytes that are not UTF-8 are replaced.
std::string error_json(unsigned status, ErrorCode code, std::string_view message);
std::string error_json(ErrorCode code, std::string_view message);  // with http_status(code)
Error parse_error(std::string_view text);

}  // namespace phub
