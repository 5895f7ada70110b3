// Calls of the C interface in any order, with any handles and arguments, against a server in this
// process; caches with a worker and without. Whatever happens, each returns a code that is one, and
// says why if it failed.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/fuzz/input.h"
#include "tests/worker/box.h"
#include "transport/error.h"
#include "worker/phub.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

testing::Box& box() {
  static testing::Box one(1, uint64_t{1} << 28);
  return one;
}

constexpr std::array<const char*, 24> kNames = {"job",
                                                "transport",
                                                "rank",
                                                "world_size",
                                                "max_ranks",
                                                "chunk_elements",
                                                "optimizer",
                                                "gradient_dtype",
                                                "reduction",
                                                "initial",
                                                "parameter_dtype",
                                                "on_loss",
                                                "work",
                                                "replace",
                                                "spin_us",
                                                "rounding",
                                                "state_dtype",
                                                "branches",
                                                "[!w]",
                                                "lr",
                                                "w",
                                                "",
                                                "b\xff\x01",
                                                nullptr};
constexpr std::array<const char*, 25> kValues = {
    "a",          "b",    "shm",       "tcp",  "0",     "1",     "-1",       "2",    "32",
    "sgd",        "adam", "f32",       "bf16", "f16",   "int8",  "fp8-e5m2", "topk", "topk-10-int2",
    "stochastic", "mean", "broadcast", "wait", "zeros", "\xc3(", nullptr};
constexpr std::array<const char*, 13> kCacheNames = {
    "budget_bytes", "reserved_bytes", "max_lead", "prefetch", "strict", "poison",
    "infer_clocks", "partitions",     "w",        "local",    "",       "\xff",
    nullptr};
constexpr std::array<const char*, 6> kCacheValues = {"0", "1", "3", "-1", "4000", nullptr};
constexpr std::array<double, 6> kNumbers = {0, 1, 0.1, -1, 1e300, __builtin_nan("")};
constexpr std::array<uint64_t, 6> kElements = {0, 1, 33, 5000, uint64_t{1} << 40, ~uint64_t{0}};
constexpr std::array<uint64_t, 8> kKeys = {0, 1, 2, 3, 7, 3, 1000, ~uint64_t{0}};
constexpr std::array<uint64_t, 6> kBudgets = {0, 100, 4096, 1 << 16, 1 << 20, ~uint64_t{0}};

void completed(void* user_data, size_t, uint64_t, phub_code code, const char* message) {
  PHUB_CHECK((code == PHUB_OK) == (message[0] == 0));
  PHUB_CHECK(phub_wait(*static_cast<phub_worker**>(user_data), 0) != PHUB_OK);
}

// The calls of one input, on a few handles of each type.
class Calls {
 public:
  explicit Calls(testing::Input input) : in_(input) {}
  ~Calls() {
    for (phub_geeps* geeps : geeps_) phub_geeps_destroy(geeps);
    phub_device_group_destroy(group_);
    phub_host_stream_destroy(stream_);
    for (phub_device* device : devices_) phub_device_close(device);
    for (phub_worker* worker : workers_) phub_worker_destroy(worker);
    for (phub_options* options : options_) phub_options_destroy(options);
    phub_geeps_options_destroy(tables_);
    if (by_branch_) phub_by_branch_destroy(by_branch_);
  }

  void run() {
    make_options(options_[0]);
    for (int calls = 0; !in_.empty() && calls < 80; ++calls) {
      const uint8_t which = in_.take() % 64;
      const phub_code code = which < 32 ? one(which) : one_of_cache(which - 32);
      PHUB_CHECK(code >= PHUB_OK && code <= PHUB_WRONG_THREAD);
      PHUB_CHECK(std::string_view(phub_code_name(code)) != "unknown");
      PHUB_CHECK(code == PHUB_OK || std::string_view(phub_last_error()).starts_with("phub_"));
    }
  }

