// A request on its way from its route to the ControlHandler, and the answer on its way back.
// Control thread.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "phub/control/router.h"
#include "transport/control/messages_json.h"

namespace phub {

struct Call {
  using Answer = std::function<void(HttpResponse)>;

  std::string job;
  HttpRequest request;
  ControlHandler& handler;
  const HttpCounters& counters;
  Background* background;
  const Access* access;
  Answer answer;
  Routed routed = {};
  std::string about = {};              // for the audit
  std::vector<uint64_t> numbers = {};  // in the path

  // Returns a function for the handler that answers with its result.
  template <typename T>
  Reply<T> reply() const {
    return [answer = answer, about = about](Result<T> result) {
      if (!result) return answer(error_response(result.code, result.message));
      HttpResponse response;
      const auto failed = error_of([&] { response.body = to_json(*result.value); });
      if (failed) response = error_response(ErrorCode::kInternal, failed->what());
      if (!failed) response.about = about;
      answer(std::move(response));
    };
  }
  // The same for long results: they are encoded beside the control thread.
  template <typename T>
  Reply<T> long_reply() const {
    return [answer = answer, background = background, &handler = handler](Result<T> result) {
      if (!result) return answer(error_response(result.code, result.message));
      const auto value = std::make_shared<T>(std::move(*result.value));
      const auto response = std::make_shared<HttpResponse>();
      run(
          background,
          [value, response] {
            response->body = to_json(*value);
            if constexpr (std::is_same_v<T, JoinReply>) {
              response->about = member(value->rank, value->incarnation);
            }
          },
          [answer, value, response, &handler](const std::optional<Error>& failed) {
            if (!failed) return answer(std::move(*response));
            forget(handler, *value);
            answer(error_response(failed->code(), failed->what()));
          });
    };
  }
  Reply<PartBytes> bytes_reply() const {
    return [answer = answer](Result<PartBytes> result) {
      if (!result) return answer(error_response(result.code, result.message));
      answer({.body = std::move(result.value->bytes), .content_type = "application/octet-stream"});
    };
  }
  // Does `work` in the background if there is one, then `end` on this thread.
  static void run(Background* background, const Background::Work& work,
                  const Background::End& end) {
    if (background) return background->run(work, end);
    end(error_of(work));
  }

  // The sender of a call: the rank that the body names, with the job and the ticket, or an admin.
  // Throws Error(kUnauthorized).
  template <typename Message>
  Credential sender(const CallInfo& info, const Message& named) {
    Credential who;
    who.rank = named.rank;
    who.incarnation = named.incarnation;
    who.epoch = named.epoch;
    return sender(info, std::move(who));
  }
  Credential sender(const CallInfo& info, Credential who);
  Credential sender_in_path();  // /part/{rank}/{incarnation}/{epoch}

  // The server's status, with the jobs that the caller may see.
  ServerStatus visible_status() const;

 private:
  static std::string member(uint32_t rank, uint32_t incarnation) {
    return fmt::format("rank={} incarnation={}", rank, incarnation);
  }
  template <typename T>
  static void forget(ControlHandler& /*handler*/, const T& /*value*/) {}
  static void forget(ControlHandler& handler, const JoinReply& joined);
  bool is_admin(const Credential& who) const;
};

// The rank that such a path names, with the ticket that it shows. Throws Error: there is none.
Credential sender_in_path(const std::string& job, const std::vector<uint64_t>& numbers,
                          std::string_view authorization);

}  // namespace phub
