// Key tables from JSON. The text may come from anywhere, so it is read as a stream of events: no
// tree is built, nothing nests deeper than the format does, and every limit is checked on the way.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "phub/models.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr size_t kMaxTableBytes = 512u << 20;  // of JSON text: kMaxKeys keys with the longest names

using Json = nlohmann::json;

// Where the reader is: in nothing, in the table, in its list of keys, in one key.
enum class Level { kOutside, kTable, kKeys, kKey, kDone };

class TableReader final : public Json::json_sax_t {
 public:
  explicit TableReader(std::string_view source) : source_(source) {}

  KeyTable take() { return std::move(table_); }

  bool start_object(size_t) override {
    if (level_ == Level::kOutside) {
      level_ = Level::kTable;
    } else if (level_ == Level::kKeys) {
      if (table_.keys.size() == kMaxKeys) reject("there are more than {} keys", kMaxKeys);
      level_ = Level::kKey;
      key_ = {};
      has_name_ = has_elements_ = false;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    if (level_ == Level::kKey) {
      finish_key();
      level_ = Level::kKeys;
    } else {
      if (!has_table_name_) reject("the field \"name\" is missing");
      if (!has_keys_) reject("the field \"keys\" is missing");
      if (table_.keys.empty()) reject("\"keys\" is empty");
      level_ = Level::kDone;
    }
    return true;
  }

  bool start_array(size_t) override {
    if (level_ != Level::kTable || field_ != "keys") unexpected("an array");
    level_ = Level::kKeys;
    return true;
  }

  bool end_array() override {
    level_ = Level::kTable;
    return true;
  }

  // A field's name, in the table or in a key.
  bool key(std::string& name) override {
    field_ = name;
    if (level_ == Level::kTable) {
      see(name, {{"name", &has_table_name_}, {"keys", &has_keys_}});
    } else {
      see(name, {{"name", &has_name_}, {"elements", &has_elements_}});
    }
    return true;
  }

  bool string(std::string& text) override {
    if (level_ == Level::kTable && field_ == "name") {
      check_name(text);
      table_.name = text;
    } else if (level_ == Level::kKey && field_ == "name") {
      check_name(text);
      key_.name = text;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (level_ != Level::kKey || field_ != "elements") unexpected(fmt::to_string(value));
    if (value == 0) reject("\"elements\" is 0; a key has at least one element");
    if (value > kMaxElements - total_) {
      reject("{} elements are too many: a job has at most {} (the keys before have {})", value,
             kMaxElements, total_);
    }
    key_.elements = value;
    return true;
  }

  bool number_integer(int64_t value) override { return unexpected(fmt::to_string(value)); }
  bool number_float(double, const std::string& text) override {
    return unexpected(printable(text));
  }
  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool binary(Json::binary_t&) override { return unexpected("binary data"); }

  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 3: …": the id helps nobody,
    // and the text that was read last may be all of the file.
    constexpr size_t kShownBytes = 300;
    std::string_view what = error.what();
    what.remove_prefix(std::min(what.size(), what.find("] ") + 2));
    fail(ErrorCode::kInvalid, "{}: {}{}", source_, what.substr(0, kShownBytes),
         what.size() > kShownBytes ? "…" : "");
  }

 private:
  struct Seen {
    std::string_view name;
    bool* seen;
  };

  template <typename... Args>
  [[noreturn]] void reject(fmt::format_string<Args...> format, Args&&... args) const {
    std::string where(source_);
    if (level_ == Level::kKey) {
      where += fmt::format(": keys[{}]", table_.keys.size());
      if (!key_.name.empty()) where += fmt::format(" '{}'", printable(key_.name));
    }
    fail(ErrorCode::kInvalid, "{}: {}", where, fmt::format(format, std::forward<Args>(args)...));
  }

  bool unexpected(std::string_view what) const {
    switch (level_) {
      case Level::kTable:
        if (field_ == "name") reject("\"name\" must be a string, not {}", what);
        reject("\"keys\" must be an array, not {}", what);
      case Level::kKeys:
        reject("keys[{}] must be an object {{\"name\": …, \"elements\": …}}, not {}",
               table_.keys.size(), what);
      case Level::kKey:
        if (field_ == "name") reject("\"name\" must be a string, not {}", what);
        reject("\"elements\" must be a positive integer, not {}", what);
      default:
        reject("a key table is an object {{\"name\": …, \"keys\": […]}}, not {}", what);
    }
  }

  void see(std::string_view name, std::initializer_list<Seen> fields) const {
    for (const Seen& field : fields) {
      if (field.name != name) continue;
      if (*field.seen) reject("the field \"{}\" is there twice", name);
      *field.seen = true;
      return;
    }
    reject("unknown field \"{}\"; known are \"{}\" and \"{}\"", printable(name),
           fields.begin()[0].name, fields.begin()[1].name);
  }

  void check_name(std::string_view name) const {
    if (name.empty()) reject("\"name\" is empty");
    if (name.size() > kMaxNameBytes) {
      reject("\"name\" has {} bytes; at most {} are allowed", name.size(), kMaxNameBytes);
    }
    for (const unsigned char c : name) {
      if (c < 0x20 || c == 0x7f) reject("\"name\" contains the control character 0x{:02x}", c);
    }
  }

  void finish_key() {
    if (!has_name_) reject("the field \"name\" is missing");
    if (!has_elements_) reject("the field \"elements\" is missing");
    if (!names_.insert(key_.name).second) reject("an earlier key has the same name");
    total_ += key_.elements;
    table_.keys.push_back(std::move(key_));
  }

  std::string_view source_;
  KeyTable table_;
  Level level_ = Level::kOutside;
  std::string field_;  // the last one seen
  bool has_table_name_ = false, has_keys_ = false;

  KeySpec key_;
  bool has_name_ = false, has_elements_ = false;
  uint64_t total_ = 0;
  std::unordered_set<std::string> names_;
};

}  // namespace

KeyTable parse_key_table(std::string_view json, std::string_view source) {
  if (json.size() > kMaxTableBytes) {
    fail(ErrorCode::kInvalid, "{}: {} bytes are too many for a key table; the limit is {}", source,
         json.size(), kMaxTableBytes);
  }
  TableReader reader(source);
  Json::sax_parse(json.begin(), json.end(), &reader);
  return reader.take();
}

KeyTable load_key_table(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  if (file) {
    // Bounded, so that a wrong path (/dev/zero) ends in an error and not in all memory.
    char block[64 << 10];
    while (text.size() <= kMaxTableBytes && (file.read(block, sizeof(block)), file.gcount() > 0)) {
      text.append(block, static_cast<size_t>(file.gcount()));
    }
  }
  if (!file.eof() && text.size() <= kMaxTableBytes) {
    fail(ErrorCode::kInvalid, "cannot read the key table {}: {}", path, std::strerror(errno));
  }
  return parse_key_table(text, path);
}

}  // namespace phub
