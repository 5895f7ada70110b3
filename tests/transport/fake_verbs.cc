#include "tests/transport/fake_verbs.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#undef ibv_reg_mr

namespace phub::fake {
namespace {

struct CmEvent {
  rdma_cm_event event = {};
  std::vector<std::byte> private_data;
};
struct EventChannel : rdma_event_channel {
  std::deque<CmEvent*> waiting;  // fd is readable while there are some
};

void deliver(CmEvent* event) {
  auto* channel = static_cast<EventChannel*>(event->event.id->channel);
  channel->waiting.push_back(event);
  eventfd_write(channel->fd, 1);
}
void deliver(rdma_cm_id* id, rdma_cm_event_type type) {
  auto* event = new CmEvent;
  event->event.id = id;
  event->event.event = type;
  deliver(event);
}

std::vector<Device*>& devices() {
  static std::vector<Device*> all;
  return all;
}
std::vector<rdma_cm_id*>& ids() {
  static std::vector<rdma_cm_id*> all;
  return all;
}

Device& device_of(const ibv_context* context) {
  return **std::find_if(devices().begin(), devices().end(),
                        [context](const Device* device) { return &device->context == context; });
}

int poll_cq(ibv_cq* cq, int count, ibv_wc* out) {
  Device& device = device_of(cq->context);
  if (device.before_poll) device.before_poll();
  if (device.poll_result < 0) return device.poll_result;
  auto& completions = static_cast<Cq*>(cq)->completions;
  int taken = 0;
  for (; taken < count && !completions.empty(); ++taken) {
    out[taken] = completions.front();
    completions.pop_front();
  }
  return taken;
}
int req_notify_cq(ibv_cq* cq, int) { return device_of(cq->context).notify_error; }
int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr**) {
  Device& device = device_of(srq->context);
  for (; wr != nullptr; wr = wr->next) ++device.receives_posted;
  return device.receive_error;
}
int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr**) {
  Device& device = device_of(qp->context);
  for (; wr != nullptr; wr = wr->next) {
    if ((wr->send_flags & IBV_SEND_SIGNALED) != 0) device.signaled.push_back(wr->wr_id);
  }
  return device.send_error;
}

rdma_cm_id* listener_of(const Device& device) {
  const auto at = std::find_if(ids().begin(), ids().end(), [&](const rdma_cm_id* id) {
    return id->verbs == &device.context && id->qp == nullptr && id->event == nullptr;
  });
  return at == ids().end() ? nullptr : *at;
}

rdma_cm_id* make_id(rdma_event_channel* channel, void* context) {
  auto* id = new rdma_cm_id{};
  id->channel = channel;
  id->context = context;
  ids().push_back(id);
  return id;
}

}  // namespace

Calls& calls() {
  static Calls all;
  return all;
}

Device::Device(std::string name) {
  std::snprintf(device.name, sizeof device.name, "%s", name.c_str());
  context.device = &device;
  context.async_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  context.ops.poll_cq = poll_cq;
  context.ops.req_notify_cq = req_notify_cq;
  context.ops.post_srq_recv = post_srq_recv;
  context.ops.post_send = post_send;
  devices().push_back(this);
}

Device::~Device() {
  std::erase(devices(), this);
  close(context.async_fd);
}

VerbsPort Device::port() {
  return {.context = &context,
          .device = device.name,
          .address = "127.0.0." + std::to_string(devices().size())};
}

void Device::raise(ibv_event_type type, ibv_qp* qp) {
  ibv_async_event event = {};
  event.element.qp = qp;
  event.event_type = type;
  events.push_back(event);
}

void Device::raise(ibv_event_type type, ibv_cq* cq) {
  ibv_async_event event = {};
  event.element.cq = cq;
  event.event_type = type;
  events.push_back(event);
}

void arrive(ibv_qp* qp, uint32_t imm) {
  ibv_wc wc = {};
  wc.wr_id = ~uint64_t{0};
  wc.status = IBV_WC_SUCCESS;
  wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  wc.imm_data = htonl(imm);
  wc.qp_num = qp->qp_num;
  static_cast<Cq*>(qp->recv_cq)->completions.push_back(wc);
}