 private:
  // Mostly of the right type.
  template <typename T, size_t N>
  T* any(const std::array<T*, N>& right) {
    const uint8_t which = in_.take();
    if (which < 250) return right[which % N];
    if (which == 255) return reinterpret_cast<T*>(in_.take<uintptr_t>());
    const std::array<void*, 5> all = {options_[0], workers_[0], devices_[0], geeps_[0], tables_};
    return static_cast<T*>(all[which % 5]);
  }
  phub_options* options() { return any(options_); }
  phub_worker* worker() { return any(workers_); }
  phub_geeps* geeps() { return any(geeps_); }
  size_t key() { return in_.choose(std::array<size_t, 5>{0, 1, 2, 3, ~size_t{0}}); }
  uint32_t table() { return in_.take() % 4; }
  uint64_t handle() { return in_.take() < 230 ? handles_[in_.take() % 4] : in_.take<uint64_t>(); }

  // With limits so small that nothing is waited for that cannot come.
  phub_code make_options(phub_options*& options, bool with_keys = true) {
    if (options) phub_options_destroy(options);
    const phub_code code = phub_options_create(&options);
    phub_options_set(options, "server", box().address().c_str());
    phub_options_set(options, "job", "a");
    for (const char* limit : {"join_limit_ms", "wait_limit_ms", "wait_timeout_ms"}) {
      phub_options_set_number(options, limit, 30);
    }
    if (with_keys) {
      phub_options_add_key(options, "w", 100);
      phub_options_add_key(options, "b", 20000);
    }
    return code;
  }

  phub_code register_memory() {
    phub_key_memory memory = {.size = in_.take() % 8 ? sizeof memory : in_.take(),
                              .gradient = in_.take() % 2 ? memory_.data() : nullptr,
                              .parameters = in_.take() % 2 ? memory_.data() : nullptr,
                              .gradient_dtype = in_.choose(kValues),
                              .parameter_dtype = in_.choose(kValues),
                              .gradient_scale = static_cast<float>(in_.choose(kNumbers))};
    return phub_register_memory(worker(), 0, &memory);
  }

  phub_code one(uint8_t which) {
    switch (which) {
      case 0:
        return make_options(options_[in_.take() % 3]);
      case 1:
        return phub_options_destroy(options());
      case 2: {
        const std::array<uint64_t, 9> shape = {
            in_.choose(kElements), in_.take(), 1, 1, 1, 1, 1, 1, 1};
        return phub_options_add_shaped_key(options(), in_.choose(kNames), shape.data(),
                                           in_.take() % 11);
      }
      case 3:
        return phub_options_set(options(), in_.choose(kNames), in_.choose(kValues));
      case 4:
        return phub_options_set_number(options(), in_.choose(kNames), in_.take<int8_t>());
      case 5:
        return phub_options_add_key(options(), in_.choose(kNames), in_.choose(kElements));
      case 6:
        if (in_.take() % 4 == 0) return phub_options_set_group(options(), key(), in_.take() % 5);
        if (in_.take() % 8 == 0) {
          return phub_options_set_rank_limit(options(), key(), in_.take() % 8);
        }
        if (in_.take() % 8 == 0) {
          return phub_options_set_rows_limit(options(), key(), in_.take() % 8, in_.take() % 2);
        }
        if (in_.take() % 4 == 0) {
          return phub_options_set_format(options(), in_.choose(kNames), in_.choose(kValues));
        }
        return phub_options_tune_key(options(), key(), in_.take<int8_t>(), in_.choose(kNumbers),
                                     in_.choose(kNumbers));
      case 7:
        return phub_options_set_hyper(options(), in_.choose(kNames), in_.choose(kNumbers));
      case 8:
        return phub_options_schedule_hyper(options(), in_.take(), in_.choose(kNames),
                                           in_.choose(kNumbers));
      case 9:
      case 10:
      case 11:
        return phub_worker_create(options(), in_.take() == 255 ? nullptr : empty_slot());
      case 12:
        return phub_worker_destroy(worker());
      case 13:
        return phub_leave(worker());
      case 14:
        return inform();
      case 15:
        return phub_key_by_name(worker(), in_.choose(kNames), &key_);
      case 16:
        return touch_gradient();
      case 17:
        return read_parameters();
      case 18:
        return phub_use_memory(worker(), 0, in_.take() % 2 ? memory_.data() : nullptr,
                               in_.take() % 2 ? memory_.data() : nullptr);
      case 19:
        if (in_.take() % 4 == 0) return register_memory();
        return phub_broadcast(worker(), in_.take() % 8 ? initial_.data() : nullptr,
                              in_.take() % 8 ? 20100 : in_.take());
      case 20:
      case 21:
      case 22:
        return phub_push(worker(), key(), in_.take<int8_t>());
      case 23:
        if (in_.take() % 4 == 0) {
          return phub_push_factors(worker(), key(), initial_.data(), initial_.data(),
                                   in_.take() % 4, 0);
        }
        if (in_.take() % 4 == 0) {
          const int64_t rows[] = {in_.take<int8_t>(), in_.take() % 4, in_.take() % 4};
          return phub_push_rows(worker(), key(), rows, initial_.data(), in_.take() % 4, 0);
        }
        return phub_push_null(worker(), key());
      case 24: {
        phub_worker*& handle = workers_[in_.take() % 3];
        return phub_push_then(handle, key(), 0, in_.take() == 255 ? nullptr : completed, &handle);
      }
      case 25:
        return phub_wait(worker(), key());
      case 26:
        return phub_wait_all(worker());
      case 27:
        return in_.take() % 2 ? phub_try_wait(worker(), key(), &ready_)
                              : phub_poll(worker(), &key_);
      case 28:
        return phub_pull(worker(), key(), memory_.data(), in_.take() % 2 ? 400 : in_.take());
      case 29:
        return in_.take() % 2 ? set_hyper() : change_branches();
      case 30:
        if (in_.take() % 4) return phub_barrier(worker());
        return in_.take() % 2 ? phub_remark(worker(), in_.choose(kNames), in_.choose(kValues))
                              : phub_abandon(worker());
      default:
        return ask();
    }
  }

