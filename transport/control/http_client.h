// A small HTTP/1.1 client for the control port: one connection, kept between requests.
//
// One thread at a time calls request(); cancel() may come from any thread. Errors are
// Error(kUnavailable) (nobody there, connection lost, cancelled), Error(kTimeout) and, where client
// and server do not accept each other over TLS, Error(kUnauthorized).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "transport/tls/client_options.h"

namespace phub {

inline constexpr std::string_view kJsonType = "application/json";
inline constexpr std::string_view kBytesType = "application/octet-stream";

struct HttpAnswer {
  unsigned status = 0;
  std::string body;
};

class HttpClient {
 public:
  // HOST:PORT or [IPV6]:PORT; with https:// before it over TLS, which checks the server's
  // certificate and its name. Throws Error(kInvalid): not an address, or a file is wrong. Does not
  // connect yet.
  //
  // `token` is sent as `bearer` over TLS or within a host only, unless the network is trusted.
  explicit HttpClient(const std::string& server, std::string token = {},
                      ClientTls tls = client_tls_from_environment());
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // Resolves, connects, writes and reads within timeout_ms (0: waits for the answer for ever;
  // connecting has a limit of its own). `bearer` goes into the Authorization header unless empty. A
  // kept connection that the server has closed is replaced; the request is sent again only if no
  // byte of an answer had come. A body of kBytesType, which may be long, is sent once the server
  // has answered to its header that it wants it (Expect: 100-continue).
  HttpAnswer request(std::string_view method, std::string_view target, std::string_view bearer,
                     std::string_view body, uint32_t timeout_ms,
                     std::string_view content_type = kJsonType);

  // The number of the server's address, of the latest connection; empty: there was none.
  std::string reached() const;

  void disconnect();  // the next request connects anew

  // Ends a request that is under way and every later one, for good. Any thread.
  void cancel();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub
