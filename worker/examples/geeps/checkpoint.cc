#include "worker/examples/geeps/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "transport/error.h"

namespace phub::examples {
namespace {

// In the file: the magic number, the fields in their order (lengths before what they are of, all
// integers as in memory), the digest of what comes before it.
constexpr uint64_t kMagic = 0x3253504545474850;  // "PHGEEPS2"

template <typename Value>
void put(std::string& bytes, std::span<const Value> values) {
  const uint64_t count = values.size();
  bytes.append(reinterpret_cast<const char*>(&count), sizeof(count));
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

class Reader {
 public:
  explicit Reader(std::span<const char> bytes) : bytes_(bytes) {}

  uint64_t number() {
    uint64_t value = 0;
    take(&value, sizeof(value));
    return value;
  }
  template <typename Values>
  void get(Values& values) {
    const uint64_t count = number();
    if (count > bytes_.size() / sizeof(values[0])) throw std::length_error("cut short");
    values.resize(count);
    take(values.data(), count * sizeof(values[0]));
  }

 private:
  void take(void* to, size_t count) {
    if (count > bytes_.size()) throw std::length_error("cut short");
    std::copy_n(bytes_.data(), count, static_cast<char*>(to));
    bytes_ = bytes_.subspan(count);
  }

  std::span<const char> bytes_;
};

void write_synced(const std::string& path, const std::string& bytes) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  size_t written = 0;
  bool failed = file < 0;
  while (!failed && written < bytes.size()) {
    const ssize_t n = ::write(file, bytes.data() + written, bytes.size() - written);
    failed = n < 0 && errno != EINTR;
    if (n > 0) written += static_cast<size_t>(n);
  }
  failed = failed || ::fsync(file) != 0;
  const int error = errno;
  if (file >= 0) ::close(file);
  if (failed) fail(ErrorCode::kInternal, "{}: {}", path, std::strerror(error));
}

void sync_folder(const std::string& path) {
  const std::string folder = std::filesystem::absolute(path).parent_path().string();
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool failed = descriptor < 0 || ::fsync(descriptor) != 0;
  const int error = errno;
  if (descriptor >= 0) ::close(descriptor);
  if (failed) fail(ErrorCode::kInternal, "{}: {}", folder, std::strerror(error));
}

}  // namespace

std::string unfinished(const std::string& path) { return path + ".new"; }

void save(const std::string& path, const Checkpoint& checkpoint) {
  std::string bytes(reinterpret_cast<const char*>(&kMagic), sizeof(kMagic));
  put(bytes, std::span<const char>(checkpoint.of));
  bytes.append(reinterpret_cast<const char*>(&checkpoint.clock), sizeof(checkpoint.clock));
  put(bytes, std::span<const float>(checkpoint.parameters));
  put(bytes, std::span<const float>(checkpoint.state));
  put(bytes, std::span<const float>(checkpoint.optimizer));
  const uint64_t sum = digest(std::as_bytes(std::span(bytes)));
  bytes.append(reinterpret_cast<const char*>(&sum), sizeof(sum));
  write_synced(unfinished(path), bytes);
  if (std::rename(unfinished(path).c_str(), path.c_str()) != 0) {
    fail(ErrorCode::kInternal, "{}: {}", path, std::strerror(errno));
  }
  sync_folder(path);
}

Checkpoint load(const std::string& path, const std::string& of) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(ErrorCode::kNotFound, "{}: {}", path, std::strerror(errno));
  std::ostringstream stream;
  stream << file.rdbuf();
  const std::string bytes = std::move(stream).str();
  const size_t end = bytes.size() - std::min(bytes.size(), sizeof(uint64_t));
  const std::span<const char> content(bytes.data(), end);
  Checkpoint checkpoint;
  try {
    if (Reader(std::span(bytes).subspan(end)).number() != digest(std::as_bytes(content))) {
      throw std::length_error("its digest is wrong");
    }
    Reader reader(content);
    if (reader.number() != kMagic) throw std::length_error("it does not begin as one");
    reader.get(checkpoint.of);
    checkpoint.clock = reader.number();
    reader.get(checkpoint.parameters);
    reader.get(checkpoint.state);
    reader.get(checkpoint.optimizer);
  } catch (const std::length_error& error) {
    fail(ErrorCode::kInvalid, "{}: not a phub checkpoint: {}", path, error.what());
  }
  if (checkpoint.of != of) {
    fail(ErrorCode::kMismatch, "{}: it is a checkpoint of '{}', not of '{}'", path, checkpoint.of,
         of);
  }
  return checkpoint;
}

uint64_t digest(std::span<const std::byte> bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const std::byte byte : bytes) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  return hash;
}

}  // namespace phub::examples
