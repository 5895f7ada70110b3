// Files whose every MiB has a checksum: computed while they are written, compared while they are
// read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "phub/checkpoint/files.h"
#include "phub/checkpoint/manifest.h"

namespace phub {

struct alignas(kDirectAlignment) DirectBlock {
  std::array<std::byte, kChecksumBytes> bytes;
};

// Writes whole MiBs, from memory that suits a direct write.
class CheckedOutput {
 public:
  // `name`: the file's, in the manifest. Creates `path`.
  CheckedOutput(Files& files, const std::string& path, std::string name);

  void write(std::span<const std::byte> bytes);
  // Writes the gathered bytes. After it, only sync_and_close() may be called.
  void finish();
  void sync_and_close();
  const CheckpointFile& entry() const { return entry_; }  // complete after finish()

 private:
  void write_gathered();

  std::unique_ptr<OutputFile> file_;
  CheckpointFile entry_;
  // The bytes that are not written yet; most files are small: the rest of it is never touched.
  std::unique_ptr<DirectBlock> block_ = std::make_unique_for_overwrite<DirectBlock>();
  size_t gathered_ = 0;  // bytes of it
};

class CheckedInput {
 public:
  // Throws Error(kInvalid) if the file's size is not that of its entry.
  CheckedInput(Files& files, std::string path, const CheckpointFile& entry);

  // Fills `into`. Throws Error(kInvalid), with nothing in `into` to be believed, if a checksum is
  // wrong or the file has no such bytes.
  void read(uint64_t offset, std::span<std::byte> into);
  void verify();  // all of it

 private:
  static constexpr uint64_t kNothing = ~uint64_t{0};

  // The bytes of checksum `index`, into `into`.
  void load(uint64_t index, std::span<std::byte> into);
  uint64_t bytes_of_piece(uint64_t index) const;

  std::string path_;
  CheckpointFile entry_;
  std::unique_ptr<InputFile> file_;
  std::vector<std::byte> piece_;  // the one read last
  uint64_t index_ = kNothing;
};

}  // namespace phub
