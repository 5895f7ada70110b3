// Jobs of any kind: how many ranks there are and in which groups, what their keys are, the formats,
// the optimizer, what becomes of gradients that are missing or not finite.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/grouped_training.h"

namespace phub::testing {

// Every card is drawn once before any is drawn again, so that a run meets all of them.
class Deck {
 public:
  Deck(std::mt19937_64& random, std::vector<std::string> cards)
      : random_(random), cards_(std::move(cards)), next_(cards_.size()) {}

  std::string draw() {
    if (next_ == cards_.size()) {
      std::ranges::shuffle(cards_, random_);
      next_ = 0;
    }
    return cards_[next_++];
  }
  bool yes() { return draw() == "yes"; }

 private:
  std::mt19937_64& random_;
  std::vector<std::string> cards_;
  size_t next_;
};

class Jobs {
 public:
  // `in_racks`: of ranks in groups, with what boxes below a parent can do.
  explicit Jobs(uint64_t seed, bool in_racks = false) : random_(seed), in_racks_(in_racks) {}

  GroupedTraining draw();

 private:
  Deck deck(std::vector<std::string> cards) { return {random_, std::move(cards)}; }
  static std::vector<std::string> optimizers();

  void draw_formats(JobSpec& spec);
  void draw_steps(GroupedTraining& run);
  void draw_matrices(JobSpec& spec);
  void draw_quorum(JobSpec& spec);
  void draw_weights(JobSpec& spec);

  std::mt19937_64 random_;
  const bool in_racks_;
  int drawn_ = 0;
  Deck ranks_ = deck({"1", "2", "3", "4", "5", "8", "1", "2", "3", "4", "5", "17"});
  Deck grouped_ = deck({"yes", "no"}), spare_ = deck({"yes", "no", "no", "no"});
  Deck nulls_ = deck({"yes", "no"}), scale_ = deck({"yes", "no", "no", "no"});
  Deck optimizer_ = deck(optimizers());
  Deck gradient_ = deck({"f32", "bf16", "f16", "fp8-e4m3", "fp8-e5m2", "int32", "int8", "int4",
                         "topk", "topk-1000", "topk-10-int4", "topk-int2", "f32*2,int8*3,topk",
                         "topk-10*4,f32*1,topk-10*1,f32"});
  Deck key_format_ =
      deck({"", "", "", "", "fp8-e4m3", "fp8-e5m2", "int32", "int8", "int4", "topk", "topk-100",
            "topk-10", "topk-int4", "topk-1000-int4", "topk-10-int2", "f32*5,topk-10",
            "int4*1,f32*2,fp8-e5m2*3,topk-100-int4", "topk-100-int2*2,int8"});
  Deck parameter_ = deck({"f32", "f32", "bf16", "f16", "fp8-e4m3", "fp8-e5m2", "int8", "int4"});
  Deck plain_ = deck({"f32", "bf16", "f16"});
  Deck rounding_ = deck({"nearest", "stochastic"}), reduction_ = deck({"sum", "mean"});
  Deck policy_ = deck({"stop", "stop", "exclude", "exclude", "skip", "pass"});
  Deck unused_ = deck({"yes", "no"}), decay_ = deck({"yes", "no"}), norm_ = deck({"yes", "no"});
  Deck state8_ = deck({"yes", "no"}), always_ = deck({"yes", "no"});
  Deck broadcasts_ = deck({"yes", "no"}), changes_ = deck({"yes", "no"});
  Deck rates_ = deck({"0", "1", "2", "3", "4", "5", "6", "0", "0", "0"});
  Deck own_memory_ = deck({"yes", "no"});
  Deck quorum_ = deck({"yes", "no", "no"});
  Deck weights_ = deck({"yes", "no", "no"}), late_decay_ = deck({"yes", "no"});
  Deck fragments_ = deck({"yes", "no"});
  Deck factors_ = deck({"yes", "no"}), rows_ = deck({"yes", "no"});
  Deck either_ = deck({"yes", "no"});
};

// Words for what the job is.
std::set<std::string> features_of(const GroupedTraining& run);

}  // namespace phub::testing
