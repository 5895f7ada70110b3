// VerbsDialer: addresses, routes, requests, answers.
#include <netdb.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/text.h"
#include "transport/verbs/link.h"

namespace phub {

VerbsDialer::VerbsDialer(const Offer& offer, uint32_t timeout_ms)
    : deadline_(Clock::now() + std::chrono::milliseconds(timeout_ms)) {
  prepare_verbs();
  channel_.reset(rdma_create_event_channel());
  if (channel_ == nullptr) {
    fail(ErrorCode::kUnavailable,
         "no RDMA on this host: rdma_create_event_channel: {}; load the modules rdma_ucm and "
         "ib_uverbs, or use the transport tcp",
         std::strerror(errno));
  }
  make_nonblocking(channel_->fd);
  for (const QueueOffer& queue : offer.queues) {
    calls_.push_back({{}, queue.address.empty() ? State::kConnected : State::kNew, queue.address});
  }
}

void VerbsDialer::resolve() {
  for (Call& call : calls_) {
    if (call.address.empty()) continue;
    const HostPort to = parse_host_port(call.address);
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    addrinfo* list = nullptr;
    if (const int error =
            getaddrinfo(to.host.c_str(), std::to_string(to.port).c_str(), &hints, &list)) {
      fail(ErrorCode::kInvalid, "the server's address '{}': {}", call.address, gai_strerror(error));
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
    rdma_cm_id* id = nullptr;
    if (rdma_create_id(channel_.get(), &id, &call, RDMA_PS_TCP) != 0) {
      fail(ErrorCode::kFull, "rdma_create_id: {}", std::strerror(errno));
    }
    call.id.reset(id);
    set_ack_timeout(id);
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
    if (rdma_resolve_addr(id, nullptr, list->ai_addr,
                          static_cast<int>(std::max<int64_t>(left.count(), 1))) != 0) {
      fail(ErrorCode::kUnavailable, "no RDMA device of this host has a route to {}: {}",
           call.address, std::strerror(errno));
    }
  }
  wait_for(State::kRoute);
}

void VerbsDialer::request(uint32_t queue, const VerbsHello& hello) {
  rdma_conn_param parameters = {};
  parameters.private_data = &hello;
  parameters.private_data_len = sizeof hello;
  parameters.retry_count = 6;      // soft-RoCE takes 7 for ever
  parameters.rnr_retry_count = 7;  // for ever
  if (rdma_connect(calls_[queue].id.get(), &parameters) != 0) {
    fail(ErrorCode::kUnavailable, "rdma_connect to {}: {}", calls_[queue].address,
         std::strerror(errno));
  }
}

void VerbsDialer::wait_for(State state) {
  const auto reached = [state](const Call& call) { return call.state >= state; };
  while (!std::all_of(calls_.begin(), calls_.end(), reached)) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
    if (left <= 0) {
      const auto slow = std::find_if_not(calls_.begin(), calls_.end(), reached);
      fail(ErrorCode::kTimeout, "{} does not answer over RDMA (queue {})", slow->address,
           slow - calls_.begin());
    }
    pollfd readable = {channel_->fd, POLLIN, 0};
    ::poll(&readable, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    rdma_cm_event* event = nullptr;
    while (rdma_get_cm_event(channel_.get(), &event) == 0) {
      try {
        handle(*event);
      } catch (...) {
        rdma_ack_cm_event(event);
        throw;
      }
      rdma_ack_cm_event(event);
    }
  }
}

void VerbsDialer::handle(rdma_cm_event& event) {
  Call& call = *static_cast<Call*>(event.id->context);
  switch (event.event) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      call.state = State::kAddress;
      if (rdma_resolve_route(event.id, 2000) != 0) {
        fail(ErrorCode::kUnavailable, "rdma_resolve_route to {}: {}", call.address,
             std::strerror(errno));
      }
      return;
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      call.state = State::kRoute;
      return;
    case RDMA_CM_EVENT_ESTABLISHED:
      call.state = State::kConnected;
      return;
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      fail(ErrorCode::kUnavailable, "no RDMA device of this host has a route to {} ({})",
           call.address, std::strerror(-event.status));
    case RDMA_CM_EVENT_REJECTED: {
      constexpr int kConsumerDefined = 28;  // IB_CM_REJ_CONSUMER_DEFINED: by the server itself
      if (event.status == kConsumerDefined && event.param.conn.private_data != nullptr) {
        const auto* data = static_cast<const std::byte*>(event.param.conn.private_data);
        throw parse_refusal({data, event.param.conn.private_data_len});
      }
      fail(ErrorCode::kUnavailable, "nobody listens for RDMA connections at {} (rejected, {})",
           call.address, event.status);
    }
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
      fail(ErrorCode::kUnavailable, "{} cannot be connected to over RDMA ({}, {})", call.address,
           rdma_event_str(event.event), event.status);
    case RDMA_CM_EVENT_DISCONNECTED:
      fail(ErrorCode::kUnavailable, "{} closed the connection at once", call.address);
    default:
      return;
  }
}

std::vector<VerbsId> VerbsDialer::take_ids() {
  std::vector<VerbsId> ids;
  for (Call& call : calls_) {
    if (call.id) call.id->context = nullptr;
    ids.push_back(std::move(call.id));
  }
  return ids;
}

}  // namespace phub