  phub_worker** empty_slot() {
    phub_worker*& slot = workers_[in_.take() % 3];
    if (slot) phub_worker_destroy(slot);
    return &slot;
  }

  phub_code touch_gradient() {
    void* at = nullptr;
    size_t bytes = 0;
    const phub_code code = phub_gradient(worker(), key(), &at, &bytes);
    if (code == PHUB_OK) std::memset(at, in_.take() % 64, bytes);  // no NaN in any format
    return code;
  }

  phub_code read_parameters() {
    const void* at = nullptr;
    size_t bytes = 0;
    const phub_code code = phub_parameters(worker(), key(), &at, &bytes);
    if (code == PHUB_OK) read_ = read_ + static_cast<const uint8_t*>(at)[bytes - 1];
    return code;
  }

  phub_code inform() {
    phub_info info = {};
    phub_stats stats = {};
    info.size = stats.size = in_.take() % 100;
    std::array<char, 20> text = {};
    phub_worker* handle = worker();
    phub_worker_connection(handle, text.data(), in_.take() % text.size());
    const char* token = nullptr;
    if (phub_job_token(handle, &token) == PHUB_OK) read_ = read_ + static_cast<uint8_t>(token[0]);
    phub_worker_stats(handle, &stats);
    return phub_worker_info(handle, &info);
  }

  phub_code set_hyper() {
    const std::array<const char*, 2> names = {in_.choose(kNames), in_.choose(kNames)};
    const std::array<double, 2> values = {in_.choose(kNumbers), in_.choose(kNumbers)};
    uint64_t round = in_.take() % 4;
    return phub_set_hyper(worker(), names.data(), values.data(), in_.take() % 3,
                          round % 2 ? &round : nullptr);
  }

