// The control connections of a simulated rack: requests and answers are delayed, and sometimes lost
// or sent twice. They end with the server: then all requests under way are kUnavailable. What
// arrives is decoded already; HTTP has tests of its own.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "phub/control/handler.h"
#include "transport/error.h"
#include "transport/sim/net.h"

namespace phub::sim {

// Answers that wait for a process. It may hang; when it is gone they are dropped.
using Mail = std::deque<std::function<void()>>;

class ControlNet {
 public:
  ControlNet(SimNet& net, double loss, double duplicate, uint64_t max_delay_ns, uint64_t timeout_ns)
      : net_(net),
        loss_(loss),
        duplicate_(duplicate),
        max_delay_ns_(max_delay_ns),
        timeout_ns_(timeout_ns) {}

  // `done` runs from the process's mail, once; with kTimeout when request or answer was lost.
  template <typename T>
  void call(const char* name, const std::shared_ptr<Mail>& mail,
            std::function<void(Reply<T>)> request, std::function<void(Result<T>)> done,
            bool may_come_twice = true) {
    auto answered = std::make_shared<bool>(false);
    std::function<void(Result<T>)> deliver = [weak = std::weak_ptr(mail), answered,
                                              done = std::move(done)](Result<T> result) {
      auto open = weak.lock();
      if (open == nullptr || std::exchange(*answered, true)) return;
      open->push_back([done, result = std::move(result)] { done(result); });
    };
    const int copies = may_come_twice && net_.random().chance(duplicate_) ? 2 : 1;
    for (int copy = 0; copy < copies; ++copy) send<T>(name, mail, request, deliver);
  }

  // Tells the server, which does not answer.
  void tell(const char* name, std::function<void()> news) {
    net_.after(delay(), [this, name, news = std::move(news), life = life_] {
      if (!up_ || life != life_) return;
      net_.trace(name);
      if (on_request_) on_request_();
      news();
    });
  }
  // Is called before the server takes a request.
  void on_request(std::function<void()> call) { on_request_ = std::move(call); }

  // What this process sends (`requests`), or is sent, is lost for so long.
  void cut(const std::shared_ptr<Mail>& mail, bool requests, uint64_t ns) {
    Cut& cut = cuts_[mail];
    (requests ? cut.requests_until_ns : cut.answers_until_ns) = net_.now_ns() + ns;
  }

  void server_died() {
    ++life_;
    up_ = false;
    unanswered_ = 0;
  }
  void server_started() { up_ = true; }

  // Requests that the server has taken and not answered, but for a shard's for orders: it waits. An
  // answer to one that it answered already stops the program.
  uint64_t unanswered() const { return unanswered_; }

 private:
  template <typename T>
  void send(const char* name, const std::weak_ptr<Mail>& process,
            const std::function<void(Reply<T>)>& request,
            const std::function<void(Result<T>)>& deliver) {
    const bool request_lost = net_.random().chance(loss_) || is_cut(process, true);
    const bool answer_lost = net_.random().chance(loss_);
    if (request_lost || answer_lost) {
      net_.after(timeout_ns_, [deliver] { deliver({ErrorCode::kTimeout, "no answer"}); });
    }
    if (request_lost) return;
    net_.after(delay(), [this, name, process, request, deliver, answer_lost, life = life_] {
      if (!up_ || life != life_) return deliver({ErrorCode::kUnavailable, "no server"});
      net_.trace(name);
      if (on_request_) on_request_();
      unanswered_ += kCounts<T>;
      // The end of the server drops it, and with it the connection.
      const auto connection = std::make_shared<Connection<T>>(*this, deliver);
      Reply<T> reply = [this, name, process, connection, answer_lost, life](Result<T> result) {
        if (life != life_) return;
        PHUB_CHECK(!std::exchange(connection->answered, true));
        unanswered_ -= kCounts<T>;
        net_.trace(name, 1, static_cast<uint64_t>(result.code), result ? 1 : 0);
        if (answer_lost) return;
        if (is_cut(process, false)) {
          net_.after(timeout_ns_, [connection] {
            connection->deliver({ErrorCode::kTimeout, "no answer"});
          });
          return;
        }
        net_.after(delay(), [this, connection, result = std::move(result), life] {
          if (life != life_) return connection->end();
          connection->deliver(result);
        });
      };
      try {
        request(reply);
      } catch (const Error& error) {
        reply({error.code(), error.what()});
      }
    });
  }
  template <typename T>
  struct Connection {
    Connection(ControlNet& control, std::function<void(Result<T>)> to)
        : net(control), deliver(std::move(to)) {}
    ~Connection() {
      if (!answered) end();
    }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;
    void end() {
      net.net_.after(net.delay(), [deliver = deliver] {
        deliver({ErrorCode::kUnavailable, "the server died"});
      });
    }
    ControlNet& net;
    const std::function<void(Result<T>)> deliver;
    bool answered = false;
  };
  bool is_cut(const std::weak_ptr<Mail>& process, bool requests) const {
    const auto at = cuts_.find(process);
    if (at == cuts_.end()) return false;
    const Cut& cut = at->second;
    return net_.now_ns() < (requests ? cut.requests_until_ns : cut.answers_until_ns);
  }
  template <typename T>
  static constexpr uint64_t kCounts = std::is_same_v<T, ShardOrders> ? 0 : 1;
  uint64_t delay() { return net_.random().between(1'000, max_delay_ns_); }

  SimNet& net_;
  const double loss_, duplicate_;
  const uint64_t max_delay_ns_, timeout_ns_;
  struct Cut {
    uint64_t requests_until_ns = 0, answers_until_ns = 0;
  };
  std::map<std::weak_ptr<Mail>, Cut, std::owner_less<>> cuts_;  // by process
  std::function<void()> on_request_;
  uint64_t unanswered_ = 0;
  uint64_t life_ = 0;  // of the server
  bool up_ = true;
};

}  // namespace phub::sim
