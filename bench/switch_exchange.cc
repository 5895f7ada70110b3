// Adds gradients in a switch: workers send them in the format int32, `phub switch` adds them, and
// the box holds every chunk to the sum of the slots that the workers encoded, bit for bit. It takes
// the way of the numbers without the job around it; `phub serve --switch` is that of jobs. Exit
// status: 0 if all chunks came from the switch and were right; 1; 2 for a wrong command line; 3 if
// the generation ended (a worker: the box or the switch was gone).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/encode.h"
#include "kernels/fixed_point.h"
#include "kernels/kernels.h"
#include "transport/error.h"
#include "transport/switch/receiver.h"
#include "transport/switch/sender.h"
#include "transport/switch/socket.h"
#include "transport/text.h"

namespace phub {
namespace {

using kernels::DType;
using Clock = std::chrono::steady_clock;

struct Arguments {
  uint32_t workers = 4;
  uint32_t worker = 0;
  uint32_t rounds = 10;
  uint64_t elements = 100'000;
  uint32_t chunk_elements = 8192;
  uint32_t slots = 64;
  uint32_t generation = 1;
  uint32_t give_up_ms = 5000;
  uint32_t retry_ms = 20;
  uint32_t round_ms = 0;
  std::string box = "127.0.0.1:7718";
};

uint64_t now_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
          .count());
}

volatile std::sig_atomic_t asked_to_stop = 0;
void ask_to_stop(int /*signal*/) { asked_to_stop = 1; }

std::vector<uint32_t> chunks_of(const Arguments& arguments) {
  std::vector<uint32_t> chunks;
  for (uint64_t first = 0; first < arguments.elements; first += arguments.chunk_elements) {
    chunks.push_back(static_cast<uint32_t>(
        std::min<uint64_t>(arguments.chunk_elements, arguments.elements - first)));
  }
  return chunks;
}

// Gradients of many magnitudes; now and then a chunk of zeros.
std::vector<std::byte> slot_of(uint32_t worker, uint32_t round, uint32_t chunk, uint32_t elements) {
  uint64_t state = (uint64_t{worker} << 48) ^ (uint64_t{round} << 24) ^ chunk;
  const auto next = [&state] {
    state += 0x9E3779B97F4A7C15;
    uint64_t h = state;
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9;
    h = (h ^ h >> 27) * 0x94D049BB133111EB;
    return h ^ h >> 31;
  };
  const int exponent = static_cast<int>(next() % 30) - 40;
  const bool zero = next() % 16 == 0;
  std::vector<float> gradient(elements);
  for (float& x : gradient) {
    x = zero ? 0.0f : std::ldexp(static_cast<float>(static_cast<int32_t>(next())), exponent);
  }
  std::vector<std::byte> slot(kernels::slot_bytes(DType::kInt32, elements));
  kernels::encode(gradient.data(), nullptr, DType::kInt32, {}, slot.data(), elements);
  return slot;
}

uint64_t all_of(const Arguments& arguments) {
  return arguments.workers == kSwitchWorkers ? ~uint64_t{0}
                                             : (uint64_t{1} << arguments.workers) - 1;
}

// --- A worker.

class WorkerSide : public SwitchOwner {
 public:
  WorkerSide(const Arguments& arguments, std::vector<uint32_t> chunks)
      : socket(kSwitchPort),
        slots(chunks.size()),
        box_(switch_address(arguments.box)),
        chunks_(std::move(chunks)) {}

  void fill(uint64_t chunk, uint32_t first, int exponent, std::span<int32_t> codes) override {
    kernels::align(slots[chunk].data(), chunks_[chunk], exponent, first, codes);
  }
  void send(const SwitchPacket& packet) override {
    socket.send(std::as_bytes(std::span(&packet, 1)), box_);
  }

  SwitchSocket socket;
  std::vector<std::vector<std::byte>> slots;

 private:
  const sockaddr_in box_;
  const std::vector<uint32_t> chunks_;
};

