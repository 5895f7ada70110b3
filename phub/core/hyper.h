// Computes the hyperparameters of every round and key from the names and numbers of a job.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kernels/hyper.h"
#include "kernels/kernels.h"
#include "kernels/whole_key.h"
#include "transport/control/branch_messages.h"
#include "transport/control/job_spec.h"

namespace phub {

inline constexpr const char* kBatchName = "batch";  // samples of a rank's gradient

// Checks values for a job whose keys have so many groups. Throws Error(kInvalid) that lists the
// known names, or says which value or group is out of range.
void check_hyper(const std::map<std::string, double>& values, uint32_t groups);

// Checks that the job may have these values: its optimizer uses them (0 is always accepted: it
// means that there is none), and it has keys of their groups; slack and batch are whole numbers,
// and in SSP a slack is no more than the job's. Throws Error(kInvalid) that names the optimizers
// that use the value. `of_fork`: in a job without an optimizer the ranks apply them, whatever their
// optimizer uses.
void check_for_job(const std::map<std::string, double>& values, const JobSpec& spec,
                   bool of_fork = false);

// Sets the values of each group; values for all groups go first. Throws likewise.
void set_values(const std::map<std::string, double>& values, std::span<kernels::Hyper> groups);

// Adds a value to the last change if that is for this round and has room, or else to a new change.
void add_value(std::vector<HyperChange>& changes, uint64_t round, std::string name, double value);

// Returns the changes that turn the values `from`, by group, into `to` from `round` on. REQUIRES:
// both have as many groups.
std::vector<HyperChange> hyper_difference(std::span<const kernels::Hyper> from,
                                          std::span<const kernels::Hyper> to, uint64_t round);

// Keys of one group and with the same learning-rate and decay scales share a class.
struct KeyScales {
  double lr = 1, decay = 1;
  uint32_t group = 0;
};
struct KeyClasses {
  std::vector<KeyScales> classes;
  std::vector<uint16_t> of_key;
  uint32_t groups = 1;
};
KeyClasses key_classes(const JobSpec& spec);  // throws kInvalid beyond 65,535 classes

// The values of one group from `from_round` on, until the next version in the same list. A list has
// a version per group for each of its rounds, one after the other.
struct HyperVersion {
  uint64_t from_round = 0;
  kernels::Hyper values;
  // By field: the round of the change that it comes from.
  std::array<uint64_t, kernels::kHyperFields.size()> since = {};
};

// The hyperparameters as a core reads them. The arrays behind the spans do not change.
struct HyperView {
  std::span<const HyperVersion> schedule;  // ascending, the first from round 0 on
  std::span<const HyperVersion> changes;   // made while the job runs, ascending; may be empty
  std::span<const KeyScales> scales;       // by key class
  uint32_t groups = 1;

  // A field has the value of the latest change up to the round, in either list; of two changes for
  // one round, that made while the job ran counts. `lr` is the round's: learning_rate() times the
  // key's scale.
  kernels::Hyper of(uint64_t round, size_t key_class) const;
  uint64_t slack(uint64_t round) const;                      // as far as the job allows it
  std::vector<BatchRun> batches(uint64_t from_round) const;  // REQUIRES: the schedule sets none
};

// The hyperparameters of a job. A change costs the same however many there were before it, and
// holds memory only as long as a chunk may be in a round that needs it. Control thread.
class HyperTable {
 public:
  // The most versions that some chunk may still need: changes times groups.
  static constexpr size_t kMostChanges = 1u << 14;

  HyperTable(const JobSpec& spec, kernels::Optimizer optimizer, const KeyClasses& classes);

  HyperView view() const;
  // Makes all changes of a boundary, each from its round on; the rounds do not descend. `lowest` is
  // the lowest round that a chunk is in. The arrays behind the view live until the second call
  // after this one: by then the cores have taken the view of the first.
  HyperView change(std::span<const HyperChange> changes, uint64_t lowest);
  // Whether more are still needed than should be, now that `lowest` is the lowest round.
  bool full(uint64_t lowest) {
    forget(lowest);
    return changes_.size() - first_ >= kMostChanges;
  }
  uint64_t bytes() const;  // the changes'
  // The changes that a chunk in this round or a later one needs, ascending: with them change()
  // gives another table of the same spec the same values.
  std::vector<HyperChange> needed_from(uint64_t round) const;

 private:
  void forget(uint64_t lowest);  // drops versions that no round from `lowest` on needs
  static void add(std::vector<HyperVersion>& list, std::span<const HyperVersion> before,
                  const HyperChange& change);

  std::vector<HyperVersion> schedule_;
  std::vector<KeyScales> scales_;
  std::vector<HyperVersion> base_;  // from round 0 on, by group
  // While there is room, versions are appended in place, so that the cores may read those before;
  // then the needed ones move to a new array.
  std::vector<HyperVersion> changes_;
  std::vector<HyperVersion> retired_;  // cores may have it until they take the next view
  size_t first_ = 0;                   // the first of changes_ that is still needed
};

// What a step of muon may take for one key: some ten seconds of a core.
inline constexpr double kMostProducts = 2.5e11;

// Hyperparameters that decide how much state there is, and so cannot change. "": there is none
// among the values; else the first one's name.
std::string fixed_value_in(const std::map<std::string, double>& values);

// By key, how its steps are made. Throws Error(kInvalid) if the steps of a key would take too long.
std::vector<kernels::WholeKey> whole_keys(const JobSpec& spec, kernels::Optimizer optimizer);

// The bytes that a job's table and its spec hold, computed before either is made.
uint64_t spec_memory(const JobSpec& spec, uint64_t classes);

}  // namespace phub
