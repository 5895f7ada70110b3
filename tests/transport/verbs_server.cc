#include "tests/transport/verbs_server.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "transport/verbs/transport.h"

namespace phub::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr uint32_t kJoinMs = 60000;
constexpr size_t kStep = 128;  // of an array's beginning, at least
constexpr size_t kScanBytes = 1 << 20;

std::string output_of(const char* command) {
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) throw std::runtime_error(std::string(command) + ": cannot be run");
  std::string text;
  std::array<char, 4096> part;
  while (const size_t n = fread(part.data(), 1, part.size(), pipe)) text.append(part.data(), n);
  if (pclose(pipe) != 0) throw std::runtime_error(std::string(command) + " failed");
  return text;
}

}  // namespace

std::vector<MemoryKey> memory_keys() {
  std::vector<MemoryKey> keys;
  const auto number = [](const nlohmann::json& value) -> uint64_t {
    return value.is_string() ? std::stoull(value.get<std::string>(), nullptr, 16)
                             : value.get<uint64_t>();
  };
  for (const auto& mr : nlohmann::json::parse(output_of("rdma -d -j resource show mr"))) {
    MemoryKey key;
    if (mr.contains("rkey")) key.remote = static_cast<uint32_t>(number(mr["rkey"]));
    if (mr.contains("lkey")) key.local = static_cast<uint32_t>(number(mr["lkey"]));
    if (mr.contains("mrlen")) key.bytes = mr["mrlen"].get<uint64_t>();
    if (mr.contains("pid")) key.pid = mr["pid"].get<int>();
    keys.push_back(key);
  }
  return keys;
}

std::string rdma_resources() { return output_of("rdma resource show"); }

size_t open_descriptors() {
  const auto begin = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

VerbsServer::VerbsServer(const std::string& cores) {
  const std::string log = "/tmp/verbs_server." + std::to_string(getpid());
  process_ = std::make_unique<Process>(
      std::vector<std::string>{PHUB_BINARY, "serve", "--transports", "verbs", "--cores", cores,
                               "--listen", "127.0.0.1:0"},
      log);
  address_ = process_->listening_address();
}

VerbsServer::~VerbsServer() {
  process_->send(SIGTERM);
  process_->wait(seconds(20));
}

std::string VerbsServer::output() const {
  const std::optional<int> status = process_->wait(seconds(1));
  return (status ? "the server ended with " + std::to_string(*status) : "the server goes on") +
         "\n" + process_->output();
}

std::vector<std::byte> VerbsServer::read(uint64_t address, size_t bytes) const {
  const std::string path = "/proc/" + std::to_string(pid()) + "/mem";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  std::vector<std::byte> memory(bytes);
  const ssize_t n = pread(fd, memory.data(), bytes, static_cast<off_t>(address));
  ::close(fd);
  if (n != static_cast<ssize_t>(bytes)) {
    throw std::runtime_error("the server's memory cannot be read: " +
                             std::string(std::strerror(errno)));
  }
  return memory;
}

uint64_t VerbsServer::find(std::span<const std::byte> bytes) const {
  std::ifstream maps("/proc/" + std::to_string(pid()) + "/maps");
  std::vector<uint64_t> found;
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin = 0, end = 0;
    std::array<char, 5> access = {};
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s", &begin, &end, access.data()) !=
            3 ||
        access[1] != 'w') {
      continue;
    }
    for (uint64_t part = begin; part < end; part += kScanBytes) {
      const size_t here = std::min<uint64_t>(kScanBytes, end - part);
      const std::vector<std::byte> memory = read(part, here);
      for (size_t at = 0; at + kStep <= here; at += kStep) {
        const size_t compared = std::min(kStep, bytes.size());
        if (std::memcmp(&memory[at], bytes.data(), compared) == 0) found.push_back(part + at);
      }
    }
  }
  std::erase_if(found,
                [&](uint64_t at) { return !std::ranges::equal(read(at, bytes.size()), bytes); });
  if (found.size() != 1) {
    throw std::runtime_error("the bytes that are looked for are in the server's memory " +
                             std::to_string(found.size()) + " times");
  }
  return found.front();
}

OpenRank::OpenRank(const VerbsServer& server, const JobSpec& spec, int32_t rank, bool replace)
    : control_(server.address()) {
  JoinRequest request;
  request.spec = spec;
  request.rank = rank;
  request.replace = replace;
  request.transport = "verbs";
  reply_ = control_.join(request, kJoinMs);
  layout_ = link_layout_of(reply_);
}

Credential OpenRank::credential() const {
  return {reply_.spec.name, reply_.rank, reply_.incarnation, reply_.offer.ticket};
}

void OpenRank::connect() {
  link_ = connect_verbs(reply_.offer, layout_, 10000);
  session_ = std::make_unique<Session>(reply_, *link_);
  await();
}

void OpenRank::await() {
  const auto deadline = steady_clock::now() + seconds(20);
  while (!session_->all_ready()) {
    if (!session_->poll()) std::this_thread::sleep_for(milliseconds(1));
    if (session_->broken()) throw std::runtime_error("the connection broke");
    if (steady_clock::now() > deadline) throw std::runtime_error("no results within 20 s");
  }
}

}  // namespace phub::testing
