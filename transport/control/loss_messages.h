// The messages of the calls about a job's losses. branches.md documents them.
//
// Ranks report losses of their rounds, each by a name (such as "train"), and a program beside the
// training asks for them: for each name and round it gets the mean over the ranks that reported it,
// and the branch that ran.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "transport/wire.h"

namespace phub {

inline constexpr size_t kKeptLosses = 1024;  // rounds of a job, the latest
inline constexpr size_t kMostLossNames = 8;  // of a job
inline constexpr size_t kMostLossNameBytes = 32;
inline constexpr const char* kLossName = "loss";  // of a loss that has no other

// POST …/losses
struct LossRequest {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t epoch = 0;
  uint64_t round = 0;
  double loss = 0;
  bool nonfinite = false;  // in place of a loss that JSON has no number for
  std::string name = kLossName;

  friend bool operator==(const LossRequest&, const LossRequest&) = default;
};
inline LossRequest loss_of(uint64_t round, double loss, std::string name = kLossName) {
  const bool finite = std::isfinite(loss);
  return {.round = round, .loss = finite ? loss : 0, .nonfinite = !finite, .name = std::move(name)};
}

struct RoundLoss {
  uint64_t round = 0;
  uint32_t branch = 0;     // the branch that ran
  uint32_t ranks = 0;      // the number of ranks that have reported it
  double loss = 0;         // their mean; 0 if that is not finite
  bool nonfinite = false;  // it is not
  std::string name = kLossName;

  friend bool operator==(const RoundLoss&, const RoundLoss&) = default;
};

// GET …/losses/{from}: the losses of all names, of the rounds from there on that some rank
// reported, and that some rank is behind: all but the latest.
struct LossPage {
  uint64_t epoch = 0;                  // the life of the job, as in Credential
  uint64_t latest = 0;                 // round that was reported; 0: none was
  std::vector<RoundLoss> losses = {};  // by round, then by name

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
  a.optional("name", &LossRequest::name, {1, kMostLossNameBytes});
}
template <class A>
void fields(A& a, const RoundLoss*) {
  a.required("round", &RoundLoss::round);
  a.optional("branch", &RoundLoss::branch);
  a.required("ranks", &RoundLoss::ranks);
  a.optional("loss", &RoundLoss::loss);
  a.optional("nonfinite", &RoundLoss::nonfinite);
  a.optional("name", &RoundLoss::name, {1, kMostLossNameBytes});
}
template <class A>
void fields(A& a, const LossPage*) {
  a.optional("epoch", &LossPage::epoch);
  a.optional("latest", &LossPage::latest);
  a.required("losses", &LossPage::losses, {0, kMostLossNames * kKeptLosses});
}

}  // namespace phub