void wait_for_round(const Arguments& arguments, WorkerSide& side, SwitchSender& sender) {
  const uint64_t least = now_ns() + uint64_t{arguments.round_ms} * 1'000'000;
  while (!sender.ended() && (!sender.idle() || now_ns() < least)) {
    if (!side.socket.holds_some()) side.socket.flush();
    const uint64_t now = now_ns(), due = std::max(sender.due_ns(), now);
    const int wait_ms = static_cast<int>(std::min<uint64_t>((due - now) / 1'000'000 + 1, 100));
    const auto got = side.socket.receive(wait_ms);
    if (got && got->bytes.size() == sizeof(SwitchHeader)) {
      SwitchHeader header;
      std::memcpy(&header, got->bytes.data(), sizeof header);
      sender.receive(header, now_ns());
    }
    sender.poll(now_ns());
  }
}

int run_worker(const Arguments& arguments) {
  const std::vector<uint32_t> chunks = chunks_of(arguments);
  WorkerSide side(arguments, chunks);
  SwitchSender sender({.worker = static_cast<uint8_t>(arguments.worker),
                       .workers = all_of(arguments),
                       .generation = arguments.generation,
                       .slots = static_cast<uint16_t>(arguments.slots),
                       .max_chunks = static_cast<uint32_t>(chunks.size()),
                       .retry_ns = uint64_t{arguments.retry_ms} * 1'000'000,
                       .give_up_ns = uint64_t{arguments.give_up_ms} * 1'000'000},
                      side);
  uint32_t round = 1;
  for (; round <= arguments.rounds && !sender.ended(); ++round) {
    for (uint32_t c = 0; c < chunks.size(); ++c) {
      side.slots[c] = slot_of(arguments.worker, round, c, chunks[c]);
      sender.push(
          {.handle = c,
           .round = round,
           .chunk = c,
           .elements = chunks[c],
           .exponent = static_cast<int16_t>(kernels::exponent_of(side.slots[c].data(), chunks[c]))},
          now_ns());
    }
    wait_for_round(arguments, side, sender);
  }
  fmt::print("worker {}: {} packets, {} of them again; {}\n", arguments.worker, sender.packets(),
             sender.repeats(),
             sender.ended() ? fmt::format("the generation ended in round {}: what has no result "
                                          "goes to the box directly",
                                          round - 1)
                            : fmt::format("the box has all {} rounds", arguments.rounds));
  return sender.ended() ? 3 : 0;
}

// --- The box.

// Whether the chunk that is closed is the sum of all workers' slots.
bool is_right(const Arguments& arguments, const SwitchReceiver& receiver, uint32_t chunk,
              uint32_t elements) {
  std::vector<std::vector<std::byte>> slots;
  std::vector<const void*> pointers;
  for (uint32_t worker = 0; worker < arguments.workers; ++worker) {
    slots.push_back(slot_of(worker, receiver.round(chunk), chunk, elements));
    pointers.push_back(slots.back().data());
  }
  std::vector<float> expected(elements), found(elements);
  kernels::sum(pointers, DType::kInt32, 1.0f, expected.data(), elements);
  kernels::from_fixed_point(receiver.sums(chunk), receiver.exponent(chunk), 1.0f, found.data());
  for (uint32_t i = 0; i < elements; ++i) {
    if (std::bit_cast<uint32_t>(expected[i]) == std::bit_cast<uint32_t>(found[i])) continue;
    fmt::print("box: WRONG: round {}, chunk {}, element {}: {} instead of {}\n",
               receiver.round(chunk), chunk, i, found[i], expected[i]);
    return false;
  }
  return true;
}