void complete_send(ibv_qp* qp, uint64_t wr_id) {
  ibv_wc wc = {};
  wc.wr_id = wr_id;
  wc.status = IBV_WC_SUCCESS;
  wc.opcode = IBV_WC_RDMA_WRITE;
  wc.qp_num = qp->qp_num;
  static_cast<Cq*>(qp->send_cq)->completions.push_back(wc);
}

void request_connection(Device& device, std::vector<std::byte> private_data) {
  rdma_cm_id* listener = listener_of(device);
  rdma_cm_id* id = make_id(listener->channel, listener->context);
  id->verbs = &device.context;
  auto* event = new CmEvent;
  event->private_data = std::move(private_data);
  event->event.id = id;
  event->event.listen_id = listener;
  event->event.event = RDMA_CM_EVENT_CONNECT_REQUEST;
  event->event.param.conn.private_data = event->private_data.data();
  event->event.param.conn.private_data_len = static_cast<uint8_t>(event->private_data.size());
  id->event = &event->event;  // not one that listens
  deliver(event);
}

void connection_event(Device& device, rdma_cm_event_type type, ibv_qp* qp) {
  rdma_cm_id* id = listener_of(device);
  for (rdma_cm_id* other : ids()) {
    if (qp != nullptr && other->qp == qp) id = other;
  }
  deliver(id, type);
}

}  // namespace phub::fake

using phub::fake::calls;
using phub::fake::device_of;

extern "C" {

const char* ibv_get_device_name(ibv_device* device) { return device->name; }

int ibv_query_device(ibv_context*, ibv_device_attr* attributes) {
  *attributes = {};
  attributes->max_cqe = 1 << 16;
  attributes->max_qp = 1024;
  attributes->max_srq_wr = 1 << 14;
  attributes->max_qp_wr = 1 << 10;
  return 0;
}

int ibv_fork_init() {
  ++calls().fork_inits;
  return 0;
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  return new ibv_comp_channel{context, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), 0};
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  close(channel->fd);
  delete channel;
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int, void*, ibv_comp_channel* channel, int) {
  auto* cq = new phub::fake::Cq();
  cq->context = context;
  cq->channel = channel;
  device_of(context).cqs.push_back(cq);
  return cq;
}
int ibv_destroy_cq(ibv_cq* cq) {
  std::erase(device_of(cq->context).cqs, static_cast<phub::fake::Cq*>(cq));
  delete static_cast<phub::fake::Cq*>(cq);
  return 0;
}
int ibv_get_cq_event(ibv_comp_channel*, ibv_cq**, void**) { return -1; }
void ibv_ack_cq_events(ibv_cq*, unsigned int) {}

ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr*) {
  auto* srq = new ibv_srq{};
  srq->context = pd->context;
  return srq;
}
int ibv_destroy_srq(ibv_srq* srq) {
  delete srq;
  return 0;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) { return new ibv_pd{context, 0}; }
int ibv_dealloc_pd(ibv_pd* pd) {
  delete pd;
  return 0;
}

ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t length, int) {
  ++calls().registrations;
  calls().registrations_before_fork_init += calls().fork_inits == 0;
  return new ibv_mr{pd->context, pd, address, length, 0, 1, 2};
}
ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t length, uint64_t, unsigned int access) {
  return ibv_reg_mr(pd, address, length, static_cast<int>(access));
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                          int access) {
  const int error = phub::fake::device_of(pd->context).dma_buf_error;
  if (error != 0 || fd < 0) {
    errno = error != 0 ? error : EBADF;
    return nullptr;
  }
  calls().dma_bufs.push_back({offset, length, iova, access});
  return ibv_reg_mr(pd, reinterpret_cast<void*>(iova), length, access);
}
int ibv_dereg_mr(ibv_mr* mr) {
  delete mr;
  return 0;
}

