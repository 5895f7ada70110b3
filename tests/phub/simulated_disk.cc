#include "tests/phub/simulated_disk.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "transport/error.h"

namespace phub::testing {

// A change of a folder's names that is not on the disk yet.
struct SimulatedDisk::Change {
  std::string erased;  // "": nothing
  std::string added;
  std::shared_ptr<Node> node;
};

struct SimulatedDisk::Node {
  bool folder = false;
  std::vector<std::byte> bytes, durable_bytes;
  bool lost = false;  // a sync failed: what was written before it never gets to the disk
  std::map<std::string, std::shared_ptr<Node>> names, durable_names;
  std::vector<Change> changes;
};

namespace {

constexpr size_t kSectorBytes = 512;

std::string parent(const std::string& path) { return path.substr(0, path.find_last_of('/')); }
std::string base(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

template <class Names, class Change>
void apply_change(Names& names, const Change& change) {
  if (!change.erased.empty()) names.erase(change.erased);
  if (!change.added.empty()) names[change.added] = change.node;
}

}  // namespace

class SimulatedDisk::Output final : public OutputFile {
 public:
  Output(SimulatedDisk& disk, std::shared_ptr<Node> node) : disk_(disk), node_(std::move(node)) {}

  void write(std::span<const std::byte> bytes) override {
    const Do what = disk_.next_call(true);
    const size_t written =
        what == Do::kAll || what == Do::kAllAndFail ? bytes.size() : bytes.size() / 2;
    node_->bytes.insert(node_->bytes.end(), bytes.begin(), bytes.begin() + written);
    if (disk_.crashed_) throw Crash();
    if (what != Do::kAll) disk_.fail_call("write");
  }
  void sync() override {
    const Do what = disk_.next_call();
    if (what == Do::kNothingAndFail) node_->lost = true;
    if (what != Do::kNothingAndFail && !node_->lost) node_->durable_bytes = node_->bytes;
    if (what != Do::kAll) disk_.fail_call("fsync");
  }
  void close() override {
    if (disk_.next_call() != Do::kAll) disk_.fail_call("close");
  }

 private:
  SimulatedDisk& disk_;
  std::shared_ptr<Node> node_;
};

class SimulatedDisk::Input final : public InputFile {
 public:
  Input(SimulatedDisk& disk, std::shared_ptr<Node> node) : disk_(disk), node_(std::move(node)) {}
  uint64_t bytes() const override { return node_->bytes.size(); }
  void read(uint64_t offset, std::span<std::byte> into) override {
    if (disk_.next_call() != Do::kAll) disk_.fail_call("read");
    if (offset + into.size() > node_->bytes.size()) fail(ErrorCode::kInvalid, "the file ends");
    if (!into.empty()) std::memcpy(into.data(), node_->bytes.data() + offset, into.size());
  }

 private:
  SimulatedDisk& disk_;
  std::shared_ptr<Node> node_;
};

class SimulatedDisk::Lock final : public FileLock {
 public:
  explicit Lock(std::shared_ptr<int> holder) : holder_(std::move(holder)) {}
  ~Lock() override { *holder_ = 0; }

