#include "tests/phub/tls_certificates.h"

#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace phub::testing {
namespace {

void must(bool good) {
  if (!good) throw std::runtime_error("OpenSSL makes no certificate");
}

std::shared_ptr<EVP_PKEY> new_key() { return {EVP_EC_gen("P-256"), EVP_PKEY_free}; }

void extend(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  must(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1);
  X509_EXTENSION_free(extension);
}

// Null issuer: itself.
std::shared_ptr<X509> make(const std::string& name, EVP_PKEY* key, X509* issuer, EVP_PKEY* signer,
                           const CertificateOptions& options) {
  static long serial = 1000;
  std::shared_ptr<X509> made(X509_new(), X509_free);
  X509* raw = made.get();
  must(raw != nullptr && X509_set_version(raw, 2) == 1 && X509_set_pubkey(raw, key) == 1);
  ASN1_INTEGER_set(X509_get_serialNumber(raw), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(raw), options.from_s);
  X509_gmtime_adj(X509_getm_notAfter(raw), options.until_s);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(raw), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_issuer_name(raw, X509_get_subject_name(issuer == nullptr ? raw : issuer));
  if (issuer == nullptr && options.names.empty()) {
    extend(raw, raw, NID_basic_constraints, "critical,CA:TRUE");
  } else {
    extend(raw, issuer == nullptr ? raw : issuer, NID_subject_alt_name, options.names);
  }
  must(X509_sign(raw, signer, EVP_sha256()) > 0);
  return made;
}

std::string text_of(BIO* bio) {
  const char* text = nullptr;
  const long bytes = BIO_get_mem_data(bio, &text);
  std::string out(text, static_cast<size_t>(bytes));
  BIO_free(bio);
  return out;
}

Certificate written(X509* certificate, EVP_PKEY* key) {
  BIO* pem = BIO_new(BIO_s_mem());
  BIO* secret = BIO_new(BIO_s_mem());
  must(PEM_write_bio_X509(pem, certificate) == 1 &&
       PEM_write_bio_PrivateKey(secret, key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
  return {text_of(pem), text_of(secret)};
}

}  // namespace

Authority::Authority(const std::string& name)
    : key_(new_key()),
      certificate_(make(name, key_.get(), nullptr, key_.get(), {.names = ""})),
      own_(written(certificate_.get(), key_.get())) {}

Certificate Authority::issue(const CertificateOptions& options) const {
  const auto key = new_key();
  return written(make("box", key.get(), certificate_.get(), key_.get(), options).get(), key.get());
}

Certificate Authority::self_signed(const CertificateOptions& options) {
  const auto key = new_key();
  return written(make("box", key.get(), nullptr, key.get(), options).get(), key.get());
}

std::string Files::write(const std::string& name, const std::string& text, mode_t mode) const {
  const std::string at = path(name);
  std::filesystem::remove(at);
  std::ofstream(at) << text;
  chmod(at.c_str(), mode);
  return at;
}

Setting::Setting(const char* name, const std::string& value) : name_(name) {
  if (const char* now = std::getenv(name)) before_ = now;
  value.empty() ? unsetenv(name) : setenv(name, value.c_str(), 1);
}
Setting::~Setting() { before_.empty() ? unsetenv(name_) : setenv(name_, before_.c_str(), 1); }

}  // namespace phub::testing
