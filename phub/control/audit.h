// The audit's lines about the requests of one connection.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "phub/control/http_shared.h"
#include "phub/control/router.h"

namespace phub {

// Says what changed something, and what strangers tried. An HttpSession owns it, and tells it of
// one request after the other. Control thread only.
class RequestAudit {
 public:
  // REQUIRES: both outlive this.
  RequestAudit(HttpShared& shared, const HttpPeer& peer) : shared_(shared), peer_(peer) {}

  void begin();  // a request whose header is not here yet
  void has_header(std::string_view method, std::string_view target, bool takes_part);
  void answered(const HttpResponse& response, const Caller& caller);
  // The rest of the body did not come in time. Small packets came, and large ones did not: that is
  // how a wrong MTU looks.
  void cut_off(uint64_t received_bytes);

 private:
  bool changes_something(std::string_view path) const;

  HttpShared& shared_;
  const HttpPeer& peer_;
  std::string asked_;  // method and path; "": not known
  bool takes_part_ = false;
};

}  // namespace phub
