#include "worker/save/rank_state.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kMagic = "PHUBRS1\n";
constexpr size_t kMostNameBytes = 255;
constexpr uint64_t kEntryBytes = sizeof(uint32_t) + sizeof(uint64_t);  // before its name

template <typename T>
void append(std::string& part, T number) {
  part.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// Takes bytes from the front of what is left.
class Reader {
 public:
  explicit Reader(std::string_view left) : left_(left) {}

  std::string_view bytes(uint64_t count) {
    if (count > left_.size()) {
      fail(ErrorCode::kInvalid,
           "a rank's part of a checkpoint ends {} bytes early: it is not what a worker saved",
           count - left_.size());
    }
    const std::string_view taken = left_.substr(0, count);
    left_.remove_prefix(count);
    return taken;
  }
  template <typename T>
  T number() {
    T number = 0;
    std::memcpy(&number, bytes(sizeof number).data(), sizeof number);
    return number;
  }
  uint64_t left() const { return left_.size(); }

 private:
  std::string_view left_;
};

}  // namespace

std::string pack(const RankState& state, uint64_t most_bytes) {
  uint64_t total = kMagic.size() + sizeof(uint32_t);
  for (const auto& [name, bytes] : state) {
    if (name.empty() || name.size() > kMostNameBytes) {
      fail(ErrorCode::kInvalid, "saver: a name has 1 to {} bytes, '{}' has {}", kMostNameBytes,
           printable(name.substr(0, kMostNameBytes)), name.size());
    }
    const uint64_t head = kEntryBytes + name.size();
    if (bytes.size() > most_bytes || total + head + bytes.size() > most_bytes) {
      fail(ErrorCode::kInvalid,
           "saver: with '{}' ({} bytes) the state of this rank is more than {} bytes, the most "
           "that a checkpoint holds of one",
           printable(name), bytes.size(), most_bytes);
    }
    total += head + bytes.size();
  }
  std::string part;
  part.reserve(total);
  part += kMagic;
  append(part, static_cast<uint32_t>(state.size()));
  for (const auto& [name, bytes] : state) {
    append(part, static_cast<uint32_t>(name.size()));
    append(part, uint64_t{bytes.size()});
    part += name;
    part.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return part;
}

RankState unpack(std::string_view part) {
  Reader reader(part);
  if (reader.bytes(kMagic.size()) != kMagic) {
    fail(ErrorCode::kInvalid,
         "a rank's part of a checkpoint does not begin as this version writes it");
  }
  RankState state;
  for (auto entries = reader.number<uint32_t>(); entries > 0; --entries) {
    const auto name_bytes = reader.number<uint32_t>();
    const auto bytes = reader.number<uint64_t>();
    std::string name(reader.bytes(name_bytes));
    const auto data = std::as_bytes(std::span(reader.bytes(bytes)));
    if (!state.emplace(std::move(name), std::vector(data.begin(), data.end())).second) {
      fail(ErrorCode::kInvalid, "a rank's part of a checkpoint has a name twice");
    }
  }
  if (reader.left() > 0) {
    fail(ErrorCode::kInvalid, "a rank's part of a checkpoint has {} bytes behind its end",
         reader.left());
  }
  return state;
}

}  // namespace phub
