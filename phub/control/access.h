// Finds the sender of a request, and decides whether they may do what it asks: before anything is
// done, and before a body is read. Without a tokens file everybody may do everything.
//
// A request shows a token of the tokens file, or the job token that the creator of a job got with
// the answer to its join: that one joins, deletes and shows this job, and nothing else. It is good
// for as long as the token that the job was created with.
//
// Control thread only.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "phub/control/handler.h"
#include "phub/control/request_head.h"
#include "phub/control/tokens.h"

namespace phub {

// The right that a request needs.
enum class Need {
  kNothing,  // or a ticket, which the job checks
  kObserve,  // any token; for a job, one that covers it
  kSee,      // the same, or the job's token
  kTrain,    // a token that covers the job, of role train or admin, or the job's token
  kOwn,      // the job's token, or role admin
};

class Access {
 public:
  using Clock = std::function<int64_t()>;  // seconds since the epoch
  static Clock system_clock();

  // Throws as load_tokens().
  explicit Access(std::string path, Clock clock = system_clock());
  // Tests use this.
  Access(std::vector<Token> tokens, Clock clock);

  // Reads the file again. Throws as load_tokens(); then the tokens stay as they were.
  void reload();
  void replace(std::vector<Token> tokens);
  bool is_empty() const { return tokens_.empty(); }  // then everybody is refused

  // Sets `caller`, or returns the reason why the request is refused. `authorization` is the
  // header's value, `job` the one in the path, "" if it has none.
  std::optional<HeadRefusal> check(Need need, std::string_view job, std::string_view authorization,
                                   const ControlHandler& handler, Caller& caller) const;

  // The quota of all jobs that this caller creates; no limit for one without a token.
  Quota quota_of(const Caller& caller) const;
  // Whether the caller may see this job in a list.
  bool sees(const Caller& caller, std::string_view job) const;

  // The reason why a rank that joined as `caller` may not stay in the job; "": it may.
  std::string why_not(const Caller& caller, std::string_view job) const;
  // Ends the ranks that may not stay.
  void sweep(ControlHandler& handler) const;

 private:
  const Token* find(const Digest& shown) const;
  const Token* find_id(const std::string& id) const;
  std::optional<HeadRefusal> check_job_token(Need need, std::string_view job, const Digest& shown,
                                             const ControlHandler& handler, Caller& caller) const;

  const std::string path_;
  const Clock clock_;
  std::vector<Token> tokens_;
  std::unordered_map<std::string, size_t> by_id_;  // places in tokens_: many ranks are looked up
};

}  // namespace phub