int run_box(const Arguments& arguments) {
  const std::vector<uint32_t> chunks = chunks_of(arguments);
  const sockaddr_in own = switch_address(arguments.box);
  SwitchSocket socket(ntohs(own.sin_port));
  const sockaddr_in all = broadcast_of(own, kSwitchPort);
  SwitchReceiver receiver({.workers = all_of(arguments),
                           .generation = arguments.generation,
                           .slots = static_cast<uint16_t>(arguments.slots),
                           .first_round = 1,
                           .elements = chunks});
  std::signal(SIGTERM, ask_to_stop);
  std::signal(SIGINT, ask_to_stop);
  fmt::print("box: listening on {}\n", arguments.box);
  std::fflush(stdout);
  uint64_t closed = 0, sums = 0;
  bool right = true;
  while (asked_to_stop == 0) {
    if (!socket.holds_some()) socket.flush();
    const auto got = socket.receive(100);
    if (!got || got->bytes.size() != sizeof(SwitchPacket)) continue;
    ++sums;
    const auto answer = receiver.receive(got->bytes);
    if (answer.closed) {
      const uint32_t chunk = answer.header.chunk;
      right = is_right(arguments, receiver, chunk, chunks[chunk]) && right;
      receiver.begin_next(chunk);
      ++closed;
    }
    if (answer.to == SwitchReceiver::To::kNobody) continue;
    socket.send(std::as_bytes(std::span(&answer.header, 1)),
                answer.to == SwitchReceiver::To::kAll ? all : got->from);
  }
  const uint64_t wanted = uint64_t{arguments.rounds} * chunks.size();
  fmt::print("box: {} packets; {} of {} chunks from the switch, {}{}\n", sums, closed, wanted,
             right ? "equal to the sum of the slots to the bit" : "NOT all equal to the sum",
             receiver.ended() ? std::string("; the generation ended: ") + receiver.why() : "");
  if (!right) return 1;
  return receiver.ended() ? 3 : closed == wanted ? 0 : 1;
}

void add_options(CLI::App& command, Arguments& arguments) {
  command.add_option("--workers", arguments.workers)->check(CLI::Range(1u, 64u));
  command.add_option("--rounds", arguments.rounds)->check(CLI::Range(1u, 1'000'000u));
  command.add_option("--elements", arguments.elements)->check(CLI::Range(1u, 1u << 28));
  command.add_option("--chunk-elements", arguments.chunk_elements)
      ->check(CLI::Range(32u, 1u << 20));
  command.add_option("--slots", arguments.slots, "Of the switch, that the workers use")
      ->check(CLI::Range(1u, 32768u));
  command.add_option("--generation", arguments.generation)->check(CLI::Range(1u, ~0u));
  command.add_option("--box", arguments.box, "The box's address and UDP port");
}

int run(int argc, char** argv) {
  CLI::App app("Adds gradients in a switch, and checks every sum.", "switch_exchange");
  app.require_subcommand(1);
  Arguments arguments;
  CLI::App* box = app.add_subcommand("box", "Takes and checks the sums, until SIGTERM");
  CLI::App* worker = app.add_subcommand("worker", "Sends gradients");
  add_options(*box, arguments);
  add_options(*worker, arguments);
  worker->add_option("--worker", arguments.worker, "Its number")->check(CLI::Range(0u, 63u));
  worker->add_option("--retry-ms", arguments.retry_ms)->check(CLI::Range(1u, 10'000u));
  worker->add_option("--give-up-ms", arguments.give_up_ms)->check(CLI::Range(1u, 600'000u));
  worker->add_option("--round-ms", arguments.round_ms, "The least time of a round")
      ->check(CLI::Range(0u, 600'000u));
  try {
    app.parse(argc, argv);
    if (arguments.worker >= arguments.workers) {
      fail(ErrorCode::kInvalid, "--worker: must be below {}, got {}", arguments.workers,
           arguments.worker);
    }
    return worker->parsed() ? run_worker(arguments) : run_box(arguments);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "switch_exchange: %s\n", escaped(error.what()).c_str());
    return 2;
  }
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  try {
    return phub::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "switch_exchange: %s\n", phub::escaped(error.what()).c_str());
    return 1;
  }
}