  phub_code change_branches() {
    const std::array<const char*, 2> names = {in_.choose(kNames), in_.choose(kNames)};
    const std::array<double, 2> values = {in_.choose(kNumbers), in_.choose(kNumbers)};
    const std::array<uint32_t, 3> branches = {in_.take() % 3u, in_.take() % 3u, in_.take()};
    const std::array<uint64_t, 3> rounds = {in_.take() % 3u, in_.take(), in_.take() % 2u};
    uint64_t round = in_.take() % 4;
    uint32_t branch = 0;
    switch (in_.take() % 10) {
      case 0:
        return phub_fork(worker(), branches[0], names.data(), values.data(), in_.take() % 3, &round,
                         &branch);
      case 1:
        return phub_schedule(worker(), in_.take() % 8 ? branches.data() : nullptr, rounds.data(),
                             in_.take() % 4, &round);
      case 2:
        return phub_discard(worker(), branches[1], in_.take() % 8 ? &round : nullptr);
      case 3:
        return phub_branch_in(worker(), round, in_.take() % 8 ? &branch : nullptr);
      case 4:
        return phub_kill(worker(), branches[1], &round);
      case 5:
        return phub_revive(worker(), branches[1], &round);
      case 6:
        if (in_.take() % 2 == 0) return phub_report_loss(worker(), values[0], round);
        return phub_report_named_loss(worker(), in_.take() % 8 ? names[0] : nullptr, values[0],
                                      round);
      case 7: {
        std::array<uint64_t, 2> from = {};
        std::array<uint32_t, 2> runs = {};
        size_t count = 0;
        return phub_branch_runs(worker(), in_.take() % 8 ? from.data() : nullptr, runs.data(),
                                in_.take() % 3, &count);
      }
      case 8:
        return use_state_by_branch();
      default: {
        std::array<phub_branch, 2> all = {};
        size_t count = 0;
        return phub_branches(worker(), in_.take() % 8 ? all.data() : nullptr, in_.take() % 3,
                             &count);
      }
    }
  }

  phub_code use_state_by_branch() {
    if (by_branch_ == nullptr || in_.take() % 8 == 0) {
      if (by_branch_) phub_by_branch_destroy(std::exchange(by_branch_, nullptr));
      return phub_by_branch_create(save_state, in_.take() % 8 ? load_state : nullptr, this,
                                   &by_branch_);
    }
    const void* bytes = nullptr;
    size_t size = 0;
    switch (in_.take() % 3) {
      case 0:
        return phub_by_branch_begin(by_branch_, worker(), in_.take() % 8, nullptr);
      case 1:
        return phub_by_branch_restore(by_branch_, memory_.data(), in_.take());
      default:
        phub_by_branch_saved(by_branch_, &bytes, &size);
        return phub_by_branch_restore(by_branch_, bytes, size);
    }
  }
  static phub_code save_state(void* self, const void** bytes, size_t* size) {
    auto& calls = *static_cast<Calls*>(self);
    *bytes = calls.memory_.data();
    *size = calls.in_.take();
    return calls.in_.take() % 8 ? PHUB_OK : PHUB_FULL;
  }
  static phub_code load_state(void* self, const void*, size_t) {
    return static_cast<Calls*>(self)->in_.take() % 8 ? PHUB_OK : PHUB_FULL;
  }

  phub_code ask() {
    phub_job job = {};
    job.size = in_.take() % 8 ? sizeof job : in_.take();
    if (in_.take() % 4 == 0) return phub_job_remove(box().address().c_str(), in_.choose(kValues));
    return phub_job_status(box().address().c_str(), in_.choose(kValues), &job);
  }

  // With a device, tables of their own keys, and a cache of them.
  void begin_with_caches() {
    phub_geeps_options_create(&tables_);
    phub_geeps_options_set(tables_, "timeout_ms", "20");
    phub_geeps_options_add_table(tables_, "w", 5, kKeys.data(), 5);
    phub_geeps_options_add_local(tables_, "local", 3, nullptr, 4);
    make_cache_options();
    phub_device_open_host(1 << 16, 0, 0, devices_.data());
    phub_geeps_create_standalone(devices_[0], options_[2], tables_, nullptr, 0, geeps_.data());
  }

  phub_code make_cache_options() {
    make_options(options_[2], false);
    return phub_options_add_tables(options_[2], tables_);
  }

