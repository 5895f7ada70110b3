#include "transport/control/json_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace phub::json {
namespace {

using Json = nlohmann::json;

constexpr size_t kShownBytes = 60;

// For messages: as JSON writes it, and not longer than a line.
std::string in_quotes(std::string_view text) {
  const std::string all(text.substr(0, kShownBytes));
  std::string shown = Json(all).dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kShownBytes) shown += fmt::format("… ({} bytes)", text.size());
  return shown;
}

std::string shown(const Scalar& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* number = std::get_if<int64_t>(&value)) return fmt::format("{}", *number);
  if (const auto* number = std::get_if<uint64_t>(&value)) return fmt::format("{}", *number);
  if (const auto* number = std::get_if<double>(&value)) return fmt::format("{}", *number);
  if (const auto* text = std::get_if<std::string_view>(&value)) return in_quotes(*text);
  return "null";
}

// Looks up one field of a struct by name and marks it as seen.
Place field_of(const Place& of, std::string_view name, uint64_t& seen) {
  const std::vector<Field>& fields = of.type->table().fields;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].name != name) continue;
    const uint64_t bit = uint64_t{1} << i;
    const bool repeated = (seen & bit) != 0;
    seen |= bit;
    return {static_cast<char*>(of.object) + fields[i].offset, fields[i].type, fields[i].bounds,
            repeated};
  }
  return {};
}

// The first required field that was not seen; "" if there is none.
std::string_view missing_of(const Type& type, uint64_t seen) {
  if (type.table == nullptr) return {};
  for (const Field& field : type.table().fields) {
    if (field.equal == nullptr && (seen & 1) == 0) return field.name;
    seen >>= 1;
  }
  return {};
}

// Takes the parser's events and puts the values where the types say. Nesting is bounded by that of
// the types: a value that opens an object where none is expected ends the parse.
class Decoder final : public Json::json_sax_t {
 public:
  Decoder(std::string_view what, Place root) : what_(what), next_(root) {}

  bool null() override { return scalar(nullptr); }
  bool boolean(bool value) override { return scalar(value); }
  bool number_integer(number_integer_t value) override { return scalar(int64_t{value}); }
  bool number_unsigned(number_unsigned_t value) override { return scalar(uint64_t{value}); }
  bool number_float(number_float_t value, const string_t&) override { return scalar(value); }
  bool string(string_t& value) override { return scalar(std::string_view(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Type::Shape::kObject, "an object"); }
  bool start_array(size_t) override { return open(Type::Shape::kList, "a list"); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    Frame& frame = stack_.back();
    frame.name.clear();
    next_ = frame.place.type->table != nullptr ? field_of(frame.place, name, frame.seen)
                                               : frame.place.type->entry(frame.place.object, name);
    if (next_.object == nullptr) refuse(fmt::format("unknown field {}", in_quotes(name)));
    if (next_.repeated) refuse(fmt::format("field {} is given twice", in_quotes(name)));
    count(frame);
    frame.name.assign(name);
    return true;
  }

  bool end_object() override {
    Frame& frame = stack_.back();
    const std::string_view name = missing_of(*frame.place.type, frame.seen);
    frame.name.clear();
    if (!name.empty()) refuse(fmt::format("field \"{}\" is missing", name));
    return close();
  }

  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    std::string_view text = error.what();  // "[json.exception.parse_error.101] parse error at …"
    if (const size_t end = text.find("] "); end != text.npos) text.remove_prefix(end + 2);
    if (const size_t last = text.find("; last read"); last != text.npos)
      text = text.substr(0, last);
    fail(ErrorCode::kInvalid, "{}: malformed JSON: {}", what_, text.substr(0, 200));
  }

 private:
  struct Frame {
    Place place;
    uint64_t seen = 0;
    size_t entries = 0;
    std::string name;  // of the field being read
  };

  [[noreturn]] void refuse(const std::string& complaint) const {
    std::string path;
    for (const Frame& frame : stack_) {
      if (frame.place.type->shape == Type::Shape::kList) {
        path += fmt::format("[{}]", frame.entries - 1);
      } else if (!frame.name.empty()) {
        if (!path.empty()) path += '.';
        path += frame.name.size() <= kShownBytes ? frame.name : in_quotes(frame.name);
      }
    }
    if (!path.empty()) path += ": ";
    fail(ErrorCode::kInvalid, "{}: {}{}", what_, path, complaint);
  }

