#include "phub/checkpoint/checked_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "phub/checkpoint/crc32c.h"
#include "transport/error.h"

namespace phub {
CheckedOutput::CheckedOutput(Files& files, const std::string& path, std::string name)
    : file_(files.create(path)) {
  entry_.name = std::move(name);
}

void CheckedOutput::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kChecksumBytes - gathered_));
    std::memcpy(block_->bytes.data() + gathered_, piece.data(), piece.size());
    gathered_ += piece.size();
    if (gathered_ == kChecksumBytes) write_gathered();
    bytes = bytes.subspan(piece.size());
  }
}

void CheckedOutput::write_gathered() {
  const auto gathered = std::span<const std::byte>(block_->bytes).first(gathered_);
  entry_.checksums.push_back(crc32c(0, gathered));
  entry_.bytes += gathered_;
  file_->write(gathered);
  gathered_ = 0;
}

void CheckedOutput::finish() {
  if (gathered_ > 0) write_gathered();
  block_.reset();
}

void CheckedOutput::sync_and_close() {
  file_->sync();
  file_->close();
  file_.reset();
}

CheckedInput::CheckedInput(Files& files, std::string path, const CheckpointFile& entry)
    : path_(std::move(path)), entry_(entry), file_(files.open(path_)) {
  if (file_->bytes() != entry_.bytes) {
    fail(ErrorCode::kInvalid, "{} has {} bytes, and should have {}: it was damaged", path_,
         file_->bytes(), entry_.bytes);
  }
}

uint64_t CheckedInput::bytes_of_piece(uint64_t index) const {
  return std::min(kChecksumBytes, entry_.bytes - index * kChecksumBytes);
}

void CheckedInput::load(uint64_t index, std::span<std::byte> into) {
  const uint64_t begin = index * kChecksumBytes;
  file_->read(begin, into);
  if (crc32c(0, into) != entry_.checksums[index]) {
    fail(ErrorCode::kInvalid, "{}: the checksum of bytes {} to {} is wrong: the file was damaged",
         path_, begin, begin + into.size() - 1);
  }
}

void CheckedInput::read(uint64_t offset, std::span<std::byte> into) {
  if (offset > entry_.bytes || into.size() > entry_.bytes - offset) {
    fail(ErrorCode::kInvalid, "{}: there are no {} bytes from byte {} on, it has {}", path_,
         into.size(), offset, entry_.bytes);
  }
  while (!into.empty()) {
    const uint64_t index = offset / kChecksumBytes, within = offset % kChecksumBytes;
    const uint64_t bytes = bytes_of_piece(index);
    const size_t taken = std::min<uint64_t>(into.size(), bytes - within);
    if (taken == bytes) {
      load(index, into.first(taken));
    } else {
      if (index_ != index) {
        index_ = kNothing;
        piece_.resize(bytes);
        load(index, piece_);
        index_ = index;
      }
      std::memcpy(into.data(), piece_.data() + within, taken);
    }
    offset += taken;
    into = into.subspan(taken);
  }
}

void CheckedInput::verify() {
  index_ = kNothing;
  for (uint64_t index = 0; index < entry_.checksums.size(); ++index) {
    piece_.resize(bytes_of_piece(index));
    load(index, piece_);
  }
}

}  // namespace phub
