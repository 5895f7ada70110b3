// The messages of the calls about a job's losses. branches.md documents them.
//
// Ranks report the loss of each of their rounds, and a program beside the training asks for them:
// for each round it gets the mean over the ranks that reported it, and the branch that ran.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/wire.h"

namespace phub {

inline constexpr size_t kKeptLosses = 1024;  // rounds of a job, the latest

// POST …/losses
struct LossRequest {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t epoch = 0;
  uint64_t round = 0;
  double loss = 0;
  bool nonfinite = false;  // in place of a loss that JSON has no number for

  friend bool operator==(const LossRequest&, const LossRequest&) = default;
};
inline LossRequest loss_of(uint64_t round, double loss) {
  const bool finite = std::isfinite(loss);
  return {.round = round, .loss = finite ? loss : 0, .nonfinite = !finite};
}

struct RoundLoss {
  uint64_t round = 0;
  uint32_t branch = 0;     // the branch that ran
  uint32_t ranks = 0;      // the number of ranks that have reported it
  double loss = 0;         // their mean; 0 if that is not finite
  bool nonfinite = false;  // it is not

  friend bool operator==(const RoundLoss&, const RoundLoss&) = default;
};

// GET …/losses/{from}: of the rounds from there on that some rank reported, and that some rank is
// behind: all but the latest.
struct LossPage {
  uint64_t epoch = 0;   // the life of the job, as in Credential
  uint64_t latest = 0;  // round that was reported; 0: none was
  std::vector<RoundLoss> losses = {};

  friend bool operator==(const LossPage&, const LossPage&) = default;
};

template <class A>
void fields(A& a, const LossRequest*) {
  a.required("rank", &LossRequest::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &LossRequest::incarnation);
  a.optional("epoch", &LossRequest::epoch);
  a.required("round", &LossRequest::round);
  a.optional("loss", &LossRequest::loss);
  a.optional("nonfinite", &LossRequest::nonfinite);
}
template <class A>
void fields(A& a, const RoundLoss*) {
  a.required("round", &RoundLoss::round);
  a.optional("branch", &RoundLoss::branch);
  a.required("ranks", &RoundLoss::ranks);
  a.optional("loss", &RoundLoss::loss);
  a.optional("nonfinite", &RoundLoss::nonfinite);
}
template <class A>
void fields(A& a, const LossPage*) {
  a.optional("epoch", &LossPage::epoch);
  a.optional("latest", &LossPage::latest);
  a.required("losses", &LossPage::losses, {0, kKeptLosses});
}

}  // namespace phub
