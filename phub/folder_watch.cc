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
  later_questions_.push_back({std::move(reply), host_.clock.now_ms() + kLongestLookMs});
  if (!looking_) look();
}

void FolderWatch::look() {
  looking_ = true;
  std::ranges::move(std::exchange(later_questions_, {}), std::back_inserter(questions_));
  host_.writer.run([this] { host_.checkpoints->look(); },
                   [this](const std::optional<Error>&) {
                     looking_ = false;
                     answer(questions_, ~uint64_t{0});
                     if (!later_questions_.empty()) look();
                   });
}

void FolderWatch::tick() {
  answer(questions_, host_.clock.now_ms());
  answer(later_questions_, host_.clock.now_ms());
}

void FolderWatch::answer(std::vector<Question>& questions, uint64_t now) {
  std::vector<Question> waiting;
  for (Question& question : std::exchange(questions, {})) {
    if (question.until_ms > now) {
      waiting.push_back(std::move(question));
    } else if (const auto gone = error_of([this] { host_.checkpoints->check_there(); })) {
      question.reply({gone->code(), gone->what()});
    } else {
      question.reply(Done{});
    }
  }
  std::ranges::move(waiting, std::back_inserter(questions));
}

}  // namespace phub
