// The server's side of TLS: its certificate, and which clients it lets in.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "transport/tls/files.h"
#include "transport/tls/socket.h"

namespace phub {

struct TlsServerFiles {
  std::string certificate, key;    // PEM files; the certificate with its chain
  std::string client_authorities;  // a PEM file; not "": clients need a certificate of one of these
};

// Thread-safe.
class TlsServerContext {
 public:
  // For requests, or for the frames of a data connection. Throws Error(kInvalid): a file is wrong.
  enum class Use { kRequests, kData };
  TlsServerContext(TlsServerFiles files, Use use);

  // Reads the files again, for connections that come later. Throws Error(kInvalid); then those read
  // before stay in use.
  void reload();

  Ssl new_connection() const;  // null: no memory
  uint64_t expires_s() const;  // when the certificate expires, since the epoch

 private:
  struct Loaded {
    TlsContext context;
    uint64_t expires_s = 0;
  };
  Loaded load() const;

  const TlsServerFiles files_;
  const Use use_;
  mutable std::mutex mutex_;
  Loaded loaded_;  // guarded by mutex_
};

}  // namespace phub
