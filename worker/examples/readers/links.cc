#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "worker/examples/readers/graph.h"
#include "worker/examples/readers/lines.h"
#include "worker/examples/readers/matrix_market.h"
#include "worker/examples/readers/names.h"

namespace phub::examples {
namespace {

// Sums of weights, and quotients of these, stay numbers.
constexpr double kLeastWeight = 1e-100, kMostWeight = 1e100;
// Nodes that have only a number take memory: so many for each link are believed, and these.
constexpr uint64_t kNodesOfLink = 10, kNodesAnyway = 1'000'000;

using Link = Graph::Link;

double weight_of(std::string_view word, const Lines& lines) {
  const std::optional<double> weight = number_in(word);
  if (weight && (*weight == 0 || (*weight >= kLeastWeight && *weight <= kMostWeight))) {
    return *weight;
  }
  lines.refuse("'{}' is not a weight: a number from {} to {}, or 0 for no link", shown(word),
               kLeastWeight, kMostWeight);
}

bool is_heading(std::string_view from, std::string_view to) {
  constexpr std::array kFrom{"source", "Source", "from", "From", "FromNodeId", "src"};
  constexpr std::array kTo{"target", "Target", "to", "To", "ToNodeId", "dst"};
  const auto has = [](const auto& words, std::string_view word) {
    return std::ranges::find(words, word) != words.end();
  };
  return has(kFrom, from) && has(kTo, to);
}

// Collects nodes and links.
class Collected {
 public:
  explicit Collected(const LinkOptions& options) : options_(options), names_(graph_.names) {}

  uint32_t node(std::string_view name, const Lines& lines) {
    if (!options_.numbered) return names_.of(name, lines);
    const std::optional<uint64_t> number = whole_number_in(name);
    if (!number || *number >= 0xffff'ffff) {
      lines.refuse("'{}' is not a node's number: without --numbered nodes may have any names",
                   shown(name));
    }
    nodes_ = std::max(nodes_, *number + 1);
    return static_cast<uint32_t>(*number);
  }
  void count_to(uint64_t nodes) { nodes_ = nodes; }
  void add(uint32_t from, uint32_t to, double weight) {
    ++lines_of_links_;
    if (weight == 0) return;
    graph_.links.push_back({from, to, weight});
    if (options_.undirected) graph_.links.push_back({to, from, weight});
  }

  // `first`: the number of the first node that has no other name.
  Graph finish(const Lines& lines, uint64_t first) {
    if (nodes_ > kNodesAnyway && nodes_ > kNodesOfLink * lines_of_links_) {
      fail(ErrorCode::kInvalid,
           "{}: it has {} links, and nodes up to number {}: all between would be nodes, too. "
           "Without --numbered, and in a file of links, only those are that have links",
           lines.path(), lines_of_links_, nodes_ - 1 + first);
    }
    for (uint64_t n = graph_.names.size(); n < nodes_; ++n) {
      graph_.names.push_back(std::to_string(n + first));
    }
    if (graph_.names.empty()) {
      fail(ErrorCode::kInvalid, "{} has no links: each is a line 'from to [weight]'", lines.path());
    }
    add_up();
    graph_.digest = lines.digest();
    return std::move(graph_);
  }

 private:
  void add_up() {
    std::vector<Link>& links = graph_.links;
    std::ranges::stable_sort(links, {}, [](const Link& l) { return std::pair(l.from, l.to); });
    size_t kept = 0;
    for (const Link& link : links) {
      if (kept > 0 && links[kept - 1].from == link.from && links[kept - 1].to == link.to) {
        links[kept - 1].weight += link.weight;
      } else {
        links[kept++] = link;
      }
    }
    links.resize(kept);
  }

