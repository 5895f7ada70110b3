// Watches whether the folder of checkpoints is there, for /readyz. A look at it may hang with the
// disk, so the writer's thread looks, and no question waits longer than 300 ms. Control thread.
#pragma once

#include <cstdint>
#include <vector>

#include "phub/job/job_context.h"
#include "transport/error.h"

namespace phub {

class FolderWatch {
 public:
  explicit FolderWatch(JobHost& host) : host_(host) {}  // `host` outlives this

  // Answers from a look that began after the question, or from the one before if that takes long.
  // REQUIRES: checkpoints are kept.
  void ask(Reply<Done> reply);
  void tick();  // answers questions that have waited long enough

 private:
  struct Question {
    Reply<Done> reply;
    uint64_t until_ms = 0;
  };
  void look();
  void answer(std::vector<Question>& questions, uint64_t now);

  JobHost& host_;
  std::vector<Question> questions_;  // from before the look under way began
  std::vector<Question> later_questions_;
  bool looking_ = false;
};

}  // namespace phub
