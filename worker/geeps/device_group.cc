#include "worker/geeps/device_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <queue>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "transport/error.h"
#include "worker/geeps/key_queue.h"
#include "worker/memory/key_arrays.h"

namespace phub::geeps {
namespace {

// The unit of summing, so that all threads share the work of a large key.
constexpr size_t kPieceElements = 32 << 10;
constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();

// Three levels of factors: the pairs of the devices, in their order, are those of the process.
std::vector<FactorPairs> concatenated(const std::vector<std::vector<FactorPairs>>& by_member) {
  std::vector<FactorPairs> all;
  for (const auto& factors : by_member) all.insert(all.end(), factors.begin(), factors.end());
  return all;
}

uint32_t default_threads() { return std::clamp(std::thread::hardware_concurrency(), 1u, 2u); }

}  // namespace

// The exchange of one device.
class DeviceGroup::Member final : public Exchange {
 public:
  Member(Impl& group, uint32_t number);

  size_t keys() const override;
  const std::string& name(size_t key) const override;
  size_t elements(size_t key) const override;
  std::span<float> gradient(size_t key) override;
  std::span<const float> parameters(size_t key) const override;
  uint32_t samples(size_t key) const override;
  void push(size_t key, int32_t priority) override;
  void push_factors(size_t key, std::span<const FactorPairs> factors, int32_t priority) override;
  void push_null(size_t key) override;
  std::optional<size_t> next() override;
  void stop() override { here_.stop(); }
  void abandon(const std::exception& error) override;
  void leave() override;
  void get_state(std::span<KeyState> states) override;
  void set_state(std::span<const KeyState> states) override;
  std::optional<uint32_t> slack() const override;
  std::vector<uint32_t> missing_ranks() override;
  uint32_t rank() const override;
  uint32_t world_size() const override;
  uint64_t saved_after(size_t key) const override;
  void save(RankState tables) override;
  std::optional<std::span<const std::byte>> restored(const std::string& name) const override;
  std::optional<Branches> branches(uint64_t pushes) override;

  KeyQueue& here() { return here_; }

 private:
  Impl& group_;
  const uint32_t number_;
  KeyArrays gradients_;  // empty for a single member, which uses the downstream's memory
  KeyQueue here_;
};

// The members' threads push. The last push of a key hands it to the summing threads or, if there is
// nothing to sum, to the downstream. Another thread waits for keys that the downstream returns.
class DeviceGroup::Impl {
 public:
  Impl(Exchange& downstream, const DeviceGroupOptions& options);
  ~Impl();

  Exchange& downstream() const { return downstream_; }
  Member& member(uint32_t i) { return *members_.at(i); }
  uint32_t members() const { return count_; }
  void push(uint32_t member, size_t key, int32_t priority, bool null,
            std::span<const FactorPairs> factors = {});
  void named(uint32_t member, size_t key);  // the member's next() returns the key
  void leave(uint32_t member);
  std::vector<uint32_t> missing_ranks();
  void tell_all(const std::exception& error);

 private:
  enum class State : uint8_t { kHere, kPushed, kNull, kBack };  // kBack: next() will return it
  struct Key {
    std::vector<State> states;                      // by member
    uint32_t missing = 0;                           // members that have not pushed
    int32_t priority = kLowest;                     // the highest of theirs
    std::vector<const float*> slots;                // the gradients, in the order of the members
    std::vector<std::vector<FactorPairs>> factors;  // or the factors, by member
    std::span<float> sum;                           // the downstream's gradient
    size_t pieces = 0, begun = 0, summed = 0;
  };
  struct Work {
    int32_t priority;
    uint64_t order;
    size_t key;
    // The first of a heap: higher priority, then what was complete before.
    bool operator<(const Work& other) const {
      return std::tuple(priority, other.order) < std::tuple(other.priority, order);
    }
  };

