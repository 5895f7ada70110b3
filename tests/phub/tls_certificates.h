// Authorities and certificates made for a test, and the files that programs read them from.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "tests/transport/shm_rig.h"

namespace phub::testing {

struct Certificate {
  std::string pem, key;  // key: PEM of the private key
};

struct CertificateOptions {
  std::string names = "DNS:localhost,IP:127.0.0.1";
  int64_t from_s = -3600, until_s = 3600;  // from now
};

class Authority {
 public:
  explicit Authority(const std::string& name);

  const std::string& pem() const { return own_.pem; }
  Certificate issue(const CertificateOptions& options = {}) const;
  // Signed by its own key.
  static Certificate self_signed(const CertificateOptions& options = {});

 private:
  std::shared_ptr<EVP_PKEY> key_;
  std::shared_ptr<X509> certificate_;
  Certificate own_;
};

// Files that last as long as the test.
class Files {
 public:
  // Returns the path. Replaces the file that is there.
  std::string write(const std::string& name, const std::string& text, mode_t mode = 0600) const;
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

 private:
  TemporaryDirectory folder_;
};

// Sets a variable of the environment for as long as it lives; "": takes it away.
class Setting {
 public:
  Setting(const char* name, const std::string& value);
  ~Setting();
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* const name_;
  std::string before_;
};

}  // namespace phub::testing
