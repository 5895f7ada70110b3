#include "phub/commands/container_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "phub/commands/config.h"
#include "tests/phub/tree.h"

namespace phub {
namespace container_memory_test {

using ::testing::HasSubstr;

constexpr uint64_t kNoLimit = ContainerMemory::kNoLimit;
constexpr uint64_t kMiB = 1u << 20;

class Files : public testing::Tree {
 public:
  Files() { put("/sys/fs/cgroup/cgroup.procs", "7"); }
  // A file that nobody can open: a link to itself.
  void put_unreadable(const std::string& path) const { link(path, root() + path); }
  // A group of version two.
  void group(const std::string& folder, const std::string& max, uint64_t used,
             uint64_t cache = 0) const {
    put(folder + "/memory.max", max);
    put(folder + "/memory.current", std::to_string(used));
    put(folder + "/memory.stat", "anon 7\nfile 9\ninactive_file " + std::to_string(cache) +
                                     "\nactive_file 0\nslab_reclaimable 0");
  }
  ContainerMemory found() const { return container_memory(root()); }
};

constexpr const char* kMountTwo =
    "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";

std::string bytes(uint64_t mib) { return std::to_string(mib * kMiB); }

TEST(ContainerMemory, NoGroupsNoLimit) {
  const Files files;
  EXPECT_EQ(files.found().limit, kNoLimit);
  EXPECT_EQ(files.found().available, kNoLimit);
  EXPECT_EQ(files.found().file, "");
  EXPECT_EQ(files.found().unknown, "");
}

TEST(ContainerMemory, VersionTwo) {
  const Files files;
  files.put("/proc/self/cgroup", "0::/system.slice/phub.service");
  files.put("/proc/self/mountinfo", kMountTwo);
  const std::string unit = "/sys/fs/cgroup/system.slice/phub.service";
  files.group(unit, "max", 100 * kMiB);
  EXPECT_EQ(files.found().limit, kNoLimit);
  files.group(unit, bytes(512), 100 * kMiB, 40 * kMiB);
  EXPECT_EQ(files.found().limit, 512 * kMiB);
  EXPECT_EQ(files.found().available, (512 - 60) * kMiB) << "the page cache can be had back";
  EXPECT_EQ(files.found().file, files.root() + unit + "/memory.max");
  files.put(unit + "/memory.high", bytes(256));
  EXPECT_EQ(files.found().limit, 256 * kMiB);
  EXPECT_EQ(files.found().file, files.root() + unit + "/memory.high");
  files.group(unit, bytes(50), 100 * kMiB);
  EXPECT_EQ(files.found().available, 0u) << "lowered below what is used";
}

TEST(ContainerMemory, TheGroupWithTheLeastLeftCounts) {
  const Files files;
  files.put("/proc/self/cgroup", "0::/kubepods/pod1/box");
  files.put("/proc/self/mountinfo", kMountTwo);
  files.group("/sys/fs/cgroup/kubepods/pod1/box", bytes(600), 100 * kMiB);
  files.group("/sys/fs/cgroup/kubepods/pod1", bytes(800), 700 * kMiB);  // its other containers
  files.group("/sys/fs/cgroup/kubepods", "max", 900 * kMiB);
  EXPECT_EQ(files.found().limit, 800 * kMiB);
  EXPECT_EQ(files.found().available, 100 * kMiB);
  files.group("/sys/fs/cgroup/kubepods", bytes(950), 900 * kMiB);
  EXPECT_EQ(files.found().available, 50 * kMiB);
}

TEST(ContainerMemory, AContainerSeesItsGroupAsTheRoot) {
  const Files files;
  // In a name space of its own; and without one, where the mount shows a part of the hierarchy.
  for (const auto& [group, root_group] : {std::pair("/", "/"), std::pair("/../other", "/"),
                                          std::pair("/docker/f00", "/docker/f00")}) {
    files.put("/proc/self/cgroup", std::string("0::") + group);
    files.put("/proc/self/mountinfo", std::string("31 23 0:28 ") + root_group +
                                          " /sys/fs/cgroup rw shared:3 - cgroup2 cgroup2 rw");
    files.group("/sys/fs/cgroup", bytes(300), 0);
    EXPECT_EQ(files.found().limit, 300 * kMiB) << group;
  }
  files.put("/proc/self/cgroup", "0::/docker/f00/inner");
  files.group("/sys/fs/cgroup/inner", bytes(200), 0);
  EXPECT_EQ(files.found().limit, 200 * kMiB);
}

TEST(ContainerMemory, VersionOne) {
  const Files files;
  files.put("/proc/self/cgroup", "5:devices:/\n4:cpu,memory:/job 7/step\n0::/");
  files.put("/proc/self/mountinfo",
            "31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            "32 23 0:29 / /sys/fs/my\\040memory rw - cgroup cgroup rw,memory\n"
            "33 23 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw");
  files.put("/sys/fs/my memory/cgroup.procs", "7");
  const std::string job = "/sys/fs/my memory/job 7", step = job + "/step";
  for (const std::string& group : {step, job, std::string("/sys/fs/my memory")}) {
    files.put(group + "/memory.limit_in_bytes", "9223372036854771712");  // that is no limit
    files.put(group + "/memory.usage_in_bytes", bytes(100));
    files.put(
        group + "/memory.stat",
        "cache 5\nhierarchical_memory_limit 9223372036854771712\ntotal_inactive_file " + bytes(30));
  }
  EXPECT_EQ(files.found().limit, kNoLimit);
  files.put(job + "/memory.limit_in_bytes", bytes(400));
  EXPECT_EQ(files.found().limit, 400 * kMiB);
  EXPECT_EQ(files.found().available, (400 - 70) * kMiB);
  EXPECT_EQ(files.found().file, files.root() + job + "/memory.limit_in_bytes");
  // A group around this one that the mount does not show.
  files.put(step + "/memory.stat", "hierarchical_memory_limit " + bytes(350));
  EXPECT_EQ(files.found().limit, 350 * kMiB);
}

TEST(ContainerMemory, SaysWhatItCannotRead) {
  const Files files;
  files.put("/proc/self/cgroup", "0::/a/b");
  files.put("/proc/self/mountinfo", kMountTwo);
  files.group("/sys/fs/cgroup/a/b", bytes(500), 0);
  files.put_unreadable("/sys/fs/cgroup/a/memory.max");
  EXPECT_EQ(files.found().limit, 500 * kMiB) << "the others still count";
  EXPECT_THAT(files.found().unknown, HasSubstr("/sys/fs/cgroup/a/memory.max: "));
}

TEST(ContainerMemory, SaysThatGroupsAreNotMounted) {
  const Files files;
  files.put("/proc/self/cgroup", "4:memory:/docker/f00");
  EXPECT_THAT(files.found().unknown, HasSubstr("not mounted"));
  EXPECT_EQ(files.found().limit, kNoLimit);
  const Files two;
  two.put("/proc/self/cgroup", "0::/docker/f00");
  EXPECT_THAT(two.found().unknown, HasSubstr("not mounted"));
}

TEST(ContainerMemory, SaysThatGroupsAreHidden) {
  const Files files;
  files.put("/proc/self/cgroup", "4:memory:/docker/f00");
  const std::string mount = " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";
  files.put("/proc/self/mountinfo", "31 23 0:28 /" + mount);
  EXPECT_THAT(files.found().unknown, HasSubstr("/sys/fs/cgroup/memory/cgroup.procs"));
  files.put("/sys/fs/cgroup/memory/cgroup.procs", "7");
  EXPECT_EQ(files.found().unknown, "");
  files.put("/proc/self/mountinfo", "31 23 0:28 /../.." + mount);
  EXPECT_THAT(files.found().unknown, HasSubstr("for another name space"));
  EXPECT_EQ(files.found().limit, kNoLimit);
}

TEST(ContainerMemory, OddFilesAreNoLimit) {
  const Files files;
  files.put("/proc/self/mountinfo", kMountTwo);
  for (const char* text : {"", ":", "0:", "::", "0::", "x::/a", "0::/a/../..", "0::////"}) {
    files.put("/proc/self/cgroup", text);
    EXPECT_EQ(files.found().limit, kNoLimit) << text;
  }
  files.put("/proc/self/cgroup", "0::/");
  for (const char* text : {"-1", "x", "99999999999999999999999", "max"}) {
    files.put("/sys/fs/cgroup/memory.max", text);
    EXPECT_EQ(files.found().limit, kNoLimit) << text;
  }
  for (const char* text : {"", "-", "1 2 3 4 5 6 7", "\\", "31 23 0:28 / \\04 rw - cgroup2"}) {
    files.put("/proc/self/mountinfo", text);
    EXPECT_EQ(files.found().limit, kNoLimit) << text;
  }
}

TEST(ContainerMemory, LimitsTheJobsOfABox) {
  const Files files;
  files.put("/proc/meminfo", "MemTotal: 999999 kB\nMemAvailable: 102400 kB");
  EXPECT_EQ(default_memory_limit(files.root()), 80 * kMiB);
  files.put("/proc/self/cgroup", "0::/a");
  files.put("/proc/self/mountinfo", kMountTwo);
  files.group("/sys/fs/cgroup/a", bytes(60), 10 * kMiB);
  EXPECT_EQ(default_memory_limit(files.root()), 40 * kMiB);
  files.group("/sys/fs/cgroup/a", bytes(600), 10 * kMiB);
  EXPECT_EQ(default_memory_limit(files.root()), 80 * kMiB);
}

TEST(ContainerMemory, ReadsThisHost) {
  const ContainerMemory here = container_memory();
  EXPECT_LE(here.available, here.limit);
  EXPECT_EQ(here.limit == kNoLimit, here.file.empty());
}

}  // namespace container_memory_test
}  // namespace phub
