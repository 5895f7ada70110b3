// Calls of the C interface to stores, in any order, with any handles and arguments, against a
// server in this process. Whatever happens, each returns a code that is one, and says why if it
// failed.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

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

// Not "threads": one of several would wait for the others for ever.
constexpr std::array<const char*, 8> kNames = {"placement",    "numa", "static_index", "batches",
                                               "gather_again", "",     "\xff",         nullptr};
constexpr std::array<const char*, 8> kValues = {"0", "1", "0.5", "-1", "nan", "1e999", "", nullptr};
constexpr std::array<const char*, 7> kTypes = {"f32", "f64", "i32", "i64", "f3", "", nullptr};
constexpr std::array<const char*, 6> kOperations = {"add", "min", "or", "multiply", "x", nullptr};
constexpr std::array<uint64_t, 6> kCounts = {0, 1, 3, 6, uint64_t{1} << 61, ~uint64_t{0}};
constexpr std::array<uint64_t, 8> kRows = {0, 1, 2, 5, 6, 1000, uint64_t{1} << 63, PHUB_NO_ROW};
constexpr std::array<size_t, 10> kBytes = {0, 2, 4, 8, 12, 16, 24, 32, 48, 96};

class Calls {
 public:
  explicit Calls(testing::Input input) : in_(input) {}
  ~Calls() {
    for (phub_store_thread* thread : threads_) phub_store_thread_destroy(thread);
    for (phub_store* store : stores_) phub_store_destroy(store);
    phub_store_options_destroy(options_);
    phub_options_destroy(worker_);
  }

  void run() {
    begin();
    for (int calls = 0; !in_.empty() && calls < 80; ++calls) {
      const phub_code code = one(in_.take() % 26);
      PHUB_CHECK(code >= PHUB_OK && code <= PHUB_WRONG_THREAD);
      PHUB_CHECK(code == PHUB_OK || std::string_view(phub_last_error()).starts_with("phub_store"));
    }
  }

 private:
  // Mostly of the right type.
  template <typename T, size_t N>
  T* any(const std::array<T*, N>& right) {
    const uint8_t which = in_.take();
    if (which < 250) return right[which % N];
    if (which == 255) return reinterpret_cast<T*>(in_.take<uintptr_t>());
    const std::array<void*, 4> all = {worker_, options_, stores_[0], threads_[0]};
    return static_cast<T*>(all[which % 4]);
  }
  phub_store_options* options() { return any(std::array{options_}); }
  phub_store* store() { return any(stores_); }
  phub_store_thread* thread() { return any(threads_); }
  uint32_t table() { return in_.take() % 3; }
  uint64_t row() { return in_.choose(kRows); }
  void* memory() { return in_.take() % 16 ? memory_.data() + in_.take() % 2 * 2 : nullptr; }

  void begin() {
    phub_options_create(&worker_);
    phub_options_set(worker_, "server", box().address().c_str());
    phub_options_set(worker_, "job", "a");
    phub_options_set_number(worker_, "rank", 0);
    for (const char* limit : {"join_limit_ms", "wait_limit_ms", "wait_timeout_ms"}) {
      phub_options_set_number(worker_, limit, 30);
    }
    phub_store_options_create(&options_);
    phub_store_options_add_table(options_, "plain", 6, 2, "i64", "add", 0, 0);
    phub_store_options_add_table(options_, "changing", 3, 1, "f32", "min", 0, 3);
    phub_store_create(worker_, options_, stores_.data());
    phub_store_thread_create(stores_[0], 0, threads_.data());
  }

  phub_code one(int which) {
    switch (which) {
      case 0:
        return phub_store_options_set(options(), in_.choose(kNames), in_.choose(kValues));
      case 1:
        return phub_store_options_set_number(options(), in_.choose(kNames), in_.take<int8_t>());
      case 2:
        return phub_store_options_add_table(
            options(), in_.choose(kNames), in_.choose(kCounts), in_.take() % 4, in_.choose(kTypes),
            in_.choose(kOperations), in_.take() % 2, in_.choose(kCounts));
      case 3:
        return remake_store();
      case 4:
      case 5:
        return remake_thread();
      case 6:
        return phub_store_begin_virtual(thread());
      case 7:
        return phub_store_begin_gathering(thread());
      case 8:
      case 9:
        return phub_store_finish(thread());
      case 10:
        return phub_store_is_virtual(thread(), in_.take() % 8 ? &answer_ : nullptr);
      case 11:
        return phub_store_has_row(thread(), table(), row(), in_.take() % 8 ? &answer_ : nullptr);
      case 12:
        return phub_store_add_row(thread(), table(), row());
      case 13:
        return phub_store_delete_row(thread(), table(), row());
      case 14:
      case 15:
        return read_or_update();
      case 16:
      case 17:
        return phub_store_clock(thread());
      case 18:
        return phub_store_table(store(), table(), memory(), in_.choose(kBytes));
      case 19:
        return phub_store_rows(store(), table(), in_.take() % 8 ? rows_.data() : nullptr,
                               in_.take() % 8);
      case 20:
        return phub_store_rank(store(), nullptr, nullptr);
      case 21:
        return phub_store_clocks(store(), in_.take() % 8 ? &clocks_ : nullptr);
      case 22:
        return phub_store_restored(store(), in_.choose(kNames), &restored_,
                                   in_.take() % 8 ? &restored_bytes_ : nullptr);
      default:
        return inform();
    }
  }

  phub_code remake_store() {
    phub_store*& store = stores_[in_.take() % 2];
    if (in_.take() % 4 == 0) phub_store_abandon(store);
    phub_store_destroy(store);
    store = nullptr;
    return phub_store_create(in_.take() % 16 ? worker_ : nullptr, options(), &store);
  }

  phub_code remake_thread() {
    phub_store_thread*& thread = threads_[in_.take() % 2];
    phub_store_thread_destroy(thread);
    thread = nullptr;
    return phub_store_thread_create(store(), in_.take() % 2, &thread);
  }

  phub_code read_or_update() {
    for (uint64_t& row_of : rows_) row_of = row();
    const uint64_t* const rows = in_.take() % 16 ? rows_.data() : nullptr;
    const size_t count = in_.take() % 8 ? in_.take() % 7 : in_.choose(kCounts);
    const char* const type = in_.choose(kTypes);
    const uint32_t of = table();
    void* const values = memory();
    const size_t bytes = in_.choose(kBytes);
    return in_.take() % 2 ? phub_store_read(thread(), of, rows, count, type, values, bytes)
                          : phub_store_update(thread(), of, rows, count, type, values, bytes);
  }

  phub_code inform() {
    phub_store_counters counters = {};
    counters.size = in_.take() % 130;
    return phub_store_stats(store(), &counters);
  }

  testing::Input in_;
  phub_options* worker_ = nullptr;
  phub_store_options* options_ = nullptr;
  std::array<phub_store*, 2> stores_ = {};
  std::array<phub_store_thread*, 2> threads_ = {};
  std::array<uint64_t, 8> rows_ = {};
  alignas(8) std::array<std::byte, 128> memory_ = {};
  int answer_ = 0;
  uint64_t clocks_ = 0;
  const void* restored_ = nullptr;
  size_t restored_bytes_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT: its name
  Calls(testing::Input({data, size})).run();
  return 0;
}
