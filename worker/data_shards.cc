#include "worker/data_shards.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include "transport/error.h"

namespace phub {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kMostSamples = uint64_t{1} << 62;  // so that no sum of positions overflows

// Of the numbers that are permuted. With fewer bits, 8 rounds do not make all orders as likely.
constexpr uint32_t kLeastBits = 6;

// A cursor as bytes.
struct CursorBytes {
  std::array<char, 8> magic;
  uint8_t partition;
  uint8_t shuffle;
  uint8_t drop_last;
  uint8_t zero;
  uint32_t rank;  // of private data; shared: 0
  uint64_t samples;
  uint64_t seed;
  uint64_t epoch;
  uint64_t position;
};
static_assert(sizeof(CursorBytes) == DataShards::kCursorBytes);
constexpr std::array<char, 8> kCursorMagic = {'P', 'H', 'U', 'B', 'D', 'S', '1', '\n'};

// One step of SplitMix64 (Steele, Lea, Flood 2014): a bijection that spreads every bit over all.
uint64_t split_mix(uint64_t state) {
  state += 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

uint64_t low_mask(uint32_t bits) { return (uint64_t{1} << bits) - 1; }

std::string_view partition_name(uint8_t partition) {
  return partition == static_cast<uint8_t>(Partition::kPrivate) ? "private" : "shared";
}

uint64_t divided_up(uint64_t number, uint64_t by) { return number / by + (number % by != 0); }

void check_batch(size_t batch) {
  if (batch == 0) fail(ErrorCode::kInvalid, "a batch of data has 0 samples: give it at least 1");
}

}  // namespace

DataShards::DataShards(const DataOptions& options) : options_(options) {
  if (options.samples == 0 || options.samples > kMostSamples) {
    fail(ErrorCode::kInvalid, "the data has {} samples: there must be 1 to 2^62", options.samples);
  }
  if (options.rank >= options.world_size) {
    fail(ErrorCode::kInvalid, "rank {} of the data is outside of the world of {} ranks",
         options.rank, options.world_size);
  }
  if (options.partition == Partition::kShared) {
    stride_ = options.world_size;
    offset_ = options.rank;
  }
  if (options.drop_last && options.samples < stride_) {
    fail(ErrorCode::kInvalid,
         "{} samples are too few for {} ranks with drop_last: every epoch would be empty",
         options.samples, stride_);
  }
  // Two halves that together hold every sample's number.
  const auto bits =
      std::max(kLeastBits, static_cast<uint32_t>(std::bit_width(options.samples - 1)));
  low_bits_ = bits / 2;
  high_bits_ = bits - low_bits_;
  begin(0, 0);
}

std::vector<uint64_t> DataShards::next(size_t batch) {
  check_batch(batch);
  std::vector<uint64_t> samples(std::min<uint64_t>(batch, left()));
  next(std::span(samples));
  return samples;
}

size_t DataShards::next(std::span<uint64_t> batch) {
  check_batch(batch.size());
  const size_t count = std::min<uint64_t>(batch.size(), left());
  for (size_t i = 0; i < count; ++i) batch[i] = sample_at(position_ + i * stride_ + offset_);
  skip(1, batch.size());
  return count;
}

void DataShards::skip(uint64_t batches, size_t batch) {
  check_batch(batch);
  const uint64_t batches_left = divided_up(left(), batch);
  if (batches < batches_left) {
    position_ += batches * batch * stride_;
    return;
  }
  batches -= batches_left;
  const uint64_t per_epoch = divided_up(left_at(0), batch);
  begin(epoch_ + 1 + batches / per_epoch, batches % per_epoch * batch * stride_);
}

uint64_t DataShards::left() const { return left_at(position_); }

uint64_t DataShards::left_at(uint64_t position) const {
  const uint64_t of_all = options_.samples - position;
  return options_.drop_last ? of_all / stride_ : divided_up(of_all, stride_);
}

void DataShards::begin(uint64_t epoch, uint64_t position) {
  epoch_ = epoch;
  position_ = position;
  const uint64_t stream =
      options_.partition == Partition::kPrivate ? 1 + uint64_t{options_.rank} : 0;
  // Hashing one after the other keeps (seed 1, epoch 2) and (seed 2, epoch 1) apart.
  const uint64_t key = split_mix(split_mix(split_mix(options_.seed) + epoch) + stream);
  for (size_t round = 0; round < kRounds; ++round) keys_[round] = split_mix(key + round);
}

// A Feistel network over as many bits as the numbers have, and from a number that is no sample's on
// to the next of the cycle (Black and Rogaway, 2002: "Ciphers with arbitrary finite domains"): a
// permutation of the samples' numbers. With more than 32 samples, at least half of the numbers are
// a sample's.
uint64_t DataShards::sample_at(uint64_t position) const {
  uint64_t number = position % options_.samples;  // padding begins at the front again
  if (!options_.shuffle) return number;
  do {
    uint64_t low = number & low_mask(low_bits_);
    uint64_t high = number >> low_bits_;
    for (size_t round = 0; round < kRounds; round += 2) {
      high ^= split_mix(low + keys_[round]) & low_mask(high_bits_);
      low ^= split_mix(high + keys_[round + 1]) & low_mask(low_bits_);
    }
    number = high << low_bits_ | low;
  } while (number >= options_.samples);
  return number;
}

std::vector<std::byte> DataShards::cursor() const {
  const bool is_private = options_.partition == Partition::kPrivate;
  const CursorBytes fields = {.magic = kCursorMagic,
                              .partition = static_cast<uint8_t>(options_.partition),
                              .shuffle = options_.shuffle,
                              .drop_last = options_.drop_last,
                              .zero = 0,
                              .rank = is_private ? options_.rank : 0,
                              .samples = options_.samples,
                              .seed = options_.seed,
                              .epoch = epoch_,
                              .position = position_};
  const auto bytes = std::as_bytes(std::span(&fields, 1));
  return {bytes.begin(), bytes.end()};
}

void DataShards::restore(std::span<const std::byte> cursor) {
  CursorBytes mine;
  std::memcpy(&mine, this->cursor().data(), sizeof mine);
  CursorBytes saved = {};
  if (cursor.size() == sizeof saved) std::memcpy(&saved, cursor.data(), sizeof saved);
  if (saved.magic != kCursorMagic || saved.partition > 1 || saved.shuffle > 1 ||
      saved.drop_last > 1 || saved.zero != 0 || saved.position >= saved.samples) {
    fail(ErrorCode::kInvalid,
         "{} bytes are no cursor of data: it has {} bytes as cursor() makes them", cursor.size(),
         sizeof saved);
  }
  const auto check_same = [](std::string_view what, auto saved_value, auto my_value) {
    if (saved_value == my_value) return;
    fail(ErrorCode::kInvalid,
         "the cursor is of other data: its {} is {}, and that of this data is {}. Give the same "
         "options as before, or begin the data anew",
         what, saved_value, my_value);
  };
  check_same("partition", partition_name(saved.partition), partition_name(mine.partition));
  check_same("number of samples", saved.samples, mine.samples);
  check_same("seed", saved.seed, mine.seed);
  check_same("shuffle", saved.shuffle != 0, mine.shuffle != 0);
  check_same("drop_last", saved.drop_last != 0, mine.drop_last != 0);
  check_same("rank", saved.rank, mine.rank);
  if (left_at(saved.position) == 0) {
    begin(saved.epoch + 1, 0);
  } else {
    begin(saved.epoch, saved.position);
  }
}

}  // namespace phub
