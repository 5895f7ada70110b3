#include "phub/control/openapi.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/core/demangle.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <typeinfo>

#include "phub/control/router.h"
#include "transport/control/shard_fields.h"

namespace phub {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
std::string name_of_type() {
  const std::string name = boost::core::demangle(typeid(T).name());
  return name.substr(name.rfind(':') + 1);
}

Json reference(std::string_view name) {
  return {{"$ref", fmt::format("#/components/schemas/{}", name)}};
}

// What a table of fields says of a message, as JSON Schema.
class Schemas {
 public:
  // Structs are added to by_name, with all that is in them, and named.
  template <class T>
  Json of(json::Bounds bounds = json::default_bounds<T>()) {
    if constexpr (std::same_as<T, bool>) {
      return {{"type", "boolean"}};
    } else if constexpr (std::same_as<T, double>) {
      return {{"type", "number"}};
    } else if constexpr (std::same_as<T, std::string>) {
      // A length in bytes is a bound for that in characters.
      return {{"type", "string"}, {"minLength", bounds.min > 0 ? 1 : 0}, {"maxLength", bounds.max}};
    } else if constexpr (std::same_as<T, ErrorCode>) {
      return {{"type", "string"}};
    } else if constexpr (json::Word<T>) {
      return {{"type", "string"}, {"enum", kWords<T>}};
    } else if constexpr (json::Integer<T>) {
      return integer<T>(bounds);
    } else if constexpr (json::IsMap<T>::value) {
      return {{"type", "object"},
              {"additionalProperties", of<typename T::mapped_type>()},
              {"minProperties", bounds.min},
              {"maxProperties", bounds.max}};
    } else if constexpr (json::IsList<T>::value) {
      return {{"type", "array"},
              {"items", of<typename T::value_type>()},
              {"minItems", bounds.min},
              {"maxItems", bounds.max}};
    } else {
      const std::string name = name_of_type<T>();
      if (!by_name.contains(name)) {
        Fields<T> all(*this);
        fields(all, static_cast<const T*>(nullptr));
        by_name[name] = {{"type", "object"},
                         {"properties", std::move(all.properties)},
                         {"required", std::move(all.needed)},
                         {"additionalProperties", false}};
      }
      return reference(name);
    }
  }

  Json by_name = Json::object();

 private:
  template <class T>
  struct Fields {
    explicit Fields(Schemas& s) : schemas(s) {}
    template <class M>
    void required(std::string_view name, M T::*, json::Bounds bounds = json::default_bounds<M>()) {
      properties[std::string(name)] = schemas.of<M>(bounds);
      needed.push_back(name);
    }
    template <class M>
    void optional(std::string_view name, M T::*member,
                  json::Bounds bounds = json::default_bounds<M>()) {
      Json& schema = properties[std::string(name)] = schemas.of<M>(bounds);
      if constexpr (!json::Struct<M>) {
        schema["default"] = Json::parse(json::encode(T{}.*member));
      }
    }
    Schemas& schemas;
    Json properties = Json::object();
    Json needed = Json::array();
  };

