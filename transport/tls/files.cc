#include "transport/tls/files.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "transport/error.h"
#include "transport/fd.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr size_t kMaxPemBytes = 4u << 20;
// The strength of AES-128 is enough, and it is the fastest.
constexpr const char* kCiphersOfData =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
constexpr const char* kCiphersOfTls12 = "ECDHE+AESGCM:ECDHE+CHACHA20";

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

template <typename... Args>
[[noreturn]] void refuse(const PemFile& file, fmt::format_string<Args...> format, Args&&... args) {
  fail(ErrorCode::kInvalid, "{} {}: {}", file.option, printable(file.path),
       fmt::format(format, std::forward<Args>(args)...));
}

void check_secret(const PemFile& file, const struct stat& facts) {
  if ((facts.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
    refuse(file, "others may use it (mode {:04o}); run 'chmod 600' on it, or 640 for its group",
           facts.st_mode & 07777);
  }
  if (facts.st_uid != geteuid() && facts.st_uid != 0) {
    refuse(file, "belongs to user {}, not to {} or root", facts.st_uid, geteuid());
  }
}

std::string read_file(const PemFile& file, bool secret) {
  const Fd fd(open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  if (!fd && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
    fail_system(file.path, errno);
  }
  if (!fd || fstat(fd.get(), &facts) != 0) refuse(file, "{}", std::strerror(errno));
  if (!S_ISREG(facts.st_mode)) refuse(file, "is not a file");
  if (secret) check_secret(file, facts);
  std::string text;
  char block[16 << 10];
  for (ssize_t got = 1; got > 0 && text.size() <= kMaxPemBytes;) {
    got = read(fd.get(), block, sizeof block);
    if (got < 0) refuse(file, "{}", std::strerror(errno));
    text.append(block, static_cast<size_t>(got));
  }
  if (text.size() > kMaxPemBytes) refuse(file, "is larger than {} bytes", kMaxPemBytes);
  return text;
}

Owned<BIO> reader_of(const std::string& text) {
  return Owned<BIO>(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// A password is not asked for: nobody may be at the terminal.
int no_password(char*, int, int, void*) { return -1; }

// Null at the end of the file.
Owned<X509> next_certificate(BIO* bio, const PemFile& file) {
  ERR_clear_error();
  Owned<X509> certificate(PEM_read_bio_X509(bio, nullptr, no_password, nullptr));
  if (certificate) return certificate;
  const unsigned long error = ERR_peek_last_error();
  if (ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE) {
    ERR_clear_error();
    return nullptr;
  }
  refuse(file, "a certificate in it is damaged: {}", last_tls_error());
}

std::string date_of(const ASN1_TIME* time) {
  const Owned<BIO> bio(BIO_new(BIO_s_mem()));
  ASN1_TIME_print(bio.get(), time);
  const char* text = nullptr;
  const long bytes = BIO_get_mem_data(bio.get(), &text);
  return std::string(text, static_cast<size_t>(bytes));
}

void check_dates(const PemFile& file, const X509* certificate) {
  const ASN1_TIME* begin = X509_get0_notBefore(certificate);
  const ASN1_TIME* end = X509_get0_notAfter(certificate);
  if (X509_cmp_current_time(end) < 0) refuse(file, "the certificate expired on {}", date_of(end));
  if (X509_cmp_current_time(begin) > 0) {
    refuse(file, "the certificate is valid from {} only; is the clock right?", date_of(begin));
  }
}

}  // namespace

std::string last_tls_error() {
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = ERR_reason_error_string(error);
  return reason != nullptr ? reason : "unknown error of OpenSSL";
}

TlsContext make_tls_context(bool for_server) {
  ERR_clear_error();
  TlsContext context(SSL_CTX_new(for_server ? TLS_server_method() : TLS_client_method()),
                     SSL_CTX_free);
  SSL_CTX* raw = context.get();
  if (raw == nullptr || SSL_CTX_set_min_proto_version(raw, TLS1_2_VERSION) != 1 ||
      SSL_CTX_set_cipher_list(raw, kCiphersOfTls12) != 1) {
    fail(ErrorCode::kInternal, "OpenSSL does not begin: {}", last_tls_error());
  }
  SSL_CTX_set_options(raw, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_NO_TICKET |
                               SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(raw, 0);
  SSL_CTX_set_mode(raw, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE |
                            SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_NO_AUTO_CHAIN);
  // A record that holds no data ends a read: who sends only such records holds up nobody else.
  if (for_server) SSL_CTX_clear_mode(raw, SSL_MODE_AUTO_RETRY);
  return context;
}

void prepare_for_data(SSL_CTX* context) {
  if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context, kCiphersOfData) != 1) {
    fail(ErrorCode::kInternal, "OpenSSL knows no TLS 1.3: {}", last_tls_error());
  }
  SSL_CTX_clear_options(context, SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_clear_mode(context, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_AUTO_RETRY);
  SSL_CTX_set_read_ahead(context, 1);
}

uint64_t load_certificate(SSL_CTX* context, const PemFile& certificate, const PemFile& key) {
  const std::string text = read_file(certificate, false);
  const Owned<BIO> chain = reader_of(text);
  const Owned<X509> leaf = next_certificate(chain.get(), certificate);
  if (!leaf) refuse(certificate, "holds no certificate in PEM form");
  check_dates(certificate, leaf.get());
  if (SSL_CTX_use_certificate(context, leaf.get()) != 1) {
    refuse(certificate, "{}", last_tls_error());
  }
  while (Owned<X509> next = next_certificate(chain.get(), certificate)) {
    if (SSL_CTX_add1_chain_cert(context, next.get()) != 1) {
      refuse(certificate, "{}", last_tls_error());
    }
  }

  std::string secret = read_file(key, true);
  ERR_clear_error();
  const Owned<EVP_PKEY> pkey(
      PEM_read_bio_PrivateKey(reader_of(secret).get(), nullptr, no_password, nullptr));
  OPENSSL_cleanse(secret.data(), secret.size());
  if (!pkey) {
    refuse(key,
           "holds no private key in PEM form, or one with a password ('openssl pkey' takes it "
           "off)");
  }
  if (X509_check_private_key(leaf.get(), pkey.get()) != 1) {
    ERR_clear_error();
    refuse(key, "is not the key of the certificate in {}", printable(certificate.path));
  }
  if (SSL_CTX_use_PrivateKey(context, pkey.get()) != 1) refuse(key, "{}", last_tls_error());
  std::tm expires{};
  ASN1_TIME_to_tm(X509_get0_notAfter(leaf.get()), &expires);
  return static_cast<uint64_t>(timegm(&expires));
}

void load_authorities(SSL_CTX* context, const PemFile& authorities, bool ask) {
  const std::string text = read_file(authorities, false);
  const Owned<BIO> list = reader_of(text);
  size_t count = 0;
  while (Owned<X509> next = next_certificate(list.get(), authorities)) {
    ++count;
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), next.get()) != 1 ||
        (ask && SSL_CTX_add_client_CA(context, next.get()) != 1)) {
      refuse(authorities, "{}", last_tls_error());
    }
  }
  if (count == 0) refuse(authorities, "holds no certificate in PEM form");
}

}  // namespace phub
