// A worker without manners: connects one queue pair by hand, with the private data that it likes,
// and posts what it likes. Its queue pair is its own and not librdmacm's, so that the limits which
// the box offers (no reads, no atomics) do not hold it back.
#pragma once

#include <arpa/inet.h>
#include <poll.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "transport/text.h"
#include "transport/transport.h"
#include "transport/verbs/format.h"
#include "transport/verbs/resources.h"

namespace phub {

inline std::vector<std::byte> bytes_of(const VerbsHello& hello) {
  const auto bytes = std::as_bytes(std::span(&hello, 1));
  return {bytes.begin(), bytes.end()};
}

// One attempt at the box's memory.
struct RawRequest {
  ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;
  uint64_t address = 0;
  uint32_t key = 0;
  uint32_t bytes = 0;
  uint32_t imm = 0;
};

class RawVerbs {
 public:
  static constexpr uint32_t kBufferBytes = 1 << 20;
  static constexpr int kPieces = 16;  // a request may be of as many times the buffer
  static constexpr int kTimeoutMs = 10000;

  // Resolves the address. Throws std::runtime_error.
  explicit RawVerbs(const std::string& address) : buffer_(kBufferBytes, std::byte{0xa7}) {
    channel_.reset(rdma_create_event_channel());
    check(channel_ != nullptr, "rdma_create_event_channel");
    make_nonblocking(channel_->fd);
    rdma_cm_id* id = nullptr;
    check(rdma_create_id(channel_.get(), &id, nullptr, RDMA_PS_TCP) == 0, "rdma_create_id");
    id_.reset(id);
    const HostPort to = parse_host_port(address);
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_port = htons(to.port);
    check(inet_pton(AF_INET, to.host.c_str(), &at.sin_addr) == 1, "inet_pton");
    check(rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&at), kTimeoutMs) == 0,
          "rdma_resolve_addr");
    check(next_event() == RDMA_CM_EVENT_ADDR_RESOLVED, "the address");
    check(rdma_resolve_route(id, kTimeoutMs) == 0, "rdma_resolve_route");
    check(next_event() == RDMA_CM_EVENT_ROUTE_RESOLVED, "the route");
    make_pair();
  }
  ~RawVerbs() { close(); }
  RawVerbs(const RawVerbs&) = delete;
  RawVerbs& operator=(const RawVerbs&) = delete;

  // Only asks; the answer is not waited for.
  void request(std::span<const std::byte> private_data) {
    rdma_conn_param parameters = {};
    parameters.private_data = private_data.data();
    parameters.private_data_len = static_cast<uint8_t>(private_data.size());
    parameters.initiator_depth = parameters.responder_resources = 4;
    parameters.retry_count = 2;
    parameters.qp_num = qp_->qp_num;
    check(rdma_connect(id_.get(), &parameters) == 0, "rdma_connect");
  }
  // False: refused, and refusal() says why. `hasty` is posted before the box can know that the
  // connection is made.
  bool connect(std::span<const std::byte> private_data, const RawRequest* hasty = nullptr) {
    request(private_data);
    const auto type = next_event();
    if (type == RDMA_CM_EVENT_REJECTED) return false;
    check(type == RDMA_CM_EVENT_CONNECT_RESPONSE, "the answer");
    move_to(IBV_QPS_RTR);
    move_to(IBV_QPS_RTS);
    if (hasty != nullptr) post(*hasty);
    check(rdma_establish(id_.get()) == 0, "rdma_establish");
    return true;
  }
  bool connect(const VerbsHello& hello, const RawRequest* hasty = nullptr) {
    return connect(bytes_of(hello), hasty);
  }
  const std::vector<std::byte>& refusal() const { return private_data_; }

  void post(const RawRequest& what) {
    std::array<ibv_sge, kPieces> pieces = {};
    int count = 0;
    for (uint32_t left = what.bytes; left > 0 && count < kPieces;) {
      const uint32_t piece = std::min(left, kBufferBytes);
      pieces[static_cast<size_t>(count++)] = {reinterpret_cast<uint64_t>(buffer_.data()), piece,
                                              mr_->lkey};
      left -= piece;
    }
    ibv_send_wr request = {};
    request.sg_list = pieces.data();
    request.num_sge = count;
    request.opcode = what.opcode;
    request.send_flags = IBV_SEND_SIGNALED;
    request.imm_data = htonl(what.imm);
    if (what.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || what.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      request.wr.atomic = {what.address, 0, 0xa7a7a7a7a7a7a7a7, what.key};
      if (what.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) request.wr.atomic.compare_add = 1;
    } else {
      request.wr.rdma = {what.address, what.key};
    }
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(qp_, &request, &bad);
    check(error == 0, "ibv_post_send");
  }
  // How what was posted ends. IBV_WC_GENERAL_ERR: no completion came in time.
  ibv_wc_status completion() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kTimeoutMs);
    for (ibv_wc wc = {}; std::chrono::steady_clock::now() < deadline;) {
      if (ibv_poll_cq(cq_.get(), 1, &wc) == 1) return wc.status;
    }
    return IBV_WC_GENERAL_ERR;
  }
  ibv_wc_status attempt(const RawRequest& what) {
    post(what);
    return completion();
  }
  std::span<std::byte> buffer() { return buffer_; }

  void close() {
    if (qp_ != nullptr) ibv_destroy_qp(qp_);
    qp_ = nullptr;
    id_.reset();
  }

 private:
  void check(bool good, const char* what) const {
    if (good) return;
    throw std::runtime_error(std::string("raw worker: ") + what + ": " + std::strerror(errno) +
                             (event_ < 0
                                  ? ""
                                  : std::string(", after ") +
                                        rdma_event_str(static_cast<rdma_cm_event_type>(event_)) +
                                        " " + std::to_string(status_)));
  }
  rdma_cm_event_type next_event() {
    pollfd readable = {channel_->fd, POLLIN, 0};
    ::poll(&readable, 1, kTimeoutMs);
    rdma_cm_event* event = nullptr;
    check(rdma_get_cm_event(channel_.get(), &event) == 0, "no event");
    event_ = event->event;
    status_ = event->status;
    const auto* data = static_cast<const std::byte*>(event->param.conn.private_data);
    private_data_.clear();
    if (event_ >= RDMA_CM_EVENT_CONNECT_REQUEST && data != nullptr) {
      private_data_.assign(data, data + event->param.conn.private_data_len);
    }
    const auto type = event->event;
    rdma_ack_cm_event(event);
    return type;
  }
  void make_pair() {
    pd_.reset(ibv_alloc_pd(id_->verbs));
    check(pd_ != nullptr, "ibv_alloc_pd");
    cq_.reset(ibv_create_cq(id_->verbs, 16, nullptr, nullptr, 0));
    check(cq_ != nullptr, "ibv_create_cq");
    // The box writes nothing that it is not given a key for; this memory is only sent from.
    mr_ = register_memory(pd_.get(), buffer_, IBV_ACCESS_LOCAL_WRITE);
    ibv_qp_init_attr attributes = {};
    attributes.send_cq = attributes.recv_cq = cq_.get();
    attributes.cap.max_send_wr = 8;
    attributes.cap.max_recv_wr = 1;
    attributes.cap.max_send_sge = kPieces;
    attributes.cap.max_recv_sge = 1;
    attributes.qp_type = IBV_QPT_RC;
    qp_ = ibv_create_qp(pd_.get(), &attributes);
    check(qp_ != nullptr, "ibv_create_qp");
    move_to(IBV_QPS_INIT);
  }
  void move_to(ibv_qp_state state) {
    ibv_qp_attr attributes = {};
    attributes.qp_state = state;
    int mask = 0;
    check(rdma_init_qp_attr(id_.get(), &attributes, &mask) == 0, "rdma_init_qp_attr");
    if (state == IBV_QPS_RTS) attributes.max_rd_atomic = 4;
    check(ibv_modify_qp(qp_, &attributes, mask) == 0, "ibv_modify_qp");
  }

  std::vector<std::byte> buffer_;
  VerbsEventChannel channel_;
  VerbsId id_;
  VerbsPd pd_;
  VerbsCq cq_;
  VerbsMr mr_;
  ibv_qp* qp_ = nullptr;
  int event_ = -1, status_ = 0;
  std::vector<std::byte> private_data_;
};

}  // namespace phub
