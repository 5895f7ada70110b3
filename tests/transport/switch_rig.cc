#include "tests/transport/switch_rig.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/encode.h"
#include "kernels/fixed_point.h"
#include "kernels/kernels.h"
#include "tests/kernels/slots.h"

namespace phub::test {
namespace {

using kernels::DType;
using Bytes = std::vector<std::byte>;

constexpr uint64_t kMicrosecond = 1000;
constexpr size_t kMostEvents = 3'000'000;

class Play {
 public:
  Play(const SwitchScene& scene, Adder& adder)
      : scene_(scene), adder_(adder), random_(scene.seed), incarnations_(scene.workers, 1) {
    for (uint32_t w = 0; w < scene.workers; ++w) {
      workers_.push_back(std::make_unique<Worker>(*this, static_cast<uint8_t>(w)));
      workers_.back()->results.assign(chunks(), 0);
    }
    direct_.resize(chunks());
    closed_.assign(chunks(), 0);
  }

  SwitchOutcome run() {
    start_generation(1);
    if (scene_.replaced_ns) after(*scene_.replaced_ns, [this] { replace(); });
    if (scene_.forgets_ns) after(*scene_.forgets_ns, [this] { forget(); });
    for (size_t n = 0; !finished(); ++n) {
      if (n == kMostEvents || events_.empty()) {
        return outcome_.problem = fmt::format("it hangs: {}", state()), outcome_;
      }
      Event event = events_.top();
      events_.pop();
      now_ = event.at;
      event.what();
      if (!outcome_.problem.empty()) break;
    }
    for (const auto& worker : workers_) add_counters(*worker);
    return outcome_;
  }

 private:
  struct Worker : SwitchOwner {
    Worker(Play& owner, uint8_t number) : play(owner), worker(number) {}
    void fill(uint64_t handle, uint32_t first, int exponent, std::span<int32_t> codes) override {
      const auto round = static_cast<uint32_t>(handle >> 32), chunk = static_cast<uint32_t>(handle);
      const Bytes slot = play.slot(worker, incarnation, round, chunk);
      kernels::align(slot.data(), play.scene_.elements[chunk], exponent, first, codes);
    }
    void send(const SwitchPacket& packet) override {
      play.over_network([this, packet] { play.at_switch(packet); });
    }

    Play& play;
    uint8_t worker;
    uint32_t incarnation = 1;
    uint32_t generation = 0;
    std::unique_ptr<SwitchSender> sender;
    std::vector<uint32_t> results;  // the rounds that chunks have one of
    uint64_t pushed = 0;            // chunks over all rounds, in order
    bool direct = false;
    bool begun = false;
  };
  struct Direct {
    uint32_t round = 0;
    std::map<uint8_t, Bytes> slots;
  };
  struct Event {
    uint64_t at;
    uint64_t order;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };

