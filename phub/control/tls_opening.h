// A connection to the control port until its TLS handshake is done, with the session that waits for
// it behind a pair of local sockets.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "transport/tls/opening.h"

namespace phub {

class TlsPortOpening final : public TlsOpening {
 public:
  // Takes over both descriptors.
  using Opened = std::function<void(Ssl ssl, int client, int session,
                                    std::shared_ptr<std::atomic<bool>> broken)>;

  // `opened` outlives this.
  TlsPortOpening(const Shared& shared, const Opened& opened, Descriptor client, Descriptor session,
                 std::shared_ptr<std::atomic<bool>> broken, std::string from);

  // Until the session has waited enough.
  void open();

 private:
  void opened(Ssl ssl) override;
  std::string_view plain_answer(char first) const override;
  void closed() override;

  const Opened& opened_;
  Descriptor session_;
  const std::shared_ptr<std::atomic<bool>> broken_;
};

}  // namespace phub
