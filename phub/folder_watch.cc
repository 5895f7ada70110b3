#include "phub/folder_watch.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace phub {
namespace {

// A longer look means a slow disk: /readyz gets the result of the look before.
constexpr uint64_t kLongestLookMs = 300;

}  // namespace

void FolderWatch::ask(Reply<Done> reply) {
  later_.push_back({std::move(reply), host_.clock.now_ms() + kLongestLookMs});
  if (!looking_) look();
}

void FolderWatch::look() {
  looking_ = true;
  std::ranges::move(std::exchange(later_, {}), std::back_inserter(asked_));
  host_.writer.run([this] { host_.checkpoints->look(); },
                   [this](const std::optional<Error>&) {
                     looking_ = false;
                     answer(asked_, ~uint64_t{0});
                     if (!later_.empty()) look();
                   });
}

void FolderWatch::tick() {
  answer(asked_, host_.clock.now_ms());
  answer(later_, host_.clock.now_ms());
}

void FolderWatch::answer(std::vector<Asked>& asked, uint64_t now) {
  std::vector<Asked> waiting;
  for (Asked& of : std::exchange(asked, {})) {
    if (of.until_ms > now) {
      waiting.push_back(std::move(of));
    } else if (const auto gone = error_of([this] { host_.checkpoints->check_there(); })) {
      of.reply({gone->code(), gone->what()});
    } else {
      of.reply(Done{});
    }
  }
  std::ranges::move(waiting, std::back_inserter(asked));
}

}  // namespace phub
