#include "transport/tls/client.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <cstdlib>
#include <string_view>

#include "transport/text.h"

namespace phub {
namespace {

constexpr const char* kCa = "PHUB_CA";
constexpr const char* kCert = "PHUB_CLIENT_CERT";
constexpr const char* kKey = "PHUB_CLIENT_KEY";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string why_not_trusted(long verified, const TlsServer& server) {
  switch (verified) {
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return fmt::format(
          "its certificate is not for '{}'; ask by a name that it has, or give it one for this "
          "name",
          printable(server.host));
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return "its certificate has expired";
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return "its certificate is not valid yet; are the clocks right?";
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
      return fmt::format(
          "its certificate is of an authority that is not trusted ({}); {} names the file with the "
          "authority's certificate",
          X509_verify_cert_error_string(verified), kCa);
    default:
      return fmt::format("its certificate is not trusted: {}",
                         X509_verify_cert_error_string(verified));
  }
}

}  // namespace

ClientTls client_tls_from_environment() {
  const std::string trusted = variable("PHUB_INSECURE");
  return {.authorities = variable(kCa),
          .certificate = variable(kCert),
          .key = variable(kKey),
          .network_is_trusted =
              trusted == "true" || trusted == "yes" || trusted == "on" || trusted == "1"};
}

TlsContext make_client_context(const ClientTls& options) {
  TlsContext context = make_tls_context(false);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  if (!options.authorities.empty()) {
    load_authorities(context.get(), {kCa, options.authorities}, false);
  } else {
    SSL_CTX_set_default_verify_paths(context.get());
  }
  if (options.certificate.empty() != options.key.empty()) {
    fail(ErrorCode::kInvalid, "{} and {} go together: a certificate, and the file of its key",
         kCert, kKey);
  }
  if (!options.certificate.empty()) {
    load_certificate(context.get(), {kCert, options.certificate}, {kKey, options.key});
  }
  return context;
}

void expect_server(SSL* connection, const TlsServer& server) {
  X509_VERIFY_PARAM* expected = SSL_get0_param(connection);
  if (X509_VERIFY_PARAM_set1_ip_asc(expected, server.host.c_str()) == 1) return;
  ERR_clear_error();
  X509_VERIFY_PARAM_set_hostflags(expected, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  if (X509_VERIFY_PARAM_set1_host(expected, server.host.data(), server.host.size()) != 1 ||
      SSL_set_tlsext_host_name(connection, server.host.c_str()) != 1) {
    fail(ErrorCode::kInvalid, "'{}' is not a name for TLS: {}", printable(server.host),
         last_tls_error());
  }
}

Error tls_error(SSL* connection, const TlsServer& server, unsigned long code) {
  const auto untrusted = [&](const std::string& why) {
    return Error(ErrorCode::kUnauthorized,
                 fmt::format("the phub server at {}: {}", server.address, why));
  };
  switch (ERR_GET_REASON(code)) {
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
      return untrusted(why_not_trusted(SSL_get_verify_result(connection), server));
    case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED:
      return untrusted(fmt::format(
          "it asks for a certificate of this client; {} and {} name the files of one and its key",
          kCert, kKey));
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
      return untrusted(fmt::format("it does not trust this client's certificate ({})", kCert));
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
      return untrusted(fmt::format("this client's certificate ({}) has expired", kCert));
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_TLSV1_ALERT_PROTOCOL_VERSION:
      return {ErrorCode::kUnavailable,
              fmt::format("what answers at {} speaks no version of TLS that is safe: 1.2 or 1.3",
                          server.address)};
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_HTTP_REQUEST:
      return {ErrorCode::kUnavailable,
              fmt::format("what answers at {} does not speak TLS; without TLS the server is {}",
                          server.address, server.address)};
    default: {
      const char* reason = ERR_reason_error_string(code);
      return {ErrorCode::kUnavailable,
              fmt::format("no TLS with the phub server at {}: {}", server.address,
                          reason == nullptr ? "unknown error" : reason)};
    }
  }
}

}  // namespace phub
