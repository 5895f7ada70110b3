// Plain structs to JSON and back. A table of fields per struct, fields(), serves both directions:
//
//   template <class A> void fields(A& a, const KeySpec*) {
//     a.required("name", &KeySpec::name, Bounds{1, kMaxNameBytes});
//     a.optional("priority", &KeySpec::priority);           // left out when it has its default
//   }
//
// Decoding is strict and goes straight from the text into the struct, without a tree in between: an
// unknown, repeated or missing field, a wrong type or a list that is too long ends it at that
// place, so the memory that a text can make us allocate is bounded by the room of the struct.
// Errors are Error(kInvalid) with the path of the value: "join request: spec.keys[3].elements: must
// be …".
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "transport/control/choices.h"
#include "transport/error.h"

namespace phub::json {

// The range of an unsigned number, the bytes of a string, the entries of a list or map.
struct Bounds {
  uint64_t min = 0;
  uint64_t max = std::numeric_limits<uint64_t>::max();
};
inline constexpr uint64_t kMaxStringBytes = 4096;  // used if the table says nothing else
inline constexpr uint64_t kMaxListEntries = 1u << 24;

using Scalar = std::variant<std::nullptr_t, bool, int64_t, uint64_t, double, std::string_view>;

// Enums travel as the words of their table.
template <class E>
struct EnumWords {
  static std::string_view name(E value) { return word_of(value); }
  static bool parse(std::string_view word, E& value) {
    const std::optional<E> parsed = value_of<E>(word);
    if (parsed) value = *parsed;
    return parsed.has_value();
  }
};

template <>
struct EnumWords<ErrorCode> {
  static std::string_view name(ErrorCode code) { return name_of(code); }
  static bool parse(std::string_view word, ErrorCode& code) {
    code = parse_error_code(word);  // a code of a later version reads as kInternal
    return true;
  }
};

void write_string(std::string& out, std::string_view text);  // throws kInvalid if not UTF-8
void write_number(std::string& out, double value);           // throws kInvalid if not finite
void write_number(std::string& out, int64_t value);
void write_number(std::string& out, uint64_t value);

// --- a type as parser and writer see it, and a place that the next value goes to -----------------

struct Type;
struct Place {
  void* object = nullptr;  // null: there is no such place
  const Type* type = nullptr;
  Bounds bounds;
  bool repeated = false;  // the field has been given before
};
struct Field {
  std::string_view name;
  size_t offset;
  const Type* type;
  Bounds bounds;
  bool (*equal)(const void*, const void*);  // to its default; null: the field is required
};
struct FieldTable {
  const void* defaults;  // a struct as it is made
  std::vector<Field> fields = {};
};
struct Type {
  enum class Shape { kScalar, kObject, kList } shape;
  std::string (*expected)(const Bounds&);                         // "a positive integer"
  bool (*assign)(void*, const Scalar&, const Bounds&) = nullptr;  // scalars; false: not as expected
  const FieldTable& (*table)() = nullptr;                         // structs
  Place (*entry)(void*, std::string_view name) = nullptr;         // objects of other kinds
  Place (*element)(void*) = nullptr;                              // lists
  void (*write)(std::string&, const void*) = nullptr;             // all but structs
  std::span<const std::string_view> words = {};                   // scalars that are one of these
};

// Throws Error(kInvalid). `what` begins the message ("join request").
void decode(std::string_view text, std::string_view what, Place root);

std::string expected_integer(const Bounds& bounds, uint64_t type_max);
std::string expected_string(const Bounds& bounds);
std::string expected_list(const Bounds& bounds);
std::string expected_object(const Bounds& bounds);

template <class T>
concept Word = std::is_enum_v<T>;
template <class T>
concept Integer = std::integral<T> && !std::same_as<T, bool>;
template <class T>
struct IsList : std::false_type {};
template <class T>
struct IsList<std::vector<T>> : std::true_type {};
template <class T>
struct IsMap : std::false_type {};
template <class T>
struct IsMap<std::map<std::string, T>> : std::true_type {};
template <class T>
concept Struct =
    std::is_class_v<T> && !std::same_as<T, std::string> && !IsList<T>::value && !IsMap<T>::value;

template <class T>
constexpr Bounds default_bounds() {
  if constexpr (std::same_as<T, std::string>) return {0, kMaxStringBytes};
  if constexpr (IsList<T>::value || IsMap<T>::value) return {0, kMaxListEntries};
  return {};
}

template <class T>
const Type* type_of();

// The enum in a Choice; other types as they are.
template <class T>
struct Plain {
  using Type = T;
};
template <class E>
struct Plain<Choice<E>> {
  using Type = E;
};
template <class T>
using PlainOf = typename Plain<T>::Type;

// Fills the table from fields(). Made for each field of each message, so it is thin.
template <class T>
class FieldLister {
 public:
  explicit FieldLister(FieldTable& table) : table_(table) {}

