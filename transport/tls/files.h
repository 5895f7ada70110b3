// Keys, certificates and trusted authorities from PEM files, for both ends of TLS. A wrong file is
// thrown as Error(kInvalid) that names the option, the file and the way out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

struct ssl_ctx_st;  // SSL_CTX

namespace phub {

using TlsContext = std::shared_ptr<ssl_ctx_st>;

// TLS 1.3 and 1.2 with forward secrecy, nothing older; no renegotiation, no compression, no resumed
// sessions.
TlsContext make_tls_context(bool for_server);

// For frames, which are many and all of one kind: TLS 1.3 only, buffers that stay, an end without
// close_notify is an error.
void prepare_for_data(ssl_ctx_st* context);

struct PemFile {
  std::string_view option;  // the option that named it: "--tls-cert", "PHUB_CA"
  std::string path;
};

// The certificate, those that lead to its authority after it, and its key. Refuses a certificate
// that is not valid now, a key of another certificate, and one that others than its owner and group
// may read. Returns when the certificate expires, in seconds since the epoch.
uint64_t load_certificate(ssl_ctx_st* context, const PemFile& certificate, const PemFile& key);

// Sets the authorities whose signature is trusted. `ask`: their names are sent to clients that are
// asked for a certificate.
void load_authorities(ssl_ctx_st* context, const PemFile& authorities, bool ask);

// The latest error of OpenSSL in this thread, in words; clears it.
std::string last_tls_error();

}  // namespace phub
