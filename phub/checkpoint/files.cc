#include "phub/checkpoint/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

#include "transport/error.h"
#include "transport/fd.h"
#include "transport/text.h"

namespace phub {
namespace {

// Written data goes to the disk at once, in pieces of this size, and not only when it is synced.
constexpr uint64_t kWriteBehindBytes = uint64_t{8} << 20;

[[noreturn]] void fail_file(std::string_view call, const std::string& path, int error) {
  const auto code = [&] {
    switch (error) {
      case ENOSPC:
      case EDQUOT:
      case EFBIG:
      case EMFILE:
      case ENFILE:
        return ErrorCode::kFull;
      case ENOENT:
        return ErrorCode::kNotFound;
      case EEXIST:
        return ErrorCode::kTaken;
      case EACCES:
      case EPERM:
      case EROFS:
        return ErrorCode::kUnauthorized;
      default:
        return ErrorCode::kInternal;
    }
  }();
  fail(code, "{} of {}: {}", call, path,
       error == ELOOP ? "it is a symbolic link, and none is followed here" : std::strerror(error));
}

int open_file(const std::string& path, int flags) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

bool is_aligned(std::span<const std::byte> bytes) {
  return reinterpret_cast<uintptr_t>(bytes.data()) % kDirectAlignment == 0 &&
         bytes.size() % kDirectAlignment == 0;
}

class SystemOutput final : public OutputFile {
 public:
  explicit SystemOutput(std::string path)
      : path_(std::move(path)), fd_(open_file(path_, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW)) {
    if (fd_ < 0) fail_file("open for writing", path_, errno);
  }
  ~SystemOutput() override {
    if (fd_ >= 0) ::close(fd_);
  }
  SystemOutput(const SystemOutput&) = delete;
  SystemOutput& operator=(const SystemOutput&) = delete;

  void write(std::span<const std::byte> bytes) override {
    set_direct(direct_works_ && is_aligned(bytes) && written_ % kDirectAlignment == 0);
    while (!bytes.empty()) {
      const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0 && errno == EINVAL && direct_) {
        direct_works_ = false;
        set_direct(false);
        continue;
      }
      if (written < 0) fail_file("write", path_, errno);
      bytes = bytes.subspan(static_cast<size_t>(written));
      written_ += static_cast<uint64_t>(written);
    }
    if (direct_ || written_ - started_ < kWriteBehindBytes) return;
    // Not every file system can do this; those that cannot write when it is synced.
    sync_file_range(fd_, static_cast<off64_t>(started_), static_cast<off64_t>(written_ - started_),
                    SYNC_FILE_RANGE_WRITE);
    started_ = written_;
  }

  void sync() override {
    if (fsync(fd_) != 0) fail_file("fsync", path_, errno);
  }

  void close() override {
    if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail_file("close", path_, errno);
  }

 private:
  void set_direct(bool direct) {
    if (direct == direct_) return;
    const int flags = fcntl(fd_, F_GETFL);
    if (flags < 0) fail_file("fcntl", path_, errno);
    if (fcntl(fd_, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0) {
      direct_ = direct;
    } else if (direct) {
      direct_works_ = false;
    } else {
      fail_file("fcntl", path_, errno);
    }
  }

  std::string path_;
  int fd_;
  bool direct_ = false;
  bool direct_works_ = true;
  uint64_t written_ = 0;
  uint64_t started_ = 0;  // up to here the kernel was told to write
};

class SystemInput final : public InputFile {
 public:
  explicit SystemInput(std::string path)
      : path_(std::move(path)), fd_(open_file(path_, O_RDONLY | O_NOFOLLOW | O_NONBLOCK)) {
    if (!fd_) fail_file("open", path_, errno);
    struct stat info = {};
    if (fstat(fd_.get(), &info) != 0) fail_file("fstat", path_, errno);
    if (!S_ISREG(info.st_mode)) fail(ErrorCode::kInvalid, "{} is not a file", path_);
    bytes_ = static_cast<uint64_t>(info.st_size);
  }

  uint64_t bytes() const override { return bytes_; }

  void read(uint64_t offset, std::span<std::byte> into) override {
    while (!into.empty()) {
      const ssize_t got = pread(fd_.get(), into.data(), into.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_file("read", path_, errno);
      if (got == 0) fail(ErrorCode::kInvalid, "{} ends at byte {}", path_, offset);
      into = into.subspan(static_cast<size_t>(got));
      offset += static_cast<uint64_t>(got);
    }
  }

 private:
  std::string path_;
  Fd fd_;
  uint64_t bytes_ = 0;
};

// Its file has the number of the process that holds it, for people and for the refusal.
class SystemLock final : public FileLock {
 public:
  explicit SystemLock(const std::string& path)
      : path_(path), fd_(open_file(path, O_RDWR | O_CREAT | O_NOFOLLOW)) {
    if (!fd_) fail_file("open", path, errno);
    if (flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) fail_file("flock", path, errno);
      const std::string holder = first_line(path);
      fail(ErrorCode::kTaken,
           "{} is locked by process {}: another box uses this directory. Stop that one, or give "
           "this "
           "one a directory of its own",
           path, holder.empty() ? "(unknown)" : printable(holder));
    }
    const std::string own = fmt::format("{}\n", getpid());
    if (ftruncate(fd_.get(), 0) != 0 ||
        pwrite(fd_.get(), own.data(), own.size(), 0) != static_cast<ssize_t>(own.size())) {
      fail_file("write", path, errno);
    }
  }

