// Chooses the samples of the training data that a rank takes: batch by batch, in a new order every
// epoch. Poseidon (Zhang et al., 2015), section 4.4: data on a file system that all nodes share, or
// partitions that are private to each node, and a restart that finds its position in the data.
//
//   phub::DataShards shards({.samples = 60'000, .rank = rank, .world_size = world_size});
//   options.saver = [&](uint64_t) { return phub::RankState{{"data", shards.cursor()}}; };
//   phub::Worker worker(options);
//   if (const auto saved = worker.restored("data")) shards.restore(*saved);
//   while (shards.epoch() < 3) {
//     for (const uint64_t sample : shards.next(32)) ...   // 0 to 59'999
//     ... push all keys, and wait for all: then the saver is called, between two batches ...
//   }
//
// The order of an epoch is a pseudorandom permutation of the samples that is computed, not stored:
// any number of samples costs 200 bytes and no set-up, each sample some 100 ns. It depends on
// nothing but the options and the epoch, so it is the same on every machine, and the same as that
// of phub.Sampler in Python.
//
// Shared data. The n-th sample of the permutation goes to rank n % world_size, so the ranks' parts
// of an epoch are disjoint. The position counts the samples that all ranks together have taken. So
// a job may go on with another world size, in the middle of an epoch: the rest of the epoch is
// dealt out to the new ranks, and no sample comes twice or is left out. This needs that all ranks
// take batches of the same size in the same round, and the cursor of any of them.
//
// Private data. Each rank has samples of its own, numbered from 0; how many may differ among ranks.
// Its epochs are its own. One that has fewer samples begins its next epoch earlier.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phub {

enum class Partition : uint8_t { kShared, kPrivate };

struct DataOptions {
  uint64_t samples = 0;  // 1 to 2^62; shared: of all ranks together, private: of this rank
  uint32_t rank = 0;
  uint32_t world_size = 1;
  Partition partition = Partition::kShared;
  uint64_t seed = 0;    // for the orders; shared: the same on all ranks
  bool shuffle = true;  // false: every epoch is in the order of the samples' numbers
  // Decides what happens if the number of samples is no multiple of the number of ranks. False: the
  // first samples of its order come once more at its end, so that all ranks have equally many.
  // True: the last ones of its order, fewer than world_size, are left out. PyTorch's
  // DistributedSampler has the same option.
  bool drop_last = false;
};

// One thread at a time. Errors are phub::Error of code kInvalid.
class DataShards {
 public:
  // Begins with the first sample of epoch 0. Throws Error: no samples or too many, a rank outside
  // of the world, or drop_last with fewer samples than ranks.
  explicit DataShards(const DataOptions& options);

  // The next samples of this rank: `batch` of them, or the rest of the epoch if that is less. No
  // batch has samples of two epochs. Throws Error: batch is 0.
  std::vector<uint64_t> next(size_t batch);
  // The same into the caller's memory, as many as it has room for. Returns how many, at least 1.
  size_t next(std::span<uint64_t> batch);
  // Goes on as if next(batch) had been called so often, at no cost. For a rank that takes over
  // from a lost one in a job in progress, and so gets no cursor: skip(first_round() - 1, batch).
  void skip(uint64_t batches, size_t batch);

  // The epoch of the next sample. Epochs count from 0: the last batch of an epoch begins the next
  // one.
  uint64_t epoch() const { return epoch_; }
  // The number of the epoch's samples that were taken; shared: by all ranks together.
  uint64_t position() const { return position_; }
  // The number of samples that this rank has still to take in this epoch, at least 1.
  uint64_t left() const;

  // The present position and the data that it belongs to: kCursorBytes, for the rank's saved state.
  std::vector<std::byte> cursor() const;
  // Goes on where `cursor` was made: the same samples follow. Shared: the cursor may be of any
  // rank, and of a job with another world size; if fewer samples than ranks are left and drop_last
  // is set, the next epoch begins. Throws Error, and changes nothing, if it is no cursor, or one of
  // other data: partition, samples, seed, shuffle or drop_last are others, or private data's rank.
  // The message names the difference.
  void restore(std::span<const std::byte> cursor);

  static constexpr size_t kCursorBytes = 48;

 private:
  static constexpr size_t kRounds = 8;  // rounds of the permutation

  void begin(uint64_t epoch, uint64_t position);
  uint64_t left_at(uint64_t position) const;
  uint64_t sample_at(uint64_t position) const;

  DataOptions options_;
  uint32_t stride_ = 1;  // ranks that take part in an epoch, and which of them this is
  uint32_t offset_ = 0;
  uint64_t epoch_ = 0;
  uint64_t position_ = 0;  // < samples
  uint32_t low_bits_ = 1;
  uint32_t high_bits_ = 1;
  std::array<uint64_t, kRounds> keys_ = {};  // the epoch's keys of the permutation
};

}  // namespace phub
