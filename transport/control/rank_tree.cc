#include "transport/control/rank_tree.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

using EndsByLevel = std::vector<std::vector<uint16_t>>;

class Parser {
 public:
  Parser(std::string_view text, uint32_t ranks)
      : text_(text), ranks_(ranks), ends_(RankTree::kMaxLevels) {}

  EndsByLevel parse() && {
    read_groups(1);
    if (at_ < text_.size()) refuse("expected ',' or the end");
    if (next_rank_ < ranks_) refuse_sum(std::to_string(next_rank_));
    end_groups(0);
    ends_.resize(levels_);
    return std::move(ends_);
  }

 private:
  void read_groups(uint32_t level) {
    levels_ = std::max(levels_, level + 1);
    do {
      if (take('(')) {
        if (level + 1 == RankTree::kMaxLevels) {
          refuse(fmt::format("there are more than {} levels", RankTree::kMaxLevels));
        }
        read_groups(level + 1);
        if (!take(')')) refuse("expected ',' or ')'");
      } else {
        read_ranks();
      }
      end_groups(level);
    } while (take(','));
  }

  void read_ranks() {
    const std::string_view rest = text_.substr(at_);
    if (rest.empty() || rest.front() < '1' || rest.front() > '9') {
      refuse("expected a number of ranks, or '('");
    }
    uint32_t ranks = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), ranks);
    if (error != std::errc() || ranks > ranks_ - next_rank_) {
      refuse_sum(fmt::format("more than {}", ranks_));
    }
    next_rank_ += ranks;
    at_ += static_cast<size_t>(end - rest.data());
  }

  // Those of this level and of the levels behind it that are not ended yet.
  void end_groups(uint32_t level) {
    for (; level < ends_.size(); ++level) {
      ends_[level].resize(next_rank_, static_cast<uint16_t>(next_rank_));
    }
  }

  bool take(char wanted) {
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  [[noreturn]] void refuse(std::string_view why) const {
    fail(
        ErrorCode::kInvalid,
        "groups: {} at character {} of '{}'; groups are the numbers of their ranks, as in '4,4' or "
        "'(2,2),(2,2)'",
        why, at_ + 1, printable(text_));
  }
  [[noreturn]] void refuse_sum(std::string_view ranks) const {
    fail(ErrorCode::kInvalid,
         "groups: '{}' has {} ranks, and max_ranks is {}: it must be all of them", printable(text_),
         ranks, ranks_);
  }

  const std::string_view text_;
  const uint32_t ranks_;
  EndsByLevel ends_;  // of the ranks before next_rank_ whose group is ended
  size_t at_ = 0;
  uint32_t next_rank_ = 0;
  uint32_t levels_ = 1;
};

}  // namespace

RankTree::RankTree(std::string_view groups, uint32_t ranks) {
  if (!groups.empty()) ends_ = Parser(groups, ranks).parse();
}

std::vector<RankRange> RankTree::last_groups() const {
  std::vector<RankRange> groups;
  const Ends& ends = ends_.back();
  for (uint32_t first = 0; first < ends.size(); first = ends[first]) {
    groups.push_back({first, ends[first]});
  }
  return groups;
}

std::string RankTree::above_last_groups() const {
  const std::vector<RankRange> groups = last_groups();
  const uint32_t above = levels() - 1;  // of what is left
  if (above == 1) return "";
  std::string text;
  for (size_t g = 0; g < groups.size();) {
    // The levels between the first and the last one are in parentheses.
    const auto begins = [&](uint32_t level) {
      const uint32_t rank = groups[g].first;
      return rank == 0 || end(level, rank - 1) == rank;
    };
    if (!text.empty()) text += ',';
    for (uint32_t level = 1; level + 1 < above; ++level) text += begins(level) ? "(" : "";
    const uint32_t group_end = end(above - 1, groups[g].first);
    size_t size = 0;
    for (; g < groups.size() && groups[g].first < group_end; ++g) ++size;
    text += std::to_string(size);
    for (uint32_t level = above - 1; level-- > 1;) {
      text += end(level, group_end - 1) == group_end ? ")" : "";
    }
  }
  return text;
}

}  // namespace phub
