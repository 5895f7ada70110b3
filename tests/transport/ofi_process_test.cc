// Box and worker as processes of their own, over libfabric: the fence. The worker is a child that
// was forked before either of them opened libfabric.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "tests/transport/ofi_rig.h"
#include "transport/error.h"
#include "transport/fd.h"

namespace phub {
namespace ofi_process_test {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kChunkBytes = 32768, kChunks = 8;
constexpr std::byte kWritten{0x77};

LinkLayout layout_of_one_core() {
  LinkLayout layout;
  layout.max_ranks = 2;
  layout.cores = 1;
  layout.queue_chunks = {kChunks};
  layout.core_node = {0};
  layout.slots_bytes = layout.results_bytes = kChunkBytes * kChunks;
  return layout;
}

// Writes as fast as it can, also when it is fenced, until its connection ends.
void write_until_revoked(const Offer& offer) {
  const std::unique_ptr<WorkerLink> link = connect_ofi(offer, layout_of_one_core(), 20'000);
  std::memset(link->gradients().data(), static_cast<int>(kWritten), link->gradients().size());
  std::array<Arrival, 8> some;
  for (uint32_t i = 0; link->connected(); ++i) {
    const uint64_t offset = uint64_t{i % kChunks} * kChunkBytes;
    link->endpoint().post({0}, {offset, offset, kChunkBytes, i});
    link->endpoint().flush();
    link->endpoint().poll(some);
  }
}

// A life for every line of `offers`: what to connect to, over what, and the ticket.
int worker_process(int offers) try {
  FILE* const lines = fdopen(offers, "r");
  std::array<char, 256> address = {}, provider = {}, ticket = {};
  while (std::fscanf(lines, "%255s %255s %255s", address.data(), provider.data(), ticket.data()) ==
         3) {
    Offer offer = {.transport = "ofi", .ticket = ticket.data()};
    offer.queues.push_back({.address = address.data(), .provider = provider.data()});
    write_until_revoked(offer);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "worker process: %s\n", error.what());
  return 99;
}

class OfiProcessTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::array<int, 2> ends = {};
    ASSERT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
    worker_ = fork();
    if (worker_ == 0) {
      ::close(ends[1]);
      _exit(worker_process(ends[0]));
    }
    ::close(ends[0]);
    offers_ = Fd(ends[1]);
    rig_ = OfiRig::over(GetParam());
    if (rig_ != nullptr) box_ = rig_->transport().open_job(layout_of_one_core());
  }
  void TearDown() override {
    offers_ = {};
    int status = -1;
    waitpid(worker_, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  void start(uint32_t incarnation) {
    const Offer offer = box_->admit(0, incarnation);
    box_->endpoint(0).attach(0, incarnation);
    const std::string line =
        offer.queues[0].address + " " + offer.queues[0].provider + " " + offer.ticket + "\n";
    ASSERT_EQ(write(offers_.get(), line.data(), line.size()), static_cast<ssize_t>(line.size()));
  }
  // Takes arrivals until `count` have come; those of the control thread, too.
  size_t take(size_t count) {
    const auto until = Clock::now() + std::chrono::seconds(30);
    std::array<Arrival, 64> some;
    size_t taken = 0;
    while (taken < count && Clock::now() < until) {
      rig_->transport().handle_events(rig_->events());
      taken += box_->endpoint(0).poll(some);
    }
    return taken;
  }

  pid_t worker_ = 0;
  Fd offers_;
  std::unique_ptr<OfiRig> rig_;
  std::unique_ptr<BoxLink> box_;
};

TEST_P(OfiProcessTest, NothingLandsBehindTheFence) {
  for (uint32_t incarnation = 1; incarnation <= 8; ++incarnation) {
    start(incarnation);
    const size_t wanted = 30 * incarnation;  // in the middle of another write each time
    ASSERT_GE(take(wanted), wanted);
    ASSERT_EQ(box_->slots(0)[0], kWritten);
    box_->endpoint(0).detach(0);
    auto* const slots = const_cast<std::byte*>(box_->slots(0).data());
    std::memset(slots, 0, kChunkBytes * kChunks);
    std::array<Arrival, 64> some;
    for (int i = 0; i < 200; ++i) {
      EXPECT_EQ(box_->endpoint(0).poll(some), 0u);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(std::count(slots, slots + kChunkBytes * kChunks, kWritten), 0) << incarnation;
    box_->revoke(0);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, OfiProcessTest, ::testing::ValuesIn(providers_to_test()),
                         name_of_provider);

}  // namespace ofi_process_test
}  // namespace phub
