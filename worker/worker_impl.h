// The worker over its parts: the link keeper (membership, connection, failure), the exchange of
// keys (what is sent and received, and how threads wait for it), and the saver.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "worker/link/join.h"
#include "worker/link/link_keeper.h"
#include "worker/memory/gradient_coder.h"
#include "worker/progress/key_exchange.h"
#include "worker/progress/stalls.h"
#include "worker/save/saver.h"
#include "worker/worker.h"

namespace phub {

struct Worker::Impl {
  Impl(const WorkerOptions& worker_options, Joined joined)
      : options(worker_options),
        keeper(options, std::move(joined)),
        stalls(keeper),
        coder(keeper.reply(), options.carry_over > 0),
        exchange(keeper, stalls, coder),
        saver(keeper, coder) {}
  ~Impl() {
    if (made) exchange.rounds().say_never_pushed();
    exchange.stop();
    const bool fails = made && std::uncaught_exceptions() > exceptions;
    if (fails) keeper.abandon();
    if (!fails) saver.finish(std::chrono::seconds(2));
    keeper.stop();
  }

  // `stop` ends it.
  static std::unique_ptr<Impl> started(const WorkerOptions& options, Joined joined,
                                       const std::string& trace, const std::stop_token& stop = {});
  // For a worker that had this answer, and lost the server.
  static std::unique_ptr<Impl> joined_again(const WorkerOptions& options, JoinReply lost,
                                            const std::stop_token& stop);
  void start(const std::string& trace_file);

  const KeySpec& key(size_t key) const;  // throws Error(kInvalid): there is none
  Pushed push(size_t key, const PushOptions& how, const KeyExchange::CopyIn& copy_in);
  Pushed push_part(size_t key, size_t part, const PushOptions& how);
  void received(size_t key);  // the caller has its latest result
  void begin_push(size_t key);
  void save_before_push(size_t key);

  const WorkerOptions options;
  LinkKeeper keeper;
  StallWatch stalls;
  GradientCoder coder;
  KeyExchange exchange;
  Saver saver;
  std::unordered_map<std::string_view, size_t> key_by_name;

  std::stop_source over;  // ends rejoin()
  std::mutex rejoining;
  bool replaced = false;  // guarded by rejoining
  std::mutex states;      // a rank gets or sets states once at a time
  std::mutex leaving;
  bool left = false;  // guarded by leaving
  // An exception that destroys a worker is a failure of the rank: it has not left.
  bool made = false;                                  // the constructor has returned
  const int exceptions = std::uncaught_exceptions();  // when it was made
};

}  // namespace phub
