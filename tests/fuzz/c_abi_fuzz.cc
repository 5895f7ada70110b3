// Calls of the C interface in any order, with any handles and arguments, against a server in this
// process. Whatever happens, each returns a code that is one, and says why if it failed.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
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

constexpr std::array<const char*, 20> kNames = {"job",
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
                                                "lr",
                                                "w",
                                                "",
                                                "b\xff\x01",
                                                nullptr};
constexpr std::array<const char*, 20> kValues = {
    "a",    "b",   "shm",  "tcp", "0",    "1",         "-1",   "2",     "32",    "sgd",
    "adam", "f32", "bf16", "f16", "mean", "broadcast", "wait", "zeros", "\xc3(", nullptr};
constexpr std::array<double, 6> kNumbers = {0, 1, 0.1, -1, 1e300, __builtin_nan("")};
constexpr std::array<uint64_t, 6> kElements = {0, 1, 33, 5000, uint64_t{1} << 40, ~uint64_t{0}};

void completed(void* user_data, size_t, uint64_t, phub_code code, const char* message) {
  PHUB_CHECK((code == PHUB_OK) == (message[0] == 0));
  PHUB_CHECK(phub_wait(*static_cast<phub_worker**>(user_data), 0) != PHUB_OK);
}

// The calls of one input, on a few handles of each type.
class Calls {
 public:
  explicit Calls(testing::Input input) : in_(input) {}
  ~Calls() {
    for (phub_worker*& worker : workers_) phub_worker_destroy(worker);
    for (phub_options*& options : options_) phub_options_destroy(options);
  }

  void run() {
    make_options(options_[0]);
    for (int calls = 0; !in_.empty() && calls < 60; ++calls) {
      const phub_code code = one();
      PHUB_CHECK(code >= PHUB_OK && code <= PHUB_WRONG_THREAD);
      PHUB_CHECK(std::string_view(phub_code_name(code)) != "unknown");
      PHUB_CHECK(code == PHUB_OK || std::string_view(phub_last_error()).starts_with("phub_"));
    }
  }

 private:
  phub_options* options() { return *any(options_, workers_); }
  phub_worker* worker() { return *any(workers_, options_); }
  size_t key() { return in_.choose(std::array<size_t, 5>{0, 1, 2, 3, ~size_t{0}}); }

  // Mostly of the right type.
  template <typename T, typename Other>
  T* const* any(std::array<T*, 3>& right, std::array<Other*, 3>& wrong) {
    const uint8_t which = in_.take();
    static T* other;
    if (which < 250) return &right[which % 3];
    other = which == 255 ? reinterpret_cast<T*>(in_.take<uintptr_t>())
                         : reinterpret_cast<T*>(wrong[which % 3]);
    return &other;
  }

  // With limits so small that nothing is waited for that cannot come.
  phub_code make_options(phub_options*& options) {
    if (options) phub_options_destroy(options);
    const phub_code code = phub_options_create(&options);
    phub_options_set(options, "server", box().address().c_str());
    phub_options_set(options, "job", "a");
    for (const char* limit : {"join_limit_ms", "wait_limit_ms", "wait_timeout_ms"}) {
      phub_options_set_number(options, limit, 30);
    }
    phub_options_add_key(options, "w", 100);
    phub_options_add_key(options, "b", 20000);
    return code;
  }

  phub_code one() {
    switch (in_.take() % 32) {
      case 0:
        return make_options(options_[in_.take() % 3]);
      case 1:
        return phub_options_destroy(options());
      case 2:
      case 3:
        return phub_options_set(options(), in_.choose(kNames), in_.choose(kValues));
      case 4:
        return phub_options_set_number(options(), in_.choose(kNames), in_.take<int8_t>());
      case 5:
        return phub_options_add_key(options(), in_.choose(kNames), in_.choose(kElements));
      case 6:
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
        return phub_broadcast(worker(), in_.take() % 8 ? initial_.data() : nullptr,
                              in_.take() % 8 ? 20100 : in_.take());
      case 20:
      case 21:
      case 22:
        return phub_push(worker(), key(), in_.take<int8_t>());
      case 23:
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
        return set_hyper();
      case 30:
        return phub_barrier(worker());
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

  phub_code ask() {
    phub_job job = {};
    job.size = in_.take() % 8 ? sizeof job : in_.take();
    if (in_.take() % 4 == 0) return phub_job_remove(box().address().c_str(), in_.choose(kValues));
    return phub_job_status(box().address().c_str(), in_.choose(kValues), &job);
  }

  testing::Input in_;
  std::array<phub_options*, 3> options_ = {};
  std::array<phub_worker*, 3> workers_ = {};
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
