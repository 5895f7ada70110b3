#include "phub/control/tokens.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>

#include "phub/text_table.h"
#include "transport/error.h"
#include "transport/fd.h"
#include "transport/greeting.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr size_t kMaxTokensFileBytes = 16u << 20;
constexpr size_t kMaxNameLength = 64;
constexpr size_t kMaxPatterns = 256;
constexpr size_t kMaxPatternBytes = 255;
constexpr std::string_view kNameAlphabet =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@-";
constexpr std::string_view kPatternAlphabet =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-*?";

constexpr std::pair<std::string_view, Role> kRoles[] = {
    {"observe", Role::kObserve}, {"train", Role::kTrain}, {"admin", Role::kAdmin}};

// One entry of the file, with the place that an error names.
class Entry {
 public:
  Entry(const toml::table& table, std::string_view path) : table_(table), path_(path) {}

  template <typename... Args>
  [[noreturn]] void refuse(const toml::node& at, fmt::format_string<Args...> format,
                           Args&&... args) const {
    fail(ErrorCode::kInvalid, "{}:{}:{}: {}", path_, at.source().begin.line,
         at.source().begin.column, fmt::format(format, std::forward<Args>(args)...));
  }

  const toml::node& need(std::string_view key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) refuse(table_, "a token needs '{}'", key);
    return *node;
  }
  std::string text(const toml::node& node, std::string_view key) const {
    if (!node.is_string()) refuse(node, "{} must be a string", key);
    return node.as_string()->get();
  }

  Token read() const {
    for (const auto& [key, node] : table_) {
      constexpr std::string_view kKeys[] = {"name", "role", "jobs", "sha256", "expires", "quota"};
      if (std::find(std::begin(kKeys), std::end(kKeys), key.str()) == std::end(kKeys)) {
        refuse(node, "a token has no '{}'; there are {}", printable(key.str()),
               fmt::join(kKeys, ", "));
      }
    }
    return {.name = read_name(),
            .role = read_role(),
            .jobs = read_jobs(),
            .digest = read_digest(),
            .expires_s = read_expiry(),
            .quota = read_quota()};
  }

 private:
  std::string read_name() const {
    const toml::node& node = need("name");
    std::string name = text(node, "name");
    if (name.empty() || name.size() > kMaxNameLength ||
        name.find_first_not_of(kNameAlphabet) != name.npos) {
      refuse(node, "name must be 1 to {} letters, digits, '.', '_', '@' or '-', got '{}'",
             kMaxNameLength, printable(name));
    }
    return name;
  }

  Role read_role() const {
    const toml::node& node = need("role");
    const std::string word = text(node, "role");
    const auto role = parse_role(word);
    if (!role) refuse(node, "role must be observe, train or admin, got '{}'", printable(word));
    return *role;
  }

  std::vector<std::string> read_jobs() const {
    const toml::node* node = table_.get("jobs");
    if (node == nullptr) return {"*"};
    std::vector<std::string> patterns;
    if (const auto* list = node->as_array()) {
      for (const toml::node& entry : *list) patterns.push_back(text(entry, "jobs"));
    } else {
      patterns.push_back(text(*node, "jobs"));
    }
    if (patterns.empty() || patterns.size() > kMaxPatterns) {
      refuse(*node, "jobs must be 1 to {} patterns", kMaxPatterns);
    }
    for (const std::string& pattern : patterns) {
      try {
        check_pattern(pattern);
      } catch (const Error& error) {
        refuse(*node, "jobs: {}", error.what());
      }
    }
    return patterns;
  }

  Digest read_digest() const {
    const toml::node& node = need("sha256");
    const std::string digits = text(node, "sha256");
    const auto value = [](char c) {
      if (c >= '0' && c <= '9') return c - '0';
      if (c >= 'a' && c <= 'f') return c - 'a' + 10;
      if (c >= 'A' && c <= 'F') return c - 'A' + 10;
      return -1;
    };
    Digest digest{};
    bool good = digits.size() == 2 * digest.size();
    for (size_t i = 0; good && i < digest.size(); ++i) {
      const int high = value(digits[2 * i]), low = value(digits[2 * i + 1]);
      good = high >= 0 && low >= 0;
      if (good) digest[i] = static_cast<uint8_t>(high << 4 | low);
    }
    if (!good) {  // it may be a token that was put here by mistake: it is not shown
      refuse(node, "sha256 must be {} hexadecimal digits, as 'phub token new' prints them",
             2 * digest.size());
    }
    return digest;
  }

  std::optional<int64_t> read_expiry() const {
    const toml::node* node = table_.get("expires");
    if (node == nullptr) return std::nullopt;
    toml::date date;
    int64_t seconds = 0;
    if (const auto* day = node->as_date()) {
      date = day->get();
    } else if (const auto* moment = node->as_date_time()) {
      const toml::date_time& at = moment->get();
      date = at.date;
      seconds = at.time.hour * 3600 + at.time.minute * 60 + at.time.second;
      if (at.offset) seconds -= int64_t{at.offset->minutes} * 60;
    } else {
      refuse(*node, "expires must be a date or a time, such as 2027-06-30T12:00:00Z");
    }
    const std::chrono::year_month_day day{
        std::chrono::year(date.year), std::chrono::month(date.month), std::chrono::day(date.day)};
    return std::chrono::duration_cast<std::chrono::seconds>(
               std::chrono::sys_days(day).time_since_epoch())
               .count() +
           seconds;
  }

  Quota read_quota() const {
    Quota quota;
    const toml::node* node = table_.get("quota");
    if (node == nullptr) return quota;
    const toml::table* amounts = node->as_table();
    if (amounts == nullptr) refuse(*node, "quota must be a table such as {{jobs = 4}}");
    for (const auto& [key, value] : *amounts) {
      const auto field = std::ranges::find(kQuotaFields, key.str(), &QuotaField::word);
      if (field == std::end(kQuotaFields)) {
        std::vector<std::string_view> words;
        for (const QuotaField& known : kQuotaFields) words.push_back(known.word);
        refuse(value, "a quota has no '{}'; there are {}", printable(key.str()),
               fmt::join(words, ", "));
      }
      quota.*field->amount =
          field->is_bytes ? read_bytes(value, key.str()) : read_count(value, key);
    }
    return quota;
  }
  uint64_t read_count(const toml::node& node, std::string_view key) const {
    const auto* number = node.as_integer();
    if (number == nullptr || number->get() < 0) refuse(node, "{} must be a number, or 0", key);
    return static_cast<uint64_t>(number->get());
  }
  uint64_t read_bytes(const toml::node& node, std::string_view key) const {
    if (!node.is_string()) return read_count(node, key);
    try {
      return parse_bytes(node.as_string()->get());
    } catch (const Error& error) {
      refuse(node, "{} {}", key, error.what());
    }
  }

  const toml::table& table_;
  const std::string_view path_;
};

