// The control messages as JSON text. Decoding throws Error(kInvalid) with the path of the problem:
// unknown, repeated and missing fields, wrong types, numbers out of range, lists that are too long;
// a spec that does not pass validate(). Encoding throws Error(kInvalid) on text that is not UTF-8
// and on numbers that are not finite. Fields that have their default value are left out. Pure
// functions, any thread.
#pragma once

#include <string>
#include <string_view>

#include "transport/control/branch_messages.h"
#include "transport/control/loss_messages.h"
#include "transport/control/messages.h"
#include "transport/control/shard_messages.h"
#include "transport/control/state_messages.h"

namespace phub {

// These are for the messages of messages.def. The job and the ticket of a rank that asks are in the
// path and in the Authorization header.
template <class Message>
std::string to_json(const Message& message);
template <class Message>
Message from_json(std::string_view text);

inline std::string to_json(const Done&) { return "{}"; }
std::string jobs_json(const ServerStatus& status);  // {"jobs": …}

// The status of an answer with this error.
unsigned http_status(ErrorCode code);
// A problem of RFC 9457. Bytes that are not UTF-8 are replaced.
std::string error_json(unsigned status, ErrorCode code, std::string_view message);
std::string error_json(ErrorCode code, std::string_view message);  // with http_status(code)
Error parse_error(std::string_view text);

}  // namespace phub