int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  if (mask & IBV_QP_STATE) qp->state = attributes->qp_state;
  return 0;
}
int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attributes, int, ibv_qp_init_attr*) {
  attributes->qp_state = qp->state;
  return 0;
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  auto& events = device_of(context).events;
  if (events.empty()) return -1;
  *event = events.front();
  events.pop_front();
  return 0;
}
void ibv_ack_async_event(ibv_async_event*) {}

rdma_event_channel* rdma_create_event_channel() {
  auto* channel = new phub::fake::EventChannel();
  channel->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return channel;
}
void rdma_destroy_event_channel(rdma_event_channel* channel) {
  close(channel->fd);
  delete static_cast<phub::fake::EventChannel*>(channel);
}
int rdma_create_id(rdma_event_channel* channel, rdma_cm_id** id, void* context, rdma_port_space) {
  *id = phub::fake::make_id(channel, context);
  return 0;
}
int rdma_destroy_id(rdma_cm_id* id) {
  std::erase(phub::fake::ids(), id);
  delete id;
  return 0;
}
// The last byte of the address is the device's number, from 1.
int rdma_bind_addr(rdma_cm_id* id, sockaddr* address) {
  const uint32_t host = ntohl(reinterpret_cast<sockaddr_in*>(address)->sin_addr.s_addr);
  id->verbs = &phub::fake::devices()[(host & 0xff) - 1]->context;
  return 0;
}
int rdma_listen(rdma_cm_id*, int) { return 0; }
uint16_t rdma_get_src_port(rdma_cm_id*) { return htons(7000); }
int rdma_set_option(rdma_cm_id*, int, int, void*, size_t) { return 0; }

int rdma_create_qp(rdma_cm_id* id, ibv_pd*, ibv_qp_init_attr* attributes) {
  auto* qp = new ibv_qp{};
  qp->context = id->verbs;
  qp->qp_context = attributes->qp_context;
  qp->send_cq = attributes->send_cq;
  qp->recv_cq = attributes->recv_cq;
  qp->srq = attributes->srq;
  qp->qp_num = device_of(id->verbs).next_qp_num++;
  device_of(id->verbs).qps.push_back(qp);
  id->qp = qp;
  return 0;
}
void rdma_destroy_qp(rdma_cm_id* id) {
  std::erase(device_of(id->qp->context).qps, id->qp);
  delete id->qp;
  id->qp = nullptr;
}
int rdma_accept(rdma_cm_id* id, rdma_conn_param*) {
  const phub::fake::Device& device = device_of(id->verbs);
  if (device.during_accept) device.during_accept();
  if (device.accept_error != 0) {
    errno = device.accept_error;
    return -1;
  }
  ++calls().accepted;
  return 0;
}
int rdma_resolve_addr(rdma_cm_id* id, sockaddr*, sockaddr* to, int) {
  rdma_bind_addr(id, to);
  phub::fake::deliver(id, RDMA_CM_EVENT_ADDR_RESOLVED);
  return 0;
}
int rdma_resolve_route(rdma_cm_id* id, int) {
  phub::fake::deliver(id, RDMA_CM_EVENT_ROUTE_RESOLVED);
  return 0;
}
int rdma_connect(rdma_cm_id* id, rdma_conn_param*) {
  phub::fake::deliver(id, RDMA_CM_EVENT_ESTABLISHED);
  return 0;
}
int rdma_reject(rdma_cm_id*, const void* data, uint8_t size) {
  ++calls().rejected;
  calls().last_rejection.assign(static_cast<const char*>(data), size);
  return 0;
}
int rdma_disconnect(rdma_cm_id*) {
  ++calls().disconnected;
  return 0;
}

int rdma_get_cm_event(rdma_event_channel* channel, rdma_cm_event** event) {
  auto& waiting = static_cast<phub::fake::EventChannel*>(channel)->waiting;
  if (waiting.empty()) return -1;
  *event = &waiting.front()->event;
  waiting.pop_front();
  eventfd_t delivered = 0;
  if (waiting.empty()) eventfd_read(channel->fd, &delivered);
  return 0;
}
int rdma_ack_cm_event(rdma_cm_event* event) {
  delete reinterpret_cast<phub::fake::CmEvent*>(event);  // its first member
  return 0;
}

}  // extern "C"