  template <class M>
  void required(std::string_view name, M T::*member, Bounds bounds = default_bounds<M>()) {
    table_.fields.push_back({name, offset_of(member), type_of<PlainOf<M>>(), bounds, nullptr});
  }
  template <class M>
  void optional(std::string_view name, M T::*member, Bounds bounds = default_bounds<M>()) {
    table_.fields.push_back({name, offset_of(member), type_of<PlainOf<M>>(), bounds, are_equal<M>});
  }

 private:
  template <class M>
  size_t offset_of(M T::*member) const {
    const auto* object = static_cast<const T*>(table_.defaults);
    return reinterpret_cast<const char*>(&(object->*member)) -
           reinterpret_cast<const char*>(object);
  }
  template <class M>
  static bool are_equal(const void* a, const void* b) {
    return *static_cast<const M*>(a) == *static_cast<const M*>(b);
  }

  FieldTable& table_;
};

template <class T>
const FieldTable& table_of() {
  static const FieldTable table = [] {
    static const T defaults{};
    FieldTable made = {&defaults};
    FieldLister<T> lister(made);
    fields(lister, static_cast<const T*>(nullptr));
    return made;
  }();
  return table;
}

// --- encoding and decoding of each kind ----------------------------------------------------------

void write(std::string& out, const void* value, const Type& type);

template <class T>
void write_scalar(std::string& out, const void* object) {
  const T& value = *static_cast<const T*>(object);
  if constexpr (std::same_as<T, bool>) {
    out += value ? "true" : "false";
  } else if constexpr (std::same_as<T, double>) {
    write_number(out, value);
  } else if constexpr (std::unsigned_integral<T>) {
    write_number(out, uint64_t{value});
  } else if constexpr (std::signed_integral<T>) {
    write_number(out, int64_t{value});
  } else if constexpr (std::same_as<T, std::string>) {
    write_string(out, value);
  } else {
    write_string(out, EnumWords<T>::name(value));
  }
}

template <class T>
void write_map(std::string& out, const void* object) {
  out += '{';
  for (const char* comma = ""; const auto& [name, entry] : *static_cast<const T*>(object)) {
    out += comma;
    write_string(out, name);
    out += ':';
    write(out, &entry, *type_of<typename T::mapped_type>());
    comma = ",";
  }
  out += '}';
}

template <class T>
void write_list(std::string& out, const void* object) {
  out += '[';
  for (const char* comma = ""; const auto& entry : *static_cast<const T*>(object)) {
    out += comma;
    write(out, &entry, *type_of<typename T::value_type>());
    comma = ",";
  }
  out += ']';
}

template <class T>
std::string expected_scalar(const Bounds& bounds) {
  if constexpr (std::same_as<T, bool>) return "true or false";
  if constexpr (std::same_as<T, double>) return "a number";
  if constexpr (std::same_as<T, std::string>) return expected_string(bounds);
  if constexpr (std::same_as<T, ErrorCode>) return "a word";
  if constexpr (Word<T>) return fmt::format("one of {}", fmt::join(kWords<T>, ", "));
  if constexpr (std::unsigned_integral<T>) {
    return expected_integer(bounds, std::numeric_limits<T>::max());
  }
  return fmt::format("an integer of {} bits", 8 * sizeof(T));
}

template <class T>
bool assign_integer(T& out, const Scalar& value, const Bounds& bounds) {
  if (const auto* number = std::get_if<uint64_t>(&value)) {
    if (!std::in_range<T>(*number) || *number < bounds.min || *number > bounds.max) return false;
    out = static_cast<T>(*number);
    return true;
  }
  const auto* number = std::get_if<int64_t>(&value);  // a negative one
  if (number == nullptr || !std::in_range<T>(*number)) return false;
  out = static_cast<T>(*number);
  return true;
}

template <class T>
bool assign_scalar(void* object, const Scalar& value, const Bounds& bounds) {
  T& out = *static_cast<T*>(object);
  if constexpr (std::same_as<T, bool>) {
    const bool* given = std::get_if<bool>(&value);
    if (given != nullptr) out = *given;
    return given != nullptr;
  } else if constexpr (std::same_as<T, double>) {
    if (const auto* real = std::get_if<double>(&value)) return out = *real, true;
    if (const auto* number = std::get_if<uint64_t>(&value)) {
      return out = static_cast<double>(*number), true;
    }
    if (const auto* number = std::get_if<int64_t>(&value)) {
      return out = static_cast<double>(*number), true;
    }
    return false;
  } else if constexpr (Integer<T>) {
    return assign_integer(out, value, bounds);
  } else {
    const auto* text = std::get_if<std::string_view>(&value);
    if (text == nullptr) return false;
    if constexpr (Word<T>) {
      return EnumWords<T>::parse(*text, out);
    } else {
      if (text->size() < bounds.min || text->size() > bounds.max) return false;
      out.assign(*text);
      return true;
    }
  }
}

template <class T>
Place map_entry(void* object, std::string_view name) {
  using M = typename T::mapped_type;
  auto [entry, added] = static_cast<T*>(object)->try_emplace(std::string(name));
  return {&entry->second, type_of<M>(), default_bounds<M>(), !added};
}

template <class T>
Place list_element(void* object) {
  using M = typename T::value_type;
  return {&static_cast<T*>(object)->emplace_back(), type_of<M>(), default_bounds<M>()};
}

template <class T>
constexpr std::span<const std::string_view> words_of() {
  if constexpr (Word<T> && !std::same_as<T, ErrorCode>) return kWords<T>;
  return {};
}

template <class T>
const Type* type_of() {
  using Shape = Type::Shape;
  if constexpr (Struct<T>) {
    static constexpr Type type = {
        .shape = Shape::kObject, .expected = expected_object, .table = table_of<T>};
    return &type;
  } else if constexpr (IsMap<T>::value) {
    static constexpr Type type = {.shape = Shape::kObject,
                                  .expected = expected_object,
                                  .entry = map_entry<T>,
                                  .write = write_map<T>};
    return &type;
  } else if constexpr (IsList<T>::value) {
    static constexpr Type type = {.shape = Shape::kList,
                                  .expected = expected_list,
                                  .element = list_element<T>,
                                  .write = write_list<T>};
    return &type;
  } else {
    static constexpr Type type = {.shape = Shape::kScalar,
                                  .expected = expected_scalar<T>,
                                  .assign = assign_scalar<T>,
                                  .write = write_scalar<T>,
                                  .words = words_of<T>()};
    return &type;
  }
}

template <class T>
T decode(std::string_view text, std::string_view what) {
  T object;
  decode(text, what, {&object, type_of<T>(), {}});
  return object;
}

// Appends.
template <class T>
void write(std::string& out, const T& value) {
  write(out, &value, *type_of<T>());
}

template <class T>
std::string encode(const T& value) {
  std::string out;
  write(out, value);
  return out;
}

}  // namespace phub::json
