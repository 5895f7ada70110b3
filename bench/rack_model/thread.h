// Threads that do one thing after another, and pipes between them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

#include "bench/rack_model/costs.h"
#include "bench/rack_model/fabric.h"
#include "bench/rack_model/grid.h"

namespace phub::rack_model {

class Thread {
 public:
  Thread(Grid& grid, CpuId cpu) : grid_(grid), cpu_(cpu) {}
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  // In the order of the calls: computes for `seconds`, then calls `then`.
  void run(double seconds, Grid::Then then) { add({seconds, {}, 0, std::move(then)}); }
  // Computes and meanwhile moves `bytes` from and to memory; it takes as long as the slower of
  // both.
  void run(double seconds, const Fabric::MemoryPorts& memory, double bytes, Grid::Then then) {
    add({seconds, memory, bytes, std::move(then)});
  }

 private:
  struct Task {
    double seconds = 0;
    Fabric::MemoryPorts memory;
    double bytes = 0;
    Grid::Then then;
  };

  void add(Task task) {
    tasks_.push_back(std::move(task));
    if (tasks_.size() == 1) begin();
  }
  void begin() {
    const Task& task = tasks_.front();
    parts_ = task.bytes > 0 ? 2 : 1;
    grid_.work(cpu_, task.seconds, [this] { end_part(); });
    if (task.bytes > 0) {
      grid_.flow(task.memory.from, task.memory.to, task.bytes, [this] { end_part(); });
    }
  }
  void end_part() {
    if (--parts_ > 0) return;
    const Grid::Then then = std::move(tasks_.front().then);
    tasks_.pop_front();
    if (!tasks_.empty()) begin();
    then();
  }

  Grid& grid_;
  const CpuId cpu_;
  std::deque<Task> tasks_;
  uint32_t parts_ = 0;  // parts of the first task that are not done
};

// Some chunks of a queue that travel and are handled as one.
struct Unit {
  uint32_t id = 0;
  uint32_t chunks = 1;
};

// One direction of a connection: payloads follow each other in order. The sender's thread copies
// them into a window, they cross the network, the receiver's thread copies them out.
class Pipe {
 public:
  struct End {
    Thread* thread = nullptr;
    PortId port = 0;
  };

  // The weight of a payload's byte for the threads (0: it does not move) and for the links.
  struct Weight {
    double copied = 1, carried = 1;
  };

  Pipe(Grid& grid, const Costs& costs, End from, End to, Weight weight)
      : grid_(grid), costs_(costs), from_(from), to_(to), weight_(weight) {}
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  // Calls `arrived` when the receiver has it.
  void post(const Unit& unit, double bytes, Grid::Then arrived) {
    waiting_.push_back({unit, bytes, std::move(arrived)});
    fill_window();
  }

 private:
  struct Parcel {
    Unit unit;
    double bytes = 0;
    Grid::Then arrived;
  };

  double seconds(const Parcel& parcel, double chunk_ns, double byte_ns) const {
    return (parcel.unit.chunks * chunk_ns + parcel.bytes * weight_.copied * byte_ns) * 1e-9;
  }
  bool has_room() const {
    return costs_.window_bytes <= 0 || in_flight_ <= 0 ||
           in_flight_ + waiting_.front().bytes <= costs_.window_bytes;
  }
  void fill_window() {
    while (!waiting_.empty() && has_room()) {
      Parcel parcel = std::move(waiting_.front());
      waiting_.pop_front();
      in_flight_ += parcel.bytes;
      const double cost = seconds(parcel, costs_.send_chunk_ns, costs_.send_byte_ns);
      from_.thread->run(cost, [this, parcel = std::move(parcel)]() mutable {
        sent_.push_back(std::move(parcel));
        if (sent_.size() == 1) move_first();
      });
    }
  }
  void move_first() {
    grid_.flow(from_.port, to_.port, sent_.front().bytes * weight_.carried, [this] {
      Parcel parcel = std::move(sent_.front());
      sent_.pop_front();
      if (!sent_.empty()) move_first();
      const double cost = seconds(parcel, costs_.receive_chunk_ns, costs_.receive_byte_ns);
      to_.thread->run(cost, [this, parcel = std::move(parcel)] {
        in_flight_ -= parcel.bytes;
        parcel.arrived();
        fill_window();
      });
    });
  }

  Grid& grid_;
  const Costs& costs_;
  const End from_, to_;
  const Weight weight_;
  double in_flight_ = 0;
  std::deque<Parcel> waiting_, sent_;
};

}  // namespace phub::rack_model