  uint32_t chunks() const { return static_cast<uint32_t>(scene_.elements.size()); }
  bool chance(double share) { return std::uniform_real_distribution<>()(random_) < share; }
  void after(uint64_t ns, std::function<void()> what) {
    events_.push({now_ + ns, order_++, std::move(what)});
  }
  uint64_t delay() {
    if (chance(scene_.late)) return random_() % (60'000 * kMicrosecond);
    return (5 + random_() % 200) * kMicrosecond;
  }
  void over_network(const std::function<void()>& what) {
    if (!chance(scene_.loss)) after(delay(), what);
    if (chance(scene_.twice)) after(delay(), what);
  }
  void reliably(std::function<void()> what) { after(delay(), std::move(what)); }

  // What a rank has encoded: of an incarnation its own.
  Bytes slot(uint8_t worker, uint32_t incarnation, uint32_t round, uint32_t chunk) const {
    std::mt19937_64 random(scene_.seed * 1000003 + worker +
                           64 * (incarnation + 8 * (round + 1000 * uint64_t{chunk})));
    std::vector<float> gradient(scene_.elements[chunk]);
    const int exponent = static_cast<int>(random() % 40) - 20;
    const bool zero = random() % 10 == 0, bad = random() % 200 == 0;
    for (float& x : gradient) {
      const float fraction = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
      x = zero ? 0.0f : std::ldexp(fraction, exponent);
    }
    if (bad) gradient[random() % gradient.size()] = INFINITY;
    Bytes slot(kernels::slot_bytes(DType::kInt32, gradient.size()));
    kernels::encode(gradient.data(), nullptr, DType::kInt32, {}, slot.data(), gradient.size());
    return slot;
  }

  // --- The workers.

  // What it has pushed of the first round over a generation that it did not know to be over, it
  // pushes again.
  void start_worker(Worker& worker, uint32_t generation, uint32_t first_round) {
    if (generation <= worker.generation) return;
    const uint64_t before = uint64_t{first_round - 1} * chunks();
    if (!worker.direct) worker.pushed = std::min(worker.pushed, before);
    worker.generation = generation;
    worker.begun = true;
    if (worker.sender) add_counters(worker);
    SwitchSenderOptions options{.worker = worker.worker,
                                .workers = everyone(),
                                .generation = generation,
                                .slots = scene_.slots,
                                .max_chunks = chunks() + scene_.slots + 1,
                                .retry_ns = 2'000 * kMicrosecond,
                                .give_up_ns = scene_.give_up_ns};
    worker.sender = std::make_unique<SwitchSender>(options, worker);
    worker.direct = false;
    push(worker);
    tick(worker, generation);
  }

  void tick(Worker& worker, uint32_t generation) {
    if (worker.generation != generation || worker.direct) return;
    worker.sender->poll(now_);
    if (worker.sender->ended()) return go_direct(worker);
    after(500 * kMicrosecond, [this, &worker, generation] { tick(worker, generation); });
  }

  // Pushes what may be pushed, in the order that all have.
  void push(Worker& worker) {
    if (!worker.begun) return;
    while (worker.pushed < uint64_t{scene_.rounds} * chunks()) {
      const auto round = static_cast<uint32_t>(worker.pushed / chunks()) + 1;
      const auto chunk = static_cast<uint32_t>(worker.pushed % chunks());
      if (worker.results[chunk] + 1 != round) return;
      ++worker.pushed;
      if (worker.direct) {
        send_directly(worker, round, chunk);
        continue;
      }
      const Bytes bytes = slot(worker.worker, worker.incarnation, round, chunk);
      const uint32_t elements = scene_.elements[chunk];
      worker.sender->push(
          {.handle = uint64_t{round} << 32 | chunk,
           .round = round,
           .chunk = chunk,
           .elements = elements,
           .exponent = static_cast<int16_t>(kernels::exponent_of(bytes.data(), elements))},
          now_);
    }
  }

  void go_direct(Worker& worker) {
    if (worker.direct || !worker.sender) return;
    worker.sender->end();
    worker.direct = true;
    for (uint64_t i = worker.pushed > chunks() ? worker.pushed - chunks() : 0; i < worker.pushed;
         ++i) {
      const auto round = static_cast<uint32_t>(i / chunks()) + 1;
      const auto chunk = static_cast<uint32_t>(i % chunks());
      if (worker.results[chunk] < round) send_directly(worker, round, chunk);
    }
    push(worker);
  }

  void send_directly(Worker& worker, uint32_t round, uint32_t chunk) {
    const uint32_t incarnation = worker.incarnation;
    reliably([this, &worker, incarnation, round, chunk] {
      if (incarnation == incarnations_[worker.worker]) {
        take_direct(worker.worker, round, chunk, slot(worker.worker, incarnation, round, chunk));
      }
    });
  }

  void result(Worker& worker, uint32_t round, uint32_t chunk) {
    if (worker.results[chunk] >= round) return;
    worker.results[chunk] = round;
    push(worker);
    if (worker.sender && worker.sender->ended()) go_direct(worker);
  }

  void add_counters(const Worker& worker) {
    if (!worker.sender) return;
    outcome_.packets += worker.sender->packets();
    outcome_.repeats += worker.sender->repeats();
  }

  // --- The switch.

  void at_switch(SwitchPacket packet) {
    if (now_ >= scene_.dead_from_ns && now_ < scene_.dead_to_ns) {
      if (scene_.silent) return;
    } else {
      const SwitchVerdict verdict = adder_.take(packet);
      if (verdict == kSwitchAdded || verdict == kSwitchLate) return;
    }
    over_network([this, packet] { at_box(packet); });
  }

  void forget() {
    adder_.forget();
    after(*scene_.forgets_ns + 100'000 * kMicrosecond, [this] { forget(); });
  }

  // --- The box.

  uint64_t everyone() const {
    return scene_.workers == 64 ? ~uint64_t{0} : (uint64_t{1} << scene_.workers) - 1;
  }

  void start_generation(uint32_t first_round) {
    ++generation_;
    if (receiver_) {
      receiver_->begin(generation_, first_round);
    } else {
      receiver_ =
          std::make_unique<SwitchReceiver>(SwitchReceiverOptions{.workers = everyone(),
                                                                 .generation = generation_,
                                                                 .slots = scene_.slots,
                                                                 .first_round = first_round,
                                                                 .elements = scene_.elements});
    }
    first_round_ = first_round;
    told_ = false;
    outcome_.generations = generation_;
    used_ = incarnations_;
    for (const auto& worker : workers_) {
      const uint64_t late = worker->worker == 0 && generation_ == 1 ? scene_.straggler_ns : 0;
      after(delay() + late, [this, &worker = *worker, generation = generation_, first_round] {
        start_worker(worker, generation, first_round);
      });
    }
  }

  void at_box(const SwitchPacket& packet) {
    const auto answer = receiver_->receive(std::as_bytes(std::span(&packet, 1)));
    for (const auto& worker : workers_) {
      const bool meant =
          answer.to == SwitchReceiver::To::kAll ||
          (answer.to == SwitchReceiver::To::kSender && worker->worker == packet.header.worker);
      if (!meant) continue;
      over_network([this, &worker = *worker, header = answer.header] {
        if (!worker.sender) return;
        worker.sender->receive(header, now_);
        if (worker.sender->ended()) go_direct(worker);
      });
    }
    if (receiver_->ended()) return tell_all();
    if (answer.closed) close_from_switch(answer.header.chunk);
  }

  // Over the links that lose nothing.
  void tell_all() {
    if (told_) return;
    told_ = true;
    for (const auto& worker : workers_) {
      reliably([this, &worker = *worker, generation = generation_, first_round = first_round_] {
        if (worker.generation > generation) return;
        start_worker(worker, generation, first_round);
        go_direct(worker);
      });
    }
  }

  void close_from_switch(uint32_t chunk) {
    const uint32_t elements = scene_.elements[chunk];
    std::vector<float> out(elements);
    kernels::from_fixed_point(receiver_->sums(chunk), receiver_->exponent(chunk), 1.0f, out.data());
    std::vector<Bytes> slots;
    const uint32_t round = receiver_->round(chunk);
    for (uint32_t w = 0; w < scene_.workers; ++w) {
      slots.push_back(slot(static_cast<uint8_t>(w), used_[w], round, chunk));
    }
    receiver_->begin_next(chunk);
    ++outcome_.closed_by_switch;
    close(round, chunk, out, slots);
  }

  void take_direct(uint8_t worker, uint32_t round, uint32_t chunk, Bytes slot) {
    if (round <= closed_[chunk]) return;  // it has been in the sum already
    receiver_->end("a rank sends directly");
    tell_all();
    if (round != closed_[chunk] + 1) return fail("a rank is ahead");
    Direct& direct = direct_[chunk];
    if (direct.round != round) direct = {round, {}};
    direct.slots[worker] = std::move(slot);
    if (direct.slots.size() < scene_.workers) return;
    std::vector<Bytes> slots;
    std::vector<const void*> pointers;
    for (const auto& [rank, bytes] : direct.slots) slots.push_back(bytes);
    for (const Bytes& bytes : slots) pointers.push_back(bytes.data());
    std::vector<float> out(scene_.elements[chunk]);
    kernels::sum(pointers, DType::kInt32, 1.0f, out.data(), out.size());
    ++outcome_.closed_directly;
    close(round, chunk, out, slots);
  }

  // `slots`: of those who were to be in it.
  void close(uint32_t round, uint32_t chunk, const std::vector<float>& out,
             const std::vector<Bytes>& slots) {
    if (round != closed_[chunk] + 1) return fail("a chunk closes twice, or too early");
    closed_[chunk] = round;
    std::vector<const void*> pointers;
    for (const Bytes& bytes : slots) pointers.push_back(bytes.data());
    std::vector<float> whole(out.size()), reference(out.size());
    kernels::sum(pointers, DType::kInt32, 1.0f, whole.data(), out.size());
    reference::sum_coded(pointers, DType::kInt32, 1.0f, reference.data(), out.size());
    for (size_t i = 0; i < out.size(); ++i) {
      const auto found = std::bit_cast<uint32_t>(out[i]);
      if (found != std::bit_cast<uint32_t>(whole[i]) ||
          found != std::bit_cast<uint32_t>(reference[i])) {
        return fail(fmt::format("round {}, chunk {}, element {}: {} instead of {} and {}", round,
                                chunk, i, out[i], whole[i], reference[i]));
      }
    }
    for (const auto& worker : workers_) {
      reliably([this, &worker = *worker, round, chunk] { result(worker, round, chunk); });
    }
    // A generation begins where nobody has sent anything of its first round directly yet. What is
    // on its way ends it.
    const bool complete =
        std::ranges::all_of(closed_, [&](uint32_t r) { return r == round; }) &&
        std::ranges::none_of(direct_, [&](const Direct& direct) { return direct.round > round; });
    if (complete && receiver_->ended() && scene_.tries_again && round < scene_.rounds) {
      start_generation(round + 1);
    }
  }

  // A new incarnation takes a worker's place. It has the results that the other had.
  void replace() {
    const uint32_t w = random_() % scene_.workers;
    Worker& worker = *workers_[w];
    after(*scene_.replaced_ns, [this] { replace(); });
    if (!worker.begun) return;
    receiver_->end("a worker was replaced");
    ++incarnations_[w];
    worker.incarnation = incarnations_[w];
    for (Direct& direct : direct_) direct.slots.erase(static_cast<uint8_t>(w));
    const bool was_direct = worker.direct;
    worker.direct = false;
    if (was_direct || worker.sender) go_direct(worker);
    told_ = false;
    tell_all();
  }

  bool finished() const {
    return std::ranges::all_of(workers_, [this](const auto& worker) {
      return std::ranges::all_of(worker->results,
                                 [this](uint32_t round) { return round == scene_.rounds; });
    });
  }

  std::string state() const {
    std::string text =
        fmt::format("at {} ns, generation {}{}; ", now_, generation_,
                    receiver_->ended() ? std::string(" ended: ") + receiver_->why() : "");
    for (const auto& worker : workers_) {
      text += fmt::format("[{} generation {} pushed {} direct {}] ", worker->worker,
                          worker->generation, worker->pushed, worker->direct);
    }
    return text;
  }
  void fail(const std::string& problem) { outcome_.problem = problem + "; " + state(); }

  const SwitchScene scene_;
  Adder& adder_;
  std::mt19937_64 random_;
  uint64_t now_ = 0, order_ = 0;
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<uint32_t> incarnations_;
  // The box.
  std::unique_ptr<SwitchReceiver> receiver_;
  uint32_t generation_ = 0;
  uint32_t first_round_ = 1;  // of the generation
  bool told_ = false;
  std::vector<uint32_t> used_;    // the incarnations of this generation
  std::vector<uint32_t> closed_;  // rounds, by chunk
  std::vector<Direct> direct_;
  SwitchOutcome outcome_;
};

}  // namespace

SwitchOutcome play(const SwitchScene& scene, Adder& adder) { return Play(scene, adder).run(); }

}  // namespace phub::test