  void gather(size_t key);
  bool lacks(const Key& key, uint32_t member) const;
  void check_missing(size_t key);
  void sum_pieces(const std::stop_token& stop);
  void sum(const Key& key, size_t piece) const;
  void give_back_results();
  void give_back(size_t key);
  template <typename Call>
  bool succeeds(Call call);

  Exchange& downstream_;
  const uint32_t count_;  // of the members
  const float factor_;
  std::vector<std::unique_ptr<Member>> members_;

  std::mutex mutex_;  // guards what follows; slots and sum are fixed once a key is in work_
  std::condition_variable_any changed_;
  std::vector<Key> keys_;
  std::priority_queue<Work> work_;  // keys with pieces that no thread has begun
  uint64_t gathered_ = 0;
  std::vector<bool> gone_;  // by member

  std::vector<std::jthread> threads_;
};

DeviceGroup::Impl::Impl(Exchange& downstream, const DeviceGroupOptions& options)
    : downstream_(downstream),
      count_(options.members),
      factor_(options.mean ? static_cast<float>(1.0 / options.members) : 1.0f) {
  if (options.members == 0) fail(ErrorCode::kInvalid, "a device group needs a member");
  for (size_t key = 0; options.members > 1 && key < downstream_.keys(); ++key) {
    if (downstream_.saved_after(key) == Exchange::kNever) continue;
    fail(ErrorCode::kInvalid,
         "a group of {} devices over a worker with a saver: devices have no common point at which "
         "it could be called; join without it, or use one device",
         options.members);
  }
  for (size_t key = 0; options.mean && options.members > 1 && key < downstream_.keys(); ++key) {
    if (downstream_.samples(key) == 0) continue;
    fail(ErrorCode::kInvalid,
         "a group that takes the mean cannot divide the factors of table '{}': divide the errors "
         "by the number of devices, and leave mean out",
         downstream_.name(key));
  }
  for (uint32_t i = 0; i < options.members; ++i) {
    members_.push_back(std::make_unique<Member>(*this, i));
  }
  gone_.resize(options.members);
  keys_.resize(downstream_.keys());
  for (Key& key : keys_) {
    key.states.resize(options.members, State::kHere);
    key.factors.resize(options.members);
    key.missing = options.members;
  }
  const uint32_t summing = options.members == 1  ? 0
                           : options.threads > 0 ? options.threads
                                                 : default_threads();
  for (uint32_t i = 0; i < summing; ++i) {
    threads_.emplace_back([this](const std::stop_token& stop) { sum_pieces(stop); });
  }
  threads_.emplace_back([this] { give_back_results(); });
}

DeviceGroup::Impl::~Impl() { downstream_.stop(); }  // then the threads end

void DeviceGroup::Impl::push(uint32_t member, size_t key, int32_t priority, bool null,
                             std::span<const FactorPairs> factors) {
  KeyQueue& here = members_[member]->here();
  here.check();
  std::unique_lock lock(mutex_);
  Key& pushed = keys_.at(key);
  State& state = pushed.states[member];
  if (state != State::kHere) {
    fail(ErrorCode::kInvalid, "device {} pushed '{}' before its last push came back", member,
         downstream_.name(key));
  }
  state = null ? State::kNull : State::kPushed;
  if (!null) pushed.priority = std::max(pushed.priority, priority);
  pushed.factors[member].assign(factors.begin(), factors.end());
  if (--pushed.missing > 0) return check_missing(key);

  gather(key);
  if (pushed.pieces > 0) {
    work_.push({.priority = pushed.priority, .order = gathered_++, .key = key});
    changed_.notify_all();
    return;
  }
  const bool all_null = pushed.slots.empty();
  const int32_t highest = pushed.priority;
  const std::vector<FactorPairs> all_factors = concatenated(pushed.factors);
  lock.unlock();
  const auto push_all = [&] {
    if (all_null) return downstream_.push_null(key);
    if (downstream_.samples(key) == 0) return downstream_.push(key, highest);
    downstream_.push_factors(key, all_factors, highest);
  };
  if (!succeeds(push_all)) here.check();
}

void DeviceGroup::Impl::named(uint32_t member, size_t key) {
  const std::lock_guard lock(mutex_);
  keys_[key].states[member] = State::kHere;
}

void DeviceGroup::Impl::leave(uint32_t member) {
  const std::lock_guard lock(mutex_);
  gone_[member] = true;
  for (size_t key = 0; key < keys_.size(); ++key) check_missing(key);
}

// Whether other members have pushed the key and this one has not. REQUIRES: the lock is held.
bool DeviceGroup::Impl::lacks(const Key& key, uint32_t member) const {
  if (key.missing == 0 || key.missing == members()) return false;
  return key.states[member] == State::kHere || key.states[member] == State::kBack;
}

// All devices of missing processes, and those of this process that other members wait for.
std::vector<uint32_t> DeviceGroup::Impl::missing_ranks() {
  std::vector<uint32_t> missing;
  for (const uint32_t rank : downstream_.missing_ranks()) {
    if (rank == downstream_.rank()) continue;
    for (uint32_t i = 0; i < members(); ++i) missing.push_back(rank * members() + i);
  }
  const std::lock_guard lock(mutex_);
  for (uint32_t i = 0; i < members(); ++i) {
    const bool waited_for =
        std::ranges::any_of(keys_, [&](const Key& key) { return lacks(key, i); });
    if (waited_for) missing.push_back(downstream_.rank() * members() + i);
  }
  std::ranges::sort(missing);
  return missing;
}

// Whether members that pushed a key wait for one that has left. REQUIRES: the lock is held.
void DeviceGroup::Impl::check_missing(size_t key) {
  for (uint32_t i = 0; i < members(); ++i) {
    if (!gone_[i] || !lacks(keys_[key], i)) continue;
    return tell_all(Error(ErrorCode::kRankLost,
                          fmt::format("device {} has left without pushing '{}', which others have",
                                      i, downstream_.name(key))));
  }
}

// Starts the sum of a key that every member has pushed. REQUIRES: the lock is held.
void DeviceGroup::Impl::gather(size_t key) {
  Key& pushed = keys_[key];
  for (uint32_t i = 0; i < members(); ++i) {
    if (pushed.states[i] == State::kPushed) {
      pushed.slots.push_back(members_[i]->gradient(key).data());
    }
  }
  pushed.sum = downstream_.gradient(key);
  const bool in_place = members() == 1 || downstream_.samples(key) > 0;
  if (!in_place && !pushed.slots.empty()) {
    pushed.pieces = (pushed.sum.size() + kPieceElements - 1) / kPieceElements;
  }
}

void DeviceGroup::Impl::sum_pieces(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return !work_.empty(); }), !stop.stop_requested()) {
    const Work work = work_.top();
    Key& key = keys_[work.key];
    const size_t piece = key.begun++;
    if (key.begun == key.pieces) work_.pop();
    lock.unlock();
    if (!succeeds([&] { sum(key, piece); })) return;
    lock.lock();
    if (++key.summed < key.pieces) continue;
    lock.unlock();
    succeeds([&] { downstream_.push(work.key, work.priority); });
    lock.lock();
  }
}