std::string system_text() { return std::strerror(errno); }

}  // namespace

Digest sha256(std::string_view text) {
  Digest digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

bool same_digest(const Digest& a, const Digest& b) {
  unsigned different = 0;
  for (size_t i = 0; i < a.size(); ++i) different |= static_cast<unsigned>(a[i] ^ b[i]);
  return different == 0;
}

std::string hex_of(const Digest& digest) { return fmt::format("{:02x}", fmt::join(digest, "")); }

std::optional<Role> parse_role(std::string_view word) {
  for (const auto& [name, role] : kRoles) {
    if (name == word) return role;
  }
  return std::nullopt;
}

std::string_view name_of(Role role) { return kRoles[static_cast<size_t>(role)].first; }

bool Token::covers(std::string_view job) const {
  return std::any_of(jobs.begin(), jobs.end(),
                     [job](const std::string& pattern) { return matches(pattern, job); });
}

void check_pattern(std::string_view pattern) {
  if (pattern.empty() || pattern.size() > kMaxPatternBytes ||
      pattern.find_first_not_of(kPatternAlphabet) != pattern.npos) {
    fail(ErrorCode::kInvalid,
         "a pattern is 1 to {} letters, digits, '.', '_', '-', '*' or '?', not '{}'",
         kMaxPatternBytes, printable(pattern));
  }
}

// After a mismatch only the latest * can take one character more.
bool matches(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0, star = pattern.npos, taken = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p, ++n;
    } else if (star != pattern.npos) {
      p = star + 1;
      n = ++taken;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::vector<Token> parse_tokens(std::string_view text, std::string_view path) {
  toml::table file;
  try {
    file = toml::parse(text);
  } catch (const toml::parse_error& error) {
    fail(ErrorCode::kInvalid, "{}:{}:{}: {}", path, error.source().begin.line,
         error.source().begin.column, printable(error.description()));
  }
  for (const auto& [key, node] : file) {
    if (key.str() == "token" && node.is_array_of_tables()) continue;
    fail(ErrorCode::kInvalid, "{}:{}:{}: '{}' is not expected; each token begins with [[token]]",
         path, node.source().begin.line, node.source().begin.column, printable(key.str()));
  }
  std::vector<Token> tokens;
  std::set<std::string> names;
  std::set<Digest> digests;
  const toml::array* list = file["token"].as_array();
  for (size_t i = 0; list != nullptr && i < list->size(); ++i) {
    if (i >= kMaxTokens) fail(ErrorCode::kInvalid, "{}: more than {} tokens", path, kMaxTokens);
    const Entry entry(*list->get_as<toml::table>(i), path);
    Token token = entry.read();
    if (!names.insert(token.name).second) {
      entry.refuse(entry.need("name"), "'{}' is there twice", token.name);
    }
    if (!digests.insert(token.digest).second) {
      entry.refuse(entry.need("sha256"), "another entry has this token, too");
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

std::vector<Token> load_tokens(const std::string& path) {
  const Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  if (!file || fstat(file.get(), &facts) != 0) {
    fail(ErrorCode::kInvalid, "tokens file {}: {}", path, system_text());
  }
  if (!S_ISREG(facts.st_mode)) fail(ErrorCode::kInvalid, "tokens file {}: is not a file", path);
  if ((facts.st_mode & (S_IWGRP | S_IRWXO)) != 0) {
    fail(
        ErrorCode::kInvalid,
        "tokens file {}: others may use it (mode {:04o}); run 'chmod 600 {}', or 640 for its group",
        path, facts.st_mode & 07777, path);
  }
  if (facts.st_uid != geteuid() && facts.st_uid != 0) {
    fail(ErrorCode::kInvalid, "tokens file {}: belongs to user {}, not to {} or root", path,
         facts.st_uid, geteuid());
  }
  std::string text;
  char block[64 << 10];
  for (ssize_t got = 1; got > 0 && text.size() <= kMaxTokensFileBytes;) {
    got = read(file.get(), block, sizeof block);
    if (got < 0) fail(ErrorCode::kInvalid, "tokens file {}: {}", path, system_text());
    text.append(block, static_cast<size_t>(got));
  }
  if (text.size() > kMaxTokensFileBytes) {
    fail(ErrorCode::kInvalid, "tokens file {}: is larger than {} bytes", path, kMaxTokensFileBytes);
  }
  return parse_tokens(text, path);
}

std::string make_token() { return "phub-" + make_ticket() + make_ticket(); }

}  // namespace phub