 private:
  std::shared_ptr<int> holder_;
};

SimulatedDisk::SimulatedDisk()
    : root_(std::make_shared<Node>()), holder_(std::make_shared<int>(0)) {
  root_->folder = true;
}
SimulatedDisk::~SimulatedDisk() = default;

void SimulatedDisk::arm(uint64_t call, Fault fault) {
  armed_ = calls_ + call;
  fault_ = fault;
  fired_ = false;
}

SimulatedDisk::Do SimulatedDisk::next_call(bool is_write) {
  if (crashed_) throw Crash();
  ++calls_;
  if (calls_ != armed_) return full_ && is_write ? Do::kHalf : Do::kAll;
  fired_ = true;
  switch (fault_) {
    case Fault::kCrash:
      crashed_ = true;
      if (is_write) return Do::kHalf;
      throw Crash();
    case Fault::kFail:
      return is_write ? Do::kHalf : Do::kNothingAndFail;
    case Fault::kFailDone:
      return Do::kAllAndFail;
    case Fault::kFull:
      full_ = true;
      return is_write ? Do::kHalf : Do::kAll;
  }
  return Do::kAll;
}

void SimulatedDisk::fail_call(const std::string& what) {
  if (full_) fail(ErrorCode::kFull, "{}: No space left on device", what);
  fail(ErrorCode::kInternal, "{}: Input/output error", what);
}

std::shared_ptr<SimulatedDisk::Node> SimulatedDisk::find(const std::string& path) {
  std::shared_ptr<Node> node = root_;
  for (size_t begin = 1; begin < path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const auto found = node->names.find(path.substr(begin, end - begin));
    if (found == node->names.end()) return nullptr;
    node = found->second;
    begin = end + 1;
  }
  return node;
}

SimulatedDisk::Node& SimulatedDisk::folder_of(const std::string& path) {
  const auto node = find(parent(path));
  if (node == nullptr || !node->folder) {
    fail(ErrorCode::kNotFound, "{}: No such file or directory", path);
  }
  return *node;
}

void SimulatedDisk::change(Node& folder, Change change) {
  apply_change(folder.names, change);
  folder.changes.push_back(std::move(change));
}

std::unique_ptr<OutputFile> SimulatedDisk::create(const std::string& path) {
  const Do what = next_call();
  if (what == Do::kNothingAndFail) fail_call("open");
  Node& folder = folder_of(path);
  if (folder.names.contains(base(path))) fail(ErrorCode::kTaken, "{}: File exists", path);
  const auto node = std::make_shared<Node>();
  change(folder, {"", base(path), node});
  if (what != Do::kAll) fail_call("open");
  return std::make_unique<Output>(*this, node);
}

std::unique_ptr<InputFile> SimulatedDisk::open(const std::string& path) {
  if (next_call() != Do::kAll) fail_call("open");
  const auto node = find(path);
  if (node == nullptr || node->folder) fail(ErrorCode::kNotFound, "{}: no such file", path);
  return std::make_unique<Input>(*this, node);
}

void SimulatedDisk::make_folder(const std::string& path) {
  const Do what = next_call();
  if (what == Do::kNothingAndFail) fail_call("mkdir");
  Node& folder = folder_of(path);
  if (!folder.names.contains(base(path))) {
    const auto node = std::make_shared<Node>();
    node->folder = true;
    change(folder, {"", base(path), node});
  }
  if (what != Do::kAll) fail_call("mkdir");
}

void SimulatedDisk::rename(const std::string& from, const std::string& to) {
  const Do what = next_call();
  if (what == Do::kNothingAndFail) fail_call("rename");
  Node& folder = folder_of(from);
  PHUB_CHECK(parent(from) == parent(to));
  const auto node = find(from);
  if (node == nullptr) fail(ErrorCode::kNotFound, "{}: No such file or directory", from);
  change(folder, {base(from), base(to), node});
  if (what != Do::kAll) fail_call("rename");
}

bool SimulatedDisk::link(const std::string& from, const std::string& to) {
  if (!links_) return false;
  const Do what = next_call();
  if (what == Do::kNothingAndFail) fail_call("link");
  const auto node = find(from);
  if (node == nullptr || node->folder) fail(ErrorCode::kNotFound, "{}: no such file", from);
  Node& folder = folder_of(to);
  if (folder.names.contains(base(to))) fail(ErrorCode::kTaken, "{}: File exists", to);
  change(folder, {"", base(to), node});
  if (what != Do::kAll) fail_call("link");
  return true;
}

void SimulatedDisk::sync_folder(const std::string& path) {
  const Do what = next_call();
  if (what == Do::kNothingAndFail) fail_call("fsync");
  const auto node = find(path);
  if (node == nullptr) fail(ErrorCode::kNotFound, "{}: No such file or directory", path);
  for (const Change& done : node->changes) apply_change(node->durable_names, done);
  node->changes.clear();
  if (what != Do::kAll) fail_call("fsync");
}

void SimulatedDisk::remove(const std::string& path) {
  const Do what = next_call();
  if (what == Do::kNothingAndFail) fail_call("remove");
  if (const auto node = find(path)) {
    if (!node->names.empty()) fail(ErrorCode::kInternal, "{}: Directory not empty", path);
    change(folder_of(path), {base(path), "", nullptr});
  }
  if (what != Do::kAll) fail_call("remove");
}

std::vector<FolderEntry> SimulatedDisk::list(const std::string& path) {
  if (next_call() != Do::kAll) fail_call("list");
  const auto node = find(path);
  if (node == nullptr || !node->folder) fail(ErrorCode::kNotFound, "{}: no such folder", path);
  std::vector<FolderEntry> entries;
  for (const auto& [name, inside] : node->names)
    entries.push_back({.name = name, .folder = inside->folder});
  return entries;
}

std::unique_ptr<FileLock> SimulatedDisk::lock(const std::string& path) {
  if (next_call() != Do::kAll) fail_call("flock");
  Node& folder = folder_of(path);
  if (*holder_ != 0) fail(ErrorCode::kTaken, "{} is locked by process {}", path, *holder_);
  if (!folder.names.contains(base(path))) {
    change(folder, {"", base(path), std::make_shared<Node>()});
  }
  *holder_ = 1;
  return std::make_unique<Lock>(holder_);
}

// What is left of a node when the power is lost.
void SimulatedDisk::settle(Node& node, Loss loss, std::mt19937_64& random) {
  if (loss == Loss::kRandom && node.bytes != node.durable_bytes) {
    std::vector<std::byte> kept(random() % (node.bytes.size() + 1));
    for (size_t begin = 0; begin < kept.size(); begin += kSectorBytes) {
      const size_t end = std::min(begin + kSectorBytes, kept.size());
      const uint64_t whose = random() % 3;  // its own, what was there before, or zeros
      for (size_t i = begin; i < end; ++i) {
        if (whose == 0) kept[i] = node.bytes[i];
        if (whose == 1 && i < node.durable_bytes.size()) kept[i] = node.durable_bytes[i];
      }
    }
    node.durable_bytes = random() % 3 == 0 ? node.bytes : kept;
  }
  if (loss == Loss::kRandom) {
    // Those before some moment, or any: file systems differ.
    const bool in_order = random() % 2 == 0;
    const size_t kept = random() % (node.changes.size() + 1);
    for (size_t i = 0; i < node.changes.size(); ++i) {
      const bool survives = in_order ? i < kept : random() % 2 == 0;
      if (survives) apply_change(node.durable_names, node.changes[i]);
    }
  }
  node.bytes = node.durable_bytes;
  node.names = node.durable_names;
  node.changes.clear();
  node.lost = false;
  for (const auto& [name, inside] : node.names) settle(*inside, loss, random);
}

void SimulatedDisk::restart(Loss loss, std::mt19937_64& random) {
  crashed_ = full_ = false;
  armed_ = 0;
  holder_ = std::make_shared<int>(0);
  // A process that dies syncs nothing: what it wrote may still be lost later.
  if (loss != Loss::kNothing) settle(*root_, loss, random);
}

std::vector<std::byte>* SimulatedDisk::bytes_of(const std::string& path) {
  const auto node = find(path);
  return node == nullptr || node->folder ? nullptr : &node->bytes;
}

std::vector<std::string> SimulatedDisk::files_below(const std::string& folder) {
  std::vector<std::string> paths;
  const auto node = find(folder);
  if (node == nullptr) return paths;
  for (const auto& [name, inside] : node->names) {
    const std::string path = folder + "/" + name;
    if (!inside->folder) {
      paths.push_back(path);
    } else {
      for (auto& below : files_below(path)) paths.push_back(std::move(below));
    }
  }
  return paths;
}

}  // namespace phub::testing
