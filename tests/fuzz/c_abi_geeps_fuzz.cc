// The calls of the C interface for devices and caches, in any order, with any handles and
// arguments, without a server. Whatever happens, each returns a code that is one, and says why if
// it failed.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tests/fuzz/input.h"
#include "transport/error.h"
#include "worker/phub.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

constexpr std::array<const char*, 13> kNames = {
    "budget_bytes", "reserved_bytes", "max_lead", "prefetch", "strict", "poison",
    "infer_clocks", "partitions",     "w",        "local",    "",       "\xff",
    nullptr};
constexpr std::array<const char*, 6> kValues = {"0", "1", "3", "-1", "4000", nullptr};
constexpr std::array<uint64_t, 8> kKeys = {0, 1, 2, 3, 7, 3, 1000, ~uint64_t{0}};
constexpr std::array<uint64_t, 6> kBudgets = {0, 100, 4096, 1 << 16, 1 << 20, ~uint64_t{0}};

// The calls of one input, on a few handles of each type.
class Calls {
 public:
  explicit Calls(testing::Input input) : in_(input) {}
  ~Calls() {
    for (phub_geeps* geeps : geeps_) phub_geeps_destroy(geeps);
    for (phub_device* device : devices_) phub_device_close(device);
    phub_geeps_options_destroy(tables_);
    phub_options_destroy(job_);
  }

  void run() {
    phub_geeps_options_create(&tables_);
    phub_geeps_options_set(tables_, "timeout_ms", "20");
    phub_geeps_options_add_table(tables_, "w", 5, kKeys.data(), 5);
    phub_geeps_options_add_local(tables_, "local", 3, nullptr, 4);
    phub_options_create(&job_);
    phub_options_set(job_, "job", "fuzz");
    phub_options_add_tables(job_, tables_);
    phub_device_open_host(1 << 16, 0, 0, devices_.data());
    phub_geeps_create_standalone(devices_[0], job_, tables_, nullptr, 0, geeps_.data());
    for (int calls = 0; !in_.empty() && calls < 80; ++calls) {
      const phub_code code = one();
      PHUB_CHECK(code >= PHUB_OK && code <= PHUB_WRONG_THREAD);
      PHUB_CHECK(code == PHUB_OK || std::string_view(phub_last_error()).starts_with("phub_"));
    }
  }

 private:
  // Mostly of the right type.
  template <typename T>
  T* any(const std::array<T*, 2>& right) {
    const uint8_t which = in_.take();
    if (which < 250) return right[which < 200 ? 0 : 1];
    return which == 255 ? reinterpret_cast<T*>(in_.take<uintptr_t>())
                        : reinterpret_cast<T*>(tables_);
  }
  phub_geeps* geeps() { return any(geeps_); }
  uint32_t table() { return in_.take() % 4; }
  uint64_t handle() { return in_.take() < 230 ? handles_[in_.take() % 4] : in_.take<uint64_t>(); }

  phub_code one() {
    const std::array<uint64_t, 2> keys = {in_.choose(kKeys), in_.choose(kKeys)};
    const bool all = in_.take() % 2 == 0;
    const uint64_t* rows = all ? nullptr : keys.data();
    const size_t count = all ? 0 : in_.take() % 3;
    phub_buffer buffer = {};
    buffer.size = in_.take() < 250 ? sizeof buffer : in_.take();
    switch (in_.take() % 24) {
      case 0:
        return remake_device();
      case 1:
      case 2:
        return remake_cache();
      case 3:
        return phub_geeps_options_set(tables_, in_.choose(kNames), in_.choose(kValues));
      case 4:
        return in_.take() % 2 ? phub_geeps_options_add_table(tables_, in_.choose(kNames),
                                                             in_.take() % 3, rows, count)
                              : phub_geeps_options_tune_table(tables_, table(), in_.take() % 2,
                                                              in_.take() % 3);
      case 5:
        return phub_geeps_begin_virtual(geeps());
      case 6:
        return phub_geeps_begin_gathering(geeps());
      case 7:
      case 8:
        return phub_geeps_finish(geeps());
      case 9:
      case 10:
        return got(buffer, phub_geeps_read(geeps(), table(), rows, count, in_.take() % 4 - 2,
                                           in_.take() < 250 ? &buffer : nullptr));
      case 11:
      case 12:
        return got(buffer, phub_geeps_pre_update(geeps(), table(), rows, count, &buffer));
      case 13:
      case 14:
        return got(buffer,
                   phub_geeps_local_access(geeps(), table(), rows, count, in_.take() % 2, &buffer));
      case 15:
      case 16:
        return phub_geeps_post_read(geeps(), handle());
      case 17:
        return phub_geeps_update(geeps(), handle());
      case 18:
        return phub_geeps_post_local_access(geeps(), handle(), in_.take() % 2);
      case 19:
        return phub_geeps_discard(geeps(), handle());
      case 20:
      case 21:
        return phub_geeps_table_clock(geeps(), table());
      case 22:
        return phub_geeps_wait_all(geeps());
      default:
        return inform();
    }
  }

  // All of a buffer may be read and written.
  phub_code got(const phub_buffer& buffer, phub_code code) {
    if (code != PHUB_OK || buffer.size < sizeof buffer) return code;
    handles_[next_handle_++ % 4] = buffer.handle;
    for (size_t i = 0; buffer.data != nullptr && i < buffer.rows * buffer.row_floats; ++i) {
      buffer.data[i] = buffer.data[i] + 1;
    }
    return code;
  }

  phub_code remake_device() {
    phub_device*& device = devices_[in_.take() % 2];
    phub_device_close(device);
    device = nullptr;
    return phub_device_open_host(in_.choose(kBudgets), in_.take() % 3 * 1e6, in_.take(), &device);
  }

  phub_code remake_cache() {
    phub_geeps*& cache = geeps_[in_.take() % 2];
    phub_geeps_destroy(cache);
    cache = nullptr;
    if (in_.take() % 2 == 0) {
      phub_options_destroy(job_);
      phub_options_create(&job_);
      phub_options_set(job_, "job", "fuzz");
      phub_options_set(job_, "consistency", in_.take() % 2 ? "bsp" : "ssp");
      phub_options_add_tables(job_, tables_);
    }
    return phub_geeps_create_standalone(any(devices_), job_, tables_, nullptr, 0, &cache);
  }

  phub_code inform() {
    phub_geeps_counters counters = {};
    phub_placement placement = {};
    phub_memory memory = {};
    counters.size = placement.size = memory.size = in_.take() % 120;
    phub_device_memory(any(devices_), &memory);
    phub_geeps_stats(geeps(), &counters);
    return phub_geeps_placement(geeps(), &placement);
  }

  testing::Input in_;
  std::array<phub_device*, 2> devices_ = {};
  std::array<phub_geeps*, 2> geeps_ = {};
  phub_geeps_options* tables_ = nullptr;
  phub_options* job_ = nullptr;
  std::array<uint64_t, 4> handles_ = {};
  size_t next_handle_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT: its name
  Calls(testing::Input({data, size})).run();
  return 0;
}
