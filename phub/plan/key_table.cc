// Key tables from JSON. The text is not trusted: every limit is checked while it is parsed.
#include <utility>

#include "phub/plan/models.h"
#include "phub/text_file.h"
#include "transport/control/json_codec.h"
#include "transport/control/message_fields.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr size_t kMaxTableBytes = 512u << 20;  // of JSON text: kMaxKeys keys with the longest names

struct Row {
  std::string name;
  uint64_t elements = 0;
  std::vector<uint64_t> shape = {};
  std::vector<ExchangedRange> exchanged_by = {};
};
struct Table {
  std::string name;
  std::vector<Row> keys;
};

template <class A>
void fields(A& a, const Row*) {
  a.required("name", &Row::name, {1, kMaxNameBytes});
  a.required("elements", &Row::elements, {1, kMaxElements});
  a.optional("shape", &Row::shape, {0, kMaxKeyDimensions});
  a.optional("exchanged_by", &Row::exchanged_by, {0, kMaxExchangedRanges});
}
template <class A>
void fields(A& a, const Table*) {
  a.required("name", &Table::name, {1, kMaxNameBytes});
  a.required("keys", &Table::keys, {1, kMaxKeys});
}

}  // namespace

KeyTable parse_key_table(std::string_view json, std::string_view source) {
  if (json.size() > kMaxTableBytes) {
    fail(ErrorCode::kInvalid, "{}: {} bytes are too many for a key table; the limit is {}", source,
         json.size(), kMaxTableBytes);
  }
  Table table = json::decode<Table>(json, source);
  if (escaped(table.name) != table.name) {
    fail(ErrorCode::kInvalid,
         "{}: name: must not hold control characters or invisible ones, got '{}'", source,
         printable(table.name));
  }
  JobSpec job;  // that has these keys
  job.name = "job";
  job.max_ranks = kMaxRanks;
  job.keys.reserve(table.keys.size());
  for (Row& row : table.keys) {
    job.keys.push_back({.name = std::move(row.name),
                        .elements = row.elements,
                        .shape = std::move(row.shape),
                        .exchanged_by = std::move(row.exchanged_by)});
  }
  try {
    validate(job);
  } catch (const Error& error) {
    fail(error.code(), "{}: {}", source, error.what());
  }
  return {std::move(table.name), std::move(job.keys)};
}

KeyTable load_key_table(const std::string& path) {
  return parse_key_table(read_file(path, kMaxTableBytes), path);
}

}  // namespace phub
