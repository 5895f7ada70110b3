#include "phub/control/audit.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "phub/clock.h"
#include "transport/text.h"

namespace phub {
namespace {

// Posts that are not of interest: heartbeats, news of racks, a shard's mail, barriers, states and
// checkpoints.
constexpr std::array<std::string_view, 7> kUnauditedEnds = {
    "/heartbeat", "/rack", "/mail", "/barrier", "/state", "/state/end", "/checkpoint"};

}  // namespace

void RequestAudit::begin() { asked_.clear(); }

void RequestAudit::has_header(std::string_view method, std::string_view target, bool takes_part) {
  if (!shared_.done) return;
  asked_ = fmt::format("{} {}", method, printable(target));
  takes_part_ = takes_part;
}

bool RequestAudit::changes_something(std::string_view path) const {
  if (asked_.starts_with("DELETE ")) return true;
  return asked_.starts_with("POST ") && !takes_part_ &&
         std::ranges::none_of(kUnauditedEnds,
                              [&](std::string_view end) { return path.ends_with(end); });
}

void RequestAudit::answered(const HttpResponse& response, const Caller& caller) {
  if (!shared_.done) return;
  const unsigned status = response.status;
  const bool refused = status == 401 || status == 403 || status == 415 || status == 421;
  if (!refused && !changes_something(response.path)) return;
  Notes& notes = status == 200 ? *shared_.done : *shared_.refused;
  notes.add(kSteadyClock.now_ms(),
            fmt::format("audit what=\"{}\" status={} who={} from={}{}{}", asked_, status,
                        caller.name.empty() ? "-" : caller.name, peer_.address,
                        response.about.empty() ? "" : " ", response.about));
}

void RequestAudit::cut_off(uint64_t received_bytes) {
  if (!shared_.refused) return;
  shared_.refused->add(
      kSteadyClock.now_ms(),
      fmt::format("audit what=\"{}\" from={} detail=\"the rest of its body did not come within {} "
                  "ms: {} bytes did; if none ever comes, look at the MTU on the way\"",
                  asked_, peer_.address, shared_.options.request_timeout_ms, received_bytes));
}

}  // namespace phub
