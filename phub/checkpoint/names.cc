#include "phub/checkpoint/names.h"

#include <fmt/format.h>

#include <charconv>

#include "transport/error.h"
#include "transport/text.h"
#include "transport/wire.h"

namespace phub {
namespace {

constexpr std::string_view kRound = "round-";
constexpr std::string_view kEpoch = ".epoch-";
constexpr std::string_view kRank = "rank-";

bool stays(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-';
}

// Removes a number from the front; what else it may look like is for the caller to compare.
std::optional<uint64_t> take_number(std::string_view& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

bool take_word(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

}  // namespace

std::string encode_name(std::string_view name) {
  if (name.empty()) fail(ErrorCode::kInvalid, "an empty name cannot be that of a file");
  std::string encoded;
  for (const char c : name) {
    if (stays(c)) {
      encoded += c;
    } else {
      encoded += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
    if (encoded.size() > kMaxEncodedBytes) {
      fail(ErrorCode::kInvalid,
           "the name '{}' is too long for a file: bytes other than letters, digits, '_' and '-' "
           "take "
           "three each, and all together may take {}",
           printable(name), kMaxEncodedBytes);
    }
  }
  return encoded;
}

std::optional<std::string> decode_name(std::string_view encoded) {
  if (encoded.empty() || encoded.size() > kMaxEncodedBytes) return std::nullopt;
  std::string name;
  for (size_t i = 0; i < encoded.size(); ++i) {
    if (stays(encoded[i])) {
      name += encoded[i];
      continue;
    }
    if (encoded[i] != '%') return std::nullopt;
    unsigned value = 0;
    const std::string_view digits = encoded.substr(i + 1, 2);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() != 2 || error != std::errc() || end != digits.data() + 2) return std::nullopt;
    name += static_cast<char>(value);
    i += 2;
  }
  if (encode_name(name) != encoded) return std::nullopt;
  return name;
}

std::string folder_name(CheckpointId id) {
  return fmt::format("{}{:012}{}{}", kRound, id.round, kEpoch, id.epoch);
}

std::optional<CheckpointId> parse_folder_name(std::string_view name) {
  std::string_view rest = name;
  if (!take_word(rest, kRound)) return std::nullopt;
  const std::optional<uint64_t> round = take_number(rest);
  if (!round || !take_word(rest, kEpoch)) return std::nullopt;
  const std::optional<uint64_t> epoch = take_number(rest);
  if (!epoch) return std::nullopt;
  const CheckpointId id{.epoch = *epoch, .round = *round};
  if (folder_name(id) != name) return std::nullopt;
  return id;
}

std::string part_name(uint32_t rank, std::string_view name) {
  return fmt::format("{}{}/{}", kRank, rank, encode_name(name));
}

std::optional<PartId> parse_part_name(std::string_view file) {
  std::string_view rest = file;
  if (!take_word(rest, kRank)) return std::nullopt;
  const std::optional<uint64_t> rank = take_number(rest);
  if (!rank || *rank >= kMaxRanks || !take_word(rest, "/")) return std::nullopt;
  const std::optional<std::string> name = decode_name(rest);
  if (!name) return std::nullopt;
  PartId part{static_cast<uint32_t>(*rank), *name};
  if (part_name(part.rank, part.name) != file) return std::nullopt;
  return part;
}

void check_file_name(std::string_view file) {
  if (parse_part_name(file)) return;
  if (file.ends_with(kTensorsSuffix)) {
    const std::string_view base = file.substr(0, file.size() - kTensorsSuffix.size());
    if (file.size() <= kMaxEncodedBytes && decode_name(base)) return;
  }
  fail(ErrorCode::kInvalid, "'{}' is not the name of a file of a checkpoint", printable(file));
}

}  // namespace phub
