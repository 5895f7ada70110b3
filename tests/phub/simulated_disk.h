// A disk in memory that can lose power. What was not synced may be there afterwards, or not, or in
// part: pieces of files, and names that were made, renamed and removed in a folder.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "phub/checkpoint/files.h"

namespace phub::testing {

// The process has died; every call from then on throws it.
class Crash : public std::exception {};

class SimulatedDisk final : public Files {
 public:
  SimulatedDisk();
  ~SimulatedDisk() override;

  enum class Fault {
    kCrash,     // half of a write is done, other calls are not
    kFail,      // an Error; half of a write is done, what a sync would have kept is lost
    kFailDone,  // an Error, though the call was carried out
    kFull,      // from then on no write succeeds
  };
  // The `call`-th call from now on has this fault.
  void arm(uint64_t call, Fault fault);
  void disarm() { armed_ = 0; }
  void make_room() { full_ = false; }
  void have_links(bool links) { links_ = links; }
  uint64_t calls() const { return calls_; }
  bool fired() const { return fired_; }
  bool crashed() const { return crashed_; }

  enum class Loss {
    kNothing,   // the process died, the kernel did not
    kUnsynced,  // all that was not synced
    kRandom,    // some of it
  };
  // The process that used the disk is gone: locks too. Ends the crash.
  void restart(Loss loss, std::mt19937_64& random);

  // For damage. Null: there is no such file.
  std::vector<std::byte>* bytes_of(const std::string& path);
  std::vector<std::string> files_below(const std::string& folder);  // paths, by name

  std::unique_ptr<OutputFile> create(const std::string& path) override;
  std::unique_ptr<InputFile> open(const std::string& path) override;
  void make_folder(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  bool link(const std::string& from, const std::string& to) override;
  void sync_folder(const std::string& path) override;
  void remove(const std::string& path) override;
  std::vector<FolderEntry> list(const std::string& path) override;
  std::unique_ptr<FileLock> lock(const std::string& path) override;

 private:
  struct Node;
  struct Change;
  class Output;
  class Input;
  class Lock;
  enum class Do { kAll, kHalf, kNothingAndFail, kAllAndFail };

  // Counts the call, and says what it is to do. Throws Crash.
  Do next_call(bool is_write = false);
  [[noreturn]] void fail_call(const std::string& what);
  Node& folder_of(const std::string& path);
  std::shared_ptr<Node> find(const std::string& path);
  void change(Node& folder, Change change);
  static void settle(Node& node, Loss loss, std::mt19937_64& random);

  std::shared_ptr<Node> root_;
  std::shared_ptr<int> holder_;  // of the lock
  uint64_t calls_ = 0;
  uint64_t armed_ = 0;
  Fault fault_ = Fault::kCrash;
  bool fired_ = false;
  bool crashed_ = false;
  bool full_ = false;
  bool links_ = true;
};

}  // namespace phub::testing
