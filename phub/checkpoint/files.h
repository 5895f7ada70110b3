// The file layer of checkpoints. Everything that a checkpoint does to a disk goes through Files, so
// that a test can put a disk in its place whose calls fail, or that forgets everything that was not
// synced.
//
// Errors are Error with the call, the path and the reason: kFull (disk or quota is full),
// kNotFound, kTaken (create: it exists; lock: another process has it), kUnauthorized (permissions),
// kInternal for the rest. An object of these classes belongs to one thread at a time; Files itself
// may be used by several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace phub {

// Bytes in memory aligned to this, and as many as a multiple of it, are written past the kernel's
// cache where the file system can: a checkpoint is not read again, and copying it costs the
// processors that rounds need.
inline constexpr size_t kDirectAlignment = 4096;

// A file that is being written, from its beginning to its end. If it is destroyed before close(),
// the file is closed as it is, and its content is worth nothing.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void write(std::span<const std::byte> bytes) = 0;  // all of them
  // The written bytes are on the disk when this returns. After a failure it must not be tried
  // again: the kernel has dropped the data, and the second call would succeed.
  virtual void sync() = 0;
  virtual void close() = 0;
};

class InputFile {
 public:
  virtual ~InputFile() = default;
  virtual uint64_t bytes() const = 0;  // when it was opened
  // Fills `into`. Throws Error(kInvalid) if the file ends before that.
  virtual void read(uint64_t offset, std::span<std::byte> into) = 0;
};

// The lock is held as long as this lives.
class FileLock {
 public:
  virtual ~FileLock() = default;
  // Throws Error(kUnavailable) if the file is not at its path any more: somebody has removed or
  // replaced its folder. Any thread.
  virtual void check() const {}
};

struct FolderEntry {
  std::string name;
  bool folder = false;  // false: a file, a link, anything else
  bool link = false;    // a symbolic one, whatever it leads to
};

class Files {
 public:
  virtual ~Files() = default;

  virtual std::unique_ptr<OutputFile> create(const std::string& path) = 0;  // 0600; kTaken if there
  virtual std::unique_ptr<InputFile> open(const std::string& path) = 0;     // follows no link
  virtual void make_folder(const std::string& path) = 0;  // 0700; nothing to do if it is there
  // Throws Error(kInvalid) if the folder is a link, another user's, or others may write to it: they
  // could put links in it, which lead elsewhere.
  virtual void check_private(const std::string& /*path*/) {}
  virtual void rename(const std::string& from, const std::string& to) = 0;
  // Another name of the same file, which it keeps if `from` is removed; kTaken if `to` is there.
  // False: this file system gives files no second name.
  virtual bool link(const std::string& from, const std::string& to) = 0;
  // Names in the folder that were made, renamed or removed are on the disk when this returns.
  virtual void sync_folder(const std::string& path) = 0;
  // A file or an empty folder. Nothing to do if it is not there.
  virtual void remove(const std::string& path) = 0;
  virtual std::vector<FolderEntry> list(const std::string& path) = 0;  // by name
  // Makes the file if it is not there. If another process holds the lock: kTaken, with its number.
  virtual std::unique_ptr<FileLock> lock(const std::string& path) = 0;
};

// The files of the operating system.
Files& system_files();

// Removes a folder and all that is in it; follows no link.
void remove_all(Files& files, const std::string& path);

// The text of a file of at most `limit` bytes; Error(kInvalid) if it is longer.
std::string read_text(Files& files, const std::string& path, uint64_t limit);

}  // namespace phub