void DeviceGroup::Impl::sum(const Key& key, size_t piece) const {
  const size_t at = piece * kPieceElements;
  std::vector<const void*> slots;
  for (const float* slot : key.slots) slots.push_back(slot + at);
  kernels::sum(slots, kernels::DType::kF32, factor_, key.sum.data() + at,
               std::min(kPieceElements, key.sum.size() - at));
}

void DeviceGroup::Impl::give_back_results() {
  const bool stopped = succeeds([this] {
    while (const std::optional<size_t> key = downstream_.next()) give_back(*key);
  });
  if (!stopped) return;
  for (const auto& member : members_) member->stop();
}

void DeviceGroup::Impl::give_back(size_t key) {
  {
    const std::lock_guard lock(mutex_);
    Key& back = keys_[key];
    back.states.assign(members(), State::kBack);
    back.missing = members();
    back.priority = kLowest;
    back.slots.clear();
    back.pieces = back.begun = back.summed = 0;
  }
  for (const auto& member : members_) member->here().add(key);
}

// Calls the downstream. False: it failed, and every member gets the error.
template <typename Call>
bool DeviceGroup::Impl::succeeds(Call call) {
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    tell_all(error);
    return false;
  }
}

void DeviceGroup::Impl::tell_all(const std::exception& error) {
  for (const auto& member : members_) member->here().fail(error);
}

