#include "transport/nic.h"

#include "transport/error.h"

namespace phub {

Offer BoxLink::reconnect(uint32_t rank) {
  fail(ErrorCode::kFenced, "rank {}: this transport cannot make a broken connection again", rank);
}

void WorkerLink::reconnect(const Offer& offer) {
  fail(ErrorCode::kFenced, "transport '{}' cannot make a broken connection again", offer.transport);
}

}  // namespace phub
