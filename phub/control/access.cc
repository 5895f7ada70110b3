#include "phub/control/access.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr std::string_view kBearerWord = "Bearer ";

HeadRefusal unknown(std::string_view message) {
  return {401, ErrorCode::kUnauthorized, std::string(message)};
}
HeadRefusal forbidden(std::string message) {
  return {403, ErrorCode::kUnauthorized, std::move(message)};
}

Role least_role(Need need) {
  switch (need) {
    case Need::kTrain:
      return Role::kTrain;
    case Need::kOwn:
      return Role::kAdmin;
    case Need::kNothing:
    case Need::kObserve:
    case Need::kSee:
      break;
  }
  return Role::kObserve;
}

}  // namespace

Access::Clock Access::system_clock() {
  return [] {
    using namespace std::chrono;
    return int64_t{
        duration_cast<seconds>(std::chrono::system_clock::now().time_since_epoch()).count()};
  };
}

Access::Access(std::string path, Clock clock) : path_(std::move(path)), clock_(std::move(clock)) {
  reload();
}

Access::Access(std::vector<Token> tokens, Clock clock) : clock_(std::move(clock)) {
  replace(std::move(tokens));
}

void Access::reload() { replace(load_tokens(path_)); }

void Access::replace(std::vector<Token> tokens) {
  tokens_ = std::move(tokens);
  by_id_.clear();
  for (size_t i = 0; i < tokens_.size(); ++i) by_id_[hex_of(tokens_[i].digest)] = i;
}

// Compares with all of them, so that the time does not tell which one it is like.
const Token* Access::find(const Digest& shown) const {
  const Token* found = nullptr;
  for (const Token& token : tokens_) {
    if (same_digest(token.digest, shown)) found = &token;
  }
  return found;
}

const Token* Access::find_id(const std::string& id) const {
  const auto at = by_id_.find(id);
  return at == by_id_.end() ? nullptr : &tokens_[at->second];
}

std::optional<HeadRefusal> Access::check(Need need, std::string_view job,
                                         std::string_view authorization,
                                         const ControlHandler& handler, Caller& caller) const {
  if (need == Need::kNothing) return std::nullopt;
  if (!authorization.starts_with(kBearerWord) || authorization.size() == kBearerWord.size() ||
      authorization.size() > kBearerWord.size() + kMaxTokenBytes) {
    return unknown(
        "this server asks for a token: 'Authorization: Bearer TOKEN' (PHUB_TOKEN or "
        "PHUB_TOKEN_FILE); its operator makes one with 'phub token new'");
  }
  const Digest shown = sha256(authorization.substr(kBearerWord.size()));
  const Token* token = find(shown);
  if (token == nullptr) return check_job_token(need, job, shown, handler, caller);
  if (token->expired(clock_())) {
    return unknown(fmt::format("the token '{}' has expired", token->name));
  }
  if (token->role < least_role(need)) {
    return forbidden(fmt::format("the token '{}' has the role {}; this needs {}{}", token->name,
                                 name_of(token->role), name_of(least_role(need)),
                                 need == Need::kOwn ? " or the job's own token" : ""));
  }
  if (!job.empty() && !token->covers(job)) {
    return forbidden(
        fmt::format("the token '{}' is not for the job '{}'", token->name, printable(job)));
  }
  caller = {.name = token->name,
            .id = hex_of(token->digest),
            .may_replace = token->role == Role::kAdmin,
            .is_admin = token->role == Role::kAdmin};
  return std::nullopt;
}

std::optional<HeadRefusal> Access::check_job_token(Need need, std::string_view job,
                                                   const Digest& shown,
                                                   const ControlHandler& handler,
                                                   Caller& caller) const {
  const JobOwner* owner = job.empty() ? nullptr : handler.owner(std::string(job));
  if (owner == nullptr || !same_ticket(owner->token_sha256, hex_of(shown))) {
    return unknown(job.empty() ? "this is not a token of this server"
                               : "this is neither a token of this server nor that of this job");
  }
  if (need == Need::kObserve) {
    return forbidden("a job's token joins, deletes and shows its job, and nothing else");
  }
  if (const std::string why = why_not(owner->creator, job); !why.empty()) return unknown(why);
  caller = owner->creator;
  caller.may_replace = true;
  caller.is_admin = false;
  return std::nullopt;
}

Quota Access::quota_of(const Caller& caller) const {
  const Token* token = find_id(caller.id);
  if (token != nullptr) return token->quota;
  return caller.id.empty() ? Quota{} : Quota{0, 0, 0, 0, 0};  // it was revoked meanwhile
}

bool Access::sees(const Caller& caller, std::string_view job) const {
  const Token* token = find_id(caller.id);
  return token != nullptr && token->covers(job);
}

std::string Access::why_not(const Caller& caller, std::string_view job) const {
  const Token* token = find_id(caller.id);
  if (token == nullptr) return fmt::format("the token '{}' was revoked", caller.name);
  if (token->expired(clock_())) return fmt::format("the token '{}' has expired", caller.name);
  if (token->role < Role::kTrain || !token->covers(job)) {
    return fmt::format("the token '{}' no longer covers this job", caller.name);
  }
  return "";
}

void Access::sweep(ControlHandler& handler) const {
  handler.expel([this](const Caller& caller, const std::string& job) {
    return caller.id.empty() ? std::string() : why_not(caller, job);
  });
}

}  // namespace phub