  const LinkOptions options_;
  Graph graph_;
  Names names_;
  uint64_t nodes_ = 0, lines_of_links_ = 0;
};

// The weight at the end of a line; nothing may follow.
double last_weight(std::string_view word, std::string_view rest, const Lines& lines) {
  if (!trimmed(rest).empty()) {
    lines.refuse(
        "a link is 'from to [weight]', and here more follows: '{}'. Names have no spaces "
        "but in a .csv; `cut` keeps the columns that are meant",
        shown(trimmed(rest)));
  }
  return word.empty() ? 1 : weight_of(word, lines);
}

Graph read_text(const std::string& path, const LinkOptions& options) {
  Lines lines(path);
  Collected collected(options);
  const bool commas = extension_of(path) == "csv";
  const auto cut = [&](std::string_view& rest) {
    return commas ? next_field(rest, ',') : next_word(rest);
  };
  for (bool first = true; const auto line = lines.next_data(); first = false) {
    std::string_view rest = *line;
    if (commas && rest.find('"') != rest.npos) {
      lines.refuse("quotes are not read: write the names without them");
    }
    const std::string_view from = cut(rest), to = cut(rest);
    if (from.empty() || to.empty()) {
      lines.refuse("'{}' is not two nodes, and perhaps a weight{}", shown(*line),
                   commas ? ", with commas between them" : "");
    }
    if (first && is_heading(from, to)) continue;
    const std::string_view word = cut(rest);
    const double weight = last_weight(word, rest, lines);
    const uint32_t a = collected.node(from, lines);
    collected.add(a, collected.node(to, lines), weight);
  }
  return collected.finish(lines, 0);
}

Graph read_lgl(const std::string& path, const LinkOptions& options) {
  Lines lines(path);
  Collected collected(options);
  std::optional<uint32_t> from;
  while (const auto line = lines.next()) {
    std::string_view rest = trimmed(*line);
    if (rest.empty()) continue;
    const bool is_node = rest.starts_with('#');
    if (is_node) rest.remove_prefix(1);
    const std::string_view name = next_word(rest);
    if (name.empty()) lines.refuse("a name is missing behind '#'");
    const std::string_view word = is_node ? std::string_view() : next_word(rest);
    const double weight = last_weight(word, rest, lines);
    const uint32_t node = collected.node(name, lines);
    if (is_node) {
      from = node;
    } else if (from) {
      collected.add(*from, node, weight);
    } else {
      lines.refuse("a link comes before the first line '# node'");
    }
  }
  return collected.finish(lines, 0);
}

Graph read_matrix(const std::string& path, const LinkOptions& options) {
  MatrixMarket matrix(path);
  if (matrix.rows() != matrix.columns()) {
    fail(ErrorCode::kInvalid, "{}: a matrix of links has as many rows as columns, not {} and {}",
         path, matrix.rows(), matrix.columns());
  }
  Collected collected(options);
  while (const auto entry = matrix.next()) {
    if (entry->value != 0 && !(entry->value >= kLeastWeight && entry->value <= kMostWeight)) {
      matrix.lines().refuse("{} is not a weight: a number from {} to {}, or 0 for no link",
                            entry->value, kLeastWeight, kMostWeight);
    }
    collected.add(static_cast<uint32_t>(entry->row - 1), static_cast<uint32_t>(entry->column - 1),
                  entry->value);
  }
  collected.count_to(matrix.rows());
  return collected.finish(matrix.lines(), 1);
}

}  // namespace

Graph read_links(const std::string& path, const LinkOptions& options) {
  const std::string extension = extension_of(path);
  for (const char* other : {"gml", "graphml", "net", "pajek", "dot", "gexf", "json", "xml"}) {
    if (extension == other) {
      fail(ErrorCode::kInvalid,
           "{}: .{} is not read: write the links as lines 'from to [weight]' (igraph: "
           "graph.write_ncol, networkx: write_weighted_edgelist)",
           path, other);
    }
  }
  if (extension == "lgl") return read_lgl(path, options);
  if (MatrixMarket::is_name_of_one(path)) return read_matrix(path, options);
  return read_text(path, options);
}

}  // namespace phub::examples