  phub_code one_of_cache(int which) {
    if (!tables_) begin_with_caches();
    const std::array<uint64_t, 2> keys = {in_.choose(kKeys), in_.choose(kKeys)};
    const bool all = in_.take() % 2 == 0;
    const uint64_t* rows = all ? nullptr : keys.data();
    const size_t count = all ? 0 : in_.take() % 3;
    phub_buffer buffer = {};
    buffer.size = in_.take() < 250 ? sizeof buffer : in_.take();
    switch (which) {
      case 0:
        return remake_device();
      case 1:
      case 2:
        return remake_cache();
      case 3:
        return phub_geeps_options_set(tables_, in_.choose(kCacheNames), in_.choose(kCacheValues));
      case 4:
        return in_.take() % 2 ? phub_geeps_options_add_table(tables_, in_.choose(kCacheNames),
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
      case 29:
        return remake_stream();
      case 30:
        return remake_group();
      case 31:
        return join_group();
      default:
        return inform_of_cache();
    }
  }

  // All of a buffer may be read and written; a fresh one holds anything.
  phub_code got(const phub_buffer& buffer, phub_code code) {
    if (code != PHUB_OK || buffer.size < sizeof buffer) return code;
    handles_[next_handle_++ % 4] = buffer.handle;
    for (size_t i = 0; buffer.data != nullptr && i < buffer.rows * buffer.row_floats; ++i) {
      buffer.data[i] = buffer.data[i] > 0 ? 0.5f : 1.0f;
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
      make_cache_options();
      phub_options_set(options_[2], "consistency", in_.take() % 2 ? "bsp" : "ssp");
    }
    phub_device* device = any(devices_);
    return in_.take() % 2
               ? phub_geeps_create_standalone(device, options_[2], tables_, nullptr, 0, &cache)
               : phub_geeps_create(device, worker(), tables_, &cache);
  }

  // For the caches to come.
  phub_code remake_stream() {
    phub_host_stream_destroy(stream_);
    stream_ = nullptr;
    const phub_code made = phub_host_stream_create(any(devices_), &stream_);
    void* const given = in_.take() % 8 ? static_cast<void*>(stream_) : any(devices_);
    const phub_code set = phub_geeps_options_set_stream(tables_, given);
    return made == PHUB_OK ? set : made;
  }

  phub_code remake_group() {
    phub_device_group_destroy(group_);
    group_ = nullptr;
    const uint32_t members = in_.take() % 4;
    const uint32_t threads = in_.take() % 3;
    const int mean = in_.take() % 2;
    if (in_.take() % 2) {
      return phub_device_group_create(worker(), tables_, members, mean, threads, &group_);
    }
    return phub_device_group_create_standalone(options_[2], nullptr, 0, members, mean, threads,
                                               &group_);
  }

  phub_code join_group() {
    phub_geeps*& cache = geeps_[in_.take() % 2];
    phub_geeps_destroy(cache);
    cache = nullptr;
    return phub_geeps_create_member(any(devices_), group_, in_.take() % 4, tables_, &cache);
  }

  phub_code inform_of_cache() {
    phub_geeps_counters counters = {};
    phub_placement placement = {};
    phub_memory memory = {};
    counters.size = placement.size = memory.size = in_.take() % 120;
    phub_device_memory(any(devices_), &memory);
    phub_geeps_stats(geeps(), &counters);
    return phub_geeps_placement(geeps(), &placement);
  }

  testing::Input in_;
  std::array<phub_options*, 3> options_ = {};
  std::array<phub_worker*, 3> workers_ = {};
  std::array<phub_device*, 2> devices_ = {};
  std::array<phub_geeps*, 2> geeps_ = {};
  phub_host_stream* stream_ = nullptr;
  phub_device_group* group_ = nullptr;
  phub_by_branch* by_branch_ = nullptr;
  phub_geeps_options* tables_ = nullptr;  // null: no call has been about caches yet
  std::array<uint64_t, 4> handles_ = {};
  size_t next_handle_ = 0;
  std::vector<float> initial_ = std::vector<float>(20100, 0.5f);
  std::array<std::byte, 400> memory_ = {};
  size_t key_ = 0;
  int ready_ = 0;
  volatile uint8_t read_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT: its name
  Calls(testing::Input({data, size})).run();
  return 0;
}