void DeviceGroup::Member::abandon(const std::exception& error) { group_.tell_all(error); }
void DeviceGroup::Member::leave() { group_.leave(number_); }

DeviceGroup::Member::Member(Impl& group, uint32_t number) : group_(group), number_(number) {
  std::vector<size_t> elements;
  for (size_t key = 0; key < keys(); ++key) {
    elements.push_back(group_.downstream().gradient(key).size());
    if (samples(key) > 0) elements.back() /= group_.members();
  }
  gradients_ = KeyArrays(elements);
}

size_t DeviceGroup::Member::keys() const { return group_.downstream().keys(); }
const std::string& DeviceGroup::Member::name(size_t key) const {
  return group_.downstream().name(key);
}
size_t DeviceGroup::Member::elements(size_t key) const { return group_.downstream().elements(key); }
std::span<float> DeviceGroup::Member::gradient(size_t key) {
  return group_.members() == 1 ? group_.downstream().gradient(key) : gradients_[key];
}
std::span<const float> DeviceGroup::Member::parameters(size_t key) const {
  return group_.downstream().parameters(key);
}
void DeviceGroup::Member::push(size_t key, int32_t priority) {
  group_.push(number_, key, priority, false);
}
uint32_t DeviceGroup::Member::samples(size_t key) const {
  return group_.downstream().samples(key) / group_.members();
}
void DeviceGroup::Member::push_factors(size_t key, std::span<const FactorPairs> factors,
                                       int32_t priority) {
  group_.push(number_, key, priority, false, factors);
}
void DeviceGroup::Member::push_null(size_t key) { group_.push(number_, key, 0, true); }
std::optional<size_t> DeviceGroup::Member::next() {
  const std::optional<size_t> key = here_.next();
  if (key) group_.named(number_, *key);
  return key;
}
std::vector<uint32_t> DeviceGroup::Member::missing_ranks() { return group_.missing_ranks(); }
std::optional<uint32_t> DeviceGroup::Member::slack() const { return group_.downstream().slack(); }
uint32_t DeviceGroup::Member::rank() const {
  return group_.downstream().rank() * group_.members() + number_;
}
uint32_t DeviceGroup::Member::world_size() const {
  return group_.downstream().world_size() * group_.members();
}

// While this member has not pushed, the group has not.
void DeviceGroup::Member::get_state(std::span<KeyState> states) {
  group_.downstream().get_state(states);
}
void DeviceGroup::Member::set_state(std::span<const KeyState> states) {
  group_.downstream().set_state(states);
}

// The group has one member, or nothing is saved.
uint64_t DeviceGroup::Member::saved_after(size_t key) const {
  return group_.downstream().saved_after(key);
}
void DeviceGroup::Member::save(RankState tables) { group_.downstream().save(std::move(tables)); }
std::optional<std::span<const std::byte>> DeviceGroup::Member::restored(
    const std::string& name) const {
  if (group_.members() > 1) return std::nullopt;
  return group_.downstream().restored(name);
}

std::optional<Exchange::Branches> DeviceGroup::Member::branches(uint64_t pushes) {
  return group_.downstream().branches(pushes);
}

DeviceGroup::DeviceGroup(Exchange& downstream, const DeviceGroupOptions& options)
    : impl_(std::make_unique<Impl>(downstream, options)) {}
DeviceGroup::~DeviceGroup() = default;
uint32_t DeviceGroup::members() const { return impl_->members(); }
Exchange& DeviceGroup::member(uint32_t i) { return impl_->member(i); }

}  // namespace phub::geeps