  void check() const override {
    struct stat held = {}, there = {};
    const bool is_there = fstat(fd_.get(), &held) == 0 && lstat(path_.c_str(), &there) == 0;
    if (is_there && held.st_dev == there.st_dev && held.st_ino == there.st_ino) return;
    fail(ErrorCode::kUnavailable,
         "{} is not the file that this box made: its folder was removed, replaced or unmounted "
         "since this box began; bring the folder back, or start the box again to use the new one",
         path_);
  }

 private:
  const std::string path_;
  Fd fd_;
};

class SystemFiles final : public Files {
 public:
  std::unique_ptr<OutputFile> create(const std::string& path) override {
    return std::make_unique<SystemOutput>(path);
  }
  std::unique_ptr<InputFile> open(const std::string& path) override {
    return std::make_unique<SystemInput>(path);
  }

  void make_folder(const std::string& path) override {
    if (mkdir(path.c_str(), 0700) == 0) return;
    const int error = errno;
    struct stat info = {};
    if (error == EEXIST && stat(path.c_str(), &info) == 0) {
      if (S_ISDIR(info.st_mode)) return;
      fail(ErrorCode::kInvalid, "{} is no folder; name one, or a path where none is yet", path);
    }
    fail_file("mkdir", path, error);
  }

  void check_private(const std::string& path) override {
    struct stat info = {};
    if (lstat(path.c_str(), &info) != 0) fail_file("stat", path, errno);
    if (S_ISLNK(info.st_mode)) {
      fail(ErrorCode::kInvalid, "{} is a symbolic link; name the folder that it leads to", path);
    }
    if (!S_ISDIR(info.st_mode)) fail(ErrorCode::kInvalid, "{} is not a folder", path);
    if (info.st_uid != geteuid()) {
      fail(ErrorCode::kInvalid, "{} belongs to user {}, this is user {}; choose another", path,
           info.st_uid, geteuid());
    }
    if ((info.st_mode & 0022) != 0) {
      fail(ErrorCode::kInvalid,
           "{} has mode {:o}, so others may write to it; chmod 700 it, or choose another", path,
           info.st_mode & 07777);
    }
  }

  void rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) {
      fail_file("rename", from + " to " + to, errno);
    }
  }

  bool link(const std::string& from, const std::string& to) override {
    if (::link(from.c_str(), to.c_str()) == 0) return true;
    constexpr int kNoLinks[] = {EPERM, EOPNOTSUPP, ENOSYS, EMLINK, EXDEV};
    if (std::ranges::find(kNoLinks, errno) != std::end(kNoLinks)) return false;
    fail_file("link", from + " to " + to, errno);
  }

  void sync_folder(const std::string& path) override {
    const Fd fd(open_file(path, O_RDONLY | O_DIRECTORY));
    if (!fd) fail_file("open", path, errno);
    if (fsync(fd.get()) != 0) fail_file("fsync", path, errno);
  }

  void remove(const std::string& path) override {
    if (::remove(path.c_str()) != 0 && errno != ENOENT) fail_file("remove", path, errno);
  }

  std::vector<FolderEntry> list(const std::string& path) override {
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), closedir);
    if (folder == nullptr) fail_file("list", path, errno);
    std::vector<FolderEntry> entries;
    for (;;) {
      errno = 0;
      const dirent* found = readdir(folder.get());
      if (found == nullptr) break;
      const std::string name = found->d_name;
      if (name == "." || name == "..") continue;
      struct stat info = {};
      if (fstatat(dirfd(folder.get()), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // removed meanwhile
        fail_file("stat", fmt::format("{}/{}", path, name), errno);
      }
      entries.push_back({name, S_ISDIR(info.st_mode), S_ISLNK(info.st_mode)});
    }
    if (errno != 0) fail_file("list", path, errno);
    std::sort(entries.begin(), entries.end(),
              [](const FolderEntry& a, const FolderEntry& b) { return a.name < b.name; });
    return entries;
  }

  std::unique_ptr<FileLock> lock(const std::string& path) override {
    return std::make_unique<SystemLock>(path);
  }
};

}  // namespace

Files& system_files() {
  static SystemFiles files;
  return files;
}

void remove_all(Files& files, const std::string& path) {
  for (const FolderEntry& entry : files.list(path)) {
    const std::string inside = path + "/" + entry.name;
    if (entry.folder) {
      remove_all(files, inside);
    } else {
      files.remove(inside);
    }
  }
  files.remove(path);
}

std::string read_text(Files& files, const std::string& path, uint64_t limit) {
  const std::unique_ptr<InputFile> file = files.open(path);
  if (file->bytes() > limit) {
    fail(ErrorCode::kInvalid, "{} has {} bytes, and may have {}", path, file->bytes(), limit);
  }
  std::string text(file->bytes(), '\0');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace phub