  template <class T>
  static Json integer(json::Bounds bounds) {
    using Limits = std::numeric_limits<T>;
    const bool is_signed = std::signed_integral<T>;
    return {{"type", "integer"},
            {"format", fmt::format("{}int{}", is_signed ? "" : "u", 8 * sizeof(T))},
            {"minimum", is_signed ? Json(Limits::min()) : Json(bounds.min)},
            {"maximum", std::min<uint64_t>(bounds.max, Limits::max())}};
  }
};

Json all_schemas() {
  Schemas schemas;
  schemas.of<JoinRequest>();
  schemas.of<JoinReply>();
  schemas.of<Credential>();
  schemas.of<RackNews>();
  schemas.of<Pulse>();
  schemas.of<HyperRequest>();
  schemas.of<HyperReply>();
  schemas.of<BranchRequest>();
  schemas.of<BranchReply>();
  schemas.of<LossRequest>();
  schemas.of<LossPage>();
  schemas.of<StateRequest>();
  schemas.of<StateReply>();
  schemas.of<CheckpointRequest>();
  schemas.of<CheckpointReply>();
  schemas.of<LogPage>();
  schemas.of<ServerStatus>();
  schemas.of<ShardHello>();
  schemas.of<ShardWelcome>();
  schemas.of<ShardMail>();
  schemas.of<ShardOrders>();
  schemas.of<Problem>();
  schemas.by_name["JobList"] = {{"type", "object"},
                                {"properties", {{"jobs", schemas.of<std::vector<JobStatus>>()}}},
                                {"required", {"jobs"}},
                                {"additionalProperties", false}};
  schemas.by_name["Done"] = {{"type", "object"}, {"additionalProperties", false}};
  return std::move(schemas.by_name);
}

Json content(std::string_view message, std::string_view type = "application/json") {
  if (message.find('/') != message.npos) return {{std::string(message), Json::object()}};
  return {{std::string(type), {{"schema", reference(message)}}}};
}

bool needs_ticket(const RouteInfo& route) {
  const bool of_rank = route.pattern.find("{incarnation}") != route.pattern.npos;
  return route.need == Need::kNothing && (route.method == "POST" || of_rank);
}

// Hyperparameters and branches are changed by a rank, or by somebody who is no rank.
bool takes_admin_too(const RouteInfo& route) {
  return route.body == "HyperRequest" || route.body == "BranchRequest";
}

std::string_view what_is_needed(const RouteInfo& route) {
  switch (route.need) {
    case Need::kObserve:
      return "Needs a token of role observe, train or admin.";
    case Need::kSee:
      return "Needs a token that covers the job, or the job's token.";
    case Need::kTrain:
      return "Needs a token of role train or admin that covers the job, or the job's token.";
    case Need::kOwn:
      return "Needs a token of role admin that covers the job, or the job's token.";
    case Need::kNothing:
      break;
  }
  if (takes_admin_too(route)) return "Needs the ticket of the rank, or a token of role admin.";
  return needs_ticket(route) ? "Needs the ticket of the rank." : "";
}

// `{}`: a box without a tokens file asks for none.
Json security_of(const RouteInfo& route) {
  if (route.need != Need::kNothing) return {Json::object(), {{"token", Json::array()}}};
  if (takes_admin_too(route)) {
    return {Json::object(), {{"ticket", Json::array()}}, {{"token", Json::array()}}};
  }
  if (needs_ticket(route)) return Json::array({{{"ticket", Json::array()}}});
  return Json::array();
}

Json parameters_of(std::string_view pattern) {
  Json parameters = Json::array();
  const auto add = [&](std::string_view name, Json schema) {
    if (pattern.find(fmt::format("{{{}}}", name)) == pattern.npos) return;
    parameters.push_back(
        {{"name", name}, {"in", "path"}, {"required", true}, {"schema", std::move(schema)}});
  };
  add("job", {{"type", "string"},
              {"pattern", "^[A-Za-z0-9._-]+$"},
              {"minLength", 1},
              {"maxLength", kMaxNameBytes}});
  const auto number = [](std::string_view format, uint64_t most) {
    return Json{{"type", "integer"}, {"format", format}, {"minimum", 0}, {"maximum", most}};
  };
  add("from", {{"type", "integer"}, {"format", "uint64"}, {"minimum", 0}});
  add("rank", number("uint32", kMaxRanks - 1));
  add("incarnation", number("uint32", ~uint32_t{0}));
  add("epoch", number("uint64", ~uint64_t{0}));
  add("whose", number("uint32", kMaxRanks - 1));
  add("round", number("uint64", ~uint64_t{0}));
  add("offset", number("uint64", ~uint64_t{0}));
  add("bytes", number("uint64", ~uint64_t{0}));
  add("shard", number("uint64", ~uint64_t{0}));
  add("part", number("uint64", ~uint64_t{0}));
  add("state", number("uint64", ~uint64_t{0}));
  return parameters;
}

Json operation(const RouteInfo& route) {
  Json operation = {{"summary", route.summary},
                    {"description", what_is_needed(route)},
                    {"security", security_of(route)},
                    {"parameters", parameters_of(route.pattern)}};
  if (!route.body.empty()) {
    operation["requestBody"] = {{"required", true}, {"content", content(route.body)}};
  }
  operation["responses"] = {
      {"200", {{"description", "Done."}, {"content", content(route.answer)}}},
      {"default",
       {{"description", "Refused, or failed: nothing was changed unless the message says so."},
        {"content", content("Problem", "application/problem+json")}}}};
  return operation;
}

Json document() {
  Json paths = Json::object();
  for (const RouteInfo& route : http_routes()) {
    std::string method(route.method);
    std::ranges::transform(method, method.begin(), [](char c) { return char(std::tolower(c)); });
    paths[std::string(route.pattern)][method] = operation(route);
  }
  const auto bearer = [](std::string_view what) {
    return Json{{"type", "http"}, {"scheme", "bearer"}, {"description", what}};
  };
  return {{"openapi", "3.1.0"},
          {"info",
           {{"title", "phub: control port"},
            {"version", fmt::format("{}", kProtocolVersion)},
            {"description",
             "Jobs, their ranks, and how they are doing. Gradients travel over data connections, "
             "which a join offers. Bodies are JSON, but for parts of checkpoints and pieces of "
             "states, with a "
             "Content-Length; unknown and repeated fields are refused."}}},
          {"paths", std::move(paths)},
          {"components",
           {{"schemas", all_schemas()},
            {"securitySchemes",
             {{"token", bearer("A token of the box's file, or a job's token.")},
              {"ticket", bearer("The ticket in the offer that answered the rank's join.")}}}}}};
}

}  // namespace

std::string_view openapi_json() {
  static const std::string text = document().dump(1) + "\n";
  return text;
}

}  // namespace phub