  [[noreturn]] void refuse_value(std::string_view given) const {
    refuse(fmt::format("must be {}, got {}", next_.type->expected(next_.bounds), given));
  }

  // Where the next value goes: into the field just named, or at the end of the open list.
  void enter_list() {
    if (stack_.empty() || stack_.back().place.type->shape != Type::Shape::kList) return;
    Frame& frame = stack_.back();
    count(frame);
    next_ = frame.place.type->element(frame.place.object);
  }

  void count(Frame& frame) const {
    if (++frame.entries > frame.place.bounds.max) {
      refuse(fmt::format("more than {} entries", frame.place.bounds.max));
    }
  }

  bool scalar(const Scalar& value) {
    enter_list();
    if (next_.type->shape != Type::Shape::kScalar ||
        !next_.type->assign(next_.object, value, next_.bounds)) {
      refuse_value(shown(value));
    }
    return true;
  }

  bool open(Type::Shape shape, std::string_view given) {
    enter_list();
    if (next_.type->shape != shape) refuse_value(given);
    stack_.push_back({next_, 0, 0, {}});
    return true;
  }

  bool close() {
    const auto [entries, least] = std::pair(stack_.back().entries, stack_.back().place.bounds.min);
    stack_.pop_back();
    if (entries < least) refuse(fmt::format("must have at least {} entries", least));
    return true;
  }

  std::string_view what_;
  Place next_;
  std::vector<Frame> stack_;
};

}  // namespace

void decode(std::string_view text, std::string_view what, Place root) {
  Decoder decoder(what, root);
  // Every refusal is thrown from the decoder; the parser itself never returns false without one.
  PHUB_CHECK(Json::sax_parse(text, &decoder));
}

void write(std::string& out, const void* value, const Type& type) {
  if (type.table == nullptr) return type.write(out, value);
  const FieldTable& table = type.table();
  char before = '{';
  for (const Field& field : table.fields) {
    const void* member = static_cast<const char*>(value) + field.offset;
    if (field.equal != nullptr &&
        field.equal(member, static_cast<const char*>(table.defaults) + field.offset)) {
      continue;
    }
    out += std::exchange(before, ',');
    write_string(out, field.name);
    out += ':';
    write(out, member, *field.type);
  }
  out += before == '{' ? "{}" : "}";
}

void write_string(std::string& out, std::string_view text) {
  // As nearly all text is: nothing to escape, and no bytes that might not be UTF-8.
  const auto is_plain = [](char c) { return c >= ' ' && c < 0x7f && c != '"' && c != '\\'; };
  if (std::ranges::all_of(text, is_plain)) {
    out += '"';
    out += text;
    out += '"';
    return;
  }
  try {
    out += Json(text).dump();
  } catch (const Json::type_error&) {
    fail(ErrorCode::kInvalid, "{} is not UTF-8", in_quotes(text));
  }
}

void write_number(std::string& out, double value) {
  if (!std::isfinite(value)) fail(ErrorCode::kInvalid, "{} is not a finite number", value);
  fmt::format_to(std::back_inserter(out), "{}", value);
}
void write_number(std::string& out, int64_t value) {
  fmt::format_to(std::back_inserter(out), "{}", value);
}
void write_number(std::string& out, uint64_t value) {
  fmt::format_to(std::back_inserter(out), "{}", value);
}

std::string expected_integer(const Bounds& bounds, uint64_t type_max) {
  const uint64_t max = std::min(bounds.max, type_max);
  if (bounds.min == max) return fmt::format("{}", max);
  if (max < std::numeric_limits<uint32_t>::max()) {
    return fmt::format("an integer from {} to {}", bounds.min, max);
  }
  return bounds.min == 0 ? "a non-negative integer" : "a positive integer";
}

std::string expected_string(const Bounds& bounds) {
  if (bounds.min == 0) return fmt::format("a string of at most {} bytes", bounds.max);
  return fmt::format("a string of {} to {} bytes", bounds.min, bounds.max);
}

std::string expected_list(const Bounds& /*any*/) { return "a list"; }
std::string expected_object(const Bounds& /*any*/) { return "an object"; }

}  // namespace phub::json
