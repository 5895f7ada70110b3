#include "transport/ofi/pair.h"

#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <string_view>

#include "transport/ofi/sockets_below.h"

namespace phub {
namespace {

constexpr uint32_t kSlack = 16;            // posted writes beyond the queue's chunks
constexpr uint32_t kMostOutstanding = 64;  // that a provider has at once: 2 MiB of chunks
constexpr size_t kMostArrivals = 1 << 16;  // that a completion queue has room for
constexpr size_t kReadAtOnce = 64;
// More than a provider sends without looking at the registration.
constexpr size_t kUnregisteredBytes = 4096;
constexpr auto kCutOffTime = std::chrono::milliseconds(20);
constexpr int kReadsBehindTheCut = 32;

}  // namespace

OfiPair::OfiPair(std::shared_ptr<const OfiDomain> domain, std::span<const std::byte> source,
                 std::span<std::byte> target, uint32_t chunks)
    : domain_(std::move(domain)), source_(source), ring_(std::bit_ceil(chunks + kSlack)) {
  const size_t sends = std::min<size_t>(
      {kMostOutstanding, ring_.size(), std::max<size_t>(domain_->info().tx_attr->size, 1)});
  contexts_.resize(sends);
  context_bytes_.resize(sends);
  for (fi_context2& context : contexts_) free_.push_back(&context);
  open_queue(chunks);
  open_endpoint();
  target_region_ = domain_->register_target(target, endpoint_.get());
  source_region_ = domain_->register_source(source, endpoint_.get());
  here_.base = target_region_.base;
  here_.key = target_region_.key;
}

void OfiPair::open_queue(uint32_t chunks) {
  fi_cq_attr attributes = {};
  // A worker may hear of a chunk that its gradient was taken, and then its result.
  const size_t arrivals = std::min<size_t>(2 * size_t{chunks} + kSlack, kMostArrivals);
  attributes.size = contexts_.size() + arrivals;
  attributes.format = FI_CQ_FORMAT_DATA;
  attributes.wait_obj = FI_WAIT_FD;
  fid_cq* queue = nullptr;
  int error = fi_cq_open(domain_->domain(), &attributes, &queue, nullptr);
  if (error != 0) {  // shm has no descriptor to wait for
    attributes.wait_obj = FI_WAIT_NONE;
    error = fi_cq_open(domain_->domain(), &attributes, &queue, nullptr);
  }
  if (error != 0) fail_ofi(domain_->provider(), "fi_cq_open", error);
  completions_.reset(queue);
  if (attributes.wait_obj != FI_WAIT_FD) return;
  error = fi_control(&queue->fid, FI_GETWAIT, &wake_fd_);
  if (error != 0) fail_ofi(domain_->provider(), "fi_control(FI_GETWAIT)", error);
}

void OfiPair::open_endpoint() {
  const auto check = [this](int64_t result, const char* call) {
    if (result != 0) fail_ofi(domain_->provider(), call, result);
  };
  fi_av_attr attributes = {};
  attributes.type = FI_AV_TABLE;
  attributes.count = 1;
  fid_av* addresses = nullptr;
  check(fi_av_open(domain_->domain(), &attributes, &addresses, nullptr), "fi_av_open");
  addresses_.reset(addresses);
  fid_ep* endpoint = nullptr;
  check(fi_endpoint(domain_->domain(), const_cast<fi_info*>(&domain_->info()), &endpoint, nullptr),
        "fi_endpoint");
  endpoint_.reset(endpoint);
  check(fi_ep_bind(endpoint, &addresses->fid, 0), "fi_ep_bind");
  check(fi_ep_bind(endpoint, &completions_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
  domain_->forbid_bounces(endpoint);
  check(fi_enable(endpoint), "fi_enable");
  size_t bytes = here_.name.size();
  check(fi_getname(&endpoint->fid, here_.name.data(), &bytes), "fi_getname");
  here_.name_bytes = static_cast<uint32_t>(bytes);
}

// A provider believes that a name is one of its own: it must not read beyond the end, nor take it
// for an address of another family.
void OfiPair::check_name(const OfiTarget& there) const {
  const uint32_t format = domain_->info().addr_format;
  if (there.name_bytes != here_.name_bytes && format != FI_ADDR_STR) {
    fail(ErrorCode::kInvalid, "an endpoint's name of {} bytes; those of provider {} have {}",
         there.name_bytes, domain_->provider(), here_.name_bytes);
  }
  if (has_ip_addresses(domain_->info()) &&
      std::memcmp(there.name.data(), here_.name.data(), sizeof(sa_family_t)) != 0) {
    fail(ErrorCode::kInvalid, "an endpoint's name that is no address of the family of {}'s",
         domain_->provider());
  }
}

void OfiPair::connect(const OfiTarget& there) {
  const std::lock_guard lock(closing_);
  if (endpoint_ == nullptr) fail(ErrorCode::kUnauthorized, "the rank is being fenced: join again");
  check_name(there);
  std::array<std::byte, kOfiMaxNameBytes + 1> name = {};
  std::memcpy(name.data(), there.name.data(), there.name_bytes);
  if (fi_av_insert(addresses_.get(), name.data(), 1, &peer_, 0, nullptr) != 1) {
    fail(ErrorCode::kInvalid, "the peer's endpoint has a name that provider {} cannot reach",
         domain_->provider());
  }
  there_ = there;
}

// ofi_rxm over verbs posts receives for what it finds unread when it closes an endpoint, to a queue
// pair that is gone by then, and crashes. A write from memory that is not registered fails here,
// whatever the peer does, and takes the queue pair into its error state: nothing comes over it any
// more, and what came before can be read.
void OfiPair::cut_off_peer() noexcept {
  if (std::string_view(domain_->provider()) != "verbs;ofi_rxm" || peer_ == FI_ADDR_UNSPEC) return;
  bool posted = false, is_cut = false;
  const auto* const beyond =
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(source_.data()) + source_.size());
  const auto until = std::chrono::steady_clock::now() + kCutOffTime;
  int reads = 0;
  while (reads < kReadsBehindTheCut && std::chrono::steady_clock::now() < until) {
    if (!posted) {
      posted =
          fi_writedata(endpoint_.get(), beyond, kUnregisteredBytes, source_region_.descriptor(), 0,
                       peer_, there_.base, there_.key, &cut_) == 0;
    }
    std::array<fi_cq_data_entry, kReadAtOnce> entries;
    if (is_cut) ++reads;
    if (fi_cq_read(completions_.get(), entries.data(), entries.size()) != -FI_EAVAIL) continue;
    fi_cq_err_entry error = {};
    fi_cq_readerr(completions_.get(), &error, 0);
    if (error.op_context == &cut_) is_cut = true;
  }
}

void OfiPair::close() noexcept {
  const std::lock_guard lock(closing_);
  if (endpoint_ == nullptr) return;
  target_region_.mr.reset();
  cut_off_peer();
  end_sockets_below(*domain_, *completions_, here_, there_);
  endpoint_.reset();
  source_region_.mr.reset();
  completions_.reset();
  addresses_.reset();
}

bool OfiPair::push(const Write& write) {
  PHUB_CHECK(write.bytes <= source_.size() && write.local_offset <= source_.size() - write.bytes);
  if (tail_ - head_ == ring_.size()) return false;
  ring_[tail_++ & (ring_.size() - 1)] = write;
  held_bytes_ += write.bytes;
  return true;
}

void OfiPair::send() {
  if (!waiting() || broken_) return;
  ++batches_;
  for (; waiting() && !free_.empty(); ++head_, ++head_count_) {
    const Write& write = ring_[head_ & (ring_.size() - 1)];
    const ssize_t result =
        fi_writedata(endpoint_.get(), source_.data() + write.local_offset, write.bytes,
                     source_region_.descriptor(), write.imm, peer_,
                     there_.base + write.remote_offset, there_.key, free_.back());
    if (result == -FI_EAGAIN) return;
    if (result != 0) {
      broken_ = true;
      return;
    }
    context_bytes_[static_cast<size_t>(free_.back() - contexts_.data())] = write.bytes;
    free_.pop_back();
  }
}

bool OfiPair::receive(std::span<uint32_t> imms, size_t& count) {
  count = 0;
  while (!broken_ && count < imms.size()) {
    std::array<fi_cq_data_entry, kReadAtOnce> entries;
    const size_t room = std::min(entries.size(), imms.size() - count);
    const ssize_t read = fi_cq_read(completions_.get(), entries.data(), room);
    if (read == -FI_EAGAIN) break;
    if (read <= 0) {
      broken_ = true;
      break;
    }
    for (ssize_t i = 0; i < read; ++i) {
      const fi_cq_data_entry& entry = entries[static_cast<size_t>(i)];
      if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
        imms[count++] = static_cast<uint32_t>(entry.data);
      } else if ((entry.flags & FI_WRITE) != 0) {
        free_.push_back(static_cast<fi_context2*>(entry.op_context));
        held_bytes_ -= context_bytes_[static_cast<size_t>(free_.back() - contexts_.data())];
      }
    }
  }
  if (waiting()) send();
  return !broken_;
}

bool OfiPair::may_sleep() const {
  fid* const queue = &completions_->fid;
  std::array<fid*, 1> all = {queue};
  return wake_fd_ < 0 || fi_trywait(domain_->fabric(), all.data(), 1) == FI_SUCCESS;
}

}  // namespace phub
