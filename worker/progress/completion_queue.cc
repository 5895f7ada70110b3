#include "worker/progress/completion_queue.h"

#include "transport/error.h"

namespace phub {

void CompletionQueue::expect(const Pushed& pushed, void* tag, Time deadline) {
  PHUB_CHECK(!at(pushed));
  expected_.push_back(
      {.what = {.pushed = pushed, .tag = tag, .end = End::kHere}, .deadline = deadline});
  at(pushed) = std::prev(expected_.end());
}

CompletionQueue::At& CompletionQueue::at(const Pushed& pushed) {
  std::vector<At>& parts = at_[pushed.key];
  if (pushed.part >= parts.size()) parts.resize(pushed.part + 1);
  return parts[pushed.part];
}

void CompletionQueue::end(Entries::iterator entry, End how) {
  entry->what.end = how;
  at(entry->what.pushed).reset();
  ended_.splice(ended_.end(), expected_, entry);
}

void CompletionQueue::arrived(size_t key, size_t part) {
  if (part < at_[key].size() && at_[key][part]) end(*at_[key][part], End::kHere);
}

void CompletionQueue::expire(Time now) {
  while (!expected_.empty() && expected_.front().deadline < now) {
    end(expected_.begin(), End::kLate);
  }
}

void CompletionQueue::fail_all() {
  while (!expected_.empty()) end(expected_.begin(), End::kFailed);
}

void CompletionQueue::forget() {
  for (const Entry& entry : expected_) at(entry.what.pushed).reset();
  expected_.clear();
  ended_.clear();
}

CompletionQueue::Ended CompletionQueue::pop() {
  PHUB_CHECK(!ended_.empty());
  const Ended first = ended_.front().what;
  ended_.pop_front();
  return first;
}

}  // namespace phub
