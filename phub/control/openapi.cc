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

std::string name_of(const std::type_info& type) {
  const std::string name = boost::core::demangle(type.name());
  return name.substr(name.rfind(':') + 1);
}

Json reference(std::string_view name) {
  return {{"$ref", fmt::format("#/components/schemas/{}", name)}};
}

Json of_type(std::string_view type) { return {{"type", type}}; }

// A length in bytes is a bound for that in characters.
Json text(json::Bounds bounds) {
  return {{"type", "string"}, {"minLength", bounds.min > 0 ? 1 : 0}, {"maxLength", bounds.max}};
}

Json map_of(Json values, json::Bounds bounds) {
  return {{"type", "object"},
          {"additionalProperties", std::move(values)},
          {"minProperties", bounds.min},
          {"maxProperties", bounds.max}};
}

Json list_of(Json items, json::Bounds bounds) {
  return {{"type", "array"},
          {"items", std::move(items)},
          {"minItems", bounds.min},
          {"maxItems", bounds.max}};
}

Json integer(std::string_view format, Json least, uint64_t most) {
  return {
      {"type", "integer"}, {"format", format}, {"minimum", std::move(least)}, {"maximum", most}};
}

// The fields of one message.
struct Properties {
  void add(std::string_view name, Json schema, bool needed) {
    all[std::string(name)] = std::move(schema);
    if (needed) names.push_back(name);
  }
  void add_default(std::string_view name, const std::string& value) {
    all[std::string(name)]["default"] = Json::parse(value);
  }
  Json schema() && {
    return {{"type", "object"},
            {"properties", std::move(all)},
            {"required", std::move(names)},
            {"additionalProperties", false}};
  }

  Json all = Json::object();
  Json names = Json::array();
};

// What a table of fields says of a message, as JSON Schema. Its templates are thin: they are made
// for each field of each message.
class Schemas {
 public:
  // Structs are added to by_name, with all that is in them, and named.
  template <class T>
  Json of(json::Bounds bounds = json::default_bounds<T>()) {
    if constexpr (std::same_as<T, bool>) {
      return of_type("boolean");
    } else if constexpr (std::same_as<T, double>) {
      return of_type("number");
    } else if constexpr (std::same_as<T, std::string>) {
      return text(bounds);
    } else if constexpr (std::same_as<T, ErrorCode>) {
      return of_type("string");
    } else if constexpr (json::Word<T>) {
      return {{"type", "string"}, {"enum", kWords<T>}};
    } else if constexpr (json::Integer<T>) {
      using Limits = std::numeric_limits<T>;
      const bool is_signed = std::signed_integral<T>;
      return integer(fmt::format("{}int{}", is_signed ? "" : "u", 8 * sizeof(T)),
                     is_signed ? Json(Limits::min()) : Json(bounds.min),
                     std::min<uint64_t>(bounds.max, Limits::max()));
    } else if constexpr (json::IsMap<T>::value) {
      return map_of(of<typename T::mapped_type>(), bounds);
    } else if constexpr (json::IsList<T>::value) {
      return list_of(of<typename T::value_type>(), bounds);
    } else {
      const std::string name = name_of(typeid(T));
      if (!by_name.contains(name)) {
        Fields<T> all{*this, {}};
        fields(all, static_cast<const T*>(nullptr));
        by_name[name] = std::move(all.properties).schema();
      }
      return reference(name);
    }
  }

  Json by_name = Json::object();

 private:
  template <class T>
  struct Fields {
    template <class M>
    void required(std::string_view name, M T::*, json::Bounds bounds = json::default_bounds<M>()) {
      properties.add(name, schemas.of<json::PlainOf<M>>(bounds), true);
    }
    template <class M>
    void optional(std::string_view name, M T::*member,
                  json::Bounds bounds = json::default_bounds<M>()) {
      using Plain = json::PlainOf<M>;
      properties.add(name, schemas.of<Plain>(bounds), false);
      if constexpr (!json::Struct<Plain>) {
        properties.add_default(name, json::encode(static_cast<const Plain&>(T{}.*member)));
      }
    }
    Schemas& schemas;
    Properties properties;
  };
};

Json all_schemas() {
  Schemas schemas;
#define PHUB_MESSAGE(Message, what) schemas.of<Message>();
#include "transport/control/messages.def"
#undef PHUB_MESSAGE
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
  if (route.admin_too) return "Needs the ticket of the rank, or a token of role admin.";
  return needs_ticket(route) ? "Needs the ticket of the rank." : "";
}

// `{}`: a box without a tokens file asks for none.
Json security_of(const RouteInfo& route) {
  if (route.need != Need::kNothing) return {Json::object(), {{"token", Json::array()}}};
  if (route.admin_too) {
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
