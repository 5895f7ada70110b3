// A small HTTP/1.1 client for the control port: one connection, kept between requests.
//
// One thread at a time calls request(); cancel() may come from any thread. Errors are
// Error(kUnavailable) (nobody there, connection lost, cancelled) and Error(kTimeout).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace phub {

struct HttpAnswer {
  unsigned status = 0;
  std::string body;
};

class HttpClient {
 public:
  // HOST:PORT or [IPV6]:PORT. Throws Error(kInvalid) if it is neither. Does not connect yet.
  explicit HttpClient(const std::string& server);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // Resolves, connects, writes and reads within timeout_ms (0: waits for the answer for ever;
  // connecting has a limit of its own). `bearer` goes into the Authorization header unless empty. A
  // kept connection that the server has closed is replaced; the request is sent again only if no
  // byte of an answer had come.
  HttpAnswer request(std::string_view method, std::string_view target, std::string_view bearer,
                     std::string_view body, uint32_t timeout_ms);

  void disconnect();  // the next request connects anew

  // Ends a request that is under way and every later one, for good. Any thread.
  void cancel();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub
