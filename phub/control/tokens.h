// The tokens file says who may use this box, and for what. It holds the SHA-256 of each token,
// never the token. `phub token new` makes an entry:
//
//   [[token]]
//   name = "alice"                 # for people; in the log
//   role = "train"                 # observe, train, admin
//   jobs = ["alice-*", "shared"]   # patterns of job names: * and ?; without it: all jobs
//   sha256 = "64 hexadecimal digits"
//   expires = 2027-06-30T12:00:00Z # optional: a date, or a time (UTC without an offset)
//   quota = {jobs = 4, ranks = 64, connections = 512, keys = 10000, memory = "8G",
//   checkpoints = "50G", cores = 2}  # optional; in one line
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phub {

using Digest = std::array<uint8_t, 32>;
Digest sha256(std::string_view text);
// Compares them in a time that does not depend on where they differ.
bool same_digest(const Digest& a, const Digest& b);
std::string hex_of(const Digest& digest);

// Each may do what those before it may. observe: read status, metrics and logs. train: create and
// join jobs. admin: replace ranks, delete jobs and set hyperparameters of others.
enum class Role { kObserve, kTrain, kAdmin };
std::optional<Role> parse_role(std::string_view word);
std::string_view name_of(Role role);

// The most that all jobs which were created with a token may have together.
struct Quota {
  static constexpr uint64_t kNone = ~uint64_t{0};  // no limit
  uint64_t jobs = kNone;
  uint64_t ranks = kNone;        // the jobs' max_ranks
  uint64_t connections = kNone;  // for data, or queue pairs: one per rank and queue of the plan
  uint64_t keys = kNone;
  uint64_t memory = kNone;       // bytes of the box, as `phub plan` counts them
  uint64_t checkpoints = kNone;  // bytes on the disk
  uint64_t cores = kNone;        // the jobs share them

  friend bool operator==(const Quota&, const Quota&) = default;
};
struct QuotaField {
  std::string_view word;  // in the tokens file, and for people
  uint64_t Quota::*amount;
  bool is_bytes;
};
inline constexpr QuotaField kQuotaFields[] = {{"jobs", &Quota::jobs, false},
                                              {"ranks", &Quota::ranks, false},
                                              {"connections", &Quota::connections, false},
                                              {"keys", &Quota::keys, false},
                                              {"memory", &Quota::memory, true},
                                              {"checkpoints", &Quota::checkpoints, true},
                                              {"cores", &Quota::cores, false}};

struct Token {
  std::string name;
  Role role = Role::kObserve;
  std::vector<std::string> jobs;  // patterns; one of them must match
  Digest digest = {};
  std::optional<int64_t> expires_s = {};  // since the epoch
  Quota quota = {};

  bool covers(std::string_view job) const;
  bool expired(int64_t now_s) const { return expires_s && now_s >= *expires_s; }
};

inline constexpr size_t kMaxTokens = 10'000;
inline constexpr size_t kMaxTokenBytes = 256;  // limit for the token in a request

// Throws Error(kInvalid) that begins with `path` and, where it can, with line and column.
std::vector<Token> parse_tokens(std::string_view text, std::string_view path);

// Throws Error(kInvalid) as well if others than its owner may write the file, or others than its
// group may read it, or its owner is neither this user nor root.
std::vector<Token> load_tokens(const std::string& path);

// Whether `pattern` matches all of `name`. * stands for any characters, ? for one.
bool matches(std::string_view pattern, std::string_view name);
// Throws Error(kInvalid) unless it is 1 to 255 of * ? and the characters of job names.
void check_pattern(std::string_view pattern);

// "phub-" and 64 hexadecimal digits, of 256 random bits.
std::string make_token();

}  // namespace phub
